"""A world of which one rank exists: its groups send nothing, and what it calls can be held against
another rank's.

torch's "fake" process group takes every collective and does nothing. `recorded` reads a call from
the operator by which torch makes it, also those of libraries. Two ranks that share a group must
make the same calls on it, in one order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives of the device meta
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter


@dataclass(frozen=True)
class Call:
    """A collective or a message as one rank makes it."""

    name: str
    group: str
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    dtype: str
    elements: tuple[int, ...]
    """Elements of each tensor."""
    sent: tuple[int, ...]
    """Rows to each rank of the group, of an uneven exchange."""
    received: tuple[int, ...]
    peer: int
    """Global rank of the other side of a message; -1 for a collective."""


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """The process group of one rank."""
    from_group = DeviceMesh.from_group
    # tensors of `meta` have no numbers either; torch does not list them
    devices = dist.Backend.backend_capability["fake"]
    if "meta" not in devices:
        devices.append("meta")

    def mesh(*args: Any, **named: Any) -> DeviceMesh:
        with unset_fake_temporarily():  # it looks its own rank up in a tensor
            return from_group(*args, **named)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with mock.patch.object(DeviceMesh, "from_group", mesh):
            yield
    finally:
        dist.destroy_process_group()


def recorded(function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Call | None:
    """The call that an operator of torch makes; None for one that is no call."""
    if getattr(function, "namespace", "") != "c10d":
        return None
    given = {a.name: x for a, x in zip(function._schema.arguments, args, strict=False)} | dict(
        named
    )
    if "process_group" not in given:
        return None
    group = dist.ProcessGroup.unbox(given["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [x for x in tree_iter(list(given.values())) if isinstance(x, torch.Tensor)]
    sent, received = (tuple(given.get(f"{way}_split_sizes") or ()) for way in ("input", "output"))
    peer = next((ranks[given[name]] for name in ("dst", "src") if name in given), -1)
    dtype, elements = str(tensors[0].dtype) if tensors else "", tuple(x.numel() for x in tensors)
    return Call(
        function._schema.name, group.group_name, ranks, dtype, elements, sent, received, peer
    )


def differences(one: int, calls: Sequence[Call], other: int, others: Sequence[Call]) -> list[str]:
    """Where two ranks call a group that they share differently; the first place of each group."""
    both = [[call for call in made if {one, other} <= {*call.ranks}] for made in (calls, others)]
    found = []
    for group in dict.fromkeys(call.group for made in both for call in made):
        mine, theirs = ([call for call in made if call.group == group] for made in both)
        pairs = [
            (_collectives(mine, other, one < other), _collectives(theirs, one, other < one)),
            (_messages(mine, "send", other), _messages(theirs, "recv", one)),
            (_messages(mine, "recv", other), _messages(theirs, "send", one)),
        ]
        for place, (here, there) in (
            (i, x) for pair in pairs for i, x in enumerate(itertools.zip_longest(*pair))
        ):
            if here != there:
                found.append(
                    f"call {place} of group {group}: rank {one} makes {here}, rank {other} makes "
                    f"{there}"
                )
                break
    return found


def _collectives(calls: Sequence[Call], other: int, first: bool) -> list[tuple[object, ...]]:
    """Calls as both sides must see them; an uneven exchange as what the two send each other, the
    lower rank first.
    """
    seen: list[tuple[object, ...]] = []
    for call in (call for call in calls if call.peer < 0):
        sizes: tuple[int, ...] = call.elements
        if call.sent:
            there = call.ranks.index(other)
            rows = call.sent[there], call.received[there]
            sizes = rows if first else rows[::-1]
        seen.append((call.name, call.dtype, sizes))
    return seen


def _messages(calls: Sequence[Call], way: str, peer: int) -> list[tuple[object, ...]]:
    return [
        (c.dtype, c.elements) for c in calls if c.peer == peer and c.name.startswith(f"c10d::{way}")
    ]
