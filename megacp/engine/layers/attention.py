"""Self-attention with grouped queries: q, k, v in one product, perhaps norms of q and k, and the
output.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.context_parallel.transports import TRANSPORTS, TransportRow
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.table import Flops, LayerKind, Linear, Tensor, norm_weight, output_std

ATTENTION_PROJECTED = ("q", "k", "v")
"""Linears of the first product."""


def _linears(model: ModelConfig) -> dict[str, Linear]:
    hidden, std, bias = model.hidden_size, model.init_method_std, model.add_qkv_bias
    heads = model.num_attention_heads * model.head_dim
    groups = model.query_groups * model.head_dim
    return {
        "q": Linear(
            hidden, heads * (1 + model.attention_output_gate), std, bias
        ),  # each head's gate behind its query
        "k": Linear(hidden, groups, std, bias),
        "v": Linear(hidden, groups, std, bias),
        "output": Linear(
            heads, hidden, output_std(model), model.add_attention_output_bias, "columns"
        ),
    }


def query_key_norms(model: ModelConfig) -> Iterator[Tensor]:
    """One weight for all heads, or one for each of their columns."""
    counts = {"q_norm": model.num_attention_heads, "k_norm": model.query_groups}
    for name, heads in counts.items() if model.qk_layernorm != "off" else ():
        if model.qk_layernorm == "head":
            yield norm_weight(model, name, model.head_dim)
        else:
            yield norm_weight(model, name, heads * model.head_dim, "rows")


def sinks(model: ModelConfig) -> Iterator[Tensor]:
    """The score of each head's sink."""
    if model.softmax_type == "learnable":
        heads = (model.num_attention_heads,)
        yield Tensor("sinks", heads, "rows", std=model.init_method_std, decays=False)


def _others(model: ModelConfig) -> Iterator[Tensor]:
    yield from query_key_norms(model)
    yield from sinks(model)


def _mixing(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Scores of all pairs, and their weighted sums of values."""
    return Flops(0.0, 4.0 * area * model.num_attention_heads * model.head_dim)


UNDECIDED = "all_gather"
"""The transport that a plan assumes for `auto`, which is chosen at the start of a run: it holds the
most.
"""


def transport_of(config: RunConfig) -> TransportRow:
    """Return the row of `--cp-comm-type`."""
    parallel = config.parallel
    return TRANSPORTS[UNDECIDED if parallel.chooses_transport else parallel.cp_comm_type]


def heads_group(config: RunConfig) -> int:
    """Return the number of ranks that exchange tokens for heads; 1 if the transport does not."""
    p = config.parallel
    return transport_of(config).head_ranks(
        p.context_parallel_size, p.hierarchical_context_parallel_sizes or ()
    )


ATTENTION = LayerKind("attention", _linears, (ATTENTION_PROJECTED, ("output",)), _others, _mixing)
