"""Data types that describe a kind of layer: its linear layers, other tensors and FLOPs.

Sizes are global, that is, before tp splits them. Modules, costs, the converter and LoRA use these
descriptions.
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
"""Name of the axis of ranks that have the same part of the model and different tokens."""
EXPERTS = "edp"
"""Name of the axis of ranks in a stage that have a copy of the same experts."""
Cut = Literal["rows", "columns", "whole"]
"""How tp splits a tensor: along dim 0, along dim 1, or not at all (a full copy on each rank)."""
MATMUL_BACKWARD = 2.0
"""Cost of a linear layer's backward pass (input and weight gradients) relative to its forward pass.
"""
ATTENTION_BACKWARD = 2.5
"""Cost of core attention's backward pass relative to its forward pass: five matrix products instead
of two (FlashAttention-2, Dao 2023).
"""
PUBLISHED_BACKWARD = 2.0
"""The same ratio in published MFU, which does not count the product that the backward pass
recomputes (PaLM, Chowdhery et al., 2022).
"""
# Name endings of the two matrices in a LoRA pair, as in peft
A = "lora_A.weight"
B = "lora_B.weight"


def lora_kind(name: str) -> str:
    """Return the kind of the linear layer with this name, as used in --lora-targets.

    For example, `layers.1.mlp.experts.3.gate` has the kind `experts.gate`.
    """
    parts = [part for part in name.split(".") if not part.isdigit()]
    return ".".join(parts[-2:])


@dataclass(frozen=True)
class Tensor:
    """Description of a global tensor, without padding."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = "whole"
    init: str = "normal"
    """Distribution of the initial values: one of the words in `ParameterSpec.init`."""
    std: float = 0.0
    decays: bool = True
    """Whether weight decay applies."""
    treated: Treated = "vector"
    """Role of the tensor, which determines its update rule."""
    reduced_over: str = DATA
    """Name of the axis whose ranks reduce-scatter the gradient and each update one slice."""

    @property
    def size(self) -> int:
        """Number of elements in the global tensor."""
        return math.prod(self.shape)

    def local_size(self, tp: int, ep: int = 1) -> int:
        """Return the number of elements per rank; for experts, the average over ep ranks."""
        # experts are distributed across ep ranks but never split over tp
        if self.reduced_over == EXPERTS:
            return self.size // ep
        if self.cut == "whole":
            return self.size
        return self.size // tp


@dataclass(frozen=True)
class Linear:
    """Description of a linear layer: a weight `[outputs, inputs]` and an optional zero bias."""

    inputs: int
    outputs: int
    std: float
    bias: bool = False
    cut: Cut = "rows"
    reduced_over: str = DATA

    def tensors(self, name: str) -> Iterator[Tensor]:
        """Yield the weight and, if there is one, the bias."""
        over = self.reduced_over
        yield Tensor(
            f"{name}.weight",
            (self.outputs, self.inputs),
            self.cut,
            "normal",
            self.std,
            treated="matrix",
            reduced_over=over,
        )
        if self.bias:
            # if columns are split, every rank adds the whole bias after the sum over tp
            cut: Cut = "rows" if self.cut == "rows" else "whole"
            yield Tensor(
                f"{name}.bias", (self.outputs,), cut, "zeros", decays=False, reduced_over=over
            )

    def pair(self, name: str, size: PairSize) -> Iterator[Tensor]:
        """Yield the layer's LoRA matrices A `[rank, inputs]` and B `[outputs, rank]`.

        A is omitted if the pair shares the A of another linear layer.
        """
        over = self.reduced_over
        # peft draws A from kaiming_uniform_(a=sqrt(5)), which has this standard deviation
        down_std = 1 / math.sqrt(3 * self.inputs)
        # tp splits the LoRA matrix on the same side as the weight: A has the input side, B the
        # output side
        down_cut: Cut = "columns" if self.cut == "columns" else "whole"
        up_cut: Cut = "rows" if self.cut == "rows" else "whole"
        if not size.shares:
            yield Tensor(
                f"{name}.{A}",
                (size.rank, self.inputs),
                down_cut,
                "uniform",
                down_std,
                treated="matrix",
                reduced_over=over,
            )
        # B = 0, so the adapted model initially equals the frozen one
        yield Tensor(
            f"{name}.{B}",
            (self.outputs, size.rank),
            up_cut,
            "zeros",
            treated="matrix",
            reduced_over=over,
        )


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass, separately for linear layers and core attention.

    They are separate because their backward passes have different relative costs.
    """

    matmul: float
    attention: float
    backward: float = ATTENTION_BACKWARD
    """Cost of core attention's backward pass relative to its forward pass."""

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass."""
        return self.matmul + self.attention

    @property
    def training(self) -> float:
        """FLOPs of the forward and backward passes, without recomputation."""
        return (1 + MATMUL_BACKWARD) * self.matmul + (1 + self.backward) * self.attention

    @property
    def passing(self) -> float:
        """FLOPs of the forward pass and of input gradients, for frozen layers after trained ones.

        Frozen layers need no weight gradients.
        """
        # a linear layer's output and its input gradient cost the same
        return MATMUL_BACKWARD * self.matmul + (1 + self.backward) * self.attention

    @property
    def published(self) -> Flops:
        """The same FLOPs, but with `training` and `passing` counted as in published MFU."""
        return dataclasses.replace(self, backward=PUBLISHED_BACKWARD)

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention)

    def times(self, factor: float) -> Flops:
        """Return these FLOPs multiplied by `factor`."""
        return Flops(self.matmul * factor, self.attention * factor)


def tokens_per_rank(config: RunConfig) -> int:
    """Return the number of a row's tokens on one cp rank, rounded up."""
    # dynamic context parallelism multiplies both the tokens and the ranks by dp, so it cancels
    row = config.training.micro_batch_size * config.data.seq_length
    return -(-row // config.parallel.context_parallel_size)


def rows_per_rank(config: RunConfig) -> int:
    """Return the number of tokens in a block's input on one rank.

    Sequence parallelism shards a cp rank's tokens across tp ranks.
    """
    if not config.parallel.sequence_parallel:
        return tokens_per_rank(config)
    return tokens_per_rank(config) // config.parallel.tensor_model_parallel_size


def residual_bytes(config: RunConfig) -> int:
    """Return the size in bytes of a block's input on one rank."""
    return rows_per_rank(config) * config.model.hidden_size * config.training.element_bytes


@dataclass(frozen=True)
class LayerKind:
    """Description of a kind of mixer (such as attention) or MLP."""

    name: str
    """Part of tensor names after `layers.{i}.`."""
    linears: Callable[[ModelConfig], Mapping[str, Linear]]
    """Function that returns the linear layers by the last part of their names."""
    products: tuple[tuple[str, ...], ...]
    """Groups of linear layers computed as one matrix product, in the order of their outputs."""
    others: Callable[[ModelConfig], Iterator[Tensor]] = lambda model: iter(())
    """Function that yields the tensors that do not belong to linear layers."""
    # FLOPs of a layer = FLOPs of its linear layers + `mixing`, such as attention scores
    mixing: Callable[[ModelConfig, int, int], Flops] = lambda model, tokens, area: Flops(0.0, 0.0)
    """Function that returns the FLOPs of the forward pass without linear layers, from the number of
    tokens and the number of allowed (query, key) pairs.
    """
    of_expert: Callable[[ModelConfig], Mapping[str, Linear]] = lambda model: {}
    """Function that returns one expert's linear layers by the last part of their names. `others`
    yields their tensors.
    """

    def tensors(self, model: ModelConfig, layer: str) -> Iterator[Tensor]:
        """Yield all tensors of this kind in the layer named `layer` (such as `layers.3`)."""
        for name, linear in self.linears(model).items():
            yield from linear.tensors(f"{layer}.{self.name}.{name}")
        for tensor in self.others(model):
            yield dataclasses.replace(tensor, name=f"{layer}.{self.name}.{tensor.name}")


def output_std(model: ModelConfig, layers: int | None = None) -> float:
    """Return the initial std of projections into the residual stream: `std / sqrt(2 layers)`.

    GPT-2 and Megatron use the same rule; each layer has two of these projections.
    """
    depth = layers or model.num_layers  # a vision tower passes its own depth
    return model.init_method_std / math.sqrt(2 * depth)


def norm_weight(model: ModelConfig, name: str, width: int, cut: Cut = "whole") -> Tensor:
    """Return the description of an RMSNorm's weight."""
    # with --apply-layernorm-1p the norm multiplies by 1 + weight
    init = "zeros" if model.apply_layernorm_1p else "ones"
    return Tensor(f"{name}.weight", (width,), cut, init, decays=False)


def layer_norm_tensors(name: str, width: int) -> Iterator[Tensor]:
    """Yield the descriptions of a LayerNorm's weight and bias."""
    yield Tensor(f"{name}.weight", (width,), init="ones", decays=False)
    yield Tensor(f"{name}.bias", (width,), init="zeros", decays=False)
