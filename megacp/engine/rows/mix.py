"""How far a model's layers look, for layouts that balance attention."""

from __future__ import annotations

from collections import Counter

from megacp.attention.context_parallel.balance import Mix
from megacp.attention.ops.mask import Reach
from megacp.engine.config.model import ModelConfig
from megacp.engine.layers.stack import layers_of


def mix_of(model: ModelConfig) -> Mix:
    """How many layers of a model look how far; those with a state do not look."""
    return Counter(Reach(layer.window) for layer in layers_of(model) if not layer.has_state)
