"""A norm followed by a linear layer, a gated MLP, and tiling of the MLP over tokens.

Each cheap operation in `NormMLP` is a separate function, so selective recomputation can drop the
norm's output and the widest activation without repeating a matrix product or communication.

With tiles (ALST: Bekman et al., 2025), gate, up and SwiGLU exist for only one tile at a time, in
both passes. Only the input is saved. The backward pass recomputes a tile, computes its gradients
and continues with the next tile. Weight gradients are summed over the tiles in fp32 or wider, and
autograd receives them once. With sequence parallelism, a tile consists of some rows of each tp
rank, which are gathered for this tile. The input is saved before the tiles are computed. If the
whole block is also recomputed, its recomputation stops at this point, so that no product is
computed a third time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from megacp.attention.ops.dtype import accumulation_dtype
from megacp.engine.save import Save, keep
from megacp.engine.tensor_parallel.linear import RowParallelLinear

Activation = Callable[[torch.Tensor], torch.Tensor]


class NormLinear(nn.Module):
    """Norm and linear layer: `linear(norm(x))`; see `NativeBackend.norm_column_linear`."""

    def __init__(self, norm: nn.Module | None, linear: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.linear = linear

    def forward(self, x: torch.Tensor, save: Save) -> torch.Tensor:
        return self.linear(x if self.norm is None else save(self.norm, x))


class NormMLP(nn.Module):
    """Gated MLP, `x[t/tp, h] -> [t/tp, h]`: norm, one product for gate and up, activation, down.

    See `NativeBackend.norm_mlp`.
    """

    def __init__(
        self, norm: nn.Module | None, gate_up: nn.Module, activation: Activation, down: nn.Module
    ) -> None:
        super().__init__()
        self.norm = norm
        self.gate_up = gate_up
        self.activation = activation
        self.down = down

    def forward(self, x: torch.Tensor, save: Save) -> torch.Tensor:
        return self.down(self.wide(x, save))

    def wide(self, x: torch.Tensor, save: Save) -> torch.Tensor:
        """Return the input of the down product, `[t, f/tp]`."""
        # one expression, because a variable would keep the norm's output alive for too long
        return save(self.activation, self.gate_up(x if self.norm is None else save(self.norm, x)))


class Kept(torch.autograd.Function):
    """Save a tensor in an autograd node at this point of the graph. It gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise AssertionError("nothing may depend on the output of Kept")


class _Tiles(torch.autograd.Function):
    """Autograd function of `TiledMLP`: computes tiles without a graph and recomputes them later."""

    @staticmethod
    def forward(ctx: Any, mlp: TiledMLP, kept: list[Any], *rows_and_trained: Any) -> torch.Tensor:
        ctx.mlp = mlp
        ctx.kept = kept
        return mlp.over_tiles(rows_and_trained[: len(kept)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = []
        for x in ctx.kept:
            if isinstance(x, torch.Tensor):  # the output of `Kept`, whose node has saved the input
                node: Any = x.grad_fn
                rows.append(node.saved_tensors[0])
            else:
                rows.append(x)
        # the graph exists until the backward pass ends, but the inputs must be freed earlier
        ctx.kept.clear()
        wanted = ctx.needs_input_grad[2 : 2 + len(rows)]
        return None, None, *ctx.mlp.gradients(rows, grads[0], wanted)


class TiledMLP(nn.Module):
    """Applies a backend's `norm_mlp` to tiles of `rows` rows: `x[t/tp, h] -> [t/tp, h]`.

    Other arguments must have one row per row of `x` and support slicing like a tensor. The number
    of tiles depends on t/tp, which is equal on all tp ranks, so they make the same calls. A rank
    without tokens has one empty tile. `precision` returns the context for recomputing a tile.
    """

    def __init__(
        self, mlp: nn.Module, rows: int, precision: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.mlp = mlp
        self.rows = rows
        self.precision = precision

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        """Return the MLP's output. The last argument, `save`, is not used for tiles."""
        rows = (x, *more[:-1])
        trained = self.trained()
        tensors = [given for given in rows if isinstance(given, torch.Tensor)]
        needs_graph = any(given.requires_grad for given in (*tensors, *trained))
        if not torch.is_grad_enabled() or not needs_graph:
            return self.over_tiles(rows)
        # keep the output of `Kept` and not only its node, which torch may clear with the tensor
        kept = []
        for given in rows:
            if isinstance(given, torch.Tensor):
                kept.append(Kept.apply(given, *tensors, *trained))
            else:
                kept.append(given)
        return _Tiles.apply(self, kept, *rows, *trained)

    def _tiles(self, rows: Sequence[Any]) -> Iterator[tuple[slice, list[Any]]]:
        """Yield the slice and the arguments of each tile; there is at least one, perhaps empty."""
        for start in range(0, max(1, len(rows[0])), self.rows):
            place = slice(start, start + self.rows)
            yield place, [given[place] for given in rows]

    def over_tiles(self, rows: Sequence[Any]) -> torch.Tensor:
        """Return the output `[t/tp, h]`, computed tile by tile without an autograd graph."""
        out = torch.empty_like(rows[0])  # [t/tp, h]
        with torch.no_grad():
            for place, tile in self._tiles(rows):
                out[place] = self.mlp(*tile, keep)
        return out

    def gradients(
        self, rows: Sequence[Any], grad: torch.Tensor, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs and of the trained parameters.

        `grad[t/tp, h]` is the gradient of the output. The gradient is None for inputs that are not
        `wanted`, and for parameters whose gradient is already in a bucket.
        """
        trained = self.trained()
        of_rows: list[Any] = []
        for x, wants in zip(rows, wanted, strict=True):
            of_rows.append(torch.empty_like(x) if wants else None)
        totals: dict[nn.Parameter, torch.Tensor] = {}  # sums over tiles, in fp32 or wider
        with _told_once(trained) as fused:
            for place, tile in self._tiles(rows):
                inputs = []
                for x, wants in zip(tile, wanted, strict=True):
                    inputs.append(x.detach().requires_grad_() if wants else x)
                of_tile, found = self._tile(inputs, grad[place], wanted, trained)
                # a tile's input gradients are rows of the whole gradient
                for whole, part in zip(itertools.compress(of_rows, wanted), of_tile, strict=True):
                    if part is not None:
                        whole[place] = part
                for parameter, part in found.items():
                    if fused(
                        parameter
                    ):  # the layer has added the gradient; `part` is a placeholder
                        totals[parameter] = part
                    elif parameter not in totals:
                        totals[parameter] = part.to(accumulation_dtype(part.dtype))
                    else:
                        totals[parameter] += part
        # narrow the sums to the dtype that autograd expects
        of_trained = []
        for parameter in trained:
            total = totals.get(parameter)
            of_trained.append(None if total is None else total.to(parameter.dtype))
        return [*of_rows, *of_trained]

    def _tile(
        self,
        tile: Sequence[Any],
        grad: torch.Tensor,
        wanted: Sequence[bool],
        trained: list[nn.Parameter],
    ) -> tuple[list[torch.Tensor | None], dict[nn.Parameter, torch.Tensor]]:
        """Return the gradients of one tile's wanted inputs, and of the parameters.

        Parameters without a gradient, for example because it is already in a bucket, are omitted.
        """
        own: dict[nn.Parameter, torch.Tensor | None] = {}
        with torch.enable_grad(), self.precision():
            if isinstance(self.mlp, NormMLP) and isinstance(self.mlp.down, RowParallelLinear):
                # gradients of the down product need only its input, so do not recompute its output
                out = self.mlp.wide(tile[0], keep)
                grad, own = self.mlp.down.gradients(out.detach(), grad)
            else:
                out = self.mlp(*tile, keep)
        # all remaining gradients come from one call of autograd
        others = [p for p in trained if p not in own]
        inputs = list(itertools.compress(tile, wanted))
        found = torch.autograd.grad(out, [*inputs, *others], grad, allow_unused=True)
        parts = [*own.items(), *zip(others, found[len(inputs) :], strict=True)]
        of_parameters = {parameter: part for parameter, part in parts if part is not None}
        return list(found[: len(inputs)]), of_parameters


@contextlib.contextmanager
def _told_once(parameters: Sequence[nn.Parameter]) -> Iterator[Callable[[nn.Parameter], bool]]:
    """Suppress gradient-ready callbacks until the last tile.

    Otherwise, a bucket would treat the first tile's gradient as final. Yield a function that
    returns whether a layer has added a parameter's gradient to its bucket. If that layer has also
    returned a placeholder to autograd, autograd's hook notifies the bucket; otherwise, this context
    does.
    """
    tellers = {p: p.gradient_added for p in parameters if hasattr(p, "gradient_added")}
    signed: set[nn.Parameter] = set()  # parameters with a placeholder

    def fused(parameter: nn.Parameter) -> bool:
        if getattr(parameter, "grad_added_to_main_grad", False):
            signed.add(parameter)
        return parameter in signed

    # replace the callbacks that buckets have attached to the parameters
    for parameter in tellers:
        parameter.gradient_added = lambda parameter: None
    try:
        yield fused
    finally:
        for parameter, tell in tellers.items():
            parameter.gradient_added = tell
    # report the parameters that autograd's hooks will not report
    for parameter, tell in tellers.items():
        # `grad_added_to_main_grad` is an attribute that the bucket sets
        if parameter.grad_added_to_main_grad and parameter not in signed:  # type: ignore[attr-defined]
            tell(parameter)
