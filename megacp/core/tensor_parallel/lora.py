"""Low-rank pairs beside frozen linears (LoRA: Hu et al., arXiv 2106.09685): `y = linear(x) + scale (x A^T) B^T`.

Of a column-parallel linear A `[r, h]` is whole on every tp rank and B is cut by rows. Of a row-parallel one A is cut by
columns and B `[h, r]` is whole. Either way the only message is the narrow product `u[t, r]`: gathered, or summed over
tp, in the place where the linear itself sends rows of full width. The frozen linear is called as it stands, so it may
be of any backend.

Global tensors of one fused linear (q, k, v) have pairs of their own, whose A are stacked to one product. So their
dropout has one mask; its bits are named by token and column as all dropout here, and are those of one process.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megacp.core.distributed.differentiable import copy_to, gather_from, reduce_from, reduce_scatter_to
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice
from megacp.core.ops.pointwise import dropout
from megacp.core.tensor_parallel.linear import LinearOptions, LinearSpec

A, B = "lora_A.weight", "lora_B.weight"
"""Ends of the names of the two matrices, as peft has them."""


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Which linears have pairs, by the last part of their names; rank and weight of all of them."""

    linears: tuple[str, ...]
    rank: int
    scale: float
    dropout: float = 0.0
    """Of what the pairs are given, in training."""


@dataclasses.dataclass(frozen=True)
class DropoutNames:
    """What the dropout bits of a microbatch are drawn from."""

    key: int
    own: torch.Tensor
    """int64 `[t/tp]`: the tokens of the residual stream on this rank; `[t]` without sequence parallelism."""
    whole: torch.Tensor
    """int64 `[t]`: those of all tp ranks."""


def is_of_a_pair(name: str) -> bool:
    """Whether a global tensor is A or B of a pair."""
    return name.endswith((f".{A}", f".{B}"))


def _down_spec(pieces: Sequence[TensorSlice], inputs: int, partial: bool, counted: bool) -> ParameterSpec:
    """Of A: uniform within 1 / sqrt(inputs), what peft's Kaiming draw with a = sqrt(5) comes to."""
    over = ("tp",) if partial else ()
    return ParameterSpec(tuple(pieces), "uniform", 1 / math.sqrt(3 * inputs), partial_over=over, counted=counted)


class LowRank(nn.Module):
    """Pairs of one linear. Their block says the names of a microbatch's dropout bits before it calls the linear."""

    names: DropoutNames | None = None

    def __init__(self, linear: LinearSpec, lora: LoraSpec) -> None:
        super().__init__()
        self.dropout = lora.dropout
        # the odd constant spreads keys of names over all 64 bits (SplitMix64)
        self.site = zlib.crc32(f"{linear.prefix}.{linear.outputs[0][0]}".encode()) * 0x9E3779B97F4A7C15

    def dropped(self, x: torch.Tensor, whole: bool, first: int = 0) -> torch.Tensor:
        """`x` in training, with zeros; `whole`: of all tokens, and its columns from `first` on."""
        if self.dropout == 0.0 or not self.training:
            return x
        assert self.names is not None, "a block names the tokens of a microbatch"
        tokens = self.names.whole if whole else self.names.own
        return dropout(x, self.names.key + self.site, tokens, self.dropout, first)


class ColumnPairs(LowRank):
    """Pairs of a column-parallel linear: adds to the columns of `y[t, f/tp]` that have one."""

    def __init__(self, linear: LinearSpec, lora: LoraSpec, options: LinearOptions) -> None:
        super().__init__(linear, lora)
        self.options, self.scale, tp, rank = options, lora.scale, options.tp, lora.rank
        self.widths = [rows // tp.size for _, rows in linear.outputs]
        self.adapted = [name in lora.linears for name, _ in linear.outputs]
        chosen = [output for output, adapted in zip(linear.outputs, self.adapted, strict=True) if adapted]
        downs, ups, start = [], [], 0
        for number, (name, rows) in enumerate(chosen):
            name, whole, local = f"{linear.prefix}.{name}", (rank, linear.in_features), rows // tp.size
            downs.append(TensorSlice(f"{name}.{A}", whole, (0, 0), whole, number * rank))
            ups.append(TensorSlice(f"{name}.{B}", (rows, rank), (tp.rank * local, 0), (local, rank), start))
            start += local
        partial = options.sequence_parallel and tp.size > 1  # each tp rank sees other tokens
        self.down = options.parameter(_down_spec(downs, linear.in_features, partial, counted=tp.rank == 0))
        self.up = options.parameter(ParameterSpec(tuple(ups), "zeros"))
        self.ranks, self.rows = [rank] * len(chosen), [piece.shape[0] for piece in ups]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`x[t/tp, h]` under sequence parallelism, else `x[t, h]`."""
        u = F.linear(self.dropped(x, whole=False), self.down)  # all pairs at once: [.., h] -> [.., pairs r]
        u = gather_from(u, self.options.tp) if self.options.sequence_parallel else copy_to(u, self.options.tp)
        pairs = zip(u.split(self.ranks, -1), self.up.split(self.rows), strict=True)
        parts = [
            torch.add(part, F.linear(*next(pairs)), alpha=self.scale) if adapted else part
            for part, adapted in zip(y.split(self.widths, -1), self.adapted, strict=True)
        ]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class RowPair(LowRank):
    """The pair of a row-parallel linear, which adds to `y[t/tp, h]` (without sequence parallelism `y[t, h]`)."""

    def __init__(self, linear: LinearSpec, lora: LoraSpec, options: LinearOptions) -> None:
        super().__init__(linear, lora)
        self.options, self.scale, tp, rank = options, lora.scale, options.tp, lora.rank
        ((last, rows),) = linear.outputs
        name, local = f"{linear.prefix}.{last}", linear.in_features // tp.size
        self.first = tp.rank * local
        piece = TensorSlice(f"{name}.{A}", (rank, linear.in_features), (0, tp.rank * local), (rank, local))
        whole = TensorSlice(f"{name}.{B}", (rows, rank), (0, 0), (rows, rank))
        over = ("tp",) if options.sequence_parallel and tp.size > 1 else ()
        self.down = options.parameter(_down_spec([piece], linear.in_features, partial=False, counted=True))
        self.up = options.parameter(ParameterSpec((whole,), "zeros", partial_over=over, counted=tp.rank == 0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`x[t, f/tp]` is what the linear has multiplied."""
        u = F.linear(self.dropped(x, True, self.first), self.down)  # [t, f/tp] -> [t, r], partial over tp
        u = reduce_scatter_to(u, self.options.tp) if self.options.sequence_parallel else reduce_from(u, self.options.tp)
        return torch.add(y, F.linear(u, self.up), alpha=self.scale)


class AdaptedLinear(nn.Module):
    """A frozen linear and the pairs beside it."""

    def __init__(self, linear: nn.Module, pairs: nn.Module) -> None:
        super().__init__()
        self.linear, self.pairs = linear, pairs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the linear gives for its input, and what the pairs add to it."""
        return self.pairs(x, self.linear(x))


def adapted(
    linear: nn.Module,
    spec: LinearSpec,
    kind: type[ColumnPairs | RowPair],
    lora: LoraSpec | None,
    options: LinearOptions,
) -> nn.Module:
    """The linear with pairs of this kind where `lora` names one of its tensors, else the linear itself."""
    if lora is None or not any(name in lora.linears for name, _ in spec.outputs):
        return linear
    # the pairs are trained; autograd takes the gradients of views of a stacked matrix
    own = dataclasses.replace(options, trained=True, weight_gradients=None)
    return AdaptedLinear(linear, kind(spec, lora, own))
