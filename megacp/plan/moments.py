"""What a rank holds while it goes through its list of a step: the terms of memory.py, moment by moment."""

from __future__ import annotations

from dataclasses import dataclass

from megacp.core.config.run import RunConfig
from megacp.core.models.costs import stage_layers
from megacp.core.pipeline_parallel.schedules import Kind
from megacp.plan.activations import Held, held_over
from megacp.plan.memory import PHASES, STATE, RankMemory, stage_memory

_PHASES_OF = {
    Kind.FORWARD: ("forward", "loss"),
    Kind.BACKWARD: ("table", "backward", "vision"),
    Kind.WEIGHTS: ("forward",),  # which needs no work of a block either
}
"""Phases that a compute goes through."""


@dataclass(frozen=True)
class Moment:
    """A compute of a stage, or what follows them all, in its largest phase."""

    name: str
    phase: str
    memory: RankMemory

    @property
    def total(self) -> int:
        """Bytes."""
        return self.memory.peaks[self.phase]

    @property
    def parts(self) -> dict[str, int]:
        """What stays for the whole step, what waits for backward, and all that is needed now alone."""
        state = sum(getattr(self.memory, term) for term in STATE)
        waiting = self.memory.activations if "activations" in PHASES[self.phase] else 0
        return {"state": state, "activations": waiting, "at work": self.total - state - waiting}


def moments(config: RunConfig, stage: int, world_size: int) -> list[Moment]:
    """A step of a rank, in the order of its stage's list."""
    layers = stage_layers(config, world_size)[stage]
    known: dict[Held | None, RankMemory] = {}
    computes = [(str(action), _PHASES_OF[action.kind], held) for action, held in held_over(config, stage, world_size)]
    found = []
    for name, phases, held in (*computes, ("optimizer", ("optimizer",), None), ("checkpoint", ("checkpoint",), None)):
        if held not in known:
            known[held] = stage_memory(config, stage, layers, world_size, held)
        peaks = known[held].peaks
        found.append(Moment(name, max(phases, key=lambda phase: peaks[phase]), known[held]))
    return found
