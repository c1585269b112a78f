"""Ranks that convert together: each does its share, one does what is done once, and an error of any ends all.

Key property: what is written depends on the model alone, never on how many ranks write it. Every rank plans the same
files from shapes and writes those of its turn, so one process and several leave the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from megacp.core.checkpoint.agree import on_all_ranks, on_rank_0
from megacp.core.distributed.grid import Axis
from megacp.huggingface.convert.tables.mapping import Info, num_bytes

_T = TypeVar("_T")
SECONDS = 10.0
"""For which a file that another machine has just made is waited for."""


def on_each(world: Axis, action: Callable[[], _T]) -> _T:
    """The result of `action` on this rank; what it raises on any rank is one ValueError on all, with the ranks."""
    if world.size == 1:
        return action()
    found: list[_T] = []  # no result of on_all_ranks, which would send it to the others
    on_all_ranks(world, lambda: found.append(action()), ValueError)
    return found[0]


def on_first(world: Axis, action: Callable[[], _T]) -> _T:
    """The small result of `action`, done by the first rank, on every rank; ValueError on all when it raises."""
    return action() if world.size == 1 else on_rank_0(world, action, ValueError)


def mine(items: Sequence[_T], world: Axis) -> Sequence[_T]:
    """The items of this rank, in turns: nothing where there are more ranks than items."""
    return items[world.rank :: world.size]


def files_of(infos: Mapping[str, Info], max_bytes: int) -> list[list[str]]:
    """The tensors of each file, in order; a file holds at most `max_bytes`, or a single larger tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + num_bytes(info) > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes(info)
    return shards
