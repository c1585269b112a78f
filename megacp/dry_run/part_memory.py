"""Bytes of one part of a model, as they are measured."""

from __future__ import annotations

from typing import NamedTuple


class PartMemory(NamedTuple):
    """Bytes of one part of a model for one microbatch on one rank.

    Weights, sums of gradients and what the microbatch holds for all parts are not among them.
    """

    kept: int
    """What waits for backward, with its input and without its result."""
    forward: int
    """The peak of its forward, with what it keeps and its result."""
    backward: int
    """The peak of its backward, with what it keeps and the gradient of its result."""
    left: int
    """What its backward leaves: factors of weight gradients that wait, or unreduced gradients under
    full sharding.
    """
    given: int = 0
    """What the microbatch holds for it from beginning to end: pixels, labels, rotary angles."""

    @property
    def work(self) -> int:
        """Return the bytes that its backward needs beyond what is kept."""
        return max(0, self.backward - self.kept)


NOTHING = PartMemory(0, 0, 0, 0)
