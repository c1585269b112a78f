"""Qwen3.5 with its tower, dense or with experts: the text model's words and tensors under
`text_config` and `language_model`, and a ViT's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from megacp.huggingface.convert.config_json import GENERAL, ConfigJson, Values, same, shown
from megacp.huggingface.convert.family import Family
from megacp.huggingface.convert.moe import (
    QWEN3_5_MOE,
    QWEN3_5_MOE_SILENT,
    QWEN3_5_MOE_WORDS,
    ExpertFamily,
)
from megacp.huggingface.convert.tables import Table
from megacp.huggingface.convert.text_families import (
    QWEN3_5,
    QWEN3_5_SILENT,
    QWEN3_5_WORDS,
    Qwen35Words,
)

_MODULES = {
    "patch_embed.proj": "vision.patch_embedding",
    "blocks.{v}.norm1": "vision.blocks.{v}.attention_norm",
    "blocks.{v}.norm2": "vision.blocks.{v}.mlp_norm",
    "blocks.{v}.attn.proj": "vision.blocks.{v}.attention.output",
    "blocks.{v}.mlp.linear_fc1": "vision.blocks.{v}.mlp.up",
    "blocks.{v}.mlp.linear_fc2": "vision.blocks.{v}.mlp.down",
    "merger.norm": "connector.norm",
    "merger.linear_fc1": "connector.mlp.up",
    "merger.linear_fc2": "connector.mlp.down",
}
_KINDS = ("weight", "bias")


def _with_tower(decoder: Table) -> Table:
    """Tensors of a decoder, and those of the tower before it."""
    return {
        **{
            theirs.replace("model.", "model.language_model.", 1): ours
            for theirs, ours in decoder.items()
        },
        **{
            f"model.visual.{theirs}.{kind}": f"{ours}.{kind}"
            for theirs, ours in _MODULES.items()
            for kind in _KINDS
        },
        **{
            f"model.visual.blocks.{{v}}.attn.qkv.{kind}": tuple(
                f"vision.blocks.{{v}}.attention.{x}.{kind}" for x in "qkv"
            )
            for kind in _KINDS
        },
        "model.visual.pos_embed.weight": "vision.position_embedding.weight",
    }


_TOWER = {
    "depth": ("vision_num_layers", 27),
    "hidden_size": ("vision_hidden_size", 1152),
    "intermediate_size": ("vision_ffn_hidden_size", 4304),
    "num_heads": ("vision_num_attention_heads", 16),
    "patch_size": ("vision_patch_size", 16),
}
"""Their size -> our flag and the library's default."""
_TOKEN_FIELDS = {
    "image_token_id": "image_patch",
    "video_token_id": "video_patch",
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}


def _from_hf(words: Qwen35Words, c: ConfigJson) -> Values:
    """Flags of a config whose `text_config` stands at the top."""
    v = words.from_hf(c)
    v |= {
        "vision_family": "qwen3_5",
        "image_attention": "causal",
        "connector_ffn_hidden_size": None,
    }
    v["mrope_section"] = v.get("mrope_section") or (11, 11, 10)
    for name, (ours, default) in _TOWER.items():
        v[ours] = c.number(
            f"vision_config.{name}",
            default,
            high=4096 if ours == "vision_num_layers" else 2**31 - 1,
        )
    c.only("vision_config.", hidden_act="gelu_pytorch_tanh", in_channels=3)
    c.only(
        "vision_config.", spatial_merge_size=2, temporal_patch_size=2, deepstack_visual_indexes=[]
    )
    count = c.number("vision_config.num_position_embeddings", 2304)
    v["vision_image_size"] = math.isqrt(count) * v["vision_patch_size"]
    for path, default, one in (
        ("vision_config.num_position_embeddings", 2304, math.isqrt(count) ** 2),
        ("vision_config.out_hidden_size", 3584, v["hidden_size"]),
    ):
        if (found := c.get(path, default)) != one:
            c.faults.append(f"{path} is {shown(found)}, megacp can only express {one}")
    rope = c.get("vision_config.rope_parameters") or {}
    if rope not in ({}, {"rope_type": "axial", "rope_theta": 10000.0}):
        c.faults.append(
            f"vision_config.rope_parameters is {shown(rope)}, megacp can only express axial, theta "
            "10000"
        )
    return v


def _to_hf(words: Qwen35Words, v: Values) -> Values:
    """The inverse."""
    vision = {name: v[ours] for name, (ours, _) in _TOWER.items()}
    vision |= {"out_hidden_size": v["hidden_size"], "hidden_act": "gelu_pytorch_tanh"}
    vision |= {
        "num_position_embeddings": (v["vision_image_size"] // v["vision_patch_size"]) ** 2,
        "in_channels": 3,
    }
    vision |= {
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": v["init_method_std"],
    }
    return words.to_hf(v) | {"vision_config": vision}


class Qwen35(Family):
    """The family whose text fields are nested."""

    def native(self, content: Mapping[str, Any]) -> dict[str, Any]:
        text = content.get("text_config")
        if text is not None and not isinstance(text, Mapping):
            raise ValueError("config.json: text_config is no object")
        probe = ConfigJson({}, self.sections)
        self.from_hf(probe)
        of_text = probe.names - {
            "tie_word_embeddings"
        }  # fields that the library reads inside alone
        for name in of_text & content.keys() - GENERAL:
            if not same((text or {}).get(name), content[name]):
                raise ValueError(
                    f"config.json: {name} is {shown(content[name])} outside text_config, where the "
                    "library reads "
                    f"{shown((text or {}).get(name))}: take it out, or write it inside"
                )
        outside = {
            name: value for name, value in content.items() if name not in of_text | {"text_config"}
        }
        return {**(text or {}), "tie_word_embeddings": False, **outside}

    def spelled(self, content: Values, layout: str) -> Values:
        text = {name: value for name, value in content.items() if name != "vision_config"}
        tied = content["tie_word_embeddings"]
        nested, vision = ({"model_type": f"{self.name}_{part}"} for part in ("text", "vision"))
        both = {"text_config": nested | text, "vision_config": vision | content["vision_config"]}
        return {**both, "tie_word_embeddings": tied}


class Qwen35Moe(Qwen35, ExpertFamily):
    """That with experts."""


def _family(
    kind: type[Qwen35],
    name: str,
    cls: str,
    words: Qwen35Words,
    decoder: Table,
    fits: Values,
    silent: frozenset[str],
) -> Qwen35:
    return kind(
        name,
        f"{cls}ForConditionalGeneration",
        words.sizes,
        partial(_from_hf, words),
        partial(_to_hf, words),
        _with_tower(decoder),
        fits=(fits,),
        harmless=silent | {"language_model_only"},
        sections=("vision_config",),
        token_fields=_TOKEN_FIELDS,
    )


QWEN3_5_VL = _family(
    Qwen35,
    "qwen3_5",
    "Qwen3_5",
    QWEN3_5_WORDS,
    QWEN3_5,
    {"vision_num_layers": True, "vision_family": "qwen3_5", "moe_shared_expert_gate": False},
    QWEN3_5_SILENT,
)
QWEN3_5_MOE_VL = _family(
    Qwen35Moe,
    "qwen3_5_moe",
    "Qwen3_5Moe",
    QWEN3_5_MOE_WORDS,
    QWEN3_5_MOE,
    {"vision_num_layers": True, "moe_shared_expert_gate": True},
    QWEN3_5_MOE_SILENT,
)
