"""Attention ranges of a model's layers, for layouts that balance attention work."""

from __future__ import annotations

from collections import Counter

from megacp.attention.context_parallel.balance import Mix
from megacp.attention.ops.mask import Reach
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.stack import layers_of


def mix_of(model: ModelConfig) -> Mix:
    """Return the number of layers per attention range; recurrent layers are not counted."""
    return Counter(Reach(layer.window) for layer in layers_of(model) if not layer.has_state)
