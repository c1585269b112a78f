"""Rules that step parameters, as a table. A rule meets them as 1-D slices, whose gradients stand in
`grad`.

Which parameters a rule steps, and what it keeps of them, is data that needs no torch:
`engine/config/training.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megacp.engine.backends.native import AdamWEngine
from megacp.engine.config.training import TrainingConfig


@dataclass(frozen=True)
class Group:
    """Slices that one rule steps alike, none of them empty."""

    weight_decay: float
    lr_multiplier: float
    """Learning rate over that of the schedule."""
    slices: list[torch.Tensor] = field(default_factory=list)
    state: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """What the rule keeps of each slice: tensors like it by `STATE_KINDS`, zero before the first
    update.
    """


class UpdateRule(Protocol):
    """One way to step groups of slices; made once for all of a rank that it steps."""

    def update(self, lr: float, scale: float) -> None:
        """Step every slice in place by its gradient times `scale`; gradients may be changed."""

    def set_updates(self, updates: int) -> None:
        """Say how many updates the state has seen."""


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), by torch's fused kernel or an `engine`."""

    def __init__(
        self, groups: Sequence[Group], settings: TrainingConfig, engine: AdamWEngine | None = None
    ) -> None:
        self._groups = groups
        asked: list[dict[str, Any]] = [
            {"params": one.slices, "weight_decay": one.weight_decay} for one in groups
        ]
        betas = (settings.adam_beta1, settings.adam_beta2)
        if engine is not None:
            self._kernel = engine(asked, betas, settings.adam_eps)
        else:
            self._kernel = torch.optim.AdamW(asked, betas=betas, eps=settings.adam_eps, fused=True)
        self._counts: list[torch.Tensor] = []
        for group in groups:
            for x, state in zip(group.slices, group.state, strict=True):
                count = torch.zeros((), dtype=torch.float32, device=x.device)
                self._counts.append(count)
                self._kernel.state[x] = {"step": count, **state}
        # torch's kernel divides gradients by a factor as it reads them, which it holds in float32
        self._divides = engine is None and all(
            x.dtype == torch.float32 for group in groups for x in group.slices
        )

    def set_updates(self, updates: int) -> None:
        """The bias correction of the next update depends on it."""
        for count in self._counts:
            count.fill_(updates)
        for described in self._kernel.param_groups:
            described["step"] = updates

    def update(self, lr: float, scale: float) -> None:
        """One call of the kernel for all groups."""
        slices = [x for group in self._groups for x in group.slices]
        if scale != 1.0 and not self._divides:
            for x in slices:
                x.grad.mul_(scale)  # type: ignore[union-attr]  # every slice has one
        # set as torch's GradScaler sets it
        divisor = (
            torch.full((), 1.0 / scale, device=slices[0].device)
            if scale != 1.0 and self._divides
            else None
        )
        self._kernel.grad_scale = divisor  # type: ignore[attr-defined]
        for described, group in zip(self._kernel.param_groups, self._groups, strict=True):
            described["lr"] = lr * group.lr_multiplier
        self._kernel.step()


UPDATE_RULES: dict[
    str, Callable[[Sequence[Group], TrainingConfig, AdamWEngine | None], UpdateRule]
] = {"adamw": AdamW}
"""Rules by the names in `STEPPED_BY`."""
