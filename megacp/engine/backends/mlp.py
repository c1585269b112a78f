"""A norm with the product behind it, a whole SwiGLU MLP, and that MLP over tiles of tokens.

Each cheap step of `NormMLP` is a function of its own: selective recomputation drops the norm's
output and the widest activation without repeating a product or a message.

Over tiles (ALST: Bekman et al., 2025) gate, up and SwiGLU exist for one tile, in forward and in
backward: only the input is kept, and backward computes a tile again, takes its gradients and goes
on. Weight gradients are summed over the tiles in fp32 or wider and handed to autograd once. Under
sequence parallelism a tile is some rows of each tp rank, gathered for that tile. The input is saved
before the tiles are computed: a block that is itself computed again in backward ends there, and no
product runs a third time.
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
    """`x[t/tp, h] -> linear(norm(x))`: see `NativeBackend.norm_column_linear`."""

    def __init__(self, norm: nn.Module | None, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: torch.Tensor, save: Save) -> torch.Tensor:
        return self.linear(x if self.norm is None else save(self.norm, x))


class NormMLP(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`: norm, gate and up in one product, activation, down; see
    `NativeBackend.norm_mlp`.
    """

    def __init__(
        self, norm: nn.Module | None, gate_up: nn.Module, activation: Activation, down: nn.Module
    ) -> None:
        super().__init__()
        self.norm, self.gate_up, self.activation, self.down = norm, gate_up, activation, down

    def forward(self, x: torch.Tensor, save: Save) -> torch.Tensor:
        return self.down(self.wide(x, save))

    def wide(self, x: torch.Tensor, save: Save) -> torch.Tensor:
        """What the last product multiplies, `[t, f/tp]`."""
        return save(self.activation, self.gate_up(x if self.norm is None else save(self.norm, x)))


class Kept(torch.autograd.Function):
    """Saves a tensor where it stands, for whoever holds its node; it has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise AssertionError("nothing depends on what is kept")


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mlp: TiledMLP, kept: list[Any], *rows_and_trained: Any) -> torch.Tensor:
        ctx.mlp, ctx.kept = mlp, kept
        return mlp.over_tiles(rows_and_trained[: len(kept)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = [x.grad_fn.saved_tensors[0] if isinstance(x, torch.Tensor) else x for x in ctx.kept]  # type: ignore[union-attr]  # of `Kept`
        ctx.kept.clear()  # the graph lives until all of backward is done, the inputs must not
        return (
            None,
            None,
            *ctx.mlp.gradients(rows, grads[0], ctx.needs_input_grad[2 : 2 + len(rows)]),
        )


class TiledMLP(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`: a `norm_mlp` of any backend over tiles of `rows` rows of this
    rank. What else it is given has a row for each of x, and is sliced like a tensor.

    The number of tiles follows from t/tp, which tp ranks share, so they make the same calls; a rank
    without tokens has one empty tile. `precision` is the context in which a tile is computed again.
    """

    def __init__(
        self, mlp: nn.Module, rows: int, precision: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.mlp, self.rows, self.precision = mlp, rows, precision

    def trained(self) -> list[nn.Parameter]:
        """Parameters that want a gradient."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        """Of the MLP's arguments the last is `save`, which tiles do not ask."""
        rows, trained = (x, *more[:-1]), self.trained()
        tensors = [given for given in rows if isinstance(given, torch.Tensor)]
        if not torch.is_grad_enabled() or not any(
            given.requires_grad for given in (*tensors, *trained)
        ):
            return self.over_tiles(rows)
        # the tensor too: torch may empty the node of one that is gone
        kept = [
            Kept.apply(x, *tensors, *trained) if isinstance(x, torch.Tensor) else x for x in rows
        ]
        return _Tiles.apply(self, kept, *rows, *trained)

    def _tiles(self, rows: Sequence[Any]) -> Iterator[tuple[slice, list[Any]]]:
        for start in range(0, max(1, len(rows[0])), self.rows):
            place = slice(start, start + self.rows)
            yield place, [given[place] for given in rows]

    def over_tiles(self, rows: Sequence[Any]) -> torch.Tensor:
        """The result, tile by tile and without a graph."""
        out = torch.empty_like(rows[0])
        with torch.no_grad():
            for place, tile in self._tiles(rows):
                out[place] = self.mlp(*tile, keep)
        return out

    def gradients(
        self, rows: Sequence[Any], grad: torch.Tensor, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs (None unless `wanted`) and of `trained`, of the result's gradient
        `[t/tp, h]`.
        """
        trained = self.trained()
        of_rows: list[Any] = [
            torch.empty_like(x) if wants else None for x, wants in zip(rows, wanted, strict=True)
        ]
        totals: dict[nn.Parameter, torch.Tensor] = {}
        with _told_once(trained) as fused:
            for place, tile in self._tiles(rows):
                inputs = [
                    x.detach().requires_grad_() if wants else x
                    for x, wants in zip(tile, wanted, strict=True)
                ]
                of_tile, found = self._tile(inputs, grad[place], wanted, trained)
                for whole, part in zip(itertools.compress(of_rows, wanted), of_tile, strict=True):
                    if part is not None:
                        whole[place] = part
                for parameter, part in found.items():
                    if (
                        fused(parameter) or parameter not in totals
                    ):  # a fused layer's is a sign without a value
                        totals[parameter] = (
                            part if fused(parameter) else part.to(accumulation_dtype(part.dtype))
                        )
                    else:
                        totals[parameter] += part
        return [*of_rows, *(totals[p].to(p.dtype) if p in totals else None for p in trained)]

    def _tile(
        self,
        tile: Sequence[Any],
        grad: torch.Tensor,
        wanted: Sequence[bool],
        trained: list[nn.Parameter],
    ) -> tuple[list[torch.Tensor | None], dict[nn.Parameter, torch.Tensor]]:
        """Gradients of what is wanted of one tile, and of the parameters that do not take theirs
        themselves.
        """
        own: dict[nn.Parameter, torch.Tensor | None] = {}
        with torch.enable_grad(), self.precision():
            if isinstance(self.mlp, NormMLP) and isinstance(self.mlp.down, RowParallelLinear):
                out = self.mlp.wide(tile[0], keep)
                grad, own = self.mlp.down.gradients(out.detach(), grad)
            else:
                out = self.mlp(*tile, keep)
        others = [p for p in trained if p not in own]
        inputs = list(itertools.compress(tile, wanted))
        found = torch.autograd.grad(out, [*inputs, *others], grad, allow_unused=True)
        parts = [*own.items(), *zip(others, found[len(inputs) :], strict=True)]
        return list(found[: len(inputs)]), {
            parameter: part for parameter, part in parts if part is not None
        }


@contextlib.contextmanager
def _told_once(parameters: Sequence[nn.Parameter]) -> Iterator[Callable[[nn.Parameter], bool]]:
    """Keep from the buckets what fused layers add to them, until all of it is added: they take it
    for a step's last.

    Gives the question whether a layer has added a parameter's gradient. Where it also returned a
    sign to autograd, that tells the bucket.
    """
    tellers = {p: p.gradient_added for p in parameters if hasattr(p, "gradient_added")}
    signed: set[nn.Parameter] = set()

    def fused(parameter: nn.Parameter) -> bool:
        if getattr(parameter, "grad_added_to_main_grad", False):
            signed.add(parameter)
        return parameter in signed

    for parameter in tellers:
        parameter.gradient_added = lambda parameter: None  # as the buckets put it there
    try:
        yield fused
    finally:
        for parameter, tell in tellers.items():
            parameter.gradient_added = tell
    for parameter, tell in tellers.items():
        if parameter.grad_added_to_main_grad and parameter not in signed:  # type: ignore[attr-defined]  # likewise
            tell(parameter)
