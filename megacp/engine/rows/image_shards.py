"""Assignment of a row's images to context-parallel ranks, in contiguous and balanced ranges.

The ranges of units minimise the largest cost per rank. If there are enough units, every rank gets
at least one. The assignment is a pure function of integers, so ranks agree without communication.

A unit is the smallest part that one rank can encode separately: a frame of a video, or an image
with all its crops. Pooling windows may cross crops, but not images or frames. In the columns of a
boundary table, "image" means crop.
"""

from __future__ import annotations

import bisect

import numpy as np

BOUNDARY_DTYPE = np.dtype(
    [
        ("start_image_idx", "<i4"),
        ("end_image_idx", "<i4"),
        ("start_pool_idx", "<i4"),
        ("end_pool_idx", "<i4"),
        ("max_num_tokens", "<i4"),
    ]
)
REPLICATE = "replicate"
"""Strategy in which every rank encodes all images, so the boundary table is for a single rank."""


def compute_image_shard_boundaries(
    cum_crop_bounds: np.ndarray,
    cum_token_pooling_bounds: np.ndarray,
    cp_size: int,
) -> np.ndarray:
    """Return the crops and pooled tokens that each rank encodes, as BOUNDARY_DTYPE [cp_size].

    The ranges are half-open and ascending. `cum_*_bounds` int [u] are the numbers of crops and
    pooled tokens in units 0..u. A unit's cost is its number of crops. If there are fewer units than
    ranks, the last ranks get none. The time is O(u + cp log(u) log(largest cost)).
    """
    stops = _stops(np.diff(cum_crop_bounds, prepend=0), cp_size)
    table = np.zeros(cp_size, BOUNDARY_DTYPE)
    for kind, bounds in (("image", cum_crop_bounds), ("pool", cum_token_pooling_bounds)):
        edge = np.concatenate(([0], bounds))[stops]  # [cp_size]
        table[f"end_{kind}_idx"] = edge
        # each rank starts at the end of the previous rank
        table[f"start_{kind}_idx"] = np.concatenate(([0], edge[:-1]))
    table["max_num_tokens"] = (table["end_pool_idx"] - table["start_pool_idx"]).max()
    return table


def _stops(costs: np.ndarray, cp_size: int) -> list[int]:
    """Return the end of each rank's range of units, [cp_size], minimising the largest cost.

    A range is empty only if there are fewer units than ranks.
    """
    if not len(costs):
        return [0] * cp_size
    running = np.concatenate(([0], np.cumsum(costs, dtype=np.int64))).tolist()
    heaviest = int(costs.max())
    total = running[-1]
    # Find the smallest limit by binary search. It is at least the cost of the heaviest unit, and at
    # least the mean cost per rank.
    low = max(heaviest, -(-total // cp_size))
    # with this limit, filling one rank after another places all units
    high = min(total, total // cp_size + heaviest)
    while low < high:
        middle = (low + high) // 2
        # fill the ranks greedily up to `middle`
        start = 0
        for _ in range(cp_size):
            start = bisect.bisect_right(running, running[start] + middle, start) - 1
        if start == len(costs):  # all units fit
            high = middle
        else:
            low = middle + 1
    units = len(costs)
    filled = min(units, cp_size)  # ranks with at least one unit
    stops = []
    start = 0
    for rank in range(filled):
        room = bisect.bisect_right(running, running[start] + low, start) - 1
        start = min(room, units - (filled - rank - 1))  # leave a unit for each following rank
        stops.append(start)
    return stops + [units] * (cp_size - filled)


def units_of(table: np.ndarray, cum_crop_bounds: np.ndarray, rank: int) -> range:
    """Return the units that `rank` encodes according to a boundary table."""
    start = int(table["start_image_idx"][rank])
    stop = int(table["end_image_idx"][rank])
    # convert crops to units
    first, last = np.searchsorted(cum_crop_bounds, (start, stop), side="right").tolist()
    return range(first, last)
