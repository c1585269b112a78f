"""A gated delta rule in the place of attention: queries, keys, values and rates in one product, then a convolution."""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.ops.chunk import CHUNK
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.table import Flops, LayerKind, Linear, Share, Tensor, output_std

DELTA_PROJECTED = ("q", "k", "v", "z", "b", "a")
"""Linears of one product: what the convolution is given, the gate of the output, and two rates of each value head."""


def _linears(model: ModelConfig) -> dict[str, Linear]:
    hidden, std, heads = model.hidden_size, model.init_method_std, model.linear_num_value_heads
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = heads * model.linear_value_head_dim
    widths = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    found = {name: Linear(hidden, width, std) for name, width in widths.items()}
    return found | {"output": Linear(values, hidden, output_std(model), cut="columns")}


def _others(model: ModelConfig) -> Iterator[Tensor]:
    taps, linears = model.linear_conv_kernel_dim, _linears(model)
    for name in "qkv":  # as torch's Conv1d has it, and draws it
        shape = (linears[name].outputs, 1, taps)
        yield Tensor(f"convolution_{name}.weight", shape, "rows", "uniform", (3 * taps) ** -0.5)
    heads = (model.linear_num_value_heads,)
    yield Tensor("dt_bias", heads, "rows", "ones", decays=False)
    yield Tensor("A_log", heads, "rows", "log_rate", 1.0, decays=False)
    yield Tensor("norm.weight", (model.linear_value_head_dim,), init="ones", decays=False)


def _mixing(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Products inside a chunk of C tokens, its map, and the scan."""
    keys, values = model.linear_key_head_dim, model.linear_value_head_dim
    inside = CHUNK * (2 * keys + (keys + values) / 2 + keys + values)  # of a token: scores, solved, seen
    across = keys * keys + 2 * keys * values + keys * keys * values / CHUNK
    return Flops(2.0 * tokens * model.linear_num_value_heads * (inside + across), 0.0)


def chunk_heads(share: Share) -> int:
    """Chunks of a rank times its heads, as if documents and ranks ended where chunks do."""
    return -(-share.tokens // CHUNK) * (share.model.linear_num_value_heads // share.tp)


def _kept(share: Share) -> tuple[int, int]:
    """Elements per token: the product of its projection, what the convolution gives, the rates of writing, what is
    read, and that normed and gated; wide ones are the logs of the decay, what they are made of, and a scale a head.

    Besides them the states before all chunks, and the rates of the heads.
    """
    model, linears, heads = share.model, _linears(share.model), share.model.linear_num_value_heads
    projected = sum(linears[name].outputs for name in DELTA_PROJECTED)
    channels = sum(linears[name].outputs for name in "qkv")
    columns = projected + channels + heads + (1 + share.cheap) * linears["output"].inputs
    states = chunk_heads(share) * model.linear_key_head_dim * model.linear_value_head_dim
    wide = share.tokens * 4 * heads // share.tp + states + 2 * heads // share.tp
    unread = share.unread("linear_attention", DELTA_PROJECTED)
    return share.tokens * columns // share.tp - unread, wide


def _work(share: Share) -> int:
    """Bytes for all chunks of C tokens at once: C x C of what is solved or seen, rows of keys and values, maps, states,
    and gradients; the factors are fitted to measured peaks. Besides them the gradients of what is read and of its gate.
    """
    keys, values = share.model.linear_key_head_dim, share.model.linear_value_head_dim
    each = CHUNK * (3 * CHUNK + 15 * keys + 8 * values) + 10 * keys * keys // 3 + 3 * keys * values
    read = share.tokens * share.model.linear_num_value_heads * values // share.tp
    return chunk_heads(share) * each * share.wide_size + 2 * read * share.size


GATED_DELTA = LayerKind("linear_attention", _linears, (DELTA_PROJECTED, ("output",)), _kept, _work, _others, _mixing)
