"""Megatron's rank order from its documented rule, one group list at a time: slow and obvious.

An order string names the axes, fastest first. A rank's coordinates are its digits in that mixed
radix. A group over some axes is the set of ranks whose other digits agree. Groups are listed by
their other digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MEGATRON_ORDER = "tp-cp-ep-dp-pp"


def digits(rank: int, sizes: Mapping[str, int], order: str = MEGATRON_ORDER) -> dict[str, int]:
    """Return the coordinates of a rank, by repeated division."""
    found = {}
    for name in order.split("-"):
        found[name] = rank % sizes[name]
        rank //= sizes[name]
    return found


def groups(
    sizes: Mapping[str, int], token: Sequence[str], order: str = MEGATRON_ORDER
) -> list[tuple[int, ...]]:
    """Return all groups over the axes of `token`, with ascending members, ordered by their first
    member.
    """
    world = 1
    for size in sizes.values():
        world *= size
    collected: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        place = digits(rank, sizes, order)
        others = tuple(place[name] for name in order.split("-") if name not in token)
        collected.setdefault(others, []).append(rank)
    return [tuple(members) for members in collected.values()]
