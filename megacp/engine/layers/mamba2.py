"""Mamba-2, a mixer with a recurrent state instead of attention.

One matrix product computes the gate z, the inputs x, B and C, and the step sizes dt. The sizes use
the flags of the gated delta rule: value heads are the heads of x and z, key heads are the groups of
B and C, and the key width is the state size.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.ops.chunk import CHUNK
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.table import Flops, LayerKind, Linear, Tensor, output_std

MAMBA_PROJECTED = ("z", "x", "B", "C", "dt")
"""Linear layers of this product: the gate z, the inputs x, B and C of the convolution, and a step
size dt for each head.
"""
CONVOLVED = ("x", "B", "C")
"""Linear layers whose outputs pass through the causal convolution."""


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
    taps = model.linear_conv_kernel_dim
    linears = _linears(model)
    # shape and initial distribution of torch's depthwise Conv1d
    for name in CONVOLVED:
        shape = (linears[name].outputs, 1, taps)  # [channels, 1, taps]
        yield Tensor(f"convolution_{name}.weight", shape, "rows", "uniform", (3 * taps) ** -0.5)
    for name in CONVOLVED:
        width = linears[name].outputs
        yield Tensor(f"convolution_{name}.bias", (width,), "rows", "zeros", decays=False)
    # step size softplus(dt + dt_bias), decay rate -exp(A_log), and the weight D of the skip path
    heads = (model.linear_num_value_heads,)
    yield Tensor("dt_bias", heads, "rows", "step", 1.0, decays=False)
    yield Tensor("A_log", heads, "rows", "log_rate", 1.0, decays=False)
    yield Tensor("D", heads, "rows", "ones", decays=False)
    yield Tensor("norm.weight", (linears["z"].outputs,), "rows", "ones", decays=False)


def _mixing(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Return the FLOPs within chunks of C tokens, and of updating and reading the state."""
    keys = model.linear_key_head_dim
    values = model.linear_value_head_dim
    # Multiply-adds per token. The scores C B^T are per group; everything else is per head.
    each = model.linear_num_value_heads * (CHUNK * values + 2 * keys * values)
    return Flops(2.0 * tokens * (model.linear_num_key_heads * CHUNK * keys + each), 0.0)


MAMBA2 = LayerKind("mamba", _linears, (MAMBA_PROJECTED, ("output",)), _others, _mixing)
