"""The gated MLP: gate and up in one product, and down."""

from __future__ import annotations

from megacp.core.config.model import ModelConfig
from megacp.core.layers.table import Flops, LayerKind, Linear, output_std


def _linears(model: ModelConfig) -> dict[str, Linear]:
    hidden, ffn, bias = model.hidden_size, model.ffn_hidden_size, model.add_mlp_bias
    return {
        "gate": Linear(hidden, ffn, model.init_method_std, bias),
        "up": Linear(hidden, ffn, model.init_method_std, bias),
        "down": Linear(ffn, hidden, output_std(model), bias, "columns"),
    }


DENSE = LayerKind("mlp", _linears, lambda model: iter(()), lambda model, tokens, area: Flops(0.0, 0.0))
