"""The families by name, and how a config.json or flags choose one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacp.huggingface.convert.config_json import Values
from megacp.huggingface.convert.family import Family
from megacp.huggingface.convert.gpt_oss import GPT_OSS
from megacp.huggingface.convert.moe import EXPERT_FAMILIES
from megacp.huggingface.convert.molmo2 import MOLMO2
from megacp.huggingface.convert.qwen3_5 import QWEN3_5_MOE_VL, QWEN3_5_VL
from megacp.huggingface.convert.text_families import TEXT_FAMILIES
from megacp.huggingface.convert.text_part import TEXT_PARTS

_ALL = (*TEXT_FAMILIES, *EXPERT_FAMILIES, GPT_OSS, MOLMO2, QWEN3_5_VL, QWEN3_5_MOE_VL)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Ends of names in old files that are not read: they follow from the config."""


def of_config(content: Mapping[str, Any]) -> Family:
    """The family of a config.json. ValueError when it is not known."""
    name = content.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"config.json: model_type is {name!r:.80}, known are "
            f"{', '.join([*FAMILIES, *TEXT_PARTS])}"
        )
    return FAMILIES[name]


def of_values(values: Values) -> Family:
    """Return the family that our flags name, or else the family that the model fits.

    Raises ValueError with the nearest family and the settings that it cannot express.
    """
    named = values["hf_model_type"]
    if named is not None:
        if named not in FAMILIES:
            raise ValueError(
                f"--hf-model-type {named} is not known, known are {', '.join(FAMILIES)}"
            )
        return FAMILIES[named]
    distances = {family.name: family.distance(values) for family in _ALL}
    known = {name: distance for name, distance in distances.items() if distance is not None}
    nearest = FAMILIES[min(known, key=known.__getitem__)]
    if known[nearest.name] == (0, 0):
        return nearest
    misfits = nearest.misfits(values)
    if misfits:
        raise ValueError(
            f"this model is no architecture that megacp can write, the nearest is {nearest.name}: "
            f"{'; '.join(misfits)}"
        )
    return nearest
