"""The last communication calls of this rank on one axis: which is under way, its number and its size.

Key property: all ranks of an axis make the same collectives in the same order, so a number tells who has not called.
Recording takes a few microseconds a call and compares nothing. Rejected: torch's flight recorder, which knows NCCL
alone.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque

import torch

_KEPT = 32
"""Calls that an axis remembers: more than are ever under way on one axis at once."""


class Call:
    """One call; `done` is set by whoever waits for it."""

    __slots__ = ("begun", "bytes", "done", "name", "number", "peer")

    def __init__(self, name: str, number: int, size: int, peer: int | None) -> None:
        self.name, self.number, self.bytes, self.peer = name, number, size, peer
        self.begun = time.monotonic()
        self.done = False


class Calls:
    """The calls of one axis, numbered from 1: collectives together, messages to and from each peer apart."""

    __slots__ = ("collectives", "last", "messages", "waits")

    def __init__(self) -> None:
        self.collectives = 0
        self.messages: dict[tuple[str, int], int] = defaultdict(int)
        self.last: deque[Call] = deque(maxlen=_KEPT)
        self.waits = 0
        """Times that the ranks have waited for each other through the store."""

    def begin(self, name: str, x: torch.Tensor | None = None) -> Call:
        """A collective that this rank now enters; `x` is what it brings."""
        self.collectives += 1
        call = Call(name, self.collectives, 0 if x is None else x.numel() * x.element_size(), None)
        self.last.append(call)
        return call

    def message(self, name: str, peer: int, x: torch.Tensor) -> Call:
        """A message to (`send`) or from (`receive`) the global rank `peer`."""
        self.messages[name, peer] += 1
        call = Call(name, self.messages[name, peer], x.numel() * x.element_size(), peer)
        self.last.append(call)
        return call

    def under_way(self) -> list[Call]:
        """The calls that are not through, the oldest first."""
        return [call for call in list(self.last) if not call.done]
