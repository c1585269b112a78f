"""Flags of the decoder, which has RMSNorm, rotary embeddings, attention and gated MLPs.

They can describe Llama, Mistral, Phi-3, Qwen2, Qwen3, OLMo2, OLMo3, SmolLM3, Gemma 3, and the text
model of Molmo2. No flag depends on the number of ranks.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from megacp.engine.config.ranges import (
    MAX_EXPERTS,
    MAX_LAYERS,
    AboveZero,
    Fraction,
    NotNegative,
    Positive,
    Range,
)

VOCABULARY_MULTIPLE = 8
"""Each tp rank pads its vocabulary rows to a multiple of this number. Checkpoints omit the padding.
"""
LINEARS = ("q", "k", "v", "output", "gate", "up", "down")
"""Short words of --lora-targets. Each stands for all kinds that end in it, and `all` for all words.
"""
LORA_KINDS = (
    *("attention.q", "attention.k", "attention.v", "attention.output"),
    *("linear_attention.q", "linear_attention.k", "linear_attention.v", "linear_attention.output"),
    *("linear_attention.z", "linear_attention.b", "linear_attention.a"),
    "mamba.output",
    *("mlp.gate", "mlp.up", "mlp.down"),
    *("shared.gate", "shared.up", "shared.down"),
    *("experts.gate", "experts.up", "experts.down"),
)
"""Kinds of linear layers that support LoRA, as `part.linear`. The part `mlp` is a dense MLP,
`shared` is the shared expert, and `experts` stands for all routed experts of a layer.
"""

_ONE_INPUT = {
    "attention": ("q", "k", "v"),
    "linear_attention": ("q", "k", "v", "z", "b", "a"),
    **dict.fromkeys(("mlp", "shared", "experts"), ("gate", "up")),
}
"""Linear layers of each part that have the same input, so their LoRA pairs may share one A."""


@dataclass(frozen=True)
class NormPosition:
    """Position of a block's norms."""

    inputs: bool
    """Whether a norm precedes attention and MLP."""
    outputs: bool
    """Whether a norm follows attention and MLP, before the residual sum."""


NORM_POSITIONS = {
    "before": NormPosition(inputs=True, outputs=False),
    "after": NormPosition(inputs=False, outputs=True),
    "both": NormPosition(inputs=True, outputs=True),
}
"""Choices of `--norm-position`."""


@dataclass(frozen=True)
class PairSize:
    """Rank and alpha of the LoRA pairs of one kind."""

    rank: int
    alpha: float
    shares: str = ""
    """Linear of the same part whose A these pairs reuse; empty if they have their own A."""

    @property
    def scale(self) -> float:
        """Factor applied to the product A B."""
        return self.alpha / self.rank


def parse_lora_targets(text: str, usual: PairSize) -> tuple[dict[str, PairSize], list[str]]:
    """Parse --lora-targets, and return pair sizes by kind and a list of invalid words.

    A word such as `experts.gate:4:8` sets rank and alpha; other words use `usual`. If several words
    match the same kind, the last one wins. `attention.q+v` makes q and v share one A.
    """
    # commas, spaces, or both may separate the words
    words = text.replace(",", " ").split()
    if words == ["all"]:
        words = list(LINEARS)
    found = dict[str, PairSize]()
    faults = []
    for word in words:
        name, *own = word.split(":")
        size = _pair_size(own) if own else usual
        kinds = _kinds_of(name)
        if not kinds or size is None:
            faults.append(word)
            continue
        found |= dict.fromkeys(kinds, size)
        if "+" in name:
            # the first linear of `attention.q+v` provides A, the following ones reuse it
            shares = kinds[0].partition(".")[2]
            found |= dict.fromkeys(kinds[1:], replace(size, shares=shares))
    # A later word may have changed the linear that provides the shared A: after
    # `attention.q+v attention.q:4:8`, v has no A of the right size.
    for kind, size in list(found.items()):
        if not size.shares:
            continue
        part = kind.partition(".")[0]
        provider = found.get(f"{part}.{size.shares}")
        if provider != replace(size, shares=""):
            faults.append(f"{kind} shares the A of {size.shares}, whose rank or alpha differs")
            del found[kind]
    return found, faults


def _kinds_of(name: str) -> list[str]:
    """Return the kinds that a word of --lora-targets stands for; none for an unknown word."""
    if name in LINEARS:
        return [kind for kind in LORA_KINDS if kind.endswith(f".{name}")]
    if name in LORA_KINDS:
        return [name]
    part, _, joined = name.partition(".")
    linears = joined.split("+")
    # requiring the order of the table also rules out repeated and unknown linears
    in_order = [linear for linear in _ONE_INPUT.get(part, ()) if linear in linears]
    if len(linears) > 1 and linears == in_order:
        return [f"{part}.{linear}" for linear in linears]
    return []


def joined_words(sizes: Mapping[str, PairSize]) -> dict[str, PairSize]:
    """Return pair sizes by words of --lora-targets: the inverse of `parse_lora_targets`.

    Kinds that share one A become a single word, such as `attention.q+v`.
    """
    found = dict[str, PairSize]()
    for kind in LORA_KINDS:
        part, _, linear = kind.partition(".")
        # a kind that reuses an A is part of its provider's word
        if kind not in sizes or sizes[kind].shares:
            continue
        sharing = [
            other.partition(".")[2]
            for other in LORA_KINDS
            if other in sizes and other.startswith(f"{part}.") and sizes[other].shares == linear
        ]
        found["+".join([kind, *sharing])] = sizes[kind]
    return found


def _pair_size(words: list[str]) -> PairSize | None:
    """Parse the texts of a rank and an alpha; return None if they are invalid."""
    # int() would also accept signs, spaces and underscores
    if len(words) != 2 or not re.fullmatch(r"[1-9][0-9]{0,8}", words[0]):
        return None
    try:
        alpha = float(words[1])
    except ValueError:
        return None
    return PairSize(int(words[0]), alpha) if 0 < alpha < math.inf else None


@dataclass(frozen=True)
class ModelConfig:
    """Flags for the decoder. Sizes and head counts are global, that is, before tp splits them."""

    num_layers: Annotated[int, Range(1, MAX_LAYERS)] = 4
    """Number of decoder blocks."""

    hidden_size: Positive[int] = 256
    """Width of the residual stream."""

    ffn_hidden_size: Positive[int] = 768
    """Hidden width of the MLP."""

    # Attention heads
    num_attention_heads: Positive[int] = 8
    """Number of query heads."""

    num_query_groups: Positive[int | None] = None
    """Number of key/value heads, for grouped-query attention. None means --num-attention-heads."""

    kv_channels: Positive[int | None] = None
    """Width of an attention head. None means --hidden-size / --num-attention-heads."""

    # Vocabulary
    vocab_size: NotNegative[int] = 0
    """Number of token ids that the model can predict, which equals the number of output-head rows.
    0 uses the vocabulary size of the dataset's tokenizer."""

    additional_vocab_size: NotNegative[int] = 0
    """Number of extra embedding rows for tokens that the model reads but never predicts (Molmo2's
    image tokens). Needs --untie-embeddings-and-output-weights."""

    # Rotary position embedding
    rotary_base: Annotated[float, Range(1, low_open=True)] = 10000.0
    """Base (theta) of the rotary position embedding."""

    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How rotary frequencies are scaled for longer contexts. linear divides all positions; llama3
    and yarn slow down only the low frequencies; yarn also scales the attention scores."""

    rope_scaling_factor: Annotated[float, Range(1)] = 1.0
    """Factor by which --rope-scaling reduces rotary frequencies."""

    rope_original_max_positions: Positive[int] = 8192
    """Context length of the original pretraining, for --rope-scaling llama3 and yarn."""

    yarn_correction_range_round_to_int: bool = True
    """Round the bounds of yarn's blending range to integers (off for gpt-oss)."""

    window_rotary_base: Annotated[float | None, Range(1, low_open=True)] = None
    """Base (theta) of the rotary embedding in sliding-window layers, which then ignore
    --rope-scaling (Gemma 3). If not set, these layers use the same embedding as all others."""

    rotary_percent: Annotated[float, Range(0, 1, low_open=True)] = 1.0
    """Fraction of each head's dimensions that the rotary embedding rotates, starting at the first
    dimension (Qwen3.5: 0.25)."""

    mrope_section: tuple[int, int, int] | None = None
    """Number of rotary angles that follow the time, row and column of an image token. The three
    sets are interleaved and add up to half the rotated dimensions (Qwen3.5: 11 11 10). If not set,
    all angles follow a single position."""

    no_rope_freq: str | None = None
    """Layers without rotary embedding: N for every N-th layer, or a pattern such as [0,0,1] for the
    third of every three layers. If not set, all layers have it."""

    # Sliding windows. The patterns below are parsed by `skip_pattern`.
    window_size: Positive[int | None] = None
    """Number of tokens that a query attends to in sliding-window layers, including itself. If not
    set, the model has no sliding windows."""

    window_attn_skip_freq: str | None = None
    """Layers without the sliding window: N for every N-th layer, or a pattern such as [1,1,0] for
    the third of every three layers. If not set, all layers have the window."""

    # Layers with a recurrent state in place of attention
    linear_attention_freq: str | None = None
    """Layers that use attention while all other layers use a recurrent state: N for every N-th
    layer (Qwen3.5: 4), or a pattern such as [1,1,0] for the third of every three layers. If not
    set, all layers use attention."""

    linear_attention_rule: Literal["gated_delta", "mamba2"] = "gated_delta"
    """Update rule for the recurrent state: the gated delta rule or Mamba-2."""

    linear_num_key_heads: Positive[int] = 16
    """Number of query and key heads in a recurrent layer (mamba2: number of groups of B and C)."""

    linear_num_value_heads: Positive[int] = 32
    """Number of value heads in a recurrent layer, each with its own state. Must be a multiple of
    --linear-num-key-heads."""

    linear_key_head_dim: Positive[int] = 128
    """Width of each query and key head in a recurrent layer (mamba2: state size)."""

    linear_value_head_dim: Positive[int] = 128
    """Width of each value head in a recurrent layer."""

    linear_conv_kernel_dim: Annotated[int, Range(2, 64)] = 4
    """Kernel size of the causal convolution before the recurrence, in tokens."""

    max_position_embeddings: Positive[int | None] = None
    """Context length to write into an exported config; it does not affect training. None means
    --seq-length."""

    # Norms, scales and the MLP
    norm_epsilon: AboveZero[float] = 1e-5
    """Epsilon inside RMSNorm."""

    apply_layernorm_1p: bool = False
    """Multiply by 1 + weight in RMSNorm, with weights initialised to 0 (Gemma)."""

    softmax_scale: AboveZero[float | None] = None
    """Scaling factor for attention scores. None means 1 / sqrt(head width)."""

    embedding_multiplier: AboveZero[float] = 1.0
    """Scaling factor for text token embeddings (Gemma: sqrt(--hidden-size))."""

    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """Type of attention softmax. learnable adds an attention sink to each head: a learned score
    that enters the softmax but has no value (gpt-oss)."""

    qk_layernorm: Literal["off", "head", "all_heads"] = "off"
    """Apply RMSNorm to queries and keys before the rotary embedding. head normalises each head
    separately (Qwen3), and all_heads normalises all heads of a token together (OLMo2)."""

    norm_position: Literal["before", "after", "both"] = "before"
    """Where a block applies its norms: before attention and MLP; after them, on their outputs
    before the residual sum (OLMo2); or both (Gemma)."""

    mlp_activation: Literal["swiglu", "geglu", "clamped_swiglu"] = "swiglu"
    """Activation of the MLP gate. swiglu uses SiLU, and geglu the tanh approximation of GELU
    (Gemma). clamped_swiglu is gpt-oss's variant: it applies a steeper SiLU to the gate, clamped to
    at most 7, and multiplies the result by 1 + the up projection, clamped to [-7, 7]."""

    attention_output_gate: bool = False
    """Multiply the attention output by the sigmoid of a gate, which is part of the query projection
    (Qwen3.5)."""

    # Biases
    add_qkv_bias: bool = False
    """Add a bias to the query, key and value projections (Qwen2, Molmo2)."""

    add_attention_output_bias: bool = False
    """Add a bias to the output projection of attention."""

    add_mlp_bias: bool = False
    """Add biases to the linear layers of the MLP."""

    # Mixture of experts. `checks.py` refuses these flags if --num-experts is 0.
    num_experts: Annotated[int, Range(0, MAX_EXPERTS)] = 0
    """Number of experts per mixture-of-experts layer; 0 uses a dense MLP in every layer."""

    moe_router_topk: Positive[int] = 2
    """Number of experts that the router chooses for each token."""

    moe_ffn_hidden_size: Positive[int | None] = None
    """Width of an expert's hidden layer. None means --ffn-hidden-size."""

    moe_shared_expert_intermediate_size: Positive[int | None] = None
    """Hidden width of the shared expert, an MLP that processes every token in addition to the
    token's chosen experts. If not set, there is no shared expert."""

    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learned per-token score (Qwen3.5)."""

    moe_layer_freq: str = "1"
    """Layers with experts: N for the first of every N layers, or a list such as [0,1,1] with one
    entry per layer: 1 if the layer has experts, otherwise 0."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router scores into expert weights. With sigmoid, experts are chosen by
    weight plus a correction per expert (DeepSeek-V3, GLM-4.5)."""

    moe_router_pre_softmax: bool = False
    """Compute expert weights with a softmax over all experts (OLMoE) instead of only the chosen
    ones (Mixtral). With sigmoid, do not divide the weights by their sum over the chosen experts."""

    moe_router_topk_scaling_factor: AboveZero[float] = 1.0
    """Scaling factor for the weights of the chosen experts."""

    moe_router_num_groups: Positive[int] = 1
    """Number of groups of consecutive experts. The router ranks groups by the sum of their two
    highest scores."""

    moe_router_group_topk: Positive[int] = 1
    """Number of top-ranked groups from which each token's experts are chosen."""

    moe_router_bias: bool = False
    """Add a bias to the router scores (gpt-oss)."""

    # Output head and initialisation
    untie_embeddings_and_output_weights: bool = False
    """Use separate weights for the output head instead of sharing the embedding weights."""

    init_method_std: NotNegative[float] = 0.02
    """Standard deviation (std) of the initial weights. Output projections into the residual stream
    use std / sqrt(2 x layers)."""

    hidden_dropout: Fraction[float] = 0.0
    """Dropout probability on the outputs of attention and MLP, in [0, 1)."""

    hf_model_type: str | None = None
    """`model_type` to write into an exported config. If not set, the first type that supports the
    model's options."""

    # LoRA
    lora_rank: NotNegative[int] = 0
    """Rank of the LoRA adapters to train on a frozen model: y = x W + (alpha / rank) * (x A B). The
    model comes from --load-hf, or from --load with --finetune. 0 trains the model itself."""

    lora_alpha: AboveZero[float | None] = None
    """LoRA alpha: adapters are scaled by alpha / rank. None means --lora-rank, which gives a scale
    of 1, as peft's defaults do."""

    lora_targets: str | None = None
    """Decoder linear layers that get a LoRA adapter, separated by commas. A word (q, k, v, output,
    gate, up, down) selects all linear layers with that name; a kind (attention.q,
    linear_attention.q, mlp.gate, shared.gate, experts.gate) selects only that kind; all selects all
    words. KIND:RANK:ALPHA sets the rank and alpha of a kind. attention.q+v gives q and v one
    adapter with a shared A. None means q,v, which peft also uses for most decoders."""

    lora_dropout: Fraction[float] = 0.0
    """Dropout probability for the inputs of LoRA adapters, in [0, 1). The frozen layers receive the
    inputs without dropout."""

    @functools.cached_property
    def lora_pairs(self) -> Mapping[str, PairSize]:
        """LoRA pair sizes by kind, in the order of `LORA_KINDS`.

        They include kinds that no layer of this model has. Invalid words are ignored.
        """
        if self.lora_rank == 0:
            return {}
        asked, _ = parse_lora_targets(self.lora_targets or "q,v", self.usual_pair)
        return {kind: asked[kind] for kind in LORA_KINDS if kind in asked}

    @property
    def usual_pair(self) -> PairSize:
        """Pair size given by --lora-rank and --lora-alpha; alpha defaults to the rank."""
        alpha = float(self.lora_rank) if self.lora_alpha is None else self.lora_alpha
        return PairSize(self.lora_rank, alpha)

    @property
    def has_input_norms(self) -> bool:
        """Whether a norm precedes attention and MLP."""
        return NORM_POSITIONS[self.norm_position].inputs

    @property
    def has_output_norms(self) -> bool:
        """Whether a norm follows attention and MLP, before the residual sum."""
        return NORM_POSITIONS[self.norm_position].outputs

    @property
    def head_dim(self) -> int:
        """Width of one head: `kv_channels`, or hidden size / heads."""
        if self.kv_channels is not None:
            return self.kv_channels
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_scale(self) -> float:
        """Factor applied to attention scores: `softmax_scale`, or 1 / sqrt(head width)."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def embedding_rows(self) -> int:
        """Number of embedding rows: all token ids that the model can read."""
        return self.vocab_size + self.additional_vocab_size

    @property
    def query_groups(self) -> int:
        """Number of key/value heads: `num_query_groups`, or the number of heads."""
        if self.num_query_groups is not None:
            return self.num_query_groups
        return self.num_attention_heads

    @property
    def expert_hidden_size(self) -> int:
        """Hidden width of an expert: `moe_ffn_hidden_size`, or `ffn_hidden_size`."""
        if self.moe_ffn_hidden_size is not None:
            return self.moe_ffn_hidden_size
        return self.ffn_hidden_size

    @property
    def rotary_dim(self) -> int:
        """Number of head dimensions to which the rotary embedding applies; always even."""
        return int(self.head_dim * self.rotary_percent) // 2 * 2


def skip_pattern(flag: str, text: str | None, skips: str = "1") -> tuple[bool, ...]:
    """Parse a layer pattern and return one period of it, with True for each skipped layer.

    A number N skips the last of every N layers. A list such as [0,0,1] skips the layers whose digit
    is `skips`. Raise ValueError if `text` is neither.
    """
    if text is None:  # no layer is skipped
        return (False,)
    if re.fullmatch(r"[1-9]\d{0,3}", text):
        return (*[False] * (int(text) - 1), True)
    if re.fullmatch(r"\[\s*[01](\s*,\s*[01])*\s*\]", text):
        return tuple(digit == skips for digit in re.findall("[01]", text))
    raise ValueError(
        f"{flag} {text}: expected a number above 0, or a pattern of 0 and 1 such as [0,0,0,1]"
    )
