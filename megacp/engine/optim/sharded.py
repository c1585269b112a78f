"""Sharded optimizer (ZeRO: Rajbhandari et al., arXiv 1910.02054).

Each rank of dp x cp updates its shard of the parameters, so the optimizer state is stored only once
across dp x cp. The state is allocated at the start, so a checkpoint can be loaded before the first
update. A float32 or float64 model is updated in place. A 16-bit model has float32 master weights,
which are separate slices or, with full sharding, the shards themselves. All ranks compute the same
global norm, so if one rank's gradient is not finite, all ranks skip the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis
from megacp.engine.backends.native import AdamWEngine
from megacp.engine.config.training import STATE_KINDS, STEPPED_BY, TrainingConfig
from megacp.engine.data_parallel.shards import ParameterShard, ParameterSlice, ShardedParameters
from megacp.engine.optim.rules import UPDATE_RULES, Group
from megacp.engine.timers import Phase, unmeasured

_ROW = 4096
"""Number of elements in a partial sum of squares."""


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of 1-D `x` as a float64 scalar on its device.

    Partial sums of 4,096 elements are added in float64, so the sum remains accurate for large
    models without a float64 copy of `x`. Float32 values above 2e17 overflow.
    """
    whole = len(x) // _ROW * _ROW
    rows = x[:whole].view(-1, _ROW)
    norms = torch.linalg.vector_norm(rows, dim=1)  # [rows], one pass over the gradients
    rest = torch.linalg.vector_norm(x[whole:]).reshape(1)
    return torch.cat([norms, rest]).double().square().sum()


def global_norm(
    shards: Iterable[tuple[torch.Tensor, bool]], world: Axis, device: torch.device | str = "cpu"
) -> float:
    """Return the L2 norm of all gradients, the same float on every rank.

    `shards` are this rank's pairs (slice, counted), all on `device`. `world` is the axis of all
    ranks in the grid. If any rank has a value that is not finite, the norm is inf or NaN.
    """
    sums = []
    for shard, counted in shards:
        # multiply by 0 instead of skipping, so that a NaN in an uncounted copy is noticed
        sums.append(sum_of_squares(shard) * (1.0 if counted else 0.0))
    if sums:
        total = torch.stack(sums).sum().reshape(1)
    else:  # a stage with only frozen parameters has no gradients
        total = torch.zeros(1, dtype=torch.float64, device=device)
    return all_reduce(total, world).sqrt().item()


def clip_scale(norm: float, clip_grad: float) -> float:
    """Return the factor that clips gradients of this norm; 1 if `clip_grad` is 0 (off)."""
    if clip_grad <= 0:
        return 1.0
    return min(1.0, clip_grad / (norm + 1e-6))


class ShardedOptimizer:
    """Updates each of this rank's shards according to its update rule.

    `world` is the axis of all ranks in the grid, which is needed for the norm. `device` is the
    model's device, and `engine` the backend's AdamW.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        settings: TrainingConfig,
        world: Axis,
        device: torch.device,
        engine: AdamWEngine | None = None,
    ) -> None:
        self.parameters = parameters
        self._clip_grad = settings.clip_grad
        self._world = world
        self._device = device
        self.updates = 0
        """Number of updates so far, not counting skipped steps."""
        shards = parameters.shards
        self.slices: list[torch.Tensor] = []
        """Tensors to update: shards, or their master weights."""
        for shard in shards:
            if shard.values.dtype == shard.wide:
                self.slices.append(shard.values.detach())
            else:  # a master weight
                self.slices.append(shard.values.to(shard.wide))
        self._state: list[dict[str, torch.Tensor]] = []
        for shard, x in zip(shards, self.slices, strict=True):
            kinds = STATE_KINDS[shard.spec.rule]
            self._state.append({kind: torch.zeros_like(x) for kind in kinds})
        # group the slices by rule, and within a rule by settings
        groups: dict[str, dict[tuple[bool, float], Group]] = {}
        for shard, x, state in zip(shards, self.slices, self._state, strict=True):
            # an empty tensor would make Transformer Engine's kernel launcher skip other tensors
            if not x.numel():
                continue
            spec = shard.spec
            weight_decay = settings.weight_decay if spec.weight_decay else 0.0
            of_rule = groups.setdefault(spec.rule, {})
            group = of_rule.setdefault(
                (spec.weight_decay, spec.lr_multiplier), Group(weight_decay, spec.lr_multiplier)
            )
            group.slices.append(x)
            group.state.append(state)
        self._rules = []
        for name, of_rule in groups.items():
            self._rules.append(UPDATE_RULES[name](list(of_rule.values()), settings, engine))

    def grad_norm(self, phase: Phase = unmeasured) -> float:
        """Return the global norm of the summed gradients, the same on all ranks.

        Call this after `ShardedParameters.finish`.
        """
        parameters = self.parameters
        with phase("norm"):
            shards = []
            for index, shard in enumerate(parameters.shards):
                shards.append((parameters.grad_shard(index), parameters.counts(shard.spec)))
            return global_norm(shards, self._world, self._device)

    def update(self, lr: float, norm: float, phase: Phase = unmeasured) -> None:
        """Clip gradients, whose global norm is `norm`, update, and publish the new parameters."""
        parameters = self.parameters
        with phase("optimizer"):
            # rules read the summed gradients from `grad`
            for i, x in enumerate(self.slices):
                x.grad = parameters.grad_shard(i)
            for rule in self._rules:
                rule.update(lr, clip_scale(norm, self._clip_grad))
            for x in self.slices:
                x.grad = None
            self.updates += 1
            # round the master weights to the model's dtype
            for shard, master in self._masters():
                shard.values.copy_(master)
        with phase("parameter exchange"):
            parameters.publish()

    def step(self, lr: float) -> float:
        """Run a complete optimizer step, and return the gradient norm.

        If the norm is finite, update the parameters. Then discard the gradients.
        """
        norm = self.grad_norm()
        if math.isfinite(norm):
            self.update(lr, norm)
        self.parameters.zero()
        return norm

    def _masters(self) -> list[tuple[ParameterShard, torch.Tensor]]:
        """Return the shards that have separate master weights, together with these weights."""
        pairs = zip(self.parameters.shards, self.slices, strict=True)
        return [(shard, master) for shard, master in pairs if master.dtype != shard.values.dtype]

    def reset_masters(self) -> None:
        """Copy the parameters to the master weights; call it after changing parameters."""
        for shard, master in self._masters():
            master.copy_(shard.values)

    def state_slices(self) -> dict[str, list[ParameterSlice]]:
        """Return this rank's share of the optimizer state, by kind.

        The kinds are the keys of the update rules' states and, for a 16-bit model, `master`.
        """
        shards = self.parameters.shards
        state: dict[str, list[ParameterSlice]] = {}
        for rule in STEPPED_BY.values():
            # every kind exists on every rank, even without slices
            for kind in STATE_KINDS[rule]:
                state[kind] = []
        for shard, kept in zip(shards, self._state, strict=True):
            for kind, values in kept.items():
                state[kind] += shard.slices_of(values)
        # float32 and float64 models have no separate master weights
        masters: list[ParameterSlice] = []
        for shard, x in zip(shards, self.slices, strict=True):
            if x.dtype != shard.narrow:
                masters += shard.slices_of(x)
        if masters:
            state["master"] = masters
        return state

    def clear(self) -> None:
        """Zero parameters and state before a checkpoint is loaded.

        This sets elements that are not in the checkpoint (padding) to 0.
        """
        self.parameters.clear()
        for x, kept in zip(self.slices, self._state, strict=True):
            for values in (x, *kept.values()):
                values.zero_()

    def set_updates(self, updates: int) -> None:
        """Set the number of past updates after loading a state."""
        self.updates = updates
        for rule in self._rules:
            rule.set_updates(updates)
