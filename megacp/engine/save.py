"""The interface between layers and recomputation: how a block saves tensors for its backward."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Save:
    """Decides how autograd saves the tensors for the backward of a block.

    This base class is for blocks without recomputation: it just calls the functions. Fused layers
    save their tensors themselves and do not use it.
    """

    def __call__(
        self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return `function(*inputs)` of a cheap function.

        Subclasses may save a recipe to recompute the output instead of the output.
        """
        return function(*inputs)

    def results(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return `function(*inputs)` of an expensive function.

        Its output and saved tensors are never recomputed. A block may call this at most once.
        """
        return function(*inputs)


# stateless, so all blocks share it
keep = Save()
