"""A model of parameters only, sharded like a transformer over tp and pp.

Its loss is `sum(p * c + p * p / 2)` with given coefficients c per data-parallel rank and step, so
the true gradient is known without a forward pass. It has every kind of parameter: sharded by rows
or by columns, three fused pieces, a padded vocabulary tied between first and last stage, replicated
vectors, and one with three dimensions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import nn

from megacp.engine.config.training import STATE_KINDS
from megacp.engine.data_parallel.parameter import ParameterSpec, TensorSlice, attach, spec_of
from megacp.engine.optim.rules import Group

VOCABULARY, HIDDEN, LAYERS, VOCABULARY_MULTIPLE = 13, 6, 2, 4
LAYER_SHAPES = {
    "attention.q.weight": (8, HIDDEN),
    "attention.k.weight": (4, HIDDEN),
    "attention.v.weight": (4, HIDDEN),
    "attention.q.bias": (8,),
    "mlp.down.weight": (HIDDEN, 12),
    "norm.weight": (HIDDEN,),
    "filter.weight": (4, 3, 5),
}
FUSED = {
    "qkv": ([f"attention.{part}.weight" for part in "qkv"], 0),
    "bias": (["attention.q.bias"], 0),
    "down": (["mlp.down.weight"], 1),
    "norm": (["norm.weight"], None),
    "filter": (["filter.weight"], None),
}
"""Local parameters of a layer: the global tensors stacked in each, and the dimension sharded over
tp.
"""


def global_shapes() -> dict[str, tuple[int, ...]]:
    """Return the global shape of every parameter by name."""
    layers = {
        f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in LAYER_SHAPES.items()
    }
    return {"embedding.weight": (VOCABULARY, HIDDEN), **layers}


def decayed(name: str) -> bool:
    """Whether weight decay applies."""
    return not name.endswith(("bias", "norm.weight"))


def values(salt: object, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return random global tensors that depend only on name and salt."""
    seeds = {
        name: torch.Generator().manual_seed(zlib.crc32(f"{name}/{salt}".encode()))
        for name in global_shapes()
    }
    return {
        name: torch.randn(shape, generator=seeds[name], dtype=torch.float64).to(dtype)
        for name, shape in global_shapes().items()
    }


class Toy(nn.Module):
    """The parameters of one (tp rank, stage).

    `of(rank)` is in the order in which a model would construct them.
    """

    def __init__(self, tp: int, tp_rank: int, stages: int, stage: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp, self.tp_rank, self.dtype = tp, tp_rank, dtype
        tied = ("embedding",) if stages > 1 else ()
        if stage == 0:
            self.embedding = self._vocabulary(tied, counted=True)
        for layer in range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages):
            for attribute, (parts, dim) in FUSED.items():
                self._add(f"{layer}_{attribute}", [f"layers.{layer}.{part}" for part in parts], dim)
        if stages > 1 and stage == stages - 1:
            self.head = self._vocabulary(tied, counted=False)
        start = values("start", dtype)
        for parameter in self.parameters():
            parameter.data.copy_(local_of(parameter, start))

    def _vocabulary(self, tied: tuple[str, ...], counted: bool) -> nn.Parameter:
        rows = math.ceil(VOCABULARY / self.tp / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        first = min(self.tp_rank * rows, VOCABULARY)
        true = min(rows, VOCABULARY - first)
        piece = TensorSlice("embedding.weight", (VOCABULARY, HIDDEN), (first, 0), (true, HIDDEN))
        spec = ParameterSpec((piece,), partial_over=tied, counted=counted)
        return attach(nn.Parameter(torch.zeros(rows, HIDDEN, dtype=self.dtype)), spec)

    def _add(self, attribute: str, names: list[str], dim: int | None) -> None:
        pieces, start = [], 0
        for name in names:
            whole = global_shapes()[name]
            shape, offsets = list(whole), [0] * len(whole)
            if dim is not None:
                shape[dim] //= self.tp
                offsets[dim] = shape[dim] * self.tp_rank
            pieces.append(TensorSlice(name, whole, tuple(offsets), tuple(shape), start))
            start += shape[0]
        copied = dim is None
        spec = ParameterSpec(
            tuple(pieces),
            weight_decay=decayed(names[0]),
            partial_over=("tp",) if copied and self.tp > 1 else (),
            counted=not copied or self.tp_rank == 0,
        )
        local = torch.zeros(start, *pieces[0].shape[1:], dtype=self.dtype)
        self.register_parameter(attribute, attach(nn.Parameter(local), spec))

    def loss(self, coefficients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of the loss; parameters with a partial gradient share it with
        their copies.
        """
        total = torch.zeros((), dtype=self.dtype)
        for parameter in self.parameters():
            partial = spec_of(parameter).partial_over
            share = (1 / self.tp if "tp" in partial else 1.0) * (
                0.5 if "embedding" in partial else 1.0
            )
            c = local_of(parameter, coefficients)
            total = total + (share * (parameter * c + 0.5 * parameter * parameter)).sum()
        return total


def local_of(parameter: nn.Parameter, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the local tensor with its pieces taken from the global tensors, and 0 elsewhere.

    The dtype is that of the global tensors.
    """
    local = torch.zeros(parameter.shape, dtype=next(iter(whole.values())).dtype)
    for piece in spec_of(parameter).pieces:
        box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))
        local[piece.start : piece.start + piece.shape[0]] = whole[piece.name][box]
    return local


def group_of(x: torch.Tensor, weight_decay: float, lr_multiplier: float = 1.0) -> Group:
    """Return a group with a single slice, before AdamW's first update."""
    return Group(
        weight_decay,
        lr_multiplier,
        [x],
        [{kind: torch.zeros_like(x) for kind in STATE_KINDS["adamw"]}],
    )
