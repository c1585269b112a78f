"""Selective and full recomputation of a block.

Selective recomputation registers the outputs of cheap functions, such as norms. Wherever autograd
would save such an output, for example as the input of a linear layer, it saves a recipe instead,
which the backward pass runs. No matrix product and no communication is repeated.
`torch.utils.checkpoint` around a norm cannot do this, because the next linear layer would save the
norm's output anyway.

Full recomputation repeats a block except its core attention, whose cost grows with the row length.
The attention node of the first forward pass stays in the graph with its output and log-sum-exp.
Only its queries, keys and values are recomputed.
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
"""Function that recomputes a tensor."""
Key = tuple[Any, ...]
"""Key that identifies a tensor by its storage and view."""
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""A function that replaces a saved tensor with another object, and one that restores the tensor."""
HELD: Hooks = (lambda x: x, lambda x: x)
"""Hooks that keep saved tensors unchanged."""


class Recomputation(Save):
    """Selective recomputation. Run a block's forward pass in `with recomputation.active():`.

    `hooks` store the inputs of recipes, and saved tensors without a recipe.
    """

    def __init__(self, hooks: Hooks = HELD) -> None:
        self._hold, self._give = hooks
        # output -> (function, inputs)
        self._registered: dict[
            Key, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
        ] = {}
        # keeps storages alive until the block is done, so that two outputs never have the same key
        self._outputs: list[torch.Tensor] = []

    def __call__(
        self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return `function(*inputs)`. Where autograd would save the result, it saves a recipe."""
        output = function(*inputs)
        self._registered[self._key(output)] = function, tuple(x.detach() for x in inputs)
        self._outputs.append(output.detach())
        return output

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Replace saved tensors with recipes within the context; forget the outputs at its end."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._registered.clear()
        self._outputs.clear()

    @staticmethod
    def _key(x: torch.Tensor) -> Key:
        return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()

    def _pack(self, x: torch.Tensor) -> Any:
        registered = self._registered.get(self._key(x))
        if registered is None:
            return self._hold(x)
        return self._recipe(*registered)

    def _recipe(
        self, function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
    ) -> Recipe:
        held = [self._hold(x) for x in inputs]
        give = self._give

        def recipe() -> torch.Tensor:
            with torch.no_grad():
                return function(*map(give, held))

        return recipe

    def _unpack(self, stored: Any) -> torch.Tensor:
        # hooks never return a callable, so a callable is a recipe
        return stored() if callable(stored) else self._give(stored)


class KeptResults(Save):
    """Full recomputation of a block, without a second call of the function given to `results`.

    This function's node stays in the graph with its saved tensors. Only its inputs are recomputed,
    together with the block.
    """

    def __init__(self, hooks: Hooks = HELD) -> None:
        self._hold, self._give = hooks
        # from the first forward pass: (held output, whether it requires a gradient)
        self._given: tuple[Any, bool] | None = None

    def results(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return `function(*inputs)`; during recomputation, return the output of the first call."""
        # These nodes save the inputs. In the forward pass, `checkpoint` drops the saved tensors.
        # Recomputation fills them in again, so both passes need the same nodes.
        marks = [Kept.apply(x, *inputs) for x in inputs]
        if self._given is not None:
            held, wanted = self._given
            # same requires_grad as in the forward pass, so that later nodes save the same tensors
            return self._give(held).detach().requires_grad_(wanted)
        places = {x.untyped_storage()._cdata: place for place, x in enumerate(inputs)}
        # cached because `checkpoint` returns each saved tensor only once
        made = functools.cache(lambda place: marks[place].grad_fn.saved_tensors[0].detach())

        def pack(x: torch.Tensor) -> Any:
            # views of an input are recomputed; other saved tensors, such as the output, are kept
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
    """Return `body(*inputs, save)`, with recomputation in the backward pass according to `mode`.

    `hooks` store and restore saved tensors, for example on the host. Under no_grad, autograd saves
    nothing, so nothing is recomputed.
    """
    if not torch.is_grad_enabled():
        return body(*inputs, keep)
    if mode.repeats_activations and not mode.repeats_block:
        recomputation = Recomputation(hooks or HELD)
        with recomputation.active():
            return body(*inputs, recomputation)
    with torch.autograd.graph.saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext():
        if mode.repeats_block:
            # `checkpoint` sets inner hooks, so these outer hooks apply only to the block's input
            results = KeptResults(hooks or HELD)
            return checkpoint(body, *inputs, results, use_reentrant=False, preserve_rng_state=False)
        return body(*inputs, keep)
