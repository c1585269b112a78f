"""ZeRO (Rajbhandari et al., arXiv 1910.02054): each rank of dp x cp updates its shard of the parameters.

Moments exist once in dp x cp. A float32 or float64 model is updated in place. A 16-bit model has float32 master
weights: slices of their own, or the shards themselves under full sharding. All ranks see the same global norm, so all
skip a step whose gradient is not finite anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megacp.core.config.training import TrainingConfig
from megacp.core.data_parallel.layout import ParameterSlice
from megacp.core.data_parallel.shards import ParameterShard, ShardedParameters
from megacp.core.distributed.grid import Axis
from megacp.core.monitor.timers import Phase, unmeasured
from megacp.core.optim.adamw import Engine, FlatAdamW, SliceRule
from megacp.core.optim.clip import clip_scale, global_norm


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did; equal on all ranks."""

    grad_norm: float
    """Global norm before clipping."""
    skipped: bool
    """True when a gradient was not finite or the norm was refused: weights, moments and updates are untouched."""


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
        engine: Engine | None = None,
    ) -> None:
        self.parameters = parameters
        self._settings = settings
        self._world = world
        self._device = device
        self.updates = 0
        """Updates done so far; skipped steps do not count."""
        shards = parameters.shards
        trained = [s.values.detach() if s.values.dtype == s.wide else s.values.to(s.wide) for s in shards]
        rules = [SliceRule(s.weight_decay, s.lr_multiplier) for s in shards]
        self._adamw = FlatAdamW(trained, rules, settings, engine)

    def grad_norm(self, phase: Phase = unmeasured) -> float:
        """The global norm of the summed gradients, equal on all ranks; call it after `ShardedParameters.finish`."""
        parameters = self.parameters
        indices = range(len(parameters.shards))
        with phase("norm"):
            shards = [(parameters.grad_shard(i), parameters.counted(i)) for i in indices]
            return global_norm(shards, self._world, self._device)

    def update(self, lr: float, norm: float, phase: Phase = unmeasured) -> None:
        """Clip to `norm`, update and publish the new parameters."""
        parameters = self.parameters
        with phase("optimizer"):
            gradients = [parameters.grad_shard(i) for i in range(len(parameters.shards))]
            self._adamw.update(gradients, lr, clip_scale(norm, self._settings.clip_grad))
            self.updates += 1
            for shard, master in self._masters():
                shard.values.copy_(master)
        with phase("parameter exchange"):
            parameters.publish()

    def step(self, lr: float) -> StepReport:
        """`update` where the norm is finite, then zero the gradients: a whole step without other checks."""
        norm = self.grad_norm()
        if math.isfinite(norm):
            self.update(lr, norm)
        self.parameters.zero()
        return StepReport(norm, skipped=not math.isfinite(norm))

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
