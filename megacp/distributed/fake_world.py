"""A world with a single real rank: its groups send nothing, and its calls can be compared with the
calls of another rank.

torch's "fake" process group accepts every collective and does nothing. `recorded` reads a call from
the torch operator that makes it, so calls by libraries are recorded too. Two ranks that share a
group must make the same calls on it in the same order.
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
    """A collective or a message, from the perspective of one rank."""

    name: str
    group: str
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    dtype: str
    elements: tuple[int, ...]
    """Number of elements of each tensor."""
    sent: tuple[int, ...]
    """Rows sent to each rank of the group in an uneven exchange."""
    received: tuple[int, ...]
    """Rows received from each rank of the group in an uneven exchange."""
    peer: int
    """Global rank of the other side of a message; -1 for a collective."""


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Create the fake process group of one rank, for the duration of the context."""
    from_group = DeviceMesh.from_group
    # tensors on `meta` have no data either, but torch does not list this device
    devices = dist.Backend.backend_capability["fake"]
    if "meta" not in devices:
        devices.append("meta")

    def mesh(*args: Any, **named: Any) -> DeviceMesh:
        with unset_fake_temporarily():  # from_group looks up its own rank in a tensor
            return from_group(*args, **named)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with mock.patch.object(DeviceMesh, "from_group", mesh):
            yield
    finally:
        dist.destroy_process_group()


def recorded(function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Call | None:
    """Return the call that a torch operator makes, or None if it does not communicate."""
    if getattr(function, "namespace", "") != "c10d":
        return None
    # arguments by name, whether they were passed by position or by name
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False))
    given |= named
    if "process_group" not in given:
        return None
    group = dist.ProcessGroup.unbox(given["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [x for x in tree_iter(list(given.values())) if isinstance(x, torch.Tensor)]
    # only messages have one of these arguments
    peer = next((ranks[given[name]] for name in ("dst", "src") if name in given), -1)
    return Call(
        name=function._schema.name,
        group=group.group_name,
        ranks=ranks,
        dtype=str(tensors[0].dtype) if tensors else "",
        elements=tuple(x.numel() for x in tensors),
        sent=tuple(given.get("input_split_sizes") or ()),
        received=tuple(given.get("output_split_sizes") or ()),
        peer=peer,
    )


def differences(one: int, calls: Sequence[Call], other: int, others: Sequence[Call]) -> list[str]:
    """Return a line for each shared group in which the calls of two ranks differ."""
    shared = {one, other}
    calls = [call for call in calls if shared <= {*call.ranks}]
    others = [call for call in others if shared <= {*call.ranks}]
    found = []
    # groups in the order in which either rank first calls them
    for group in dict.fromkeys(call.group for call in [*calls, *others]):
        mine = [call for call in calls if call.group == group]
        theirs = [call for call in others if call.group == group]
        # collectives must be equal, and every send must have a receive
        pairs = [
            (_collectives(mine, other, one < other), _collectives(theirs, one, other < one)),
            (_messages(mine, "send", other), _messages(theirs, "recv", one)),
            (_messages(mine, "recv", other), _messages(theirs, "send", one)),
        ]
        difference = _first_difference(pairs)
        if difference is not None:
            place, here, there = difference
            found.append(
                f"call {place} of group {group}: rank {one} makes {here}, rank {other} makes "
                f"{there}"
            )
    return found


def _first_difference(pairs: Sequence[tuple[list, list]]) -> tuple[int, object, object] | None:
    """Return the first index at which the lists of a pair differ, with both elements."""
    for mine, theirs in pairs:
        for place, (here, there) in enumerate(itertools.zip_longest(mine, theirs)):
            if here != there:
                return place, here, there
    return None


def _collectives(calls: Sequence[Call], other: int, first: bool) -> list[tuple[object, ...]]:
    """Return the collectives in a form that is equal on both ranks.

    An uneven exchange is represented by the rows that the two ranks send each other, the lower rank
    first.
    """
    seen: list[tuple[object, ...]] = []
    for call in calls:
        if call.peer >= 0:  # a message
            continue
        sizes: tuple[int, ...] = call.elements
        if call.sent:
            there = call.ranks.index(other)
            rows = (call.sent[there], call.received[there])
            sizes = rows if first else rows[::-1]
        seen.append((call.name, call.dtype, sizes))
    return seen


def _messages(calls: Sequence[Call], way: str, peer: int) -> list[tuple[object, ...]]:
    """Return the dtypes and sizes of the messages to (`send`) or from (`recv`) a peer."""
    name = f"c10d::{way}"
    return [
        (call.dtype, call.elements)
        for call in calls
        if call.peer == peer and call.name.startswith(name)
    ]
