"""The words in which a kind of layer is described: linears, other tensors, and the row that holds
them.

Sizes are global, before tensor parallelism. Modules, costs, converter and low-rank pairs read the
rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megacp.engine.config.model import ModelConfig, PairSize
from megacp.engine.config.run import RunConfig
from megacp.engine.config.training import Treated

DATA = "dp_cp"
"""Name of the axis over all ranks that hold the same part of the model and see other tokens."""
EXPERTS = "edp"
"""Name of the axis over all ranks that hold the same experts: what expert parallelism leaves of a
stage's ranks.
"""
Cut = Literal["rows", "columns", "whole"]
"""How tp ranks share a tensor: its dim 0, its dim 1, or each has all of it."""
MATMUL_BACKWARD = 2.0
"""Backward of a linear over its forward: the gradients of input and weight."""
ATTENTION_BACKWARD = 2.5
"""Backward of core attention over its forward: five products against two (FlashAttention-2, Dao
2023).
"""
PUBLISHED_BACKWARD = 2.0
"""The same where MFU is published (PaLM, Chowdhery et al., 2022): a product computed again is none
of the model.
"""
A, B = "lora_A.weight", "lora_B.weight"
"""Ends of the names of the two matrices of a low-rank pair, as peft has them."""


def lora_kind(name: str) -> str:
    """Return the kind of a linear, as --lora-targets names it: `experts.gate` of
    `layers.1.mlp.experts.3.gate`.
    """
    parts = [part for part in name.split(".") if not part.isdigit()]
    return ".".join(parts[-2:])


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
    treated: Treated = "vector"
    """By which the optimizer chooses the rule that steps it."""
    reduced_over: str = DATA
    """Name of the axis whose ranks sum the gradient by slices and step a slice each."""

    @property
    def size(self) -> int:
        """Elements of all ranks together."""
        return math.prod(self.shape)

    def local_size(self, tp: int, ep: int = 1) -> int:
        """Elements on one tp rank; of an expert, those that an ep rank has in the mean."""
        return self.size // (
            ep if self.reduced_over == EXPERTS else 1 if self.cut == "whole" else tp
        )


@dataclass(frozen=True)
class Linear:
    """A matrix `[outputs, inputs]`, and perhaps a bias that begins at 0."""

    inputs: int
    outputs: int
    std: float
    bias: bool = False
    cut: Cut = "rows"
    reduced_over: str = DATA

    def tensors(self, name: str) -> Iterator[Tensor]:
        """Its weight and bias. A bias behind columns is whole, because it is added after the sum
        over tp.
        """
        over, shape = self.reduced_over, (self.outputs, self.inputs)
        yield Tensor(
            f"{name}.weight",
            shape,
            self.cut,
            "normal",
            self.std,
            treated="matrix",
            reduced_over=over,
        )
        if self.bias:
            cut: Cut = "rows" if self.cut == "rows" else "whole"
            yield Tensor(
                f"{name}.bias", (self.outputs,), cut, "zeros", decays=False, reduced_over=over
            )

    def pair(self, name: str, size: PairSize) -> Iterator[Tensor]:
        """The low-rank matrices A `[rank, inputs]`, unless it is another linear's, and B `[outputs,
        rank]` beside it.

        The cut one has the cut side.
        """
        down, up, over = (size.rank, self.inputs), (self.outputs, size.rank), self.reduced_over
        # what peft's Kaiming draw with a = sqrt(5) comes to
        down_std = 1 / math.sqrt(3 * self.inputs)
        down_cut: Cut = "columns" if self.cut == "columns" else "whole"
        up_cut: Cut = "rows" if self.cut == "rows" else "whole"
        if not size.shares:
            yield Tensor(
                f"{name}.{A}",
                down,
                down_cut,
                "uniform",
                down_std,
                treated="matrix",
                reduced_over=over,
            )
        yield Tensor(f"{name}.{B}", up, up_cut, "zeros", treated="matrix", reduced_over=over)


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass: linear layers and core attention, kept apart because their backward
    costs differ.
    """

    matmul: float
    attention: float
    backward: float = ATTENTION_BACKWARD
    """Of attention, over its forward."""

    @property
    def forward(self) -> float:
        return self.matmul + self.attention

    @property
    def training(self) -> float:
        """Forward and backward, nothing computed twice."""
        return (1 + MATMUL_BACKWARD) * self.matmul + (1 + self.backward) * self.attention

    @property
    def passing(self) -> float:
        """Forward and the gradient of only the input: frozen weights with trained ones before
        them.
        """
        return MATMUL_BACKWARD * self.matmul + (1 + self.backward) * self.attention

    @property
    def published(self) -> Flops:
        """The same, of which `training` and `passing` are what MFU is published with."""
        return dataclasses.replace(self, backward=PUBLISHED_BACKWARD)

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention)

    def times(self, factor: float) -> Flops:
        """The FLOPs of `factor` such passes."""
        return Flops(self.matmul * factor, self.attention * factor)


def tokens_per_rank(config: RunConfig) -> int:
    """Tokens of a microbatch's row on one cp rank."""
    row = config.training.micro_batch_size * config.data.seq_length
    return -(
        -row // config.parallel.context_parallel_size
    )  # dynamic: dp times the packs over dp times the ranks


def rows_per_rank(config: RunConfig) -> int:
    """Return the tokens of a block's input on one rank: with sequence parallelism, a part of
    `tokens_per_rank`.
    """
    sharers = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    return tokens_per_rank(config) // sharers


def residual_bytes(config: RunConfig) -> int:
    """Return the bytes of a block's input on one rank."""
    return rows_per_rank(config) * config.model.hidden_size * config.training.element_bytes


@dataclass(frozen=True)
class LayerKind:
    """A kind of mixer or MLP."""

    name: str
    """Name of its tensors, behind `layers.{i}.`."""
    linears: Callable[[ModelConfig], Mapping[str, Linear]]
    """Linears by the last part of their names."""
    products: tuple[tuple[str, ...], ...]
    """The linears of each product, in the order in which it holds them."""
    others: Callable[[ModelConfig], Iterator[Tensor]] = lambda model: iter(())
    """Tensors beside the linears."""
    mixing: Callable[[ModelConfig, int, int], Flops] = lambda model, tokens, area: Flops(0.0, 0.0)
    """The forward beside the linears, over some tokens with an area of allowed (query, key) pairs.
    """
    of_expert: Callable[[ModelConfig], Mapping[str, Linear]] = lambda model: {}
    """Linears of each expert, by the last part of their names; their tensors are among the others.
    """

    def tensors(self, model: ModelConfig, layer: str) -> Iterator[Tensor]:
        """All of them, of a layer with this name."""
        for name, linear in self.linears(model).items():
            yield from linear.tensors(f"{layer}.{self.name}.{name}")
        for tensor in self.others(model):
            yield dataclasses.replace(tensor, name=f"{layer}.{self.name}.{tensor.name}")


def output_std(model: ModelConfig, layers: int | None = None) -> float:
    """Std of the two linears that write to the residual stream: `std / sqrt(2 layers)` (GPT-2;
    Megatron).
    """
    return model.init_method_std / math.sqrt(2 * (layers or model.num_layers))


def norm_weight(model: ModelConfig, name: str, width: int, cut: Cut = "whole") -> Tensor:
    """The weight of an RMSNorm."""
    return Tensor(
        f"{name}.weight",
        (width,),
        cut,
        "zeros" if model.apply_layernorm_1p else "ones",
        decays=False,
    )


def layer_norm_tensors(name: str, width: int) -> Iterator[Tensor]:
    """Weight and bias of a LayerNorm."""
    yield Tensor(f"{name}.weight", (width,), init="ones", decays=False)
    yield Tensor(f"{name}.bias", (width,), init="zeros", decays=False)
