"""LoRA (Hu et al., arXiv 2106.09685) for frozen linear layers: `y = linear(x) + scale (x A^T) B^T`.

For a column-parallel layer, A `[r, h]` is replicated over tp, and B is sharded by rows. For a
row-parallel layer, A is sharded by columns, and B `[h, r]` is replicated. In both cases, LoRA only
communicates the narrow product `u[t, r]`, which is gathered or summed over tp, while the frozen
layer communicates rows of full width. The frozen layer is called unchanged, so this works with any
backend.

The global tensors of a fused layer (q, k, v) have separate pairs, but their A matrices are stacked
into one product, so they share one dropout mask. As everywhere in megacp, dropout bits depend on
token and column, and are the same on every grid.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megacp.attention.ops.pointwise import dropout
from megacp.distributed.differentiable import (
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
)
from megacp.engine.config.model import PairSize
from megacp.engine.layers.table import A, B, Tensor, lora_kind
from megacp.engine.tensor_parallel.linear import LinearSpec
from megacp.engine.tensor_parallel.parameters import LinearOptions, parameter_spec


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """The kinds of linear layers with LoRA pairs, and the sizes of the pairs."""

    pairs: Mapping[str, PairSize]
    dropout: float = 0.0
    """Dropout probability of the pairs' inputs during training."""

    def sizes(self, spec: LinearSpec) -> list[PairSize | None]:
        """Return the size of each linear layer's pair; None for a layer without a pair."""
        return [self.pairs.get(lora_kind(f"{spec.prefix}.{name}")) for name in spec.linears]


@dataclasses.dataclass(frozen=True)
class DropoutNames:
    """Key and token identifiers from which the dropout bits of a microbatch are derived."""

    key: int
    own: torch.Tensor
    """Identifiers of the tokens in this rank's residual stream: int64 `[t/tp]`, or `[t]` without
    sequence parallelism.
    """
    whole: torch.Tensor
    """Identifiers of all tp ranks' tokens: int64 `[t]`."""


def is_of_a_pair(name: str) -> bool:
    """Return whether the global tensor `name` is the A or B matrix of a LoRA pair."""
    return name.endswith((f".{A}", f".{B}"))


def places_of_inputs(
    names: Sequence[str],
    sizes: Sequence[PairSize | None],
) -> tuple[list[int], list[int]]:
    """Return the index of each linear layer's A matrix, and the ranks of a product's A matrices.

    Layers whose pairs share an A matrix have the same index; for a layer without a pair, it is 0.
    """
    own = []  # layers with their own A matrix
    ranks = []
    for name, size in zip(names, sizes, strict=True):
        if size is not None and not size.shares:
            own.append(name)
            ranks.append(size.rank)
    places = []
    for name, size in zip(names, sizes, strict=True):
        places.append(0 if size is None else own.index(size.shares or name))
    return places, ranks


class LowRank(nn.Module):
    """A frozen linear layer with LoRA pairs.

    Before each forward pass with dropout, the block sets `names` for the microbatch.
    """

    names: DropoutNames | None = None

    def __init__(
        self,
        linear: nn.Module,
        spec: LinearSpec,
        lora: LoraSpec,
        options: LinearOptions,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.lora = lora
        self.tp = options.tp
        self.sequence_parallel = options.sequence_parallel
        # the odd constant spreads a name's 32-bit hash over all 64 bits (SplitMix64)
        site_name = f"{spec.prefix}.{next(iter(spec.linears))}"
        self.site = zlib.crc32(site_name.encode()) * 0x9E3779B97F4A7C15
        # autograd computes the gradients of pairs, because it handles views of a stacked matrix
        self.options = dataclasses.replace(options, trained=True, weight_gradients=None)
        self.sizes = lora.sizes(spec)
        self.places, self.ranks = places_of_inputs([*spec.linears], self.sizes)
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        for (name, part), size in zip(spec.linears.items(), self.sizes, strict=True):
            if size is not None:
                *down, up = part.pair(f"{spec.prefix}.{name}", size)
                downs += down
                ups.append(up)
        # stacked A matrices of all pairs: [sum of ranks, inputs]
        self.down = self.options.parameter(parameter_spec(downs, self.options))
        # B matrix of each pair: [outputs, rank of the pair]
        up_specs = [parameter_spec([up], self.options) for up in ups]
        self.ups = nn.ParameterList(self.options.parameter(up_spec) for up_spec in up_specs)

    def dropped(self, x: torch.Tensor, whole: bool, first: int = 0) -> torch.Tensor:
        """Return `x`, with dropout during training.

        With `whole`, `x` has the tokens of all tp ranks, and its first column has the global index
        `first`.
        """
        if self.lora.dropout == 0.0 or not self.training:
            return x
        assert self.names is not None, "the block must first set the token names of the microbatch"
        # `site` makes the bits for the same tokens different in every layer
        tokens = self.names.whole if whole else self.names.own
        return dropout(x, self.names.key + self.site, tokens, self.lora.dropout, first)


class ColumnPairs(LowRank):
    """A column-parallel layer with LoRA pairs; each pair adds to some columns of `y[t, f/tp]`."""

    def __init__(
        self,
        linear: nn.Module,
        spec: LinearSpec,
        lora: LoraSpec,
        options: LinearOptions,
    ) -> None:
        super().__init__(linear, spec, lora, options)
        self.widths = [part.outputs // options.tp.size for part in spec.linears.values()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `y[t, f/tp]` for `x[t/tp, h]` or, without sequence parallelism, `x[t, h]`."""
        y = self.linear(x)  # [t, f/tp]
        # all A matrices in one product: [.., h] -> [.., sum of ranks]
        u = F.linear(self.dropped(x, whole=False), self.down)
        u = gather_from(u, self.tp) if self.sequence_parallel else copy_to(u, self.tp)
        inputs = u.split(self.ranks, -1)
        ups = iter(self.ups)
        outputs = y.split(self.widths, -1)
        parts = []
        for part, size, place in zip(outputs, self.sizes, self.places, strict=True):
            if size is not None:
                part = torch.add(part, F.linear(inputs[place], next(ups)), alpha=size.scale)
            parts.append(part)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class RowPair(LowRank):
    """A row-parallel layer with a LoRA pair, which adds to the output.

    The output is `y[t/tp, h]` or, without sequence parallelism, `y[t, h]`.
    """

    def __init__(
        self,
        linear: nn.Module,
        spec: LinearSpec,
        lora: LoraSpec,
        options: LinearOptions,
    ) -> None:
        super().__init__(linear, spec, lora, options)
        (size,) = self.sizes
        assert size is not None
        self.scale = size.scale
        # global index of this rank's first input column
        self.first = options.tp.rank * self.down.shape[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the outputs of layer and pair for `x[t, f/tp]`."""
        # [t, f/tp] -> [t, r], to be summed over tp
        u = F.linear(self.dropped(x, whole=True, first=self.first), self.down)
        u = reduce_scatter_to(u, self.tp) if self.sequence_parallel else reduce_from(u, self.tp)
        return torch.add(self.linear(x), F.linear(u, self.ups[0]), alpha=self.scale)


def adapted(
    linear: nn.Module,
    spec: LinearSpec,
    kind: type[LowRank],
    lora: LoraSpec | None,
    options: LinearOptions,
) -> nn.Module:
    """Return `linear` wrapped in `kind` if `lora` has pairs for it, otherwise `linear` itself."""
    # avoid the overhead of a wrapper without a pair
    if lora is None or not any(lora.sizes(spec)):
        return linear
    return kind(linear, spec, lora, options)
