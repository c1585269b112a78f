"""Llama (2 and 3.x): names and shapes of its tensors, fields of its config; the decoder that all others share.

Rows of q and k are in the library's order (rotary by halves), which is ours; nothing is permuted. Weights as Meta
published them (rotary by pairs) have other names and are refused as missing and unexpected tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megacp.huggingface.convert.tables.fields import (
    EPSILON,
    LAYERS,
    SIZE,
    SPREAD,
    TIED,
    Field,
    Fixed,
    LayerTypes,
    Number,
    Same,
    Switch,
    Theirs,
    Unsaid,
    Values,
)
from megacp.huggingface.convert.tables.mapping import Link, Named, same
from megacp.huggingface.convert.tables.rope import Rope

Linears = dict[str, tuple[tuple[str, int, int, bool], ...]]
"""Their name -> (our name, outputs, inputs, bias) of each of the linears that it holds, in order."""


def head_width(values: Values) -> int:
    """Width of one head."""
    return values["kv_channels"] or values["hidden_size"] // values["num_attention_heads"]


def query_groups(values: Values) -> int:
    """Key/value heads."""
    return values["num_query_groups"] or values["num_attention_heads"]


def decoder_linears(values: Values) -> Linears:
    """The linears of a decoder block, one by one, as the library names them."""
    hidden, ffn = values["hidden_size"], values["ffn_hidden_size"]
    heads, groups = values["num_attention_heads"] * head_width(values), query_groups(values) * head_width(values)
    qkv, mlp = values["add_qkv_bias"], values["add_mlp_bias"]
    return {
        "self_attn.q_proj": (("attention.q", heads, hidden, qkv),),
        "self_attn.k_proj": (("attention.k", groups, hidden, qkv),),
        "self_attn.v_proj": (("attention.v", groups, hidden, qkv),),
        "self_attn.o_proj": (("attention.output", hidden, heads, values["add_attention_output_bias"]),),
        "mlp.gate_proj": (("mlp.gate", ffn, hidden, mlp),),
        "mlp.up_proj": (("mlp.up", ffn, hidden, mlp),),
        "mlp.down_proj": (("mlp.down", hidden, ffn, mlp),),
    }


def linear_links(theirs: str, ours: str, linears: Linears) -> Iterator[Link]:
    """Links of linears below the prefixes `theirs` and `ours`; the parts of a fused one are stacked in order."""
    for name, parts in linears.items():
        rows, inputs = sum(outputs for _, outputs, _, _ in parts), parts[0][2]
        weights = tuple(Named(f"{ours}.{part}.weight", (outputs, inputs)) for part, outputs, _, _ in parts)
        yield Link((Named(f"{theirs}.{name}.weight", (rows, inputs)),), weights)
        if parts[0][3]:
            biases = tuple(Named(f"{ours}.{part}.bias", (outputs,)) for part, outputs, _, _ in parts)
            yield Link((Named(f"{theirs}.{name}.bias", (rows,)),), biases)


def block_links(values: Values, prefix: str, linears: Linears, norms: tuple[str, str]) -> Iterator[Link]:
    """Links of all decoder blocks; `norms` are their names of the norms of attention and MLP."""
    hidden, width = values["hidden_size"], head_width(values)
    together = values["qk_layernorm_scope"] == "all_heads"
    normed = {
        "q_norm": width * (values["num_attention_heads"] if together else 1),
        "k_norm": width * (query_groups(values) if together else 1),
    }
    for layer in range(values["num_layers"]):
        theirs, ours = f"{prefix}.{layer}", f"layers.{layer}"
        yield same(f"{theirs}.{norms[0]}.weight", f"{ours}.attention_norm.weight", hidden)
        yield from linear_links(theirs, ours, linears)
        if values["qk_layernorm"]:
            for name, size in normed.items():
                yield same(f"{theirs}.self_attn.{name}.weight", f"{ours}.attention.{name}.weight", size)
        yield same(f"{theirs}.{norms[1]}.weight", f"{ours}.mlp_norm.weight", hidden)


NORMS = ("input_layernorm", "post_attention_layernorm")


def links(
    values: Values, linears: Callable[[Values], Linears] = decoder_linears, norms: tuple[str, str] = NORMS
) -> list[Link]:
    """All tensors of a text model; a tied head is none of them."""
    rows, hidden = values["vocab_size"], values["hidden_size"]
    found = [same("model.embed_tokens.weight", "embedding.weight", rows, hidden)]
    found += block_links(values, "model.layers", linears(values), norms)
    found.append(same("model.norm.weight", "final_norm.weight", hidden))
    if values["untie_embeddings_and_output_weights"]:
        found.append(same("lm_head.weight", "head.weight", rows, hidden))
    return found


class _Rows:
    """The length of rows in a run that starts from this model, unless the run gives another."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        values["seq_length"] = values["max_position_embeddings"]

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """Nothing: rows are the run's, and say nothing of the model."""


class _UnsaidWidth(Same):
    """`head_dim` where the library's class has no such field, but reads one: said where it is not what sizes say."""

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        if self.resolved(values) != head_width_of_sizes(values):
            super().write(values, content, reasons)


def sizes(defaults: Values, section: str = "", rope: Rope | None = None) -> list[Field]:
    """Rows that all decoders share; `defaults` are the library's for this architecture, without `head_dim` where its
    class has none.
    """

    def row(theirs: str, ours: str, number: Number = SIZE) -> Same:
        return Same(section + theirs, ours, defaults[theirs], number)

    def heads(v: Values) -> int:
        return v["num_attention_heads"]

    groups, width, of_sizes = defaults["num_key_value_heads"], defaults.get("head_dim"), head_width_of_sizes
    null_heads, null_width = None if section else heads, None if width else of_sizes  # as the library's own types
    positions = "max_position_embeddings"
    return [
        row("num_hidden_layers", "num_layers", LAYERS),
        row("hidden_size", "hidden_size"),
        row("intermediate_size", "ffn_hidden_size"),
        row("num_attention_heads", "num_attention_heads"),
        Same(section + "num_key_value_heads", "num_query_groups", groups or heads, null=null_heads, absent=heads),
        (Same if "head_dim" in defaults else _UnsaidWidth)(
            section + "head_dim", "kv_channels", width or of_sizes, null=null_width, absent=head_width
        ),
        row("vocab_size", "vocab_size"),
        Same(section + positions, positions, defaults[positions], absent=lambda v: v["seq_length"]),
        _Rows(),
        rope or Rope(section),
        row("rms_norm_eps", "norm_epsilon", EPSILON),
        row("initializer_range", "init_method_std", SPREAD),
        Fixed(section + "hidden_act", "silu"),
        Fixed(section + "attention_dropout", 0.0),
    ]


def head_width_of_sizes(values: Values) -> int:
    """Hidden size / heads, before a width is known."""
    return values["hidden_size"] // values["num_attention_heads"]


DEFAULTS: Values = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
"""Of transformers' LlamaConfig; None: hidden size / heads, and as many groups as heads."""

PRENORM: list[Field] = [Unsaid("norm_position", "before"), Unsaid("qk_layernorm_scope", "head")]
"""Of blocks whose norms stand before attention and MLP."""
TEXT_ALONE: list[Field] = [Unsaid("additional_vocab_size", 0), Unsaid("vision_num_layers", 0)]
NO_BIASES: list[Field] = [Unsaid(name, False) for name in ("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias")]

FIELDS: list[Field] = [
    *sizes(DEFAULTS),
    LayerTypes(),
    TIED,
    Switch("attention_bias", ("add_qkv_bias", "add_attention_output_bias")),
    Switch("mlp_bias", ("add_mlp_bias",)),
    *PRENORM,
    *TEXT_ALONE,
    Unsaid("qk_layernorm", False),
    Unsaid("no_rope_freq", None),
]


def reasons(values: Values) -> list[str]:
    """Values that the library's class refuses though each field could be written."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads == 0:
        return []
    return [
        f"--hidden-size {hidden} is no multiple of --num-attention-heads {heads}, which a Llama config refuses: "
        "num_attention_heads"
    ]
