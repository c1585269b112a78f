"""Molmo2: the tensors and config fields of both of its layouts, the library's own and the released one.

The layouts differ in names, in fused tensors (q, k, v in `att_proj`; up, then gate, in `ff_proj`) and in where the
embedding is split. The config fields are one table under two spellings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megacp.huggingface.convert.tables.fields import (
    EPSILON,
    LAYERS,
    SIZE,
    Field,
    Fixed,
    LayerTypes,
    Same,
    Switch,
    Theirs,
    Unsaid,
    Values,
    Word,
    is_whole,
)
from megacp.huggingface.convert.tables.llama import (
    NORMS,
    PRENORM,
    Linears,
    block_links,
    decoder_linears,
    linear_links,
    sizes,
)
from megacp.huggingface.convert.tables.mapping import Info, Link, Named, same

NATIVE, RELEASED = "native", "released"
_SPLIT_EMBEDDING = ("model.transformer.wte.embedding", "model.transformer.wte.new_embedding")
TOKEN_FIELDS = {
    "image_start_token_id": "image_start",
    "low_res_image_start_token_id": "low_res_image_start",
    "image_end_token_id": "image_end",
    "image_patch_id": "image_patch",
    "frame_start_token_id": "frame_start",
    "frame_end_token_id": "frame_end",
}
"""Ids that stand in the config, by the names of the image rules."""
TOKEN_ORDER = (
    *("image_patch", "image_col", "image_start", "low_res_image_start"),
    *("frame_start", "image_end", "frame_end", "image_low_res"),
)
"""The order in which image tokens get ids behind the vocabulary where no rules are known."""


def released_linears(values: Values) -> Linears:
    """The linears of a decoder block as they were released."""
    parts = {ours: part for linear in decoder_linears(values).values() for part in linear for ours in (part[0],)}
    return {
        "self_attn.att_proj": (parts["attention.q"], parts["attention.k"], parts["attention.v"]),
        "self_attn.attn_out": (parts["attention.output"],),
        "mlp.ff_proj": (parts["mlp.up"], parts["mlp.gate"]),
        "mlp.ff_out": (parts["mlp.down"],),
    }


def layout_of(names: Iterable[str]) -> str:
    """Which layout a file's tensors are in."""
    return RELEASED if any(name.startswith("model.transformer.") for name in names) else NATIVE


def links(values: Values, layout: str, first_rows: int | None = None) -> list[Link]:
    """All tensors of a Molmo2. `first_rows`: rows of the first of the two tables that a released embedding is split
    into (default: the vocabulary that is predicted).
    """
    rows, extra, hidden = values["vocab_size"], values["additional_vocab_size"], values["hidden_size"]
    embedding = (Named("embedding.weight", (rows + extra, hidden)),)
    if layout == RELEASED:
        first = rows if first_rows is None else first_rows
        tables = zip(_SPLIT_EMBEDDING, (first, rows + extra - first), strict=True)
        found = [Link(tuple(Named(name, (count, hidden)) for name, count in tables), embedding)]
        text, norms, linears = "model.transformer.blocks", ("attn_norm", "ff_norm"), released_linears(values)
        last = "model.transformer.ln_f.weight"
    else:
        found = [Link((Named("model.language_model.embed_tokens.weight", embedding[0].shape),), embedding)]
        text, norms, linears = "model.language_model.layers", NORMS, decoder_linears(values)
        last = "model.language_model.norm.weight"
    found += block_links(values, text, linears, norms)
    found += [same(last, "final_norm.weight", hidden), same("lm_head.weight", "head.weight", rows, hidden)]
    return found + list(_vision_links(values, layout))


def first_rows(infos: Mapping[str, Info], values: Values) -> int:
    """Rows of the first embedding table in a released file, wherever it was cut; the vocabulary where none is sound."""
    info = infos.get(_SPLIT_EMBEDDING[0])
    total = values["vocab_size"] + values["additional_vocab_size"]
    sound = info is not None and len(info.shape) == 2 and 0 < info.shape[0] < total
    return info.shape[0] if info is not None and sound else values["vocab_size"]


def _attention(values: Values, tower: str, inputs: int, names: tuple[str, str, str, str], where: str) -> Linears:
    width, hidden = values[f"{tower}_head_dim"], values["vision_hidden_size"]
    heads = values[f"{tower}_num_attention_heads"]
    groups = values[f"{tower}_num_query_groups"] or heads
    parts = (("q", heads * width), ("k", groups * width), ("v", groups * width))
    found: Linears = {
        where + name: ((f"attention.{part}", rows, inputs, True),)
        for name, (part, rows) in zip(names, parts, strict=False)
    }
    return found | {where + names[3]: (("attention.output", hidden, heads * width, True),)}


def _vision_links(values: Values, layout: str) -> Iterator[Link]:
    released = layout == RELEASED
    hidden, ffn = values["vision_hidden_size"], values["vision_ffn_hidden_size"]
    names = ("wq", "wk", "wv", "wo") if released else ("q_proj", "k_proj", "v_proj", "o_proj")
    up, down = ("feed_forward.w1", "feed_forward.w2") if released else ("mlp.fc1", "mlp.fc2")
    norms = ("attention_norm", "ffn_norm") if released else ("layer_norm1", "layer_norm2")
    linears = _attention(values, "vision", hidden, names, "attention." if released else "self_attn.")
    linears |= {up: (("mlp.up", ffn, hidden, True),), down: (("mlp.down", hidden, ffn, True),)}
    tower = "model.vision_backbone.image_vit" if released else "model.vision_tower"
    patches = (values["vision_image_size"] // values["vision_patch_size"]) ** 2
    patch = 3 * values["vision_patch_size"] ** 2
    yield same(f"{tower}.positional_embedding", "vision.position_embedding.weight", patches, hidden)
    yield same(f"{tower}.patch_embedding.weight", "vision.patch_embedding.weight", hidden, patch)
    yield same(f"{tower}.patch_embedding.bias", "vision.patch_embedding.bias", hidden)
    for layer in range(values["vision_num_layers"]):
        theirs = f"{tower}.{'transformer.resblocks' if released else 'layers'}.{layer}"
        ours = f"vision.blocks.{layer}"
        for norm, name in zip(norms, ("attention_norm", "mlp_norm"), strict=True):
            for kind in ("weight", "bias"):
                yield same(f"{theirs}.{norm}.{kind}", f"{ours}.{name}.{kind}", hidden)
        yield from linear_links(theirs, ours, linears)
    adapter = "model.vision_backbone" if released else "model.multi_modal_projector"
    yield from linear_links(
        f"{adapter}.image_pooling_2d", "connector", _attention(values, "connector", 2 * hidden, names, "")
    )
    mlp = ("w1", "w3", "w2") if released else ("gate_proj", "up_proj", "down_proj")
    width = values["connector_ffn_hidden_size"] or values["ffn_hidden_size"]
    projector: Linears = {
        mlp[0]: (("mlp.gate", width, hidden, False),),
        mlp[1]: (("mlp.up", width, hidden, False),),
        mlp[2]: (("mlp.down", values["hidden_size"], width, False),),
    }
    yield from linear_links(f"{adapter}.image_projector", "connector", projector)


class _ImageSize:
    """`image_size` and the number of positions that follows from it."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        size = theirs.get("vision_config.image_size") or [378, 378]
        if not isinstance(size, list) or len(size) != 2 or size[0] != size[1] or SIZE.read(size[0]) is None:
            reasons.append(f"vision_config.image_size is {size!r}, megacp can only express squares")
            return
        values["vision_image_size"] = size[0]
        patches = (size[0] // values.get("vision_patch_size", 14)) ** 2
        count = theirs.get("vision_config.num_position_embeddings")
        if count not in (None, patches):
            reasons.append(f"vision_config.num_position_embeddings is {count}, the patches of a crop are {patches}")

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        size = values["vision_image_size"]
        content["vision_config.image_size"] = [size, size]
        content["vision_config.num_position_embeddings"] = (size // values["vision_patch_size"]) ** 2


class _FeatureLayers:
    """The two layers that feed the connector; one must be the last, since later layers would go unread."""

    path = "adapter_config.vision_feature_layer"

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        chosen, count = theirs.get(self.path) or [24, 18], values.get("vision_num_layers", 0)
        sound = isinstance(chosen, list) and len(chosen) == 2 and all(map(is_whole, chosen))
        if not sound or not all(-count <= layer < count for layer in chosen):
            reasons.append(f"{self.path} is {chosen!r}, megacp can only express two of the {count} layers")
        elif max(layer % count for layer in chosen) != count - 1:
            reasons.append(
                f"{self.path} is {chosen}, which leaves layers of vision_config.num_hidden_layers {count} unread: "
                "megacp has no such layers"
            )
        else:
            values["vision_feature_layers"] = tuple(chosen)

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        content[self.path] = list(values["vision_feature_layers"])


class _Widths:
    """Widths that the library says twice: of the tower in the adapter, of the text in the adapter."""

    twins = (
        ("adapter_config.hidden_size", 1152, "vision_hidden_size"),
        ("adapter_config.text_hidden_size", 3584, "hidden_size"),
    )

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        for path, default, ours in self.twins:
            found = theirs.get(path, default)
            if found != values.get(ours):
                reasons.append(
                    f"{path} is {found}, megacp can only express {values.get(ours)} as in the tower it joins"
                )

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        for path, _, ours in self.twins:
            content[path] = values[ours]


class _ScaledLayers:
    """`rope_scaling_layers`: all of them, or there is no scaling."""

    path = "text_config.rope_scaling_layers"

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        chosen, count = theirs.get(self.path), values.get("num_layers", 0)
        if chosen is None or values.get("rope_scaling") == "none":
            return
        sound = isinstance(chosen, list) and all(map(is_whole, chosen))
        if not sound or sorted(chosen) != list(range(count)):
            reasons.append(f"{self.path} is {chosen}, megacp can only scale the positions of all {count} layers")

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        content[self.path] = list(range(values["num_layers"]))


class _ExtraRows:
    """Rows for image tokens, which a model with a tower must have."""

    path = "text_config.additional_vocab_size"

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        found = theirs.get(self.path, 128)
        if SIZE.read(found) is None:
            reasons.append(f"{self.path} is {found!r}, megacp needs at least one row for image tokens")
        values["additional_vocab_size"] = found

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        content[self.path] = values["additional_vocab_size"]
        if values["additional_vocab_size"] < 1:
            reasons.append("--additional-vocab-size is 0: a Molmo2 has rows for image tokens")
        if values["vision_num_layers"] < 1:
            reasons.append("--vision-num-layers is 0: a Molmo2 has a vision tower")


class _InitialRange:
    """One standard deviation of ours for the four of theirs; only the text's is read."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """Nothing: the text's row has read it."""

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        for section in ("", "vision_config.", "adapter_config."):
            content[section + "initializer_range"] = values["init_method_std"]


def _fixed(section: str, values: Mapping[str, Any], written: bool = True) -> list[Field]:
    return [Fixed(f"{section}_config.{name}", value, written=written) for name, value in values.items()]


TEXT_DEFAULTS: Values = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 36864,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
"""Of transformers' Molmo2TextConfig."""
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _tower_heads(v: Values) -> int:
    return v["vision_num_attention_heads"]


def _connector_heads(v: Values) -> int:
    return v["connector_num_attention_heads"]


FIELDS: list[Field] = [
    *sizes(TEXT_DEFAULTS, "text_config."),
    LayerTypes(section="text_config."),
    _ScaledLayers(),
    _ExtraRows(),
    Switch("text_config.attention_bias", ("add_qkv_bias",)),
    *_fixed("text", {"qk_norm_type": "qwen3", "norm_after": False, "tie_word_embeddings": False}),
    *_fixed("text", {"use_qk_norm": True, "embedding_dropout": 0.0, "residual_dropout": 0.0}, written=False),
    Same("vision_config.num_hidden_layers", "vision_num_layers", 25, LAYERS),
    Same("vision_config.hidden_size", "vision_hidden_size", 1152),
    Same("vision_config.intermediate_size", "vision_ffn_hidden_size", 4304),
    Same("vision_config.num_attention_heads", "vision_num_attention_heads", 16),
    Same("vision_config.num_key_value_heads", "vision_num_query_groups", 16, absent=_tower_heads),
    Same("vision_config.head_dim", "vision_head_dim", 72),
    Same("vision_config.patch_size", "vision_patch_size", 14),
    _ImageSize(),
    Same("vision_config.layer_norm_eps", "vision_norm_epsilon", 1e-6, EPSILON),
    Word("vision_config.hidden_act", "vision_activation", "gelu_pytorch_tanh", _ACTIVATIONS),
    *_fixed("vision", {"num_channels": 3, "attention_bias": True, "attention_dropout": 0.0}),
    *_fixed("vision", {"residual_dropout": 0.0}, written=False),
    _FeatureLayers(),
    _Widths(),
    Same("adapter_config.num_attention_heads", "connector_num_attention_heads", 16),
    Same("adapter_config.num_key_value_heads", "connector_num_query_groups", 16, absent=_connector_heads),
    Same("adapter_config.head_dim", "connector_head_dim", 72),
    Same("adapter_config.intermediate_size", "connector_ffn_hidden_size", 18944, absent=lambda v: v["ffn_hidden_size"]),
    *_fixed("adapter", {"attention_bias": True, "attention_dropout": 0.0, "hidden_act": "silu", "mlp_bias": False}),
    *_fixed("adapter", {"residual_dropout": 0.0, "image_feature_dropout": 0.0}, written=False),
    *_fixed("adapter", {"pooling_attention_mask": True}, written=False),
    _InitialRange(),
    Fixed("tie_word_embeddings", False),
    Unsaid("untie_embeddings_and_output_weights", True),
    *PRENORM,
    Unsaid("qk_layernorm", True),
    Unsaid("no_rope_freq", None),
    Unsaid("add_attention_output_bias", False),
    Unsaid("add_mlp_bias", False),
    Unsaid("image_attention", "example"),
]
SECTIONS = ("text_config", "vision_config", "adapter_config")
HARMLESS = frozenset({"float32_attention", "use_frame_special_tokens"})

_SPELLINGS = {
    ("vision_config", "image_size"): "image_default_input_size",
    ("vision_config", "patch_size"): "image_patch_size",
    ("vision_config", "num_position_embeddings"): "image_num_pos",
    ("adapter_config", "vision_feature_layer"): "vit_layers",
    ("text_config", "attention_bias"): "qkv_bias",
    ("text_config", "rms_norm_eps"): "layer_norm_eps",
}
"""(section, field) of the library: the field as it was released; the section `vision_config` was `vit_config`."""


def native_spelling(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config in either spelling as the library's own.

    A released tower declares unread layers without weights: they are left out, as the library does.
    """
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in content.items()}
    legacy = found.pop("vit_config", None)
    trimmed = legacy is not None and found.get("vision_config") is None
    if trimmed:
        found["vision_config"] = legacy
    for (section, name), released in _SPELLINGS.items():
        inside = found.get(section)
        if isinstance(inside, dict) and released in inside:
            inside[name] = inside.pop(released)
    if trimmed:
        vision, adapter = found["vision_config"], found.setdefault("adapter_config", {})
        count, chosen = vision.get("num_hidden_layers", 25), adapter.get("vision_feature_layer") or [24, 18]
        # other values are refused by their rows
        if LAYERS.read(count) is not None and isinstance(chosen, list) and all(map(is_whole, chosen)):
            chosen = [layer % count for layer in chosen]
            adapter["vision_feature_layer"], vision["num_hidden_layers"] = chosen, max(chosen) + 1
    return found


def released_spelling(content: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse, for a config of the library's own spelling."""
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in content.items()}
    for (section, name), released in _SPELLINGS.items():
        found[section][released] = found[section].pop(name)
    vision, adapter = found.pop("vision_config"), found["adapter_config"]
    adapter["vit_layers"] = [layer % vision["num_hidden_layers"] for layer in adapter["vit_layers"]]
    found["vit_config"] = vision
    return found
