"""Parameters and FLOPs of the decoder, by layer, embedding and head.

The same few products give the parameter table of the dry run, the cut of the pipeline and the FLOPs of the logged
utilisation. So they cannot disagree. A multiply-add counts as two FLOPs. `6 x parameters x tokens` would forget
attention, most of the work of long rows, and count the embedding, which multiplies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacp.core.config.model import VOCABULARY_MULTIPLE, ModelConfig

MATMUL_BACKWARD = 2.0
"""Backward of a linear over its forward: the gradients of input and weight."""
ATTENTION_BACKWARD = 2.5
"""Backward of core attention over its forward: five products against two (FlashAttention-2, Dao 2023)."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass: linear layers and core attention, kept apart because their backward costs differ."""

    matmul: float
    attention: float

    @property
    def forward(self) -> float:
        """Forward alone."""
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


def causal_area(tokens: int) -> int:
    """Allowed (query, key) pairs of one causal document: n (n + 1) / 2."""
    return tokens * (tokens + 1) // 2


def attention_weights(model: ModelConfig) -> int:
    """Weights of the q, k, v and output projections of a layer."""
    return model.hidden_size * model.head_dim * 2 * (model.num_attention_heads + model.query_groups)


def mlp_weights(model: ModelConfig) -> int:
    """Weights of the gate, up and down projections of a layer."""
    return 3 * model.hidden_size * model.ffn_hidden_size


def layer_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of one decoder block on one tp rank: sharded linears, replicated norms and row biases."""
    sharded = attention_weights(model) + mlp_weights(model)
    sharded += model.add_qkv_bias * model.head_dim * (model.num_attention_heads + 2 * model.query_groups)
    sharded += model.add_mlp_bias * 2 * model.ffn_hidden_size
    replicated = model.hidden_size * (2 + model.add_attention_output_bias + model.add_mlp_bias)
    if model.qk_layernorm == "all_heads":
        sharded += model.head_dim * (model.num_attention_heads + model.query_groups)
    elif model.qk_layernorm == "head":
        replicated += 2 * model.head_dim
    return sharded // tp + replicated


def pair_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of the low-rank pairs of one decoder block on one tp rank; 0 without them.

    Of a linear that is cut by rows, A is whole on each rank; of one that is cut by columns, B.
    """
    total = 0
    for name in model.lora_linears:
        inputs, outputs = model.linear_sizes[name]
        cut = inputs if name in ("output", "down") else outputs
        total += model.lora_rank * (inputs + outputs - cut + cut // tp)
    return total


def vocabulary_rows(model: ModelConfig, rows: int, tp: int = 1) -> int:
    """Rows of a table of `rows` on each tp rank, padding included; 0 while the vocabulary is unknown."""
    multiple = VOCABULARY_MULTIPLE
    return -(-rows // (tp * multiple)) * multiple


def embedding_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of the embedding on one tp rank, padded rows included."""
    return vocabulary_rows(model, model.embedding_rows, tp) * model.hidden_size


def head_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of the final norm and the head on one tp rank, whether the head's weight is tied or not."""
    return model.hidden_size + vocabulary_rows(model, model.vocab_size, tp) * model.hidden_size


def model_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model as a checkpoint counts them: no padding, a tied weight once."""
    rows = model.embedding_rows + model.untie_embeddings_and_output_weights * model.vocab_size
    layer = layer_parameters(model) + pair_parameters(model)
    return model.num_layers * layer + (1 + rows) * model.hidden_size


def layer_flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """One block's forward over `tokens` tokens with `area` allowed (query, key) pairs."""
    weights = attention_weights(model) + mlp_weights(model)
    return Flops(2.0 * tokens * weights, 4.0 * area * model.num_attention_heads * model.head_dim)


def head_flops(model: ModelConfig, tokens: int) -> Flops:
    """The output head's forward."""
    return Flops(2.0 * tokens * model.hidden_size * model.vocab_size, 0.0)


def pair_flops(model: ModelConfig, tokens: int) -> Flops:
    """The forward of all low-rank pairs."""
    return Flops(2.0 * tokens * model.num_layers * pair_parameters(model), 0.0)


def model_flops(model: ModelConfig, tokens: int, area: int) -> Flops:
    """The whole model's forward over `tokens` tokens, without pairs; `area` is summed over their documents."""
    return layer_flops(model, tokens, area).times(model.num_layers) + head_flops(model, tokens)
