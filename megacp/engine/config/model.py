"""The architecture: a decoder with RMSNorm, rotary embedding, grouped queries and gated MLPs; a
vision tower before it.

Llama, Mistral, Phi-3, Qwen2, Qwen3, OLMo2, OLMo3, SmolLM3, Gemma 3 and Molmo2 are settings of it.
No field speaks of ranks.
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
"""Rows of the vocabulary on each tp rank are padded to a multiple of it; padding is in no
checkpoint.
"""
LINEARS = ("q", "k", "v", "output", "gate", "up", "down")
"""Short words of --lora-targets. Each means all kinds of linears whose names end in it; `all` means
all words.
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
"""Kinds of linears that can have a low-rank pair: the part of a block, and the linear in it. `mlp`
is a dense MLP, `shared` the MLP that all tokens pass next to their experts, `experts` all routed
experts of a layer.
"""


_ONE_INPUT = {
    "attention": ("q", "k", "v"),
    "linear_attention": ("q", "k", "v", "z", "b", "a"),
    **dict.fromkeys(("mlp", "shared", "experts"), ("gate", "up")),
}
"""Linears of a part that are multiplied by the same inputs, so that their pairs may share A."""


@dataclass(frozen=True)
class NormPosition:
    """Where the norms of a block are."""

    inputs: bool
    """Whether a norm precedes attention and MLP."""
    outputs: bool
    """Whether a norm follows attention and MLP, before the residual sum."""


NORM_POSITIONS = {
    "before": NormPosition(inputs=True, outputs=False),
    "after": NormPosition(inputs=False, outputs=True),
    "both": NormPosition(inputs=True, outputs=True),
}
"""Rows of `--norm-position`."""


@dataclass(frozen=True)
class PairSize:
    """Rank and alpha of the low-rank pairs of one kind."""

    rank: int
    alpha: float
    shares: str = ""
    """The linear of the same part whose A these pairs use; empty: they have their own."""

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return self.alpha / self.rank


def parse_lora_targets(text: str, usual: PairSize) -> tuple[dict[str, PairSize], list[str]]:
    """Return the sizes of the kinds that --lora-targets names, and its faulty words.

    A kind has the rank and alpha of its word (`experts.gate:4:8`), or the usual ones. If several
    words name a kind, the last one decides. `attention.q+v` is a pair of q and v together, with one
    A.
    """
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
            shares = kinds[0].partition(".")[2]
            found |= dict.fromkeys(kinds[1:], replace(size, shares=shares))
    for kind, size in list(found.items()):
        if size.shares and found.get(f"{kind.partition('.')[0]}.{size.shares}") != replace(
            size, shares=""
        ):
            faults.append(f"{kind} shares A of {size.shares}, which has another rank or alpha")
            del found[kind]
    return found, faults


def _kinds_of(name: str) -> list[str]:
    """Return the kinds that a word means: all of its name, one, or several that share A; none for
    an unknown word.
    """
    if name in LINEARS:
        return [kind for kind in LORA_KINDS if kind.endswith(f".{name}")]
    if name in LORA_KINDS:
        return [name]
    part, _, joined = name.partition(".")
    linears = joined.split("+")
    in_order = [linear for linear in _ONE_INPUT.get(part, ()) if linear in linears]
    return (
        [f"{part}.{linear}" for linear in linears]
        if len(linears) > 1 and linears == in_order
        else []
    )


def joined_words(sizes: Mapping[str, PairSize]) -> dict[str, PairSize]:
    """Return sizes by words of --lora-targets, those of kinds that share A in one:
    `attention.q+v`.
    """
    found = dict[str, PairSize]()
    for kind in LORA_KINDS:
        part, _, linear = kind.partition(".")
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
    """Return the rank and alpha that two words spell, or None if they do not spell any."""
    if len(words) != 2 or not re.fullmatch(r"[1-9][0-9]{0,8}", words[0]):
        return None
    try:
        alpha = float(words[1])
    except ValueError:
        return None
    return PairSize(int(words[0]), alpha) if 0 < alpha < math.inf else None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of the decoder. Head counts and sizes are global, before tensor
    parallelism.
    """

    num_layers: Annotated[int, Range(1, MAX_LAYERS)] = 4
    """Decoder blocks."""

    hidden_size: Positive[int] = 256
    """Width of the residual stream."""

    ffn_hidden_size: Positive[int] = 768
    """Width of the MLP's hidden layer."""

    num_attention_heads: Positive[int] = 8
    """Query heads."""

    num_query_groups: Positive[int | None] = None
    """Key/value heads of grouped-query attention (default: as many as query heads)."""

    kv_channels: Positive[int | None] = None
    """Width of one head (default: hidden size / attention heads)."""

    vocab_size: NotNegative[int] = 0
    """Token ids that can be predicted: rows of the output head; 0 takes it from the tokenizer of
    the dataset.
    """

    additional_vocab_size: NotNegative[int] = 0
    """Further rows of the embedding, for tokens that are read but never predicted (Molmo2's image
    tokens); needs --untie-embeddings-and-output-weights."""

    rotary_base: Annotated[float, Range(1, low_open=True)] = 10000.0
    """Theta of the rotary position embedding."""

    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Stretching of rotary frequencies for longer contexts: linear divides positions, llama3 and
    yarn only the slow frequencies; yarn also scales the attention scores."""

    rope_scaling_factor: Annotated[float, Range(1)] = 1.0
    """Factor by which rotary frequencies are slowed when scaling is on."""

    rope_original_max_positions: Positive[int] = 8192
    """llama3 and yarn scaling: the context length the model was first trained with."""

    yarn_correction_range_round_to_int: bool = True
    """yarn scaling: the frequencies between which it blends have whole numbers (gpt-oss: not)."""

    window_rotary_base: Annotated[float | None, Range(1, low_open=True)] = None
    """Theta in layers with a sliding window, where nothing is stretched then (default: as in the
    others; Gemma 3).
    """

    rotary_percent: Annotated[float, Range(0, 1, low_open=True)] = 1.0
    """Part of a head that the rotary embedding turns: its first dimensions (Qwen3.5: 0.25)."""

    mrope_section: tuple[int, int, int] | None = None
    """Angles of the rotary embedding that turn by time, by row and by column of an image's token,
    interleaved, half as many in all as dimensions are turned (default: all by one position;
    Qwen3.5: 11 11 10)."""

    no_rope_freq: str | None = None
    """Layers without rotary embedding: N leaves it out of every N-th layer, [0,0,1] out of the
    third of each three.
    """

    window_size: Positive[int | None] = None
    """Tokens that a layer with a sliding window sees, the query's own included (default: no layer
    has one).
    """

    window_attn_skip_freq: str | None = None
    """Which layers have the window: N leaves it out of every N-th layer, [1,1,0] of the third of
    each three (default: all have it)."""

    linear_attention_freq: str | None = None
    """Which layers have a state instead of attention: N leaves it out of every N-th layer, [1,1,0]
    of the third of each three (default: none has it; Qwen3.5: 4)."""

    linear_attention_rule: Literal["gated_delta", "mamba2"] = "gated_delta"
    """What moves the state: a gated delta rule or Mamba-2."""

    linear_num_key_heads: Positive[int] = 16
    """Query and key heads of a layer with a state (mamba2: groups of B and C)."""

    linear_num_value_heads: Positive[int] = 32
    """Value heads of a layer with a state, each with one; a multiple of the key heads."""

    linear_key_head_dim: Positive[int] = 128
    """Width of a query and key head of a layer with a state (mamba2: size of the state)."""

    linear_value_head_dim: Positive[int] = 128
    """Width of a value head of a layer with a state."""

    linear_conv_kernel_dim: Annotated[int, Range(2, 64)] = 4
    """Tokens of the convolution before a state, the token itself included."""

    max_position_embeddings: Positive[int | None] = None
    """Positions that the model is for, as an exported config says (default: --seq-length); changes
    no computation.
    """

    norm_epsilon: AboveZero[float] = 1e-5
    """Epsilon inside RMSNorm."""

    apply_layernorm_1p: bool = False
    """RMSNorm multiplies by 1 + weight, and weights begin at 0 (Gemma)."""

    softmax_scale: AboveZero[float | None] = None
    """What attention scores are multiplied by (default: 1 / sqrt(width of a head))."""

    embedding_multiplier: AboveZero[float] = 1.0
    """What the embedding of text tokens is multiplied by (Gemma: sqrt(hidden size))."""

    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """Whether each head has a learned score that takes its share of attention and gives nothing: a
    sink (gpt-oss).
    """

    qk_layernorm: Literal["off", "head", "all_heads"] = "off"
    """RMSNorm on q and k before the rotary embedding: on each head (Qwen3), or on all of a token
    together (OLMo2).
    """

    norm_position: Literal["before", "after", "both"] = "before"
    """Where the norms of a block stand: before attention and MLP, after them, before the residual
    sum (OLMo2), or in both places (Gemma)."""

    mlp_activation: Literal["swiglu", "geglu", "clamped_swiglu"] = "swiglu"
    """What the gate of the MLP passes: SiLU, GELU by its tanh approximation (Gemma), or, of a gate
    up to 7, a steeper SiLU that multiplies 1 + a value within 7 (gpt-oss)."""

    attention_output_gate: bool = False
    """Attention's output times the sigmoid of a gate that the query projection gives beside the
    queries (Qwen3.5).
    """

    add_qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2, Molmo2)."""

    add_attention_output_bias: bool = False
    """Bias on the attention's output projection."""

    add_mlp_bias: bool = False
    """Biases on the linears of the MLP."""

    num_experts: Annotated[int, Range(0, MAX_EXPERTS)] = 0
    """Experts of a layer with a mixture of them in the place of its MLP; 0: every MLP is dense."""

    moe_router_topk: Positive[int] = 2
    """Experts that a token is given to."""

    moe_ffn_hidden_size: Positive[int | None] = None
    """Width of an expert's hidden layer (default: --ffn-hidden-size)."""

    moe_shared_expert_intermediate_size: Positive[int | None] = None
    """Width of an MLP that all tokens pass beside their experts (default: there is none)."""

    moe_shared_expert_gate: bool = False
    """That MLP's output times the sigmoid of a score of the token (Qwen3.5)."""

    moe_layer_freq: str = "1"
    """Which layers have experts: N gives them to the first of every N layers, [0,1,1] tells of each
    of three.
    """

    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What makes weights of an expert's score: the softmax, or a sigmoid, to which a correction is
    added where experts are chosen (DeepSeek-V3, GLM-4.5)."""

    moe_router_pre_softmax: bool = False
    """Weigh experts by the softmax over all of them, as it is (OLMoE), instead of over the chosen
    ones (Mixtral); by sigmoids as they are, instead of their shares of the chosen ones' sum."""

    moe_router_topk_scaling_factor: AboveZero[float] = 1.0
    """What the weights of chosen experts are multiplied by."""

    moe_router_num_groups: Positive[int] = 1
    """Groups of neighbouring experts, ranked by the sum of their two highest scores."""

    moe_router_group_topk: Positive[int] = 1
    """The highest groups of a token, from which its experts are chosen."""

    moe_router_bias: bool = False
    """A bias on the scores of experts (gpt-oss)."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output head its own weight instead of the embedding's."""

    init_method_std: NotNegative[float] = 0.02
    """Standard deviation of the initial weights; residual outputs use std / sqrt(2 x layers)."""

    hidden_dropout: Fraction[float] = 0.0
    """Dropout on the outputs of attention and MLP, in [0, 1)."""

    hf_model_type: str | None = None
    """The `model_type` that an exported config has (default: the first that can say these options).
    """

    lora_rank: NotNegative[int] = 0
    """Rank of the low-rank pairs that are trained beside a frozen model (LoRA): y = x W + alpha /
    rank x A B; 0 trains the model itself. It starts from --load-hf, or from --load with
    --finetune."""

    lora_alpha: AboveZero[float | None] = None
    """Weight of the pairs over 1 / --lora-rank (default: --lora-rank, so a weight of 1, as peft's 8
    and 8).
    """

    lora_targets: str | None = None
    """Linears of the decoder that get a pair, separated by commas: a word (q, k, v, output, gate,
    up or down) means all linears of that name, a kind (attention.q, linear_attention.q, mlp.gate,
    shared.gate, experts.gate) only that one; KIND:RANK:ALPHA gives it a rank and alpha of its own,
    attention.q+v is one pair with one A for both; all means all words (default: q,v, as in peft for
    most decoders)."""

    lora_dropout: Fraction[float] = 0.0
    """Dropout on what the pairs are given, in [0, 1); the frozen model is given all of it."""

    @functools.cached_property
    def lora_pairs(self) -> Mapping[str, PairSize]:
        """Kinds of linears with a low-rank pair, in the order of `LORA_KINDS`, also those that no
        layer has. Faulty words of `lora_targets` are left out.
        """
        if self.lora_rank == 0:
            return {}
        asked, _ = parse_lora_targets(self.lora_targets or "q,v", self.usual_pair)
        return {kind: asked[kind] for kind in LORA_KINDS if kind in asked}

    @property
    def usual_pair(self) -> PairSize:
        """Rank and alpha of kinds without their own. Without --lora-alpha the pairs have a weight
        of 1.
        """
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
        return (
            self.kv_channels
            if self.kv_channels is not None
            else self.hidden_size // self.num_attention_heads
        )

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by: `softmax_scale`, or 1 / sqrt(width of a
        head).
        """
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding: all token ids that can be read."""
        return self.vocab_size + self.additional_vocab_size

    @property
    def query_groups(self) -> int:
        """Number of key/value heads: `num_query_groups`, or the number of heads."""
        return (
            self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads
        )

    @property
    def expert_hidden_size(self) -> int:
        """Width of an expert: `moe_ffn_hidden_size`, or that of a dense MLP."""
        return (
            self.ffn_hidden_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size
        )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are turned, an even number."""
        return int(self.head_dim * self.rotary_percent) // 2 * 2


def skip_pattern(flag: str, text: str | None, skips: str = "1") -> tuple[bool, ...]:
    """Which layers of a repeating pattern go without: of N the last, of a list those with the digit
    `skips`.

    ValueError when `text` is neither.
    """
    if text is None:
        return (False,)
    if re.fullmatch(r"[1-9]\d{0,3}", text):
        return (*[False] * (int(text) - 1), True)
    if re.fullmatch(r"\[\s*[01](\s*,\s*[01])*\s*\]", text):
        return tuple(digit == skips for digit in re.findall("[01]", text))
    raise ValueError(f"{flag} {text}: expected N above 0 or a pattern of 0 and 1 like [0,0,0,1]")
