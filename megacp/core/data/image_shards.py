"""Which rank of a context-parallel group encodes which units of a row: contiguous ranges, evenly loaded.

Of all partitions into ascending ranges, the largest cost of a rank is the least possible. No rank is empty unless there
are fewer units than ranks. It is a pure function of integers, so ranks agree without a message.

A unit is the smallest thing that one rank may encode alone: a frame of a video, or an image with all its crops. Pooling
windows cross crops, never images or frames. "image" in the columns of a boundary table means crop. Arguments `bounds`
are cumulative crops and cumulative pooled tokens of the units of a row, int [u] each.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOUNDARY_DTYPE = np.dtype(
    [(name, "<i4") for name in ("start_image_idx", "end_image_idx", "start_pool_idx", "end_pool_idx", "max_num_tokens")]
)
REPLICATE = "replicate"
"""Every rank encodes everything: the table is that of one rank."""


@dataclass(frozen=True, eq=False)
class ImageShards:
    """The ranges of all ranks and how they were found."""

    boundaries: np.ndarray
    """BOUNDARY_DTYPE [P]."""
    strategy: str
    """`stored`, `computed`, `longest_first` or `replicate`."""
    order: np.ndarray | None = None
    """int64 [u]: the units in the order in which `boundaries` counts them; None = as they stand in the row."""

    def units(self, cum_crop_bounds: np.ndarray, rank: int) -> np.ndarray:
        """int64 [k]: the units that a rank encodes, in the order of its features."""
        if self.strategy == REPLICATE:
            return np.arange(len(cum_crop_bounds))
        if self.order is None:
            return np.array(units_of(self.boundaries, cum_crop_bounds, rank), np.int64)
        crops = np.diff(cum_crop_bounds, prepend=0)
        return self.order[units_of(self.boundaries, np.cumsum(crops[self.order]), rank)]

    def first_crop(self, rank: int) -> int:
        """Number of the first crop that a rank encodes, as `boundaries` counts."""
        return 0 if self.strategy == REPLICATE else int(self.boundaries["start_image_idx"][rank])


def image_shards(
    bounds: tuple[np.ndarray, np.ndarray],
    cp_size: int,
    strategy: str = "computed",
    stored: np.ndarray | None = None,
    cost: tuple[int, int] = (1, 0),
) -> ImageShards:
    """The ranges of a row by one of the strategies; `cost` as `longest_first`.

    `stored`: a table for just this degree and these units, or None, where the function computes the same.
    """
    if strategy == REPLICATE:
        return ImageShards(compute_image_shard_boundaries(*bounds, 1), REPLICATE)
    if strategy == "longest_first":
        return longest_first(*bounds, cp_size, cost)
    if strategy == "stored" and stored is not None:
        return ImageShards(stored, "stored")
    return ImageShards(compute_image_shard_boundaries(*bounds, cp_size), "computed")


def compute_image_shard_boundaries(
    cum_crop_bounds: np.ndarray, cum_token_pooling_bounds: np.ndarray, cp_size: int
) -> np.ndarray:
    """BOUNDARY_DTYPE [cp_size]: the crops and pooled tokens that each rank encodes, half open, in ascending order.

    A unit costs its crops. O(u + cp log(u) log(largest cost)). With fewer units than ranks the last ranks are empty.
    """
    return _table(cum_crop_bounds, cum_token_pooling_bounds, _stops(np.diff(cum_crop_bounds, prepend=0), cp_size))


def longest_first(
    cum_crop_bounds: np.ndarray, cum_token_pooling_bounds: np.ndarray, cp_size: int, cost: tuple[int, int] = (1, 0)
) -> ImageShards:
    """Units to ranks one by one, the costliest first, each to the rank with the least so far: ranges of a permutation.

    `cost`: of a crop and of a pooled token. Graham's rule: at most 4/3 of the optimum over all assignments, and often
    less than the best contiguous one. A rank has its units in the order of the row. O(u log u).
    """
    crops = np.diff(cum_crop_bounds, prepend=0).astype(np.int64)
    pooled = np.diff(cum_token_pooling_bounds, prepend=0).astype(np.int64)
    costs = crops * cost[0] + pooled * cost[1]
    loads = [(0, 0, rank) for rank in range(cp_size)]  # cost, units, rank: ties go to the rank with fewer units
    rank_of = np.zeros(len(costs), np.int64)
    for unit in np.argsort(-costs, kind="stable").tolist():
        load, units, rank = loads[0]
        heapq.heapreplace(loads, (load + int(costs[unit]), units + 1, rank))
        rank_of[unit] = rank
    order = np.argsort(rank_of, kind="stable")
    stops = np.cumsum(np.bincount(rank_of, minlength=cp_size)).tolist()
    return ImageShards(_table(np.cumsum(crops[order]), np.cumsum(pooled[order]), stops), "longest_first", order)


def _stops(costs: np.ndarray, cp_size: int) -> list[int]:
    """Number of units up to and with each rank [cp_size]: the least largest cost, no rank empty that need not be."""
    if not len(costs):
        return [0] * cp_size
    running = np.concatenate(([0], np.cumsum(costs, dtype=np.int64))).tolist()
    heaviest, total = int(costs.max()), running[-1]
    low = max(heaviest, -(-total // cp_size))
    high = min(total, total // cp_size + heaviest)  # filling ranks one by one up to this much takes all units
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(running, cp_size, middle) else (middle + 1, high)
    units, filled = len(costs), min(len(costs), cp_size)
    stops, start = [], 0
    for rank in range(filled):
        room = bisect.bisect_right(running, running[start] + low, start) - 1
        start = min(room, units - (filled - rank - 1))  # a unit is left for each rank that follows
        stops.append(start)
    return stops + [units] * (cp_size - filled)


def _fits(running: Sequence[int], cp_size: int, limit: int) -> bool:
    """Whether ranks of at most `limit` hold all units, where no unit is above it."""
    start = 0
    for _ in range(cp_size):
        start = bisect.bisect_right(running, running[start] + limit, start) - 1
    return start == len(running) - 1


def _table(crops: np.ndarray, tokens: np.ndarray, stops: Sequence[int]) -> np.ndarray:
    """The boundary table of ranks that end at these units."""
    table = np.zeros(len(stops), BOUNDARY_DTYPE)
    ends = np.array(stops, np.int64)
    for kind, bounds in (("image", crops), ("pool", tokens)):
        edge = np.concatenate(([0], bounds))[ends]
        table[f"end_{kind}_idx"], table[f"start_{kind}_idx"] = edge, np.concatenate(([0], edge[:-1]))
    table["max_num_tokens"] = (table["end_pool_idx"] - table["start_pool_idx"]).max()
    return table


def units_of(table: np.ndarray, cum_crop_bounds: np.ndarray, rank: int) -> range:
    """The units that rank `rank` of a table encodes."""
    start, stop = (int(table[name][rank]) for name in ("start_image_idx", "end_image_idx"))
    first, last = np.searchsorted(cum_crop_bounds, (start, stop), side="right").tolist()
    return range(first, last)
