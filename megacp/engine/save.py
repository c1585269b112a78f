"""How a block stores what its backward needs: the contract between layers and recomputation."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Save:
    """How autograd stores what the backward of a block needs; a fused layer stores that itself and
    does not ask. This one is of a block that recomputes nothing: it just calls the functions.
    """

    def __call__(
        self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """`function(*inputs)`, a cheap one: its output is stored as it is, or as a recipe that
        makes it again.
        """
        return function(*inputs)

    def results(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """`function(*inputs)`, a dear one, at most once in a block: what it gives and saves is
        never made again.
        """
        return function(*inputs)


keep = Save()
