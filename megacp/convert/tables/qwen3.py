"""Qwen3: Llama's tensors with a norm on each head of q and k, and its own fields.

A config that uses sliding windows is refused: our attention has no mask for them.
"""

from __future__ import annotations

from megacp.convert.tables.fields import TIED, Field, Fixed, LayerTypes, Switch, Unsaid, Values
from megacp.convert.tables.llama import DEFAULTS as LLAMA
from megacp.convert.tables.llama import sizes

DEFAULTS: Values = {
    **LLAMA,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
"""Of transformers' Qwen3Config."""


FIELDS: list[Field] = [
    *sizes(DEFAULTS),
    TIED,
    Switch("attention_bias", ("add_qkv_bias", "add_attention_output_bias")),
    Fixed("use_sliding_window", False),
    LayerTypes(written=True),
    Unsaid("qk_layernorm", True),
    Unsaid("add_mlp_bias", False),
    Unsaid("additional_vocab_size", 0),
    Unsaid("vision_num_layers", 0),
]
HARMLESS = frozenset({"sliding_window", "max_window_layers"})
"""Fields without a meaning while `use_sliding_window` is false."""
