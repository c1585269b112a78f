"""Self-attention with grouped queries: q, k, v in one product, perhaps norms of q and k, and the output."""

from __future__ import annotations

from collections.abc import Iterator

from megacp.core.config.model import ModelConfig
from megacp.core.layers.table import Flops, LayerKind, Linear, Tensor, norm_weight, output_std


def _linears(model: ModelConfig) -> dict[str, Linear]:
    hidden, std, bias = model.hidden_size, model.init_method_std, model.add_qkv_bias
    heads = model.num_attention_heads * model.head_dim
    groups = model.query_groups * model.head_dim
    return {
        "q": Linear(hidden, heads * (1 + model.attention_output_gate), std, bias),  # each head's gate behind its query
        "k": Linear(hidden, groups, std, bias),
        "v": Linear(hidden, groups, std, bias),
        "output": Linear(heads, hidden, output_std(model), model.add_attention_output_bias, "columns"),
    }


def _norms(model: ModelConfig) -> Iterator[Tensor]:
    """One weight for all heads, or one for each of their columns."""
    counts = {"q_norm": model.num_attention_heads, "k_norm": model.query_groups}
    for name, heads in counts.items() if model.qk_layernorm != "off" else ():
        if model.qk_layernorm == "head":
            yield norm_weight(model, name, model.head_dim)
        else:
            yield norm_weight(model, name, heads * model.head_dim, "rows")


def _mixing(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Scores of all pairs, and their weighted sums of values."""
    return Flops(0.0, 4.0 * area * model.num_attention_heads * model.head_dim)


ATTENTION = LayerKind("attention", _linears, _norms, _mixing)
