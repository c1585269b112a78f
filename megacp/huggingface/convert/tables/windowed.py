"""Mistral and Phi-3 (with Phi-4): decoders whose configs may have a sliding window, taken where it changes nothing.

Mistral has Llama's tensors without biases. Phi-3 joins q, k, v in one tensor, and gate, up in another.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacp.huggingface.convert.tables.fields import (
    SIZE,
    TIED,
    Field,
    Fixed,
    LayerTypes,
    Theirs,
    Unsaid,
    Values,
)
from megacp.huggingface.convert.tables.llama import DEFAULTS as LLAMA
from megacp.huggingface.convert.tables.llama import NO_BIASES, PRENORM, TEXT_ALONE, Linears, decoder_linears, sizes
from megacp.huggingface.convert.tables.rope import Rope


@dataclass(frozen=True)
class Window:
    """`sliding_window`: null, or no shorter than the longest text the model is for."""

    default: int | None

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        found, longest = theirs.get("sliding_window", self.default), values["max_position_embeddings"]
        if found is None or (SIZE.read(found) is not None and found >= longest):
            return
        reasons.append(
            f"sliding_window is {found!r:.80} and max_position_embeddings {longest}: tokens of longer texts do not see "
            "those before the window, and megacp has no mask for that; null, or a window of at least "
            "max_position_embeddings, would be the same as none"
        )

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        content["sliding_window"] = None


MISTRAL_DEFAULTS: Values = {
    **LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""Of transformers' MistralConfig."""

PLAIN: list[Field] = [
    TIED,
    LayerTypes(),
    *PRENORM,
    *TEXT_ALONE,
    *NO_BIASES,
    Unsaid("qk_layernorm", False),
    Unsaid("no_rope_freq", None),
]
MISTRAL_FIELDS: list[Field] = [*sizes(MISTRAL_DEFAULTS), Window(4096), *PLAIN]

PHI3_DEFAULTS: Values = {
    **{name: value for name, value in LLAMA.items() if name != "head_dim"},
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
"""Of transformers' Phi3Config."""

PHI3_FIELDS: list[Field] = [
    *sizes(PHI3_DEFAULTS, rope=Rope(kinds=("default",))),
    Window(None),
    Fixed("resid_pdrop", 0.0),
    Fixed("embd_pdrop", 0.0),
    *PLAIN,
]
PHI3_HARMLESS = frozenset({"original_max_position_embeddings"})
"""It has a meaning for scaled rotary embeddings alone, which a row refuses."""


def phi3_linears(values: Values) -> Linears:
    """The linears of a block as Phi-3 joins them."""
    parts = {part[0]: part for linear in decoder_linears(values).values() for part in linear}
    return {
        "self_attn.qkv_proj": (parts["attention.q"], parts["attention.k"], parts["attention.v"]),
        "self_attn.o_proj": (parts["attention.output"],),
        "mlp.gate_up_proj": (parts["mlp.gate"], parts["mlp.up"]),
        "mlp.down_proj": (parts["mlp.down"],),
    }
