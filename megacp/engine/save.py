"""The interface between layers and recomputation: how tensors are saved for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Save:
    """Decides how autograd saves the tensors for a block's backward pass.

    This base class is for blocks without recomputation: it only calls the functions. Fused layers
    save their tensors themselves and do not use it.
    """

    def __call__(
        self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return `function(*inputs)` for a function that is cheap to recompute.

        Subclasses may recompute the output in the backward pass instead of saving it.
        """
        return function(*inputs)

    def results(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return `function(*inputs)` for an expensive function.

        Its output and saved tensors are never recomputed. A block may call this at most once.
        """
        return function(*inputs)


# stateless, so all blocks share it
keep = Save()
