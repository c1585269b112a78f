"""Qwen2 and 2.5, and Qwen3: Llama's tensors with biases on q, k and v, or with norms on each head of q and k.

A config that uses sliding windows is refused: our attention has no mask for them.
"""

from __future__ import annotations

from megacp.huggingface.convert.tables.fields import TIED, Field, Fixed, LayerTypes, Switch, Unsaid, Values
from megacp.huggingface.convert.tables.llama import DEFAULTS as LLAMA
from megacp.huggingface.convert.tables.llama import PRENORM, TEXT_ALONE, sizes

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
    *PRENORM,
    *TEXT_ALONE,
    Unsaid("qk_layernorm", True),
    Unsaid("no_rope_freq", None),
    Unsaid("add_mlp_bias", False),
]
HARMLESS = frozenset({"sliding_window", "max_window_layers"})
"""Fields without a meaning while `use_sliding_window` is false."""

QWEN2_DEFAULTS: Values = {name: value for name, value in DEFAULTS.items() if name != "head_dim"}
"""Of transformers' Qwen2Config, which has no width of a head."""

QWEN2_FIELDS: list[Field] = [
    *sizes(QWEN2_DEFAULTS),
    TIED,
    Fixed("use_sliding_window", False),
    LayerTypes(written=True),
    *PRENORM,
    *TEXT_ALONE,
    Unsaid("qk_layernorm", False),
    Unsaid("no_rope_freq", None),
    Unsaid("add_qkv_bias", True),
    Unsaid("add_attention_output_bias", False),
    Unsaid("add_mlp_bias", False),
]
