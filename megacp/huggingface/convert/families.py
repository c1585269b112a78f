"""The table of all families, and the selection of a family from a config.json or from flags."""

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
# Suffixes of tensors that are skipped: old files store tensors that the config determines.
IGNORED_TENSORS = ("rotary_emb.inv_freq",)

# Other types that the Trainer integration trains exactly, by the measurements of
# docs/trl_and_accelerate.md.
TRAINED_BY_THE_TRAINER = (
    *("apertus", "arcee", "bamba", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm"),
    *("deepseek_v2", "deepseek_v3", "diffllama", "ernie4_5", "exaone4", "falcon_h1"),
    *("gemma4_text", "glm", "glm4", "gpt2", "gpt_neox", "granite", "granite_swa", "granitemoe"),
    *("granitemoehybrid", "helium", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "llama4_text"),
    *("mimo_v2_flash", "nemotron", "nemotron_h", "olmo", "olmo_hybrid", "opt"),
    *("persimmon", "phi", "phimoe", "qwen2_moe", "qwen3_next", "seed_oss", "stablelm"),
    *("starcoder2", "vaultgemma", "zamba2"),
)
_ADVICE = (
    ". The Trainer of transformers trains this type, and megacp.integrations shards its sequences "
    "with shard_sequences(trainer, cp_size=N): see docs/trl_and_accelerate.md"
)


def of_config(content: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raise ValueError if it is unknown."""
    # The value may be anything, so the message shows at most 80 characters.
    name = content.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join([*FAMILIES, *TEXT_PARTS])
        advice = _ADVICE if name in TRAINED_BY_THE_TRAINER else ""
        raise ValueError(
            f"config.json: model_type {name!r:.80} is not supported; supported types are {known}"
            f"{advice}"
        )
    return FAMILIES[name]


def of_values(values: Values) -> Family:
    """Return the family set by --hf-model-type, or else the family that the model fits.

    Raise ValueError with the nearest family and the settings that it cannot express.
    """
    # A model that was converted from a folder is exported as its family.
    named = values["hf_model_type"]
    if named is not None:
        if named not in FAMILIES:
            raise ValueError(
                f"--hf-model-type {named} is not supported; use one of {', '.join(FAMILIES)}"
            )
        return FAMILIES[named]
    # Otherwise compare the model with each family's usual settings.
    distances = {family.name: family.distance(values) for family in _ALL}
    known = {name: distance for name, distance in distances.items() if distance is not None}
    nearest = FAMILIES[min(known, key=known.__getitem__)]
    if known[nearest.name] == (0, 0):
        return nearest
    # A family may express a model that does not match its usual settings.
    misfits = nearest.misfits(values)
    if misfits:
        raise ValueError(
            "this model cannot be exported: it matches no supported architecture. The nearest is "
            f"{nearest.name}: {'; '.join(misfits)}"
        )
    return nearest
