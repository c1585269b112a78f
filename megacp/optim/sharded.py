"""ZeRO stage 1 (Rajbhandari et al., arXiv 1910.02054): each rank of dp x cp updates its slice of every bucket.

Moments exist once in dp x cp. A float32 or float64 model is updated in place in its flat buffer; only a 16-bit model
has float32 master slices. All ranks see the same global norm, so all skip a step whose gradient is not finite anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megacp.config.training import TrainingConfig
from megacp.data_parallel.buckets import Bucket, FlatBuckets
from megacp.data_parallel.layout import ParameterSlice, slices_of
from megacp.distributed.grid import Axis
from megacp.monitor.timers import Phase, unmeasured
from megacp.optim.adamw import Engine, FlatAdamW, SliceRule
from megacp.optim.clip import clip_scale, global_norm


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did; equal on all ranks."""

    grad_norm: float
    """Global norm before clipping."""
    skipped: bool
    """True when a gradient was not finite or the norm was refused: weights, moments and updates are untouched."""


class ShardedAdamW:
    """AdamW over this rank's slices of `buckets`; `world` spans all ranks of the grid (for the norm), `engine` is the
    backend's AdamW.
    """

    def __init__(
        self, buckets: FlatBuckets, settings: TrainingConfig, world: Axis, engine: Engine | None = None
    ) -> None:
        self.buckets = buckets
        self._settings = settings
        self._world = world
        self.updates = 0
        """Updates done so far; skipped steps do not count."""
        trained = []
        for bucket in buckets.buckets:
            shard = bucket.parameter_shard
            own_dtype = shard.dtype == bucket.gradients.dtype
            trained.append(shard.detach() if own_dtype else shard.to(bucket.gradients.dtype))
        rules = [SliceRule(b.plan.weight_decay, b.plan.lr_multiplier) for b in buckets.buckets]
        self._adamw = FlatAdamW(trained, rules, settings, engine)
        self._device = (*buckets.buckets, *buckets.frozen)[0].parameters.device

    def step(self, lr: float, allows: Callable[[float], bool] = math.isfinite, phase: Phase = unmeasured) -> StepReport:
        """Clip, update, gather the new parameters, zero the gradients; call it after `FlatBuckets.finish`.

        `allows` is asked once, with the global norm, before anything is changed; its answer must be that of all ranks.
        """
        gradients = [self.buckets.grad_shard(i) for i in range(len(self.buckets.buckets))]
        counted = [bucket.plan.counted for bucket in self.buckets.buckets]
        with phase("norm"):
            norm = global_norm(zip(gradients, counted, strict=True), self._world, self._device)
        applied = allows(norm) and math.isfinite(norm)
        if applied:
            with phase("optimizer"):
                self._update(gradients, norm, lr)
            with phase("parameter exchange"):
                self.buckets.gather_parameters()
        self.buckets.zero()
        return StepReport(norm, skipped=not applied)

    def _update(self, gradients: Sequence[torch.Tensor], norm: float, lr: float) -> None:
        scale = clip_scale(norm, self._settings.clip_grad)
        if scale < 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        self._adamw.update(gradients, lr)
        self.updates += 1
        for bucket, master in self._masters():
            bucket.parameter_shard.copy_(master)

    def _masters(self) -> list[tuple[Bucket, torch.Tensor]]:
        pairs = zip(self.buckets.buckets, self._adamw.slices, strict=True)
        return [(bucket, s) for bucket, s in pairs if s.dtype != bucket.parameters.dtype]

    def reset_masters(self) -> None:
        """Take the master slices from the parameters again, after another room wrote those."""
        for bucket, master in self._masters():
            master.copy_(bucket.parameter_shard)

    def state_slices(self) -> dict[str, list[ParameterSlice]]:
        """This rank's share of the state by kind: `exp_avg`, `exp_avg_sq` and, for a 16-bit model, `master`."""
        kinds = {"exp_avg": self._adamw.exp_avg, "exp_avg_sq": self._adamw.exp_avg_sq}
        state = {kind: self.buckets.shard_slices(values) for kind, values in kinds.items()}
        masters = [part for b, master in self._masters() for part in slices_of(b.plan, b.shard_start, master)]
        return {**state, "master": masters} if masters else state

    def clear(self) -> None:
        """Zero parameters and state before a checkpoint is read into them: what it does not hold (padding) is 0."""
        for bucket in (*self.buckets.buckets, *self.buckets.frozen):
            bucket.parameters.zero_()
        for values in (*self._adamw.exp_avg, *self._adamw.exp_avg_sq, *self._adamw.slices):
            values.zero_()

    def set_updates(self, updates: int) -> None:
        """Say how many updates the state has seen, after it was read from a checkpoint."""
        self.updates = updates
        self._adamw.set_updates(updates)
