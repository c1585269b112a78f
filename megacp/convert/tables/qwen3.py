"""Qwen3: Llama's tensors with a norm on each head of q and k, and its own fields.

A config that uses sliding windows is refused: our attention has no mask for them.
"""

from __future__ import annotations

from megacp.convert.tables.fields import TIED, Field, Fixed, Switch, Theirs, Unsaid, Values
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


class _LayerTypes:
    """`layer_types` may say only what is so without it."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        found, count = theirs.get("layer_types"), values.get("num_layers")
        if found is None:
            return
        if not isinstance(found, list) or not all(isinstance(kind, str) for kind in found):
            reasons.append("layer_types is no list of words")
        elif other := {kind for kind in found if kind != "full_attention"}:
            reasons.append(f"layer_types holds {', '.join(sorted(other))}, megacp can only express full_attention")
        elif len(found) != count:
            reasons.append(f"layer_types has {len(found)} words, num_hidden_layers is {count}")

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        content["layer_types"] = ["full_attention"] * values["num_layers"]


FIELDS: list[Field] = [
    *sizes(DEFAULTS),
    TIED,
    Switch("attention_bias", ("add_qkv_bias", "add_attention_output_bias")),
    Fixed("use_sliding_window", False),
    _LayerTypes(),
    Unsaid("qk_layernorm", True),
    Unsaid("add_mlp_bias", False),
    Unsaid("additional_vocab_size", 0),
    Unsaid("vision_num_layers", 0),
]
HARMLESS = frozenset({"sliding_window", "max_window_layers"})
"""Fields without a meaning while `use_sliding_window` is false."""
