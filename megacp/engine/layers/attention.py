"""Self-attention with grouped queries: q, k, v in one product, perhaps norms of q and k, and the output."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megacp.attention.context_parallel.transports import TRANSPORTS, TransportRow
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.table import Flops, LayerKind, Linear, Share, Tensor, norm_weight, output_std

ATTENTION_PROJECTED = ("q", "k", "v")
"""Linears of the first product."""
MATH_BLOCK = 1024
"""Query rows of one block of the `math` kernel."""


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
"""The transport that a plan assumes for `auto`, which is chosen at the start of a run: it holds the most."""


def transport_of(config: RunConfig) -> TransportRow:
    """Return the row of `--cp-comm-type`."""
    name = config.parallel.cp_comm_type
    return TRANSPORTS[UNDECIDED if name == "auto" else name]


def heads_group(config: RunConfig) -> int:
    """Return the number of ranks that exchange tokens for heads; 1 if the transport does not."""
    p = config.parallel
    return transport_of(config).head_ranks(p.context_parallel_size, p.hierarchical_context_parallel_sizes or ())


def _key_value_share(config: RunConfig) -> float:
    """K/V elements a rank keeps over those of its own tokens: above 1 where several ranks share a group, as each then
    keeps its whole K/V head of more tokens.
    """
    tp, ranks = config.parallel.tensor_model_parallel_size, heads_group(config)
    groups = config.model.query_groups // tp
    return math.lcm(groups, ranks) / groups


def _kept(share: Share) -> tuple[int, int]:
    """Elements per token, with a heads, g query groups and heads of width d:

    q, k, v as one product                       (a + 2 g) d / tp     (a view of v keeps the product whole)
    q, k after the rotary embedding              (a + g) d / tp       (+ a + g wide numbers / tp with q/k norm,
                                                                       2 with one over all heads)
    attention output, wide log-sum-exp           a d / tp, a / tp

    A layer without rotary embedding keeps q and k as they are.
    """
    model, gated, norms = share.model, share.model.attention_output_gate, share.model.qk_layernorm
    heads, groups = model.num_attention_heads, model.query_groups
    # inputs of the q/k norms and the gate, else v alone
    fused = heads * (1 + gated) + 2 * groups if gated or norms != "off" else groups
    columns = (fused + (2 + gated * share.cheap) * heads + groups) * model.head_dim
    columns += int((_key_value_share(share.config) - 1) * 2 * groups * model.head_dim)
    if heads_group(share.config) > 1:
        columns += heads * model.head_dim  # the output on both sides of the swap
    wide_heads = heads + (norms == "head") * (heads + groups)
    wide = share.tokens * wide_heads // share.tp + 2 * share.tokens * (norms == "all_heads")
    return share.tokens * columns // share.tp - share.unread("attention", ATTENTION_PROJECTED), wide


def _held(share: Share) -> int:
    """The output and the wide log-sum-exp of each head, of a block that is computed again without its attention."""
    heads = share.tokens * share.model.num_attention_heads // share.tp
    return share.bytes_of(heads * share.model.head_dim, heads) if share.granularity == "full" else 0


def _work(share: Share) -> int:
    """K/V of others, and gradients.

    The row of the transport knows how many blocks of K/V a rank holds, with their gradients. The kernels `flex` and
    `cudnn`, which `auto` takes on CUDA, have what one part among several adds to the queries' gradient, also in the
    wide dtype, and no sums where a rank has all keys; `math`, which `auto` takes there for float64, the scores, weights
    and their gradients of one block of queries.
    """
    config, model, p = share.config, share.model, share.config.parallel
    tp, size, wide, tokens, cp = share.tp, share.size, share.wide_size, share.tokens, p.context_parallel_size
    key_values = 2 * tokens * model.query_groups * model.head_dim // tp
    transport = transport_of(config)
    # of the K/V of a rank's own tokens
    sizes = p.hierarchical_context_parallel_sizes or ()
    copies = transport.blocks_held(cp, sizes) * _key_value_share(config)
    queries = tokens * model.num_attention_heads * model.head_dim // tp
    kernel, double = config.training.attention_kernel, config.training.dtype == "float64"
    scores = part = 0
    flex = kernel in ("cudnn", "flex", "flex_flash") or (kernel == "auto" and not double)
    if flex and (cp == 1 or transport.whole_row) and model.softmax_type == "vanilla":
        wide = size  # one call, which adds nothing up
    elif flex:
        part = queries * (size + wide)
    if kernel == "math" or (kernel == "auto" and double):
        keys = tokens * transport.blocks_at_once(cp, sizes)
        scores = 3 * (model.num_attention_heads // tp) * min(MATH_BLOCK, tokens) * keys * wide
    # under a2a the output's gradient and that of the queries exist on both sides
    swapped = queries * (size + wide) if heads_group(config) > 1 else 0
    return int(copies * key_values * (size + wide)) + queries * wide + swapped + scores + part


ATTENTION = LayerKind("attention", _linears, (ATTENTION_PROJECTED, ("output",)), _kept, _work, _others, _mixing, _held)
