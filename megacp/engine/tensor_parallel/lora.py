"""Low-rank pairs beside frozen linears (LoRA: Hu et al., arXiv 2106.09685): `y = linear(x) + scale
(x A^T) B^T`.

Of a column-parallel linear A `[r, h]` is whole on every tp rank and B is cut by rows. Of a
row-parallel one A is cut by columns and B `[h, r]` is whole. Either way the only message is the
narrow product `u[t, r]`: gathered, or summed over tp, in the place where the linear itself sends
rows of full width. The frozen linear is called as it stands, so it may be of any backend.

Global tensors of one fused linear (q, k, v) have pairs of their own, whose A are stacked to one
product. So their dropout has one mask; its bits are named by token and column as all dropout here,
and are those of one process.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megacp.attention.ops.pointwise import dropout
from megacp.distributed.differentiable import copy_to, gather_from, reduce_from, reduce_scatter_to
from megacp.engine.config.model import PairSize
from megacp.engine.layers.table import A, B, Tensor, lora_kind
from megacp.engine.tensor_parallel.linear import LinearSpec
from megacp.engine.tensor_parallel.parameters import LinearOptions, parameter_spec


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Which kinds of linears have pairs, and of which size."""

    pairs: Mapping[str, PairSize]
    dropout: float = 0.0
    """Dropout of the inputs of the pairs, in training."""

    def sizes(self, spec: LinearSpec) -> list[PairSize | None]:
        """The size of the pair of each linear of a product; None: it has no pair."""
        return [self.pairs.get(lora_kind(f"{spec.prefix}.{name}")) for name in spec.linears]


@dataclasses.dataclass(frozen=True)
class DropoutNames:
    """What the dropout bits of a microbatch are drawn from."""

    key: int
    own: torch.Tensor
    """int64 `[t/tp]`: the tokens of the residual stream on this rank; `[t]` without sequence
    parallelism.
    """
    whole: torch.Tensor
    """int64 `[t]`: those of all tp ranks."""


def is_of_a_pair(name: str) -> bool:
    """Whether a global tensor is A or B of a pair."""
    return name.endswith((f".{A}", f".{B}"))


def places_of_inputs(
    names: Sequence[str], sizes: Sequence[PairSize | None]
) -> tuple[list[int], list[int]]:
    """Return the number of each linear's A, and the ranks of all A of a product.

    Linears whose pairs share A have the same one; a linear without a pair has 0.
    """
    own = [
        name
        for name, size in zip(names, sizes, strict=True)
        if size is not None and not size.shares
    ]
    places = []
    for name, size in zip(names, sizes, strict=True):
        places.append(0 if size is None else own.index(size.shares or name))
    return places, [size.rank for size in sizes if size is not None and not size.shares]


class LowRank(nn.Module):
    """A frozen linear and the pairs beside it. Its block says the names of a microbatch's dropout
    bits before.
    """

    names: DropoutNames | None = None

    def __init__(
        self, linear: nn.Module, spec: LinearSpec, lora: LoraSpec, options: LinearOptions
    ) -> None:
        super().__init__()
        self.linear, self.lora, self.tp = linear, lora, options.tp
        self.sequence_parallel = options.sequence_parallel
        # the odd constant spreads keys of names over all 64 bits (SplitMix64)
        self.site = (
            zlib.crc32(f"{spec.prefix}.{next(iter(spec.linears))}".encode()) * 0x9E3779B97F4A7C15
        )
        # the pairs are trained; autograd takes the gradients of views of a stacked matrix
        self.options = dataclasses.replace(options, trained=True, weight_gradients=None)
        self.sizes = lora.sizes(spec)
        self.places, self.ranks = places_of_inputs([*spec.linears], self.sizes)
        # matrices A of all pairs stacked, [sum of ranks, inputs], and B of each pair, [outputs, its
        # rank]
        downs, ups = list[Tensor](), list[Tensor]()
        for (name, part), size in zip(spec.linears.items(), self.sizes, strict=True):
            if size is not None:
                *down, up = part.pair(f"{spec.prefix}.{name}", size)
                downs += down
                ups.append(up)
        self.down = self.options.parameter(parameter_spec(downs, self.options))
        self.ups = nn.ParameterList(
            self.options.parameter(parameter_spec([up], self.options)) for up in ups
        )

    def dropped(self, x: torch.Tensor, whole: bool, first: int = 0) -> torch.Tensor:
        """`x` in training, with zeros; `whole`: of all tokens, and its columns from `first` on."""
        if self.lora.dropout == 0.0 or not self.training:
            return x
        assert self.names is not None, "a block names the tokens of a microbatch"
        tokens = self.names.whole if whole else self.names.own
        return dropout(x, self.names.key + self.site, tokens, self.lora.dropout, first)


class ColumnPairs(LowRank):
    """A column-parallel linear, with pairs that add to those columns of `y[t, f/tp]` that have
    one.
    """

    def __init__(
        self, linear: nn.Module, spec: LinearSpec, lora: LoraSpec, options: LinearOptions
    ) -> None:
        super().__init__(linear, spec, lora, options)
        self.widths = [part.outputs // options.tp.size for part in spec.linears.values()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t/tp, h]` under sequence parallelism, else `x[t, h]`."""
        y = self.linear(x)
        u = F.linear(
            self.dropped(x, whole=False), self.down
        )  # all pairs at once: [.., h] -> [.., pairs r]
        u = gather_from(u, self.tp) if self.sequence_parallel else copy_to(u, self.tp)
        inputs, ups = u.split(self.ranks, -1), iter(self.ups)
        parts = []
        for part, size, place in zip(
            y.split(self.widths, -1), self.sizes, self.places, strict=True
        ):
            if size is not None:
                part = torch.add(part, F.linear(inputs[place], next(ups)), alpha=size.scale)
            parts.append(part)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class RowPair(LowRank):
    """A row-parallel linear and its pair, which adds to `y[t/tp, h]` (without sequence parallelism
    `y[t, h]`).
    """

    def __init__(
        self, linear: nn.Module, spec: LinearSpec, lora: LoraSpec, options: LinearOptions
    ) -> None:
        super().__init__(linear, spec, lora, options)
        (size,) = self.sizes
        assert size is not None
        self.scale = size.scale
        self.first = (
            options.tp.rank * self.down.shape[1]
        )  # column of the whole input with which this rank's begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t, f/tp]` is what the linear multiplies."""
        u = F.linear(
            self.dropped(x, True, self.first), self.down
        )  # [t, f/tp] -> [t, r], partial over tp
        u = reduce_scatter_to(u, self.tp) if self.sequence_parallel else reduce_from(u, self.tp)
        return torch.add(self.linear(x), F.linear(u, self.ups[0]), alpha=self.scale)


def adapted(
    linear: nn.Module,
    spec: LinearSpec,
    kind: type[LowRank],
    lora: LoraSpec | None,
    options: LinearOptions,
) -> nn.Module:
    """Return the linear with pairs of this class if `lora` names one of its tensors, else the
    linear itself.
    """
    if lora is None or not any(lora.sizes(spec)):
        return linear
    return kind(linear, spec, lora, options)
