"""Qwen3.5 with its vision tower, dense or with experts.

The text model has the config fields and tensors of the text family, below `text_config` and
`language_model`. The tower is a ViT.
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

# Modules of the tower and the connector, all with weight and bias.
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
    """Return the table of a decoder with its vision tower."""
    table: dict[str, str | tuple[str, ...]] = {
        theirs.replace("model.", "model.language_model.", 1): ours
        for theirs, ours in decoder.items()
    }
    for theirs, module in _MODULES.items():
        for kind in _KINDS:
            table[f"model.visual.{theirs}.{kind}"] = f"{module}.{kind}"
    for kind in _KINDS:
        # The library joins q, k and v.
        parts = tuple(f"vision.blocks.{{v}}.attention.{x}.{kind}" for x in "qkv")
        table[f"model.visual.blocks.{{v}}.attn.qkv.{kind}"] = parts
    table["model.visual.pos_embed.weight"] = "vision.position_embedding.weight"
    return table


# Size in the config -> our flag and the library's default.
_TOWER = {
    "depth": ("vision_num_layers", 27),
    "hidden_size": ("vision_hidden_size", 1152),
    "intermediate_size": ("vision_ffn_hidden_size", 4304),
    "num_heads": ("vision_num_attention_heads", 16),
    "patch_size": ("vision_patch_size", 16),
}
# Config fields with ids of image tokens -> names of these tokens in the image rules.
_TOKEN_FIELDS = {
    "image_token_id": "image_patch",
    "video_token_id": "video_patch",
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}


def _from_hf(words: Qwen35Words, c: ConfigJson) -> Values:
    """Return our flags for a config whose text fields are at the top (see `Qwen35.native`)."""
    v = words.from_hf(c)
    v |= {
        "vision_family": "qwen3_5",
        "image_attention": "causal",
        "connector_ffn_hidden_size": None,
    }
    # Angles per axis (time, rows, columns); the default of the class.
    v["mrope_section"] = v.get("mrope_section") or (11, 11, 10)
    for name, (ours, default) in _TOWER.items():
        high = 4096 if ours == "vision_num_layers" else 2**31 - 1
        v[ours] = c.number(f"vision_config.{name}", default, high=high)
    c.only("vision_config.", hidden_act="gelu_pytorch_tanh", in_channels=3)
    c.only(
        "vision_config.", spatial_merge_size=2, temporal_patch_size=2, deepstack_visual_indexes=[]
    )
    # For other image sizes, positions are interpolated.
    count = c.number("vision_config.num_position_embeddings", 2304)
    # The table of positions is a square grid of patches.
    v["vision_image_size"] = math.isqrt(count) * v["vision_patch_size"]
    for path, default, one in (
        ("vision_config.num_position_embeddings", 2304, math.isqrt(count) ** 2),
        ("vision_config.out_hidden_size", 3584, v["hidden_size"]),
    ):
        found = c.get(path, default)
        if found != one:
            c.faults.append(f"{path} is {shown(found)}, but megacp can only express {one}")
    # The tower rotates patches by their row and column.
    rope = c.get("vision_config.rope_parameters") or {}
    if rope not in ({}, {"rope_type": "axial", "rope_theta": 10000.0}):
        c.faults.append(
            f"vision_config.rope_parameters is {shown(rope)}, but megacp can only express axial "
            "with theta 10000"
        )
    return v


def _to_hf(words: Qwen35Words, v: Values) -> Values:
    """Return the config for our flags; the inverse of `_from_hf`."""
    vision = {name: v[ours] for name, (ours, _) in _TOWER.items()}
    # The tower itself, without the fields of its processor.
    side = v["vision_image_size"] // v["vision_patch_size"]
    vision |= {
        "out_hidden_size": v["hidden_size"],
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": side**2,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": v["init_method_std"],
    }
    return words.to_hf(v) | {"vision_config": vision}


class Qwen35(Family):
    """The family whose text fields are inside `text_config`."""

    def native(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Move the text fields to the top.

        Raise ValueError for a text field at the top that the library would not read there.
        """
        text = content.get("text_config")
        if text is not None and not isinstance(text, Mapping):
            raise ValueError(f"config.json: text_config is {shown(text)}, expected an object")
        inside = text or {}
        # Read an empty config to find the fields that the library reads only from text_config.
        probe = ConfigJson({}, self.sections)
        self.from_hf(probe)
        of_text = probe.names - {"tie_word_embeddings"}
        # Old configs repeat text fields at the top, which is harmless if both values agree.
        for name in of_text & content.keys() - GENERAL:
            if not same(inside.get(name), content[name]):
                raise ValueError(
                    f"config.json: {name} is {shown(content[name])} outside text_config, but "
                    f"transformers reads text_config, where it is {shown(inside.get(name))}: "
                    "remove the outer field, or move it into text_config"
                )
        skipped = of_text | {"text_config"}
        # Fields of the whole model, such as token ids, have priority.
        outside = {name: value for name, value in content.items() if name not in skipped}
        return {**inside, "tie_word_embeddings": False, **outside}

    def spelled(self, content: Values, layout: str) -> Values:
        """Move the text fields into `text_config`."""
        # Both sections have their own model_type, which the library uses to build them.
        text = {name: value for name, value in content.items() if name != "vision_config"}
        return {
            "text_config": {"model_type": f"{self.name}_text", **text},
            "vision_config": {"model_type": f"{self.name}_vision", **content["vision_config"]},
            "tie_word_embeddings": content["tie_word_embeddings"],
        }


class Qwen35Moe(Qwen35, ExpertFamily):
    """The same family with experts."""


def _family(
    kind: type[Qwen35],
    name: str,
    cls: str,
    words: Qwen35Words,
    decoder: Table,
    fits: Values,
    silent: frozenset[str],
) -> Qwen35:
    """Return a family with a tower whose text fields are read and written by `words`."""
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
