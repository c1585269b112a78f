"""Table of update rules for parameters.

A rule updates 1-D slices of parameters, whose gradients are in `grad`. `engine/config/training.py`,
which does not import torch, assigns parameters to rules and lists the state of each rule.
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
    """Non-empty slices that one rule updates with the same settings."""

    weight_decay: float
    lr_multiplier: float
    """Factor applied to the scheduled learning rate."""
    slices: list[torch.Tensor] = field(default_factory=list)
    state: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """State of each slice: tensors shaped like it, by `STATE_KINDS`; 0 before the first update."""


class UpdateRule(Protocol):
    """Interface of an update rule. A rank has one object per rule, for all groups of that rule."""

    def update(self, lr: float, scale: float) -> None:
        """Update every slice in place with its gradient times `scale`; may overwrite gradients."""

    def set_updates(self, updates: int) -> None:
        """Set the number of past updates that the state reflects."""


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), with torch's fused kernel or an `engine`."""

    def __init__(
        self, groups: Sequence[Group], settings: TrainingConfig, engine: AdamWEngine | None = None
    ) -> None:
        self._groups = groups
        asked: list[dict[str, Any]] = []
        for group in groups:
            asked.append({"params": group.slices, "weight_decay": group.weight_decay})
        betas = (settings.adam_beta1, settings.adam_beta2)
        # use the engine's kernel if the backend has one, otherwise torch's fused kernel
        if engine is not None:
            self._kernel = engine(asked, betas, settings.adam_eps)
        else:
            self._kernel = torch.optim.AdamW(asked, betas=betas, eps=settings.adam_eps, fused=True)
        # create the state before the first update, so that a checkpoint can be loaded into it
        self._counts: list[torch.Tensor] = []
        is_float32 = True
        for group in groups:
            for x, state in zip(group.slices, group.state, strict=True):
                count = torch.zeros((), dtype=torch.float32, device=x.device)
                self._counts.append(count)
                self._kernel.state[x] = {"step": count, **state}
                is_float32 = is_float32 and x.dtype == torch.float32
        # torch's kernel can divide gradients by a float32 factor as it reads them
        self._divides = engine is None and is_float32

    def set_updates(self, updates: int) -> None:
        """Set the number of past updates, for the bias correction of the next update."""
        for count in self._counts:
            count.fill_(updates)
        # torch stores the count in the state, Transformer Engine in the group: set both
        for described in self._kernel.param_groups:
            described["step"] = updates

    def update(self, lr: float, scale: float) -> None:
        """Update all groups with one call of the kernel."""
        slices: list[torch.Tensor] = []
        for group in self._groups:
            slices += group.slices
        if scale != 1.0 and not self._divides:
            for x in slices:
                assert x.grad is not None
                x.grad.mul_(scale)
        divisor = None
        if scale != 1.0 and self._divides:
            divisor = torch.full((), 1.0 / scale, device=slices[0].device)
        # the attribute through which torch's GradScaler passes its factor
        self._kernel.grad_scale = divisor  # type: ignore[attr-defined]
        for described, group in zip(self._kernel.param_groups, self._groups, strict=True):
            described["lr"] = lr * group.lr_multiplier
        self._kernel.step()


UPDATE_RULES: dict[
    str, Callable[[Sequence[Group], TrainingConfig, AdamWEngine | None], UpdateRule]
] = {"adamw": AdamW}
"""Update rules, by the names in `STEPPED_BY`."""
