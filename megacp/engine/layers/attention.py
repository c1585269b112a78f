"""Grouped-query self-attention: q, k and v in one product, optional q and k norms, and output."""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.context_parallel.transports import TRANSPORTS, TransportRow
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.table import Flops, LayerKind, Linear, Tensor, norm_weight, output_std

ATTENTION_PROJECTED = ("q", "k", "v")
"""Linear layers that form the first matrix product."""


def _linears(model: ModelConfig) -> dict[str, Linear]:
    # tp splits the rows of q, k and v (whole heads), and the columns of the output
    hidden = model.hidden_size
    std = model.init_method_std
    bias = model.add_qkv_bias
    heads = model.num_attention_heads * model.head_dim
    groups = model.query_groups * model.head_dim
    # the rows of each head's gate follow the rows of its query
    queries = 2 * heads if model.attention_output_gate else heads
    return {
        "q": Linear(hidden, queries, std, bias),
        "k": Linear(hidden, groups, std, bias),
        "v": Linear(hidden, groups, std, bias),
        "output": Linear(
            heads, hidden, output_std(model), model.add_attention_output_bias, "columns"
        ),
    }


def query_key_norms(model: ModelConfig) -> Iterator[Tensor]:
    """Yield the weights of the query and key norms, if the model has them."""
    if model.qk_layernorm == "off":
        return
    # grouped queries: fewer key heads than query heads
    counts = {"q_norm": model.num_attention_heads, "k_norm": model.query_groups}
    for name, heads in counts.items():
        # one weight for all heads, or one weight per dimension of every head
        if model.qk_layernorm == "head":
            yield norm_weight(model, name, model.head_dim)
        else:
            yield norm_weight(model, name, heads * model.head_dim, "rows")


def sinks(model: ModelConfig) -> Iterator[Tensor]:
    """Yield the learned attention-sink scores `[heads]`, if the model has sinks."""
    if model.softmax_type == "learnable":
        # like biases, sinks are exempt from weight decay
        heads = (model.num_attention_heads,)
        yield Tensor("sinks", heads, "rows", std=model.init_method_std, decays=False)


def _others(model: ModelConfig) -> Iterator[Tensor]:
    yield from query_key_norms(model)
    yield from sinks(model)


def _mixing(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Return the FLOPs of scores and weighted value sums: two products per allowed pair."""
    return Flops(0.0, 4.0 * area * model.num_attention_heads * model.head_dim)


UNDECIDED = "all_gather"
"""Transport that the planner assumes for `auto`, because it needs the most memory. A run makes its
own choice when it starts.
"""


def transport_of(config: RunConfig) -> TransportRow:
    """Return the row of TRANSPORTS for `--cp-comm-type`; for `auto`, the row of `UNDECIDED`."""
    if config.parallel.chooses_transport:
        return TRANSPORTS[UNDECIDED]
    return TRANSPORTS[config.parallel.cp_comm_type]


def heads_group(config: RunConfig) -> int:
    """Return the number of cp ranks that exchange tokens for heads; 1 for other transports."""
    parallel = config.parallel
    # only a2a+p2p has group sizes, and only its inner groups exchange heads
    sizes = parallel.hierarchical_context_parallel_sizes or ()
    return transport_of(config).head_ranks(parallel.context_parallel_size, sizes)


ATTENTION = LayerKind("attention", _linears, (ATTENTION_PROJECTED, ("output",)), _others, _mixing)
