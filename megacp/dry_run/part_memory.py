"""The record of a part's measured memory."""

from __future__ import annotations

from typing import NamedTuple


class PartMemory(NamedTuple):
    """Bytes of one part of a model for one microbatch on one rank.

    Weights, gradient sums, and tensors that all parts of a microbatch share are not included.
    """

    kept: int
    """Tensors saved for the backward pass, including the input but not the output."""
    forward: int
    """Peak of the forward pass, including saved tensors and the output."""
    backward: int
    """Peak of the backward pass, including saved tensors and the gradient of the output."""
    left: int
    """Memory in use after the backward pass: factors of deferred weight gradients, or unreduced
    gradients under full sharding.
    """
    given: int = 0
    """Inputs that exist for the whole microbatch: pixels, labels, rotary angles."""

    @property
    def work(self) -> int:
        """Peak bytes of the backward pass beyond the saved tensors; never negative."""
        return max(0, self.backward - self.kept)


NOTHING = PartMemory(0, 0, 0, 0)
