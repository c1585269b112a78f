"""The shape of a grid of ranks: conversion between global ranks and positions on the axes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

AXES = ("tp", "cp", "dp", "pp")
"""Axis names, fastest varying first."""


@dataclass(frozen=True)
class GridShape:
    """Sizes of the four axes, and of the expert axis inside a stage.

    The ranks are numbered as an array `[pp, dp, cp, tp]`, which is Megatron's default order
    `tp-cp-ep-dp-pp` without experts. For experts, the ranks of a stage form another array
    `[edp, ep]`. This is Megatron's folding with one expert-tp rank.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 0
    """Number of ranks among which a stage's experts are divided; 0 for models without experts."""

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the axis sizes."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a global rank on each axis, by axis name."""
        place = {}
        for name in AXES:
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def members(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the global ranks that differ from `rank` only on `axes`, in ascending order."""
        mine = self.coordinates(rank)
        slowest_first = tuple(reversed(AXES))
        place = tuple(slice(None) if name in axes else mine[name] for name in slowest_first)
        sizes = [getattr(self, name) for name in slowest_first]
        ranks = np.arange(self.world_size).reshape(sizes)  # [pp, dp, cp, tp]
        return tuple(ranks[place].flatten().tolist())

    def experts(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the expert groups of a rank, as global ranks.

        The first group (ep) divides the experts of a layer; the second group (edp) has the same
        experts as `rank`. Both include `rank`.
        """
        stage = self.tp * self.cp * self.dp  # ranks per stage
        first = rank // stage * stage
        place = rank % stage
        ep_start = first + place // self.ep * self.ep
        ep = range(ep_start, ep_start + self.ep)
        edp = range(first + place % self.ep, first + stage, self.ep)
        return tuple(ep), tuple(edp)
