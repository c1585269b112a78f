"""Mamba-2 in the place of attention: a gate, what states are made of and read by, and steps in one
product.

Flags of the delta rule say its sizes: key heads are groups of B and C, a key's width is the state's
size, value heads and their width are the heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.ops.chunk import CHUNK
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.table import Flops, LayerKind, Linear, Tensor, output_std

MAMBA_PROJECTED = ("z", "x", "B", "C", "dt")
"""Linears of one product: the gate, three that the convolution is given, and a step for each head.
"""
CONVOLVED = ("x", "B", "C")


def _linears(model: ModelConfig) -> dict[str, Linear]:
    heads = model.linear_num_value_heads
    values = heads * model.linear_value_head_dim
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    widths = {"z": values, "x": values, "B": keys, "C": keys, "dt": heads}
    found = {
        name: Linear(model.hidden_size, width, model.init_method_std)
        for name, width in widths.items()
    }
    return found | {"output": Linear(values, model.hidden_size, output_std(model), cut="columns")}


def _others(model: ModelConfig) -> Iterator[Tensor]:
    taps, linears = model.linear_conv_kernel_dim, _linears(model)
    for name in CONVOLVED:  # as torch's Conv1d has them, and draws the weight
        width = linears[name].outputs
        yield Tensor(
            f"convolution_{name}.weight", (width, 1, taps), "rows", "uniform", (3 * taps) ** -0.5
        )
    for name in CONVOLVED:
        yield Tensor(
            f"convolution_{name}.bias", (linears[name].outputs,), "rows", "zeros", decays=False
        )
    heads = (model.linear_num_value_heads,)
    yield Tensor("dt_bias", heads, "rows", "step", 1.0, decays=False)
    yield Tensor("A_log", heads, "rows", "log_rate", 1.0, decays=False)
    yield Tensor("D", heads, "rows", "ones", decays=False)
    yield Tensor("norm.weight", (linears["z"].outputs,), "rows", "ones", decays=False)


def _mixing(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Products inside a chunk of C tokens, what it adds to its state, and what is read of the state
    before it.
    """
    keys, values = model.linear_key_head_dim, model.linear_value_head_dim
    each = model.linear_num_value_heads * (CHUNK * values + 2 * keys * values)
    return Flops(2.0 * tokens * (model.linear_num_key_heads * CHUNK * keys + each), 0.0)


MAMBA2 = LayerKind("mamba", _linears, (MAMBA_PROJECTED, ("output",)), _others, _mixing)
