"""The gated MLP: gate and up as one matrix product, then down."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.table import LayerKind, Linear, output_std

# linear layers of the two matrix products
GATE_UP = ("gate", "up")
DOWN = ("down",)
Width = Callable[[ModelConfig], int]
"""Function that returns the hidden width of an MLP: dense MLPs and shared experts use different
flags.
"""


def _width(model: ModelConfig) -> int:
    return model.ffn_hidden_size


def _linears(width: Width, model: ModelConfig) -> dict[str, Linear]:
    # tp splits the rows of gate and up, and the columns of down
    hidden = model.hidden_size
    ffn = width(model)
    bias = model.add_mlp_bias
    return {
        "gate": Linear(hidden, ffn, model.init_method_std, bias),
        "up": Linear(hidden, ffn, model.init_method_std, bias),
        "down": Linear(ffn, hidden, output_std(model), bias, "columns"),
    }


def gated_mlp(name: str, width: Width) -> LayerKind:
    """Return the description of a gated MLP with this name and width."""
    return LayerKind(name, partial(_linears, width), (GATE_UP, DOWN))


DENSE = gated_mlp("mlp", _width)
