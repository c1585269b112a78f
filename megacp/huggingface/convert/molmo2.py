"""Molmo2: tensors and config fields of its two layouts, the library's and the released one.

The layouts differ in names, in fused tensors (q, k, v in `att_proj`; up, then gate, in `ff_proj`)
and in how the embedding is split. Configs are read with the library's field names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacp.huggingface.convert.config_json import ConfigJson, Values, shown
from megacp.huggingface.convert.family import Family
from megacp.huggingface.convert.tables import DECODER, NATIVE, RELEASED, links_of, shapes_of
from megacp.huggingface.convert.tensors import Info, Link, Named
from megacp.huggingface.convert.words import SIZES, UNWRITTEN, model_of, sizes_from_hf, sizes_to_hf
from megacp.training.data.vision.molmo2 import Molmo2Rules

# Config fields with ids of image tokens -> names of these tokens in the image rules.
_TOKEN_FIELDS = {
    "image_start_token_id": "image_start",
    "low_res_image_start_token_id": "low_res_image_start",
    "image_end_token_id": "image_end",
    "image_patch_id": "image_patch",
    "frame_start_token_id": "frame_start",
    "frame_end_token_id": "frame_end",
}
# The released embedding: the vocabulary, then the image tokens.
_SPLIT_EMBEDDING = ("model.transformer.wte.embedding", "model.transformer.wte.new_embedding")


def _both(theirs: str, ours: str) -> dict[str, str]:
    """Return the table rows for a module's weight and bias."""
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}


def _attention_rows(theirs: str, ours: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the table rows for attention; `names` are the names of q, k, v and output."""
    rows: dict[str, str] = {}
    for their, our in zip(names, ("q", "k", "v", "output"), strict=True):
        rows |= _both(f"{theirs}.{their}", f"{ours}.{our}")
    return rows


# Names of q, k, v and output in both layouts.
_PROJ = ("q_proj", "k_proj", "v_proj", "o_proj")
_W = ("wq", "wk", "wv", "wo")
# The library's names.
NATIVE_TABLE = {
    **{
        theirs.replace("model.", "model.language_model.", 1): ours
        for theirs, ours in DECODER.items()
    },
    "model.vision_tower.positional_embedding": "vision.position_embedding.weight",
    **_both("model.vision_tower.patch_embedding", "vision.patch_embedding"),
    **_both("model.vision_tower.layers.{v}.layer_norm1", "vision.blocks.{v}.attention_norm"),
    **_both("model.vision_tower.layers.{v}.layer_norm2", "vision.blocks.{v}.mlp_norm"),
    **_attention_rows(
        "model.vision_tower.layers.{v}.self_attn", "vision.blocks.{v}.attention", _PROJ
    ),
    **_both("model.vision_tower.layers.{v}.mlp.fc1", "vision.blocks.{v}.mlp.up"),
    **_both("model.vision_tower.layers.{v}.mlp.fc2", "vision.blocks.{v}.mlp.down"),
    **_attention_rows("model.multi_modal_projector.image_pooling_2d", "connector.attention", _PROJ),
    "model.multi_modal_projector.image_projector.gate_proj.weight": "connector.mlp.gate.weight",
    "model.multi_modal_projector.image_projector.up_proj.weight": "connector.mlp.up.weight",
    "model.multi_modal_projector.image_projector.down_proj.weight": "connector.mlp.down.weight",
}
# The released names.
_BLOCK = "model.transformer.blocks.{i}"
# A layer of the tower.
_RESBLOCK = "model.vision_backbone.image_vit.transformer.resblocks.{v}"
# Fused: q, k and v in `att_proj`; up, then gate, in `ff_proj`.
RELEASED_TABLE: dict[str, str | tuple[str, ...]] = {
    f"{_BLOCK}.attn_norm.weight": "layers.{i}.attention_norm.weight",
    f"{_BLOCK}.self_attn.att_proj.weight": tuple(
        f"layers.{{i}}.attention.{x}.weight" for x in "qkv"
    ),
    f"{_BLOCK}.self_attn.att_proj.bias": tuple(f"layers.{{i}}.attention.{x}.bias" for x in "qkv"),
    f"{_BLOCK}.self_attn.attn_out.weight": "layers.{i}.attention.output.weight",
    f"{_BLOCK}.self_attn.q_norm.weight": "layers.{i}.attention.q_norm.weight",
    f"{_BLOCK}.self_attn.k_norm.weight": "layers.{i}.attention.k_norm.weight",
    f"{_BLOCK}.ff_norm.weight": "layers.{i}.mlp_norm.weight",
    f"{_BLOCK}.mlp.ff_proj.weight": ("layers.{i}.mlp.up.weight", "layers.{i}.mlp.gate.weight"),
    f"{_BLOCK}.mlp.ff_out.weight": "layers.{i}.mlp.down.weight",
    "model.transformer.ln_f.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
    "model.vision_backbone.image_vit.positional_embedding": "vision.position_embedding.weight",
    **_both("model.vision_backbone.image_vit.patch_embedding", "vision.patch_embedding"),
    **_both(f"{_RESBLOCK}.attention_norm", "vision.blocks.{v}.attention_norm"),
    **_both(f"{_RESBLOCK}.ffn_norm", "vision.blocks.{v}.mlp_norm"),
    **_attention_rows(f"{_RESBLOCK}.attention", "vision.blocks.{v}.attention", _W),
    **_both(f"{_RESBLOCK}.feed_forward.w1", "vision.blocks.{v}.mlp.up"),
    **_both(f"{_RESBLOCK}.feed_forward.w2", "vision.blocks.{v}.mlp.down"),
    **_attention_rows("model.vision_backbone.image_pooling_2d", "connector.attention", _W),
    "model.vision_backbone.image_projector.w1.weight": "connector.mlp.gate.weight",
    "model.vision_backbone.image_projector.w3.weight": "connector.mlp.up.weight",
    "model.vision_backbone.image_projector.w2.weight": "connector.mlp.down.weight",
}


# Defaults of transformers' Molmo2TextConfig.
_TEXT = {
    **SIZES,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 36864,
}
# Size in the config -> our flag and the library's default.
_TOWER = {
    "vision_config.num_hidden_layers": ("vision_num_layers", 25),
    "vision_config.hidden_size": ("vision_hidden_size", 1152),
    "vision_config.intermediate_size": ("vision_ffn_hidden_size", 4304),
    "vision_config.num_attention_heads": ("vision_num_attention_heads", 16),
    "vision_config.patch_size": ("vision_patch_size", 14),
    "adapter_config.intermediate_size": ("connector_ffn_hidden_size", 18944),
}


def _from_hf(c: ConfigJson) -> Values:
    """Return our flags for a config with the library's field names."""
    v = UNWRITTEN | sizes_from_hf(c, _TEXT, "text_config.")
    v |= {
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": "head",
        "image_attention": "example",
    }
    v["add_qkv_bias"] = c.switch("text_config.attention_bias")
    v["additional_vocab_size"] = c.number("text_config.additional_vocab_size", 128)
    for path, (ours, default) in _TOWER.items():
        high = 4096 if ours == "vision_num_layers" else 2**31 - 1
        v[ours] = c.number(path, default, high=high)
    # The library's class cannot tie its head, so these fields have no effect.
    c.switch("tie_word_embeddings")
    c.switch("text_config.tie_word_embeddings")
    # Settings with only one supported value.
    # Each of these fields selects one of several implementations in the library.
    c.only("text_config.", qk_norm_type="qwen3", norm_after=False)
    c.only("text_config.", use_qk_norm=True, embedding_dropout=0.0, residual_dropout=0.0)
    c.only("vision_config.", layer_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh")
    c.only(
        "vision_config.",
        num_channels=3,
        attention_bias=True,
        attention_dropout=0.0,
        residual_dropout=0.0,
    )
    c.only(
        "adapter_config.",
        attention_bias=True,
        attention_dropout=0.0,
        hidden_act="silu",
        mlp_bias=False,
    )
    c.only(
        "adapter_config.",
        residual_dropout=0.0,
        image_feature_dropout=0.0,
        pooling_attention_mask=True,
    )
    c.full_attention(v["num_layers"], "text_config.")
    scaled = c.get("text_config.rope_scaling_layers")
    # Without scaling the field has no effect.
    is_scaled = scaled is not None and v.get("rope_scaling") != "none"
    if is_scaled and scaled != list(range(v["num_layers"])):
        c.faults.append(
            f"text_config.rope_scaling_layers is {shown(scaled)}, but megacp can only scale "
            "all layers"
        )
    _read_image_size(c, v)
    for path, (default, one) in _twins(v).items():
        # The connector's sizes must match those of the tower and the text model.
        found = c.get(path, default)
        if found != one:
            c.faults.append(
                f"{path} is {shown(found)}, but the sizes of the modules that it connects require "
                f"{one}"
            )
    _read_feature_layers(c, v)
    return v


def _read_image_size(c: ConfigJson, v: Values) -> None:
    """Set the flag for the size of crops, which must be square."""
    size = c.get("vision_config.image_size") or [378, 378]
    is_square = isinstance(size, list) and len(size) == 2 and size[0] == size[1]
    if not is_square or type(size[0]) is not int or not 1 <= size[0] < 2**31:
        c.faults.append(
            f"vision_config.image_size is {shown(size)}, but megacp can only express squares"
        )
        return
    v["vision_image_size"] = size[0]
    # A crop is cut into square patches, each with a learned position.
    patches = (size[0] // v["vision_patch_size"]) ** 2
    count = c.get("vision_config.num_position_embeddings")
    if count not in (None, patches):
        c.faults.append(
            f"vision_config.num_position_embeddings is {shown(count)}, but a crop has {patches} "
            "patches"
        )


def _read_feature_layers(c: ConfigJson, v: Values) -> None:
    """Set the flag for the tower layers that the connector uses; the last must be one of them."""
    path = "adapter_config.vision_feature_layer"
    count = v["vision_num_layers"]
    # The default of the library; negative numbers count from the last layer.
    chosen = c.get(path) or [24, 18]
    is_pair = isinstance(chosen, list) and len(chosen) == 2
    if not is_pair or not all(type(i) is int and -count <= i < count for i in chosen):
        c.faults.append(
            f"{path} is {shown(chosen)}, but megacp can only express two of the {count} layers"
        )
    # Layers after the last used one would have no effect.
    elif max(layer % count for layer in chosen) != count - 1:
        c.faults.append(
            f"{path} is {chosen}, which leaves out the last layer "
            f"(vision_config.num_hidden_layers {count})"
        )
    else:
        v["vision_feature_layers"] = tuple(chosen)


def _twins(v: Values) -> dict[str, tuple[int, int]]:
    """Return fields that repeat another size -> their default, and the only consistent value."""
    hidden = v["vision_hidden_size"]
    heads = v["vision_num_attention_heads"]
    found = {
        "adapter_config.hidden_size": (1152, hidden),
        "adapter_config.text_hidden_size": (3584, v["hidden_size"]),
        "adapter_config.num_attention_heads": (16, heads),
    }
    for section in ("vision_config", "adapter_config"):
        found[f"{section}.num_key_value_heads"] = (16, heads)
        found[f"{section}.head_dim"] = (72, hidden // heads)
    return found


def _to_hf(v: Values) -> Values:
    """Return the config for our flags with the library's field names; inverse of `_from_hf`."""
    sizes = {
        path: v["ffn_hidden_size"] if v[ours] is None else v[ours]
        for path, (ours, _) in _TOWER.items()
    }
    # Sizes that the library repeats in several places.
    sizes |= {path: one for path, (_, one) in _twins(v).items()}
    content: Values = {"text_config": {"model_type": "molmo2_text"} | sizes_to_hf(v)}
    content["text_config"] |= {
        "attention_bias": v["add_qkv_bias"],
        "num_key_value_heads": model_of(v).query_groups,
        "qk_norm_type": "qwen3",
        "norm_after": False,
        "tie_word_embeddings": False,
        "additional_vocab_size": v["additional_vocab_size"],
        "rope_scaling_layers": list(range(v["num_layers"])),
    }
    for section in ("vision_config", "adapter_config"):
        inside: Values = {"model_type": f"molmo2_{section.removesuffix('_config')}"}
        for path, size in sizes.items():
            if path.startswith(section):
                inside[path.split(".")[1]] = size
        inside |= {
            "attention_bias": True,
            "attention_dropout": 0.0,
            "initializer_range": v["init_method_std"],
        }
        content[section] = inside
    # Fixed settings of the tower and the connector.
    size = v["vision_image_size"]
    content["vision_config"] |= {
        "image_size": [size, size],
        "num_position_embeddings": (size // v["vision_patch_size"]) ** 2,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "num_channels": 3,
    }
    content["adapter_config"] |= {
        "vision_feature_layer": list(v["vision_feature_layers"]),
        "hidden_act": "silu",
        "mlp_bias": False,
    }
    return content | {"initializer_range": v["init_method_std"], "tie_word_embeddings": False}


# (section, field) of the library -> the released field. The released name of the section
# `vision_config` is `vit_config`.
_SPELLINGS = {
    ("vision_config", "image_size"): "image_default_input_size",
    ("vision_config", "patch_size"): "image_patch_size",
    ("vision_config", "num_position_embeddings"): "image_num_pos",
    ("adapter_config", "vision_feature_layer"): "vit_layers",
    ("text_config", "attention_bias"): "qkv_bias",
    ("text_config", "rms_norm_eps"): "layer_norm_eps",
}


def _copied(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config and its sections."""
    return {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in content.items()
    }


class Molmo2(Family):
    """The family with two layouts."""

    def native(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the library's field names.

        The layer count of a released config includes tower layers without weights, whose outputs no
        module uses. They are left out, as in the library.
        """
        found = _copied(content)
        # Only released configs have this section.
        legacy = found.pop("vit_config", None)
        trimmed = legacy is not None and found.get("vision_config") is None
        if trimmed:
            found["vision_config"] = legacy
        for (section, name), released in _SPELLINGS.items():
            inside = found.get(section)
            if isinstance(inside, dict) and released in inside:
                inside[name] = inside.pop(released)
        if trimmed:
            vision = found["vision_config"]
            adapter = found.setdefault("adapter_config", {})
            count = vision.get("num_hidden_layers", 25)
            chosen = adapter.get("vision_feature_layer") or [24, 18]
            chosen = [layer % count for layer in chosen]  # counted from the front
            adapter["vision_feature_layer"] = chosen
            vision["num_hidden_layers"] = max(chosen) + 1
        return found

    def spelled(self, content: Values, layout: str) -> Values:
        if layout == NATIVE:
            return content
        found = _copied(content)
        for (section, name), released in _SPELLINGS.items():
            found[section][released] = found[section].pop(name)
        # The released section has another name.
        vision = found.pop("vision_config")
        adapter = found["adapter_config"]
        adapter["vit_layers"] = [
            layer % vision["num_hidden_layers"] for layer in adapter["vit_layers"]
        ]
        return found | {"vit_config": vision}

    def links(
        self, values: Values, layout: str = NATIVE, infos: Mapping[str, Info] | None = None
    ) -> list[Link]:
        """Return the links of all tensors.

        The released layout splits the embedding in two. The split is that of the file to read, or
        else follows the vocabulary.
        """
        shapes = shapes_of(values)
        layers = (values["num_layers"], values["vision_num_layers"])
        if layout == NATIVE:
            return links_of(NATIVE_TABLE, shapes, *layers)
        # Our embedding has the vocabulary and the image tokens in one tensor.
        total, hidden = shapes["embedding.weight"]
        first = values["vocab_size"]
        info = (infos or {}).get(_SPLIT_EMBEDDING[0])
        if info is not None and len(info.shape) == 2 and 0 < info.shape[0] < total:
            first = info.shape[0]
        sizes = zip(_SPLIT_EMBEDDING, (first, total - first), strict=True)
        halves = tuple(Named(name, (rows, hidden)) for name, rows in sizes)
        embedding = Named("embedding.weight", (total, hidden))
        return [Link(halves, (embedding,)), *links_of(RELEASED_TABLE, shapes, *layers)]

    def layout_of(self, infos: Mapping[str, Info]) -> str:
        # The released layout has another name for the decoder.
        is_released = any(name.startswith("model.transformer.") for name in infos)
        return RELEASED if is_released else NATIVE


MOLMO2 = Molmo2(
    "molmo2",
    "Molmo2ForConditionalGeneration",
    _TEXT,
    _from_hf,
    _to_hf,
    NATIVE_TABLE,
    fits=({"vision_num_layers": True, "vision_family": "molmo2", "moe_shared_expert_gate": False},),
    harmless=frozenset({"float32_attention", "use_frame_special_tokens"}),
    sections=("text_config", "vision_config", "adapter_config"),
    token_fields=_TOKEN_FIELDS,
    gives_tower=True,
    token_order=tuple(Molmo2Rules.token_texts),
)
