"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on flat slices: a fused kernel with its moments laid open.

Slices are grouped by decay and learning rate. The moments exist from the start, so a checkpoint can be read into them
before the first update. Torch's fused kernel runs on CPU and CUDA, and its result does not depend on where an element
lies in a slice. It also clips: it divides float32 gradients by a factor as it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megacp.core.config.training import TrainingConfig

Engine = Callable[[list[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""`(groups, betas, epsilon)`: AdamW over groups with `params` and `weight_decay`, of torch or of Transformer Engine.

Its moments are `exp_avg` and `exp_avg_sq` of a slice's state. Torch counts updates there, Transformer Engine in the
group.
"""


def fused_adamw(groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """Torch's AdamW with its fused kernel, on CPU and CUDA: the engine where the backend has none."""
    return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)


class SliceRule(NamedTuple):
    """What differs between the slices of one optimizer."""

    decayed: bool
    """Whether weight decay applies."""
    lr_multiplier: float = 1.0
    """Learning rate over that of the schedule; decay follows it."""


class FlatAdamW:
    """AdamW over 1-D tensors; `rules[i]` says how `slices[i]` is updated.

    A stage with frozen towers alone has no slices, and an optimizer that does nothing.
    """

    def __init__(
        self,
        slices: Sequence[torch.Tensor],
        rules: Sequence[SliceRule],
        settings: TrainingConfig,
        engine: Engine | None = None,
    ) -> None:
        self.slices = list(slices)
        groups: dict[SliceRule, list[torch.Tensor]] = {}
        for s, rule in zip(slices, rules, strict=True):
            groups.setdefault(rule, []).append(s)
        decays: list[dict[str, Any]] = [
            {"params": members, "weight_decay": settings.weight_decay if rule.decayed else 0.0}
            for rule, members in groups.items()
        ]
        empty: list[dict[str, Any]] = [{"params": torch.zeros(0)}]  # torch's AdamW wants at least one tensor
        betas = (settings.adam_beta1, settings.adam_beta2)
        self._adamw = (engine or fused_adamw)(decays or empty, betas, settings.adam_eps)
        # the kernel holds the factor in float32, and Transformer Engine's takes none
        self._divides = engine is None and len(slices) > 0 and all(s.dtype == torch.float32 for s in slices)
        self._multipliers = [rule.lr_multiplier for rule in groups] or [1.0]
        self.exp_avg = [torch.zeros_like(s) for s in slices]
        """First moments, one 1-D tensor per slice, in its dtype."""
        self.exp_avg_sq = [torch.zeros_like(s) for s in slices]
        """Second moments."""
        self._counts = [torch.zeros((), dtype=torch.float32, device=s.device) for s in slices]
        for s, count, first, second in zip(self.slices, self._counts, self.exp_avg, self.exp_avg_sq, strict=True):
            self._adamw.state[s] = {"step": count, "exp_avg": first, "exp_avg_sq": second}

    def set_updates(self, updates: int) -> None:
        """Say how many updates the moments have seen: the bias correction of the next one depends on it."""
        for count in self._counts:
            count.fill_(updates)
        for group in self._adamw.param_groups:
            group["step"] = updates

    def update(self, gradients: Sequence[torch.Tensor], lr: float, scale: float = 1.0) -> None:
        """One update in place by gradients times `scale`; `gradients[i]` has the shape and dtype of `slices[i]`."""
        if scale != 1.0 and not self._divides:
            for gradient in gradients:
                gradient.mul_(scale)
        # set as torch's GradScaler sets it
        divisor = torch.full((), 1.0 / scale, device=self.slices[0].device) if scale != 1.0 and self._divides else None
        self._adamw.grad_scale = divisor  # type: ignore[attr-defined]
        for group, multiplier in zip(self._adamw.param_groups, self._multipliers, strict=True):
            group["lr"] = lr * multiplier
        for s, gradient in zip(self.slices, gradients, strict=True):
            s.grad = gradient
        self._adamw.step()
        for s in self.slices:
            s.grad = None
