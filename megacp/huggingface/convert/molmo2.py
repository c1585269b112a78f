"""Molmo2: the tensors and config fields of both of its layouts, the library's own and the released
one.

The layouts differ in names, in fused tensors (q, k, v in `att_proj`; up, then gate, in `ff_proj`)
and in where the embedding is split. The config is read in the library's spelling.
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

_TOKEN_FIELDS = {
    "image_start_token_id": "image_start",
    "low_res_image_start_token_id": "low_res_image_start",
    "image_end_token_id": "image_end",
    "image_patch_id": "image_patch",
    "frame_start_token_id": "frame_start",
    "frame_end_token_id": "frame_end",
}
"""Ids that stand in the config, by the names of the image rules."""
_SPLIT_EMBEDDING = ("model.transformer.wte.embedding", "model.transformer.wte.new_embedding")


def _both(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}


def _attention_rows(theirs: str, ours: str, names: tuple[str, ...]) -> dict[str, str]:
    """Their q, k, v and output in order."""
    pairs = zip(names, ("q", "k", "v", "output"), strict=True)
    return {
        k: v for their, our in pairs for k, v in _both(f"{theirs}.{their}", f"{ours}.{our}").items()
    }


_PROJ, _W = ("q_proj", "k_proj", "v_proj", "o_proj"), ("wq", "wk", "wv", "wo")
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
_BLOCK = "model.transformer.blocks.{i}"
_RESBLOCK = "model.vision_backbone.image_vit.transformer.resblocks.{v}"
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


_TEXT = {
    **SIZES,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_TEXT |= {"vocab_size": 151936, "max_position_embeddings": 36864}
"""Defaults of transformers' Molmo2TextConfig."""
_TOWER = {
    "vision_config.num_hidden_layers": ("vision_num_layers", 25),
    "vision_config.hidden_size": ("vision_hidden_size", 1152),
    "vision_config.intermediate_size": ("vision_ffn_hidden_size", 4304),
    "vision_config.num_attention_heads": ("vision_num_attention_heads", 16),
    "vision_config.patch_size": ("vision_patch_size", 14),
    "adapter_config.intermediate_size": ("connector_ffn_hidden_size", 18944),
}
"""Their size -> our flag and the library's default."""


def _from_hf(c: ConfigJson) -> Values:
    v = UNWRITTEN | sizes_from_hf(c, _TEXT, "text_config.")
    v |= {
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": "head",
        "image_attention": "example",
    }
    v["add_qkv_bias"] = c.switch("text_config.attention_bias")
    v["additional_vocab_size"] = c.number("text_config.additional_vocab_size", 128)
    for path, (ours, default) in _TOWER.items():
        v[ours] = c.number(path, default, high=4096 if ours == "vision_num_layers" else 2**31 - 1)
    # the library's class has no pair of tensors to tie, so its head is its own whatever these
    # fields say
    c.switch("tie_word_embeddings")
    c.switch("text_config.tie_word_embeddings")
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
    if (
        scaled is not None
        and v.get("rope_scaling") != "none"
        and scaled != list(range(v["num_layers"]))
    ):
        c.faults.append(
            f"text_config.rope_scaling_layers is {shown(scaled)}, megacp can only scale all layers"
        )
    size = c.get("vision_config.image_size") or [378, 378]
    square = isinstance(size, list) and len(size) == 2 and size[0] == size[1]
    if square and type(size[0]) is int and 1 <= size[0] < 2**31:
        v["vision_image_size"] = size[0]
        patches, count = (
            (size[0] // v["vision_patch_size"]) ** 2,
            c.get("vision_config.num_position_embeddings"),
        )
        if count not in (None, patches):
            c.faults.append(
                f"vision_config.num_position_embeddings is {shown(count)}, a crop has {patches} "
                "patches"
            )
    else:
        c.faults.append(
            f"vision_config.image_size is {shown(size)}, megacp can only express squares"
        )
    for path, (default, one) in _twins(v).items():
        if (found := c.get(path, default)) != one:
            c.faults.append(
                f"{path} is {shown(found)}, megacp can only express {one} as in what it joins"
            )
    path, count = "adapter_config.vision_feature_layer", v["vision_num_layers"]
    chosen = c.get(path) or [24, 18]
    two = isinstance(chosen, list) and len(chosen) == 2
    if not two or not all(type(i) is int and -count <= i < count for i in chosen):
        c.faults.append(
            f"{path} is {shown(chosen)}, megacp can only express two of the {count} layers"
        )
    elif max(layer % count for layer in chosen) != count - 1:
        c.faults.append(
            f"{path} is {chosen}, which leaves layers of vision_config.num_hidden_layers {count} "
            "unread"
        )
    else:
        v["vision_feature_layers"] = tuple(chosen)
    return v


def _twins(v: Values) -> dict[str, tuple[int, int]]:
    """Sizes that the library says once more: its default, and the one that fits."""
    hidden, heads = v["vision_hidden_size"], v["vision_num_attention_heads"]
    found = {
        "adapter_config.hidden_size": (1152, hidden),
        "adapter_config.text_hidden_size": (3584, v["hidden_size"]),
    }
    found["adapter_config.num_attention_heads"] = (16, heads)
    for section in ("vision_config", "adapter_config"):
        found |= {
            f"{section}.num_key_value_heads": (16, heads),
            f"{section}.head_dim": (72, hidden // heads),
        }
    return found


def _to_hf(v: Values) -> Values:
    sizes = {
        path: v["ffn_hidden_size"] if v[ours] is None else v[ours]
        for path, (ours, _) in _TOWER.items()
    }
    sizes |= {path: one for path, (_, one) in _twins(v).items()}
    content: Values = {"text_config": {"model_type": "molmo2_text"} | sizes_to_hf(v)}
    content["text_config"] |= {
        "attention_bias": v["add_qkv_bias"],
        "num_key_value_heads": model_of(v).query_groups,
    }
    content["text_config"] |= {
        "qk_norm_type": "qwen3",
        "norm_after": False,
        "tie_word_embeddings": False,
    }
    content["text_config"] |= {"additional_vocab_size": v["additional_vocab_size"]}
    content["text_config"] |= {"rope_scaling_layers": list(range(v["num_layers"]))}
    for section in ("vision_config", "adapter_config"):
        inside = {
            path.split(".")[1]: size for path, size in sizes.items() if path.startswith(section)
        }
        content[section] = {"model_type": f"molmo2_{section.removesuffix('_config')}", **inside}
        content[section] |= {"attention_bias": True, "attention_dropout": 0.0}
        content[section] |= {"initializer_range": v["init_method_std"]}
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
    }
    content["adapter_config"] |= {"mlp_bias": False}
    return content | {"initializer_range": v["init_method_std"], "tie_word_embeddings": False}


_SPELLINGS = {
    ("vision_config", "image_size"): "image_default_input_size",
    ("vision_config", "patch_size"): "image_patch_size",
    ("vision_config", "num_position_embeddings"): "image_num_pos",
    ("adapter_config", "vision_feature_layer"): "vit_layers",
    ("text_config", "attention_bias"): "qkv_bias",
    ("text_config", "rms_norm_eps"): "layer_norm_eps",
}
"""(section, field) of the library: the field as it was released; the section `vision_config` was
`vit_config`.
"""


class Molmo2(Family):
    """The family with two layouts."""

    def native(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """A released tower declares unread layers without weights: they are left out, as the
        library does.
        """
        found = {
            key: dict(value) if isinstance(value, Mapping) else value
            for key, value in content.items()
        }
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
            count, chosen = (
                vision.get("num_hidden_layers", 25),
                adapter.get("vision_feature_layer") or [24, 18],
            )
            chosen = [layer % count for layer in chosen]
            adapter["vision_feature_layer"], vision["num_hidden_layers"] = chosen, max(chosen) + 1
        return found

    def spelled(self, content: Values, layout: str) -> Values:
        if layout == NATIVE:
            return content
        found = {
            key: dict(value) if isinstance(value, Mapping) else value
            for key, value in content.items()
        }
        for (section, name), released in _SPELLINGS.items():
            found[section][released] = found[section].pop(name)
        vision, adapter = found.pop("vision_config"), found["adapter_config"]
        adapter["vit_layers"] = [
            layer % vision["num_hidden_layers"] for layer in adapter["vit_layers"]
        ]
        return found | {"vit_config": vision}

    def links(
        self, values: Values, layout: str = NATIVE, infos: Mapping[str, Info] | None = None
    ) -> list[Link]:
        """A released embedding is split in two, where the file that is read has it, else behind the
        vocabulary.
        """
        shapes = shapes_of(values)
        layers = values["num_layers"], values["vision_num_layers"]
        if layout == NATIVE:
            return links_of(NATIVE_TABLE, shapes, *layers)
        total, hidden = shapes["embedding.weight"]
        info = (infos or {}).get(_SPLIT_EMBEDDING[0])
        sound = info is not None and len(info.shape) == 2 and 0 < info.shape[0] < total
        first = info.shape[0] if info is not None and sound else values["vocab_size"]
        split = zip(_SPLIT_EMBEDDING, (first, total - first), strict=True)
        embedding = Named("embedding.weight", (total, hidden))
        cut = Link(tuple(Named(name, (rows, hidden)) for name, rows in split), (embedding,))
        return [cut, *links_of(RELEASED_TABLE, shapes, *layers)]

    def layout_of(self, infos: Mapping[str, Info]) -> str:
        return RELEASED if any(name.startswith("model.transformer.") for name in infos) else NATIVE


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
