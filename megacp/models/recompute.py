"""Recomputation of a block, whole or selective: cheap, large activations remembered as recipes instead of tensors.

The granularities are ways to call the same block, chosen once. In the selective one, autograd stores a recipe wherever
it would store a registered output (the input of a linear), and backward runs it. No matrix product and no message is
repeated. `torch.utils.checkpoint` around norm and activation cannot drop an output that the next linear saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Recipe = Callable[[], torch.Tensor]
Key = tuple[int, torch.Size, tuple[int, ...]]


class Recomputation:
    """Registers outputs that can be made again; used as `with recomputation.active():` around a block."""

    def __init__(self) -> None:
        self._recipes: dict[Key, Recipe] = {}
        self._outputs: list[torch.Tensor] = []

    def __call__(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """`function(*inputs)`, stored by autograd as a recipe wherever the result is an input of something else."""
        output = function(*inputs)
        kept = [x.detach() for x in inputs]

        def recipe() -> torch.Tensor:
            with torch.no_grad():
                return function(*kept)

        self._recipes[self._key(output)] = recipe
        self._outputs.append(output.detach())  # holds the address until the block is done, so no key is met twice
        return output

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Route autograd's saved tensors through the recipes; forget the recipes at the end of the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._recipes.clear()
        self._outputs.clear()

    @staticmethod
    def _key(x: torch.Tensor) -> Key:
        return x.data_ptr(), x.shape, x.stride()

    def _pack(self, x: torch.Tensor) -> torch.Tensor | Recipe:
        return self._recipes.get(self._key(x), x)

    @staticmethod
    def _unpack(stored: torch.Tensor | Recipe) -> torch.Tensor:
        return stored if isinstance(stored, torch.Tensor) else stored()


def keep(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """The way of a block that recomputes nothing: just call the function."""
    return function(*inputs)


def rerun(body: Callable[..., torch.Tensor], granularity: str) -> Callable[..., torch.Tensor]:
    """The block `body(*inputs, remember)` under a recompute granularity: `none`, `selective` or `full`.

    Under no_grad nothing is stored anyway, so nothing is recomputed.
    """

    def plain(*inputs: Any) -> torch.Tensor:
        return body(*inputs, keep)

    def selective(*inputs: Any) -> torch.Tensor:
        recomputation = Recomputation()
        with recomputation.active():
            return body(*inputs, recomputation)

    def full(*inputs: Any) -> torch.Tensor:
        return checkpoint(plain, *inputs, use_reentrant=False, preserve_rng_state=False)

    chosen = {"none": plain, "selective": selective, "full": full}[granularity]
    return lambda *inputs: chosen(*inputs) if torch.is_grad_enabled() else plain(*inputs)
