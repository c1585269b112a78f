"""A gated delta rule in the place of attention: queries, keys, values and rates in one product,
then a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.ops.chunk import CHUNK
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.table import Flops, LayerKind, Linear, Tensor, output_std

DELTA_PROJECTED = ("q", "k", "v", "z", "b", "a")
"""Linears of one product: what the convolution is given, the gate of the output, and two rates of
each value head.
"""


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
    inside = CHUNK * (
        2 * keys + (keys + values) / 2 + keys + values
    )  # of a token: scores, solved, seen
    across = keys * keys + 2 * keys * values + keys * keys * values / CHUNK
    return Flops(2.0 * tokens * model.linear_num_value_heads * (inside + across), 0.0)


GATED_DELTA = LayerKind(
    "linear_attention", _linears, (DELTA_PROJECTED, ("output",)), _others, _mixing
)
