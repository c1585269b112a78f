"""The words in which a kind of layer is described: linears, other tensors, and the row that holds them.

Sizes are global, before tensor parallelism. Modules, costs, converter, low-rank pairs and the dry run read the rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megacp.core.config.model import ModelConfig

Cut = Literal["rows", "columns", "whole"]
"""How tp ranks share a tensor: its dim 0, its dim 1, or each has all of it."""
MATMUL_BACKWARD = 2.0
"""Backward of a linear over its forward: the gradients of input and weight."""
ATTENTION_BACKWARD = 2.5
"""Backward of core attention over its forward: five products against two (FlashAttention-2, Dao 2023)."""
A, B = "lora_A.weight", "lora_B.weight"
"""Ends of the names of the two matrices of a low-rank pair, as peft has them."""


@dataclass(frozen=True)
class Tensor:
    """A global tensor, without padding."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = "whole"
    init: str = "normal"
    """How it is drawn, as `ParameterSpec.init` says."""
    std: float = 0.0
    decays: bool = True

    @property
    def size(self) -> int:
        """Elements of all ranks together."""
        return math.prod(self.shape)

    def local_size(self, tp: int) -> int:
        """Elements on one tp rank."""
        return self.size if self.cut == "whole" else self.size // tp

    def below(self, prefix: str) -> Tensor:
        """The same tensor, named within a model."""
        return dataclasses.replace(self, name=f"{prefix}.{self.name}")


@dataclass(frozen=True)
class Linear:
    """A matrix `[outputs, inputs]`, and perhaps a bias that begins at 0."""

    inputs: int
    outputs: int
    std: float
    bias: bool = False
    cut: Cut = "rows"

    def tensors(self, name: str) -> Iterator[Tensor]:
        """Its weight and bias. A bias behind columns is whole, because it is added after the sum over tp."""
        yield Tensor(f"{name}.weight", (self.outputs, self.inputs), self.cut, "normal", self.std)
        if self.bias:
            cut: Cut = "rows" if self.cut == "rows" else "whole"
            yield Tensor(f"{name}.bias", (self.outputs,), cut, "zeros", decays=False)

    def pair(self, name: str, rank: int) -> Iterator[Tensor]:
        """The low-rank matrices A `[rank, inputs]` and B `[outputs, rank]` beside it: the cut one has the cut side."""
        by_columns = self.cut == "columns"
        # what peft's Kaiming draw with a = sqrt(5) comes to
        down_std = 1 / math.sqrt(3 * self.inputs)
        down_cut: Cut = "columns" if by_columns else "whole"
        up_cut: Cut = "whole" if by_columns else "rows"
        yield Tensor(f"{name}.{A}", (rank, self.inputs), down_cut, "uniform", down_std)
        yield Tensor(f"{name}.{B}", (self.outputs, rank), up_cut, "zeros")


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass: linear layers and core attention, kept apart because their backward costs differ."""

    matmul: float
    attention: float

    @property
    def forward(self) -> float:
        return self.matmul + self.attention

    @property
    def training(self) -> float:
        """Forward and backward, nothing computed twice."""
        return (1 + MATMUL_BACKWARD) * self.matmul + (1 + ATTENTION_BACKWARD) * self.attention

    @property
    def passing(self) -> float:
        """Forward and the gradient of the input alone: frozen weights with trained ones before them."""
        return MATMUL_BACKWARD * self.matmul + (1 + ATTENTION_BACKWARD) * self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention)

    def times(self, factor: float) -> Flops:
        """The FLOPs of `factor` such passes."""
        return Flops(self.matmul * factor, self.attention * factor)


@dataclass(frozen=True)
class LayerKind:
    """A kind of mixer or MLP."""

    name: str
    """Of its tensors, behind `layers.{i}.`."""
    linears: Callable[[ModelConfig], Mapping[str, Linear]]
    """By the last part of their names; the order in which one product holds them."""
    others: Callable[[ModelConfig], Iterator[Tensor]]
    """Tensors beside the linears."""
    mixing: Callable[[ModelConfig, int, int], Flops]
    """The forward beside the linears, over some tokens with an area of allowed (query, key) pairs."""

    def tensors(self, model: ModelConfig) -> Iterator[Tensor]:
        """All of them, named within the layer."""
        for name, linear in self.linears(model).items():
            yield from linear.tensors(f"{self.name}.{name}")
        for tensor in self.others(model):
            yield tensor.below(self.name)


def output_std(model: ModelConfig) -> float:
    """Std of the two linears that write to the residual stream: `std / sqrt(2 layers)` (GPT-2; Megatron)."""
    return model.init_method_std / math.sqrt(2 * model.num_layers)


def norm_weight(model: ModelConfig, name: str, width: int, cut: Cut = "whole") -> Tensor:
    """The weight of an RMSNorm."""
    return Tensor(f"{name}.weight", (width,), cut, "zeros" if model.apply_layernorm_1p else "ones", decays=False)
