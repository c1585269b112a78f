"""The gated MLP: gate and up in one product, and down."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.table import LayerKind, Linear, output_std

GATE_UP, DOWN = ("gate", "up"), ("down",)
"""Linears of its two products."""
Width = Callable[[ModelConfig], int]


def _width(model: ModelConfig) -> int:
    return model.ffn_hidden_size


def _linears(width: Width, model: ModelConfig) -> dict[str, Linear]:
    hidden, ffn, bias = model.hidden_size, width(model), model.add_mlp_bias
    return {
        "gate": Linear(hidden, ffn, model.init_method_std, bias),
        "up": Linear(hidden, ffn, model.init_method_std, bias),
        "down": Linear(ffn, hidden, output_std(model), bias, "columns"),
    }


def gated_mlp(name: str, width: Width) -> LayerKind:
    """Return the row of a gated MLP with this name and width."""
    return LayerKind(name, partial(_linears, width), (GATE_UP, DOWN))


DENSE = gated_mlp("mlp", _width)
