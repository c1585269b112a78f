"""Which rank of a context-parallel group encodes which units of a row: contiguous ranges, evenly
loaded.

Of all partitions into ascending ranges, the largest cost of a rank is the least possible. No rank
is empty unless there are fewer units than ranks. It is a pure function of integers, so ranks agree
without a message.

A unit is the smallest thing that one rank may encode by itself: a frame of a video, or an image
with all its crops. Pooling windows cross crops, never images or frames. "image" in the columns of a
boundary table means crop.
"""

from __future__ import annotations

import bisect

import numpy as np

BOUNDARY_DTYPE = np.dtype(
    [
        (name, "<i4")
        for name in (
            "start_image_idx",
            "end_image_idx",
            "start_pool_idx",
            "end_pool_idx",
            "max_num_tokens",
        )
    ]
)
REPLICATE = "replicate"
"""Every rank encodes everything: the table is that of one rank."""


def compute_image_shard_boundaries(
    cum_crop_bounds: np.ndarray, cum_token_pooling_bounds: np.ndarray, cp_size: int
) -> np.ndarray:
    """BOUNDARY_DTYPE [cp_size]: the crops and pooled tokens that each rank encodes, half open, in
    ascending order.

    `cum_*_bounds` int [u]: crops and pooled tokens of units 0..u. A unit costs its crops. O(u + cp
    log(u) log(largest cost)). With fewer units than ranks the last ranks are empty.
    """
    stops = _stops(np.diff(cum_crop_bounds, prepend=0), cp_size)
    table = np.zeros(cp_size, BOUNDARY_DTYPE)
    for kind, bounds in (("image", cum_crop_bounds), ("pool", cum_token_pooling_bounds)):
        edge = np.concatenate(([0], bounds))[stops]  # [cp_size]
        table[f"end_{kind}_idx"] = edge
        table[f"start_{kind}_idx"] = np.concatenate(
            ([0], edge[:-1])
        )  # a rank begins where the one before it ends
    table["max_num_tokens"] = (table["end_pool_idx"] - table["start_pool_idx"]).max()
    return table


def _stops(costs: np.ndarray, cp_size: int) -> list[int]:
    """Number of units up to and with each rank [cp_size]: the least largest cost, no rank empty
    that need not be.
    """
    if not len(costs):
        return [0] * cp_size
    running = np.concatenate(([0], np.cumsum(costs, dtype=np.int64))).tolist()
    heaviest = int(costs.max())
    total = running[-1]
    low = max(
        heaviest, -(-total // cp_size)
    )  # some rank has the heaviest unit, some at least the mean
    high = min(
        total, total // cp_size + heaviest
    )  # filling ranks one by one up to this much takes all units
    while low < high:
        middle = (low + high) // 2
        start = 0
        for _ in range(cp_size):  # whether ranks of at most `middle` hold all units
            start = bisect.bisect_right(running, running[start] + middle, start) - 1
        low, high = (low, middle) if start == len(costs) else (middle + 1, high)
    units = len(costs)
    filled = min(units, cp_size)  # ranks with at least one unit
    stops = []
    start = 0
    for rank in range(filled):
        room = bisect.bisect_right(running, running[start] + low, start) - 1
        start = min(room, units - (filled - rank - 1))  # a unit is left for each rank that follows
        stops.append(start)
    return stops + [units] * (cp_size - filled)


def units_of(table: np.ndarray, cum_crop_bounds: np.ndarray, rank: int) -> range:
    """The units that rank `rank` of a table encodes."""
    start, stop = (int(table[name][rank]) for name in ("start_image_idx", "end_image_idx"))
    first, last = np.searchsorted(cum_crop_bounds, (start, stop), side="right").tolist()
    return range(first, last)
