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

import torch
import torch.nn.functional as F
from torch import nn

from megacp.core.distributed.differentiable import copy_to, gather_from, reduce_from, reduce_scatter_to
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice
from megacp.core.layers.table import A, B
from megacp.core.ops.pointwise import dropout
from megacp.core.tensor_parallel.linear import LinearOptions, LinearSpec


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Which linears have pairs, by the last part of their names; rank and weight of all of them."""

    linears: tuple[str, ...]
    rank: int
    scale: float
    dropout: float = 0.0
    """Dropout of the inputs of the pairs, in training."""


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


class LowRank(nn.Module):
    """A frozen linear and the pairs beside it. Its block says the names of a microbatch's dropout bits before."""

    names: DropoutNames | None = None

    def __init__(self, linear: nn.Module, spec: LinearSpec, lora: LoraSpec, options: LinearOptions) -> None:
        super().__init__()
        self.linear, self.lora, self.tp = linear, lora, options.tp
        self.sequence_parallel = options.sequence_parallel
        # the odd constant spreads keys of names over all 64 bits (SplitMix64)
        self.site = zlib.crc32(f"{spec.prefix}.{spec.outputs[0][0]}".encode()) * 0x9E3779B97F4A7C15
        # the pairs are trained; autograd takes the gradients of views of a stacked matrix
        self.options = dataclasses.replace(options, trained=True, weight_gradients=None)
        self.partial = ("tp",) if options.sequence_parallel and options.tp.size > 1 else ()
        """Axes over which a whole matrix has a partial gradient: each tp rank sees other tokens."""

    def down_parameter(self, pieces: list[TensorSlice], inputs: int, whole: bool) -> nn.Parameter:
        """A: uniform within 1 / sqrt(inputs), what peft's Kaiming draw with a = sqrt(5) comes to."""
        over, counted = (self.partial, self.tp.rank == 0) if whole else ((), True)
        spec = ParameterSpec(tuple(pieces), "uniform", 1 / math.sqrt(3 * inputs), partial_over=over, counted=counted)
        return self.options.parameter(spec)

    def dropped(self, x: torch.Tensor, whole: bool, first: int = 0) -> torch.Tensor:
        """`x` in training, with zeros; `whole`: of all tokens, and its columns from `first` on."""
        if self.lora.dropout == 0.0 or not self.training:
            return x
        assert self.names is not None, "a block names the tokens of a microbatch"
        tokens = self.names.whole if whole else self.names.own
        return dropout(x, self.names.key + self.site, tokens, self.lora.dropout, first)


class ColumnPairs(LowRank):
    """A column-parallel linear, with pairs that add to those columns of `y[t, f/tp]` that have one."""

    def __init__(self, linear: nn.Module, spec: LinearSpec, lora: LoraSpec, options: LinearOptions) -> None:
        super().__init__(linear, spec, lora, options)
        tp, rank = options.tp, lora.rank
        self.widths = [rows // tp.size for _, rows in spec.outputs]
        self.adapted = [name in lora.linears for name, _ in spec.outputs]
        downs: list[TensorSlice] = []
        ups, start = [], 0
        for name, rows in (output for output in spec.outputs if output[0] in lora.linears):
            name, whole, local = f"{spec.prefix}.{name}", (rank, spec.in_features), rows // tp.size
            downs.append(TensorSlice(f"{name}.{A}", whole, (0, 0), whole, len(downs) * rank))
            ups.append(TensorSlice(f"{name}.{B}", (rows, rank), (tp.rank * local, 0), (local, rank), start))
            start += local
        self.down = self.down_parameter(downs, spec.in_features, whole=True)
        self.up = self.options.parameter(ParameterSpec(tuple(ups), "zeros"))
        self.rows = [piece.shape[0] for piece in ups]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t/tp, h]` under sequence parallelism, else `x[t, h]`."""
        y = self.linear(x)
        u = F.linear(self.dropped(x, whole=False), self.down)  # all pairs at once: [.., h] -> [.., pairs r]
        u = gather_from(u, self.tp) if self.sequence_parallel else copy_to(u, self.tp)
        pairs = zip(u.split(self.lora.rank, -1), self.up.split(self.rows), strict=True)
        parts = [
            torch.add(part, F.linear(*next(pairs)), alpha=self.lora.scale) if adapted else part
            for part, adapted in zip(y.split(self.widths, -1), self.adapted, strict=True)
        ]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class RowPair(LowRank):
    """A row-parallel linear and its pair, which adds to `y[t/tp, h]` (without sequence parallelism `y[t, h]`)."""

    def __init__(self, linear: nn.Module, spec: LinearSpec, lora: LoraSpec, options: LinearOptions) -> None:
        super().__init__(linear, spec, lora, options)
        tp, rank, ((last, rows),) = options.tp, lora.rank, spec.outputs
        name, local = f"{spec.prefix}.{last}", spec.in_features // tp.size
        self.first = tp.rank * local
        piece = TensorSlice(f"{name}.{A}", (rank, spec.in_features), (0, self.first), (rank, local))
        whole = TensorSlice(f"{name}.{B}", (rows, rank), (0, 0), (rows, rank))
        self.down = self.down_parameter([piece], spec.in_features, whole=False)
        up = ParameterSpec((whole,), "zeros", partial_over=self.partial, counted=tp.rank == 0)
        self.up = self.options.parameter(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t, f/tp]` is what the linear multiplies."""
        u = F.linear(self.dropped(x, True, self.first), self.down)  # [t, f/tp] -> [t, r], partial over tp
        u = reduce_scatter_to(u, self.tp) if self.sequence_parallel else reduce_from(u, self.tp)
        return torch.add(self.linear(x), F.linear(u, self.up), alpha=self.lora.scale)


def adapted(
    linear: nn.Module, spec: LinearSpec, kind: type[LowRank], lora: LoraSpec | None, options: LinearOptions
) -> nn.Module:
    """The linear with pairs of this kind where `lora` names one of its tensors, else the linear itself."""
    named = lora is not None and any(name in lora.linears for name, _ in spec.outputs)
    return kind(linear, spec, lora, options) if named and lora is not None else linear
