"""Megatron's rank order by its documented rule, one list of groups at a time.

An order string names the axes, fastest first. The coordinates of a rank are its digits in that
mixed radix. A group over some axes contains all ranks whose other digits agree. Groups are listed
by these other digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MEGATRON_ORDER = "tp-cp-ep-dp-pp"


def digits(rank: int, sizes: Mapping[str, int], order: str = MEGATRON_ORDER) -> dict[str, int]:
    """Return the coordinates of a rank by repeated division."""
    found = {}
    for name in order.split("-"):
        found[name] = rank % sizes[name]
        rank //= sizes[name]
    return found


def groups(
    sizes: Mapping[str, int], token: Sequence[str], order: str = MEGATRON_ORDER
) -> list[tuple[int, ...]]:
    """Return all groups over the axes of `token`, with ascending members, sorted by first members."""
    world = 1
    for size in sizes.values():
        world *= size
    collected: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        place = digits(rank, sizes, order)
        others = tuple(place[name] for name in order.split("-") if name not in token)
        collected.setdefault(others, []).append(rank)
    return [tuple(members) for members in collected.values()]
