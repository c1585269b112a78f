"""Where the time of a step went, over all ranks, and which rank was the slowest.

Key property: only steps that are asked for are timed phase by phase; their seconds are gathered once. A rank is slow by
what it computes: in an exchange the others wait for it, so there it shows the shortest time. Rejected: comparing whole
steps, which all ranks end together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megacp.distributed.collectives import all_gather
from megacp.distributed.grid import Axis

COMPUTING = ("data", "shard", "forward", "backward", "optimizer")
WAITING = ("agreement", "pipeline exchange", "gradient exchange", "norm", "parameter exchange")
"""Phases of a step, in which a rank works and in which it mostly waits for others."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step by phase and rank."""

    seconds: dict[str, list[float]]
    """Phase to the seconds of rank 0, 1, ...; phases that took no time anywhere are left out."""

    @property
    def slowest(self) -> int:
        """The rank that computed longest."""
        ranks = range(len(next(iter(self.seconds.values()), [0.0])))
        return max(ranks, key=lambda rank: sum(self.seconds[name][rank] for name in COMPUTING if name in self.seconds))

    def line(self, step: int) -> str:
        """One line: mean and longest milliseconds of each phase."""
        parts = []
        for name, of_ranks in self.seconds.items():
            mean, most = sum(of_ranks) / len(of_ranks), max(of_ranks)
            where = f" (rank {of_ranks.index(most)})" if len(of_ranks) > 1 else ""
            parts.append(f"{name} {1e3 * mean:.3g} / {1e3 * most:.3g}{where}")
        computing = [seconds for name, seconds in self.seconds.items() if name in COMPUTING]
        busy = [sum(of_rank) for of_rank in zip(*computing, strict=True)] or [0.0]
        mean = sum(busy) / len(busy)
        over = f", {max(busy) / mean:.2f} times the mean" if mean else ""
        return f"step {step}: mean / longest ms: {'; '.join(parts)}; slowest in computing: rank {self.slowest}{over}"

    def figures(self) -> dict[str, float]:
        """The same for a log file."""
        found: dict[str, float] = {"slowest_rank": self.slowest}
        for name, of_ranks in self.seconds.items():
            key = name.replace(" ", "_")
            found |= {f"{key}_mean": sum(of_ranks) / len(of_ranks), f"{key}_max": max(of_ranks)}
        return found


def breakdown(taken: dict[str, float], world: Axis, device: torch.device) -> Breakdown:
    """The seconds by phase of all ranks, from those of this one. Collective over `world`."""
    names = (*COMPUTING, *WAITING)
    row = torch.tensor([[taken.get(name, 0.0) for name in names]], dtype=torch.float64, device=device)
    columns = all_gather(row, world).cpu().T.tolist()  # [1, phases] -> [world, phases] -> by phase
    return Breakdown({name: of_ranks for name, of_ranks in zip(names, columns, strict=True) if any(of_ranks)})
