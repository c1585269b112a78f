"""SmolLM3: Llama's tensors, and layers without a rotary embedding."""

from __future__ import annotations

from megacp.core.config.model import no_rope_pattern
from megacp.huggingface.convert.tables.fields import SIZE, Field, Fixed, LayerTypes, Switch, Theirs, Unsaid, Values
from megacp.huggingface.convert.tables.llama import DEFAULTS as LLAMA
from megacp.huggingface.convert.tables.llama import PRENORM, TEXT_ALONE, sizes
from megacp.huggingface.convert.tables.rope import Rope

_EVERY = 4
"""Layers of the library's default, of which the last has no rotary embedding."""


def no_rope_freq(without: list[bool]) -> str | None:
    """The flag that says which layers have no rotary embedding: every N-th of them, or one by one."""
    if not any(without):
        return None
    every = without.index(True) + 1
    if without == [(layer + 1) % every == 0 for layer in range(len(without))]:
        return str(every)
    return f"[{','.join(str(int(one)) for one in without)}]"


class _NoRopeLayers:
    """`no_rope_layers`, where 1 is a layer with a rotary embedding, or `no_rope_layer_interval`."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        found, every = theirs.get("no_rope_layers"), theirs.get("no_rope_layer_interval", _EVERY)
        count = values.get("num_layers", 0)
        if found is None:
            if SIZE.read(every) is None:
                reasons.append(f"no_rope_layer_interval is {every!r:.80}, expected {SIZE}")
                return
            found = [int((layer + 1) % every != 0) for layer in range(count)]
        if (
            not isinstance(found, list)
            or len(found) < count
            or any(type(x) is not int or x not in (0, 1) for x in found)
        ):
            reasons.append(f"no_rope_layers is {found!r:.80}, expected 0 or 1 for each of {count} layers")
            return
        values["no_rope_freq"] = no_rope_freq([rotates == 0 for rotates in found[:count]])

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        pattern, count = no_rope_pattern(values["no_rope_freq"]), values["num_layers"]
        without = [pattern[layer % len(pattern)] for layer in range(count)]
        content["no_rope_layers"] = [int(not one) for one in without]
        told = no_rope_freq(without)
        if told is not None and told.isdigit():
            content["no_rope_layer_interval"] = int(told)


DEFAULTS: Values = {
    **{name: value for name, value in LLAMA.items() if name != "head_dim"},
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
}
"""Of transformers' SmolLM3Config."""

FIELDS: list[Field] = [
    *sizes(DEFAULTS, rope=Rope(theta=2_000_000.0)),
    Switch("tie_word_embeddings", ("untie_embeddings_and_output_weights",), inverted=True, default=True),
    Switch("attention_bias", ("add_qkv_bias", "add_attention_output_bias")),
    Switch("mlp_bias", ("add_mlp_bias",)),
    Fixed("use_sliding_window", False),
    LayerTypes(written=True),
    _NoRopeLayers(),
    *PRENORM,
    *TEXT_ALONE,
    Unsaid("qk_layernorm", False),
]
HARMLESS = frozenset({"sliding_window", "max_window_layers"})
"""Without a meaning while `use_sliding_window` is false."""
