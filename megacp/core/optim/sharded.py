"""ZeRO (Rajbhandari et al., arXiv 1910.02054): each rank of dp x cp updates its shard of the parameters.

Moments exist once in dp x cp, from the start, so a checkpoint can be read into them before the first update. A float32
or float64 model is updated in place. A 16-bit model has float32 master weights: slices of their own, or the shards
themselves under full sharding. All ranks see the same global norm, so all skip a step whose gradient is not finite
anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megacp.core.backends.native import AdamW
from megacp.core.config.training import TrainingConfig
from megacp.core.data_parallel.shards import ParameterShard, ParameterSlice, ShardedParameters
from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.grid import Axis
from megacp.core.monitor.timers import Phase, unmeasured

_ROW = 4096
"""Elements of a partial sum of squares."""


class FlatAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over 1-D tensors, by torch's fused kernel or an `engine`.

    `rules[i]` says whether `slices[i]` decays, and its learning rate over that of the schedule. A stage with frozen
    towers alone has no slices, and an optimizer that does nothing.
    """

    def __init__(
        self,
        slices: Sequence[torch.Tensor],
        rules: Sequence[tuple[bool, float]],
        settings: TrainingConfig,
        engine: AdamW | None = None,
    ) -> None:
        self.slices = list(slices)
        members: dict[tuple[bool, float], list[torch.Tensor]] = {}
        for s, rule in zip(slices, rules, strict=True):
            if s.numel():  # Transformer Engine's launcher counts chunks: an empty tensor may hide others
                members.setdefault(rule, []).append(s)
        self._multipliers = [multiplier for _, multiplier in members] or [1.0]
        groups: list[dict[str, Any]] = [
            {"params": some, "weight_decay": settings.weight_decay if decayed else 0.0}
            for (decayed, _), some in members.items()
        ]
        groups = groups or [{"params": torch.zeros(0)}]  # torch's AdamW wants at least one tensor
        betas = (settings.adam_beta1, settings.adam_beta2)
        if engine is not None:
            self._adamw = engine(groups, betas, settings.adam_eps)
        else:
            self._adamw = torch.optim.AdamW(groups, betas=betas, eps=settings.adam_eps, fused=True)
        # torch's kernel divides gradients by a factor as it reads them, which it holds in float32
        self._divides = engine is None and len(slices) > 0 and all(s.dtype == torch.float32 for s in slices)
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


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of 1-D `x` as a float64 scalar on its device; from 4,096 elements on it adds in float64.

    So it is no less exact for a large model, and no float64 copy of `x` is made. Values above 2e17 overflow in float32.
    """
    whole = len(x) // _ROW * _ROW
    norms = torch.linalg.vector_norm(x[:whole].view(-1, _ROW), dim=1)  # [rows], one pass over the gradients
    rest = torch.linalg.vector_norm(x[whole:]).reshape(1)
    return torch.cat([norms, rest]).double().square().sum()


def global_norm(shards: Iterable[tuple[torch.Tensor, bool]], world: Axis, device: torch.device | str = "cpu") -> float:
    """L2 norm of all gradients; `shards` are (slice, counted) of this rank, all on `device`, `world` spans all ranks of
    the grid.

    The same float on every rank; inf or NaN when any rank holds a non-finite value: a copy that is not counted
    contributes `0 * sum`.
    """
    sums = [sum_of_squares(shard) * (1.0 if counted else 0.0) for shard, counted in shards]
    # a stage whose towers are all frozen has no gradient, and adds nothing
    total = torch.stack(sums).sum().reshape(1) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    return all_reduce(total, world).sqrt().item()


def clip_scale(norm: float, clip_grad: float) -> float:
    """The factor that brings gradients of this norm to at most `clip_grad`; 1 when that is 0 (off)."""
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0


class ShardedAdamW:
    """AdamW over this rank's shards; `world` spans all ranks of the grid (for the norm), `engine` is the backend's
    AdamW, and `device` the one of the model.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        settings: TrainingConfig,
        world: Axis,
        device: torch.device,
        engine: AdamW | None = None,
    ) -> None:
        self.parameters = parameters
        self._clip_grad, self._world, self._device = settings.clip_grad, world, device
        self.updates = 0
        """Updates done so far; skipped steps do not count."""
        shards = parameters.shards
        trained = [s.values.detach() if s.values.dtype == s.wide else s.values.to(s.wide) for s in shards]
        rules = [(s.spec.weight_decay, s.spec.lr_multiplier) for s in shards]
        self._adamw = FlatAdamW(trained, rules, settings, engine)

    def grad_norm(self, phase: Phase = unmeasured) -> float:
        """The global norm of the summed gradients, equal on all ranks; call it after `ShardedParameters.finish`."""
        parameters = self.parameters
        with phase("norm"):
            shards = [(parameters.grad_shard(i), parameters.counts(s.spec)) for i, s in enumerate(parameters.shards)]
            return global_norm(shards, self._world, self._device)

    def update(self, lr: float, norm: float, phase: Phase = unmeasured) -> None:
        """Clip to `norm`, update and publish the new parameters."""
        parameters = self.parameters
        with phase("optimizer"):
            gradients = [parameters.grad_shard(i) for i in range(len(parameters.shards))]
            self._adamw.update(gradients, lr, clip_scale(norm, self._clip_grad))
            self.updates += 1
            for shard, master in self._masters():
                shard.values.copy_(master)
        with phase("parameter exchange"):
            parameters.publish()

    def step(self, lr: float) -> float:
        """A whole step without other checks: `update` where the norm is finite, which it returns; gradients go."""
        norm = self.grad_norm()
        if math.isfinite(norm):
            self.update(lr, norm)
        self.parameters.zero()
        return norm

    def _masters(self) -> list[tuple[ParameterShard, torch.Tensor]]:
        pairs = zip(self.parameters.shards, self._adamw.slices, strict=True)
        return [(shard, master) for shard, master in pairs if master.dtype != shard.values.dtype]

    def reset_masters(self) -> None:
        """Take the master weights from the parameters again, after another room wrote those."""
        for shard, master in self._masters():
            master.copy_(shard.values)

    def state_slices(self) -> dict[str, list[ParameterSlice]]:
        """This rank's share of the state by kind: `exp_avg`, `exp_avg_sq` and, for a 16-bit model, `master`."""
        kinds = {"exp_avg": self._adamw.exp_avg, "exp_avg_sq": self._adamw.exp_avg_sq}
        state = {kind: self.parameters.shard_slices(values) for kind, values in kinds.items()}
        pairs = zip(self.parameters.shards, self._adamw.slices, strict=True)
        masters = [part for shard, x in pairs if x.dtype != shard.narrow for part in shard.slices_of(x)]
        return {**state, "master": masters} if masters else state

    def clear(self) -> None:
        """Zero parameters and state before a checkpoint is read into them: what it does not hold (padding) is 0."""
        self.parameters.clear()
        for values in (*self._adamw.exp_avg, *self._adamw.exp_avg_sq, *self._adamw.slices):
            values.zero_()

    def set_updates(self, updates: int) -> None:
        """Say how many updates the state has seen, after it was read from a checkpoint."""
        self.updates = updates
        self._adamw.set_updates(updates)
