"""OLMo2: norms after attention and MLP, and norms over all heads of q and of k together."""

from __future__ import annotations

from megacp.huggingface.convert.tables.fields import TIED, Field, LayerTypes, Switch, Unsaid, Values
from megacp.huggingface.convert.tables.llama import DEFAULTS as LLAMA
from megacp.huggingface.convert.tables.llama import TEXT_ALONE, sizes

DEFAULTS: Values = {
    **{name: value for name, value in LLAMA.items() if name != "head_dim"},
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
}
"""Of transformers' Olmo2Config."""
NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")

FIELDS: list[Field] = [
    *sizes(DEFAULTS),
    TIED,
    LayerTypes(),
    Switch("attention_bias", ("add_qkv_bias", "add_attention_output_bias")),
    *TEXT_ALONE,
    Unsaid("add_mlp_bias", False),
    Unsaid("norm_position", "after"),
    Unsaid("qk_layernorm", True),
    Unsaid("qk_layernorm_scope", "all_heads"),
    Unsaid("no_rope_freq", None),
]
