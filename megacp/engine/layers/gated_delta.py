"""The gated delta rule, a mixer with a recurrent state instead of attention.

One matrix product computes queries, keys, values, output gate and rates. A causal convolution of
queries, keys and values follows.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacp.attention.ops.chunk import CHUNK
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.table import Flops, LayerKind, Linear, Tensor, output_std

DELTA_PROJECTED = ("q", "k", "v", "z", "b", "a")
"""Linear layers of this product: q, k and v for the convolution, the output gate z, and the rates b
and a of each value head.
"""


def _linears(model: ModelConfig) -> dict[str, Linear]:
    hidden = model.hidden_size
    std = model.init_method_std
    heads = model.linear_num_value_heads
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = heads * model.linear_value_head_dim
    widths = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    found = {name: Linear(hidden, width, std) for name, width in widths.items()}
    return found | {"output": Linear(values, hidden, output_std(model), cut="columns")}


def _others(model: ModelConfig) -> Iterator[Tensor]:
    taps = model.linear_conv_kernel_dim
    linears = _linears(model)
    # shape and initial distribution of torch's depthwise Conv1d
    for name in "qkv":
        shape = (linears[name].outputs, 1, taps)  # [channels, 1, taps]
        yield Tensor(f"convolution_{name}.weight", shape, "rows", "uniform", (3 * taps) ** -0.5)
    # log decay of a head's state: -exp(A_log) * softplus(a + dt_bias)
    heads = (model.linear_num_value_heads,)
    yield Tensor("dt_bias", heads, "rows", "ones", decays=False)
    yield Tensor("A_log", heads, "rows", "log_rate", 1.0, decays=False)
    yield Tensor("norm.weight", (model.linear_value_head_dim,), init="ones", decays=False)


def _mixing(model: ModelConfig, tokens: int, area: int) -> Flops:
    """Return the FLOPs within chunks of C tokens and of the scan across chunks."""
    keys = model.linear_key_head_dim
    values = model.linear_value_head_dim
    # Multiply-adds per token within its chunk: two score matrices, the triangular solve (half of a
    # full product), and the products with its results.
    inside = CHUNK * (2 * keys + (keys + values) / 2 + keys + values)
    # Per token across chunks: the chunk's transition matrix, updates and reads of the state, and
    # (once per chunk) the transition of the state.
    across = keys * keys + 2 * keys * values + keys * keys * values / CHUNK
    return Flops(2.0 * tokens * model.linear_num_value_heads * (inside + across), 0.0)


GATED_DELTA = LayerKind(
    "linear_attention", _linears, (DELTA_PROJECTED, ("output",)), _others, _mixing
)
