"""Megatron's rank order from its documented rule, one group list at a time, as slowly as it reads.

The rule: an order string names the axes fastest first; a rank's coordinates are the digits of the
rank in that mixed radix; a group over some axes is all ranks whose other digits agree; groups are
listed by their other digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MEGATRON_ORDER = "tp-cp-ep-dp-pp"


def digits(rank: int, sizes: Mapping[str, int], order: str = MEGATRON_ORDER) -> dict[str, int]:
    """Coordinates of a rank by repeated division."""
    found = {}
    for name in order.split("-"):
        found[name] = rank % sizes[name]
        rank //= sizes[name]
    return found


def groups(
    sizes: Mapping[str, int], token: Sequence[str], order: str = MEGATRON_ORDER
) -> list[tuple[int, ...]]:
    """All groups over the axes of `token`, members ascending, in the order in which their first
    members appear.
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
