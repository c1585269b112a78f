"""ZeRO (Rajbhandari et al., arXiv 1910.02054): each rank of dp x cp updates its shard of the
parameters.

State exists once in dp x cp, from the start, so a checkpoint can be read into it before the first
update. A float32 or float64 model is updated in place. A 16-bit model has float32 master weights:
slices of their own, or the shards themselves under full sharding. All ranks see the same global
norm, so all skip a step whose gradient is not finite anywhere.
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
"""Elements of a partial sum of squares."""


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of 1-D `x` as a float64 scalar on its device; from 4,096 elements on it
    adds in float64.

    So it is no less exact for a large model, and no float64 copy of `x` is made. Values above 2e17
    overflow in float32.
    """
    whole = len(x) // _ROW * _ROW
    norms = torch.linalg.vector_norm(
        x[:whole].view(-1, _ROW), dim=1
    )  # [rows], one pass over the gradients
    rest = torch.linalg.vector_norm(x[whole:]).reshape(1)
    return torch.cat([norms, rest]).double().square().sum()


def global_norm(
    shards: Iterable[tuple[torch.Tensor, bool]], world: Axis, device: torch.device | str = "cpu"
) -> float:
    """L2 norm of all gradients; `shards` are (slice, counted) of this rank, all on `device`,
    `world` spans all ranks of the grid.

    The same float on every rank; inf or NaN when any rank holds a non-finite value: a copy that is
    not counted contributes `0 * sum`.
    """
    sums = [sum_of_squares(shard) * (1.0 if counted else 0.0) for shard, counted in shards]
    # a stage whose towers are all frozen has no gradient, and adds nothing
    total = (
        torch.stack(sums).sum().reshape(1)
        if sums
        else torch.zeros(1, dtype=torch.float64, device=device)
    )
    return all_reduce(total, world).sqrt().item()


def clip_scale(norm: float, clip_grad: float) -> float:
    """The factor that brings gradients of this norm to at most `clip_grad`; 1 when that is 0
    (off).
    """
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0


class ShardedOptimizer:
    """Steps this rank's shards, each by its rule; `world` spans all ranks of the grid (for the
    norm), `engine` is the backend's AdamW, and `device` the one of the model.
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
        self._clip_grad, self._world, self._device = settings.clip_grad, world, device
        self.updates = 0
        """Updates done so far; skipped steps do not count."""
        shards = parameters.shards
        self.slices = [
            s.values.detach() if s.values.dtype == s.wide else s.values.to(s.wide) for s in shards
        ]
        """What is stepped: a shard itself, or its master weights."""
        self._state = [
            {kind: torch.zeros_like(x) for kind in STATE_KINDS[shard.spec.rule]}
            for shard, x in zip(shards, self.slices, strict=True)
        ]
        groups: dict[str, dict[tuple[bool, float], Group]] = {}
        for shard, x, state in zip(shards, self.slices, self._state, strict=True):
            if (
                not x.numel()
            ):  # Transformer Engine's launcher counts chunks: an empty tensor may hide others
                continue
            spec = shard.spec
            alone = Group(settings.weight_decay if spec.weight_decay else 0.0, spec.lr_multiplier)
            group = groups.setdefault(spec.rule, {}).setdefault(
                (spec.weight_decay, spec.lr_multiplier), alone
            )
            group.slices.append(x)
            group.state.append(state)
        self._rules = [
            UPDATE_RULES[name](list(alike.values()), settings, engine)
            for name, alike in groups.items()
        ]

    def grad_norm(self, phase: Phase = unmeasured) -> float:
        """The global norm of the summed gradients, equal on all ranks; call it after
        `ShardedParameters.finish`.
        """
        parameters = self.parameters
        with phase("norm"):
            shards = [
                (parameters.grad_shard(i), parameters.counts(s.spec))
                for i, s in enumerate(parameters.shards)
            ]
            return global_norm(shards, self._world, self._device)

    def update(self, lr: float, norm: float, phase: Phase = unmeasured) -> None:
        """Clip to `norm`, update and publish the new parameters."""
        parameters = self.parameters
        with phase("optimizer"):
            for i, x in enumerate(self.slices):
                x.grad = parameters.grad_shard(i)
            for rule in self._rules:
                rule.update(lr, clip_scale(norm, self._clip_grad))
            for x in self.slices:
                x.grad = None
            self.updates += 1
            for shard, master in self._masters():
                shard.values.copy_(master)
        with phase("parameter exchange"):
            parameters.publish()

    def step(self, lr: float) -> float:
        """A whole step without other checks: `update` where the norm is finite, which it returns;
        gradients go.
        """
        norm = self.grad_norm()
        if math.isfinite(norm):
            self.update(lr, norm)
        self.parameters.zero()
        return norm

    def _masters(self) -> list[tuple[ParameterShard, torch.Tensor]]:
        pairs = zip(self.parameters.shards, self.slices, strict=True)
        return [(shard, master) for shard, master in pairs if master.dtype != shard.values.dtype]

    def reset_masters(self) -> None:
        """Take the master weights from the parameters again, after another room wrote those."""
        for shard, master in self._masters():
            master.copy_(shard.values)

    def state_slices(self) -> dict[str, list[ParameterSlice]]:
        """This rank's share of the state by kind: those of the rules and, for a 16-bit model,
        `master`.
        """
        shards = self.parameters.shards
        state: dict[str, list[ParameterSlice]] = {
            k: [] for rule in STEPPED_BY.values() for k in STATE_KINDS[rule]
        }
        for shard, kept in zip(shards, self._state, strict=True):
            for kind, values in kept.items():
                state[kind] += shard.slices_of(values)
        pairs = zip(shards, self.slices, strict=True)
        masters = [
            part for shard, x in pairs if x.dtype != shard.narrow for part in shard.slices_of(x)
        ]
        return {**state, "master": masters} if masters else state

    def clear(self) -> None:
        """Zero parameters and state before a checkpoint is read into them: what it does not hold
        (padding) is 0.
        """
        self.parameters.clear()
        for x, kept in zip(self.slices, self._state, strict=True):
            for values in (x, *kept.values()):
                values.zero_()

    def set_updates(self, updates: int) -> None:
        """Say how many updates the state has seen, after it was read from a checkpoint."""
        self.updates = updates
        for rule in self._rules:
            rule.set_updates(updates)
