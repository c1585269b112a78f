"""The shape of a grid of ranks, as arithmetic: which rank has which place on which axis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

AXES = ("tp", "cp", "dp", "pp")
"""Axis names, fastest varying first."""


@dataclass(frozen=True)
class GridShape:
    """Sizes of the four axes, and of one for experts inside a stage; all else about them follows.

    The ranks are an array `[pp, dp, cp, tp]`, counted through in its order: Megatron's default
    `tp-cp-ep-dp-pp` without experts. For experts the ranks of a stage are another array `[edp,
    ep]`: Megatron's folding with one expert-tp rank.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 0
    """Ranks of a stage that share its experts; 0: there are none."""

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the axes."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a global rank on each axis, by axis name."""
        place = {}
        for name in AXES:
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def members(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Global ranks that differ from `rank` only on `axes`, ascending (the faster axis varies
        first).
        """
        mine = self.coordinates(rank)
        place = tuple(slice(None) if name in axes else mine[name] for name in reversed(AXES))
        sizes = [getattr(self, name) for name in reversed(AXES)]
        return tuple(np.arange(self.world_size).reshape(sizes)[place].flatten().tolist())

    def experts(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Global ranks that share the experts of a layer with `rank` (ep), and those that hold the
        same (edp).
        """
        stage = self.tp * self.cp * self.dp
        first, place = rank // stage * stage, rank % stage
        neighbours = place // self.ep * self.ep
        ep = range(first + neighbours, first + neighbours + self.ep)
        return tuple(ep), tuple(range(first + place % self.ep, first + stage, self.ep))
