"""Recomputation of a block, whole or selective: cheap, large activations remembered as recipes
instead of tensors.

In the selective one, autograd stores a recipe wherever it would store a registered output (the
input of a linear), and backward runs it: no matrix product and no message is repeated.
`torch.utils.checkpoint` around norm and activation cannot drop an output that the next linear
saves.

The whole one computes a block again but for its attention, whose cost grows with the length of a
row: the node of the first forward stays in the graph with its output and log-sum-exp, and only its
queries, keys and values are made again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megacp.engine.backends.mlp import Kept
from megacp.engine.config.training import RecomputeMode
from megacp.engine.save import Save, keep

Recipe = Callable[[], torch.Tensor]
Key = tuple[Any, ...]
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What autograd holds instead of a tensor that is saved, and how it becomes the tensor again."""
HELD: Hooks = (lambda x: x, lambda x: x)
"""The hooks of tensors that stay where they are."""


class Recomputation(Save):
    """Registers outputs that can be made again; used as `with recomputation.active():` around a
    block.

    `hooks` hold all that is saved besides recipes, and what recipes are made from.
    """

    def __init__(self, hooks: Hooks = HELD) -> None:
        self._hold, self._give = hooks
        self._registered: dict[
            Key, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
        ] = {}
        self._outputs: list[torch.Tensor] = []

    def __call__(
        self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """`function(*inputs)`, stored by autograd as a recipe wherever the result is an input of
        something else.
        """
        output = function(*inputs)
        self._registered[self._key(output)] = function, tuple(x.detach() for x in inputs)
        self._outputs.append(
            output.detach()
        )  # holds the storage until the block is done, so no key is met twice
        return output

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Route autograd's saved tensors through the recipes; forget the recipes at the end of the
        block.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._registered.clear()
        self._outputs.clear()

    @staticmethod
    def _key(x: torch.Tensor) -> Key:
        return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()

    def _pack(self, x: torch.Tensor) -> Any:
        registered = self._registered.get(self._key(x))
        return self._hold(x) if registered is None else self._recipe(*registered)

    def _recipe(
        self, function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
    ) -> Recipe:
        held, give = [self._hold(x) for x in inputs], self._give

        def recipe() -> torch.Tensor:
            with torch.no_grad():
                return function(*map(give, held))

        return recipe

    def _unpack(self, stored: Any) -> torch.Tensor:
        return stored() if callable(stored) else self._give(stored)


class KeptResults(Save):
    """One forward of a block that is computed again, without a second call of what `results`
    called.

    Its node stays in the graph with what it saved; `inputs` alone are made again, with the block.
    """

    def __init__(self, hooks: Hooks = HELD) -> None:
        self._hold, self._give = hooks
        self._given: tuple[Any, bool] | None = None

    def results(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """`function(*inputs)` in the forward, and what it gave when the block is computed again."""
        marks = [Kept.apply(x, *inputs) for x in inputs]  # both times: the second fills the first
        if self._given is not None:
            held, wanted = self._given
            return (
                self._give(held).detach().requires_grad_(wanted)
            )  # so that what follows saves as much as before
        places = {x.untyped_storage()._cdata: place for place, x in enumerate(inputs)}
        made = functools.cache(
            lambda place: marks[place].grad_fn.saved_tensors[0].detach()
        )  # torch gives each once

        def pack(x: torch.Tensor) -> Any:
            place = places.get(x.untyped_storage()._cdata)
            if place is None:
                return self._hold(x)
            view = x.shape, x.stride(), x.storage_offset()
            return lambda: made(place).as_strided(*view)

        def unpack(stored: Any) -> torch.Tensor:
            return stored() if callable(stored) else self._give(stored)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = function(*inputs)
        self._given = self._hold(output.detach()), output.requires_grad
        return output


def run_block(
    body: Callable[..., torch.Tensor], mode: RecomputeMode, *inputs: Any, hooks: Hooks | None = None
) -> torch.Tensor:
    """Return `body(*inputs, save)`, whose backward computes again what `mode` repeats.

    `hooks` store and return the saved tensors. Under no_grad autograd saves nothing, so nothing is
    recomputed.
    """
    if not torch.is_grad_enabled():
        return body(*inputs, keep)
    if mode.repeats_activations and not mode.repeats_block:
        recomputation = Recomputation(hooks or HELD)
        with recomputation.active():
            return body(*inputs, recomputation)
    with torch.autograd.graph.saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext():
        if mode.repeats_block:
            # checkpoint sets hooks of its own inside of ours, so that ours see only the block's
            # input
            results = KeptResults(hooks or HELD)
            return checkpoint(body, *inputs, results, use_reentrant=False, preserve_rng_state=False)
        return body(*inputs, keep)
