"""The families by name, and how a config.json or flags choose one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacp.huggingface.convert.config_json import Values
from megacp.huggingface.convert.gpt_oss import GPT_OSS
from megacp.huggingface.convert.moe import EXPERT_FAMILIES
from megacp.huggingface.convert.molmo2 import MOLMO2
from megacp.huggingface.convert.qwen3_5 import QWEN3_5_MOE_VL, QWEN3_5_VL
from megacp.huggingface.convert.text_part import TEXT_PARTS
from megacp.huggingface.convert.words import TEXT_FAMILIES, Family

_ALL = (*TEXT_FAMILIES, *EXPERT_FAMILIES, GPT_OSS, MOLMO2, QWEN3_5_VL, QWEN3_5_MOE_VL)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Ends of names in old files that are not read: they follow from the config."""


def of_config(content: Mapping[str, Any]) -> Family:
    """The family of a config.json. ValueError when it is not known."""
    name = content.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"config.json: model_type is {name!r:.80}, known are {', '.join([*FAMILIES, *TEXT_PARTS])}")
    return FAMILIES[name]


def of_values(values: Values) -> Family:
    """The family that our flags name, or the first that can say them. ValueError."""
    named = values["hf_model_type"]
    if named is not None:
        if named not in FAMILIES:
            raise ValueError(f"--hf-model-type {named} is not known, known are {', '.join(FAMILIES)}")
        return FAMILIES[named]
    after, biases = values["norm_position"] == "after", (values["add_qkv_bias"], values["add_attention_output_bias"])
    experts = values["num_experts"] > 0
    chosen = {
        "qwen3_5_moe": values["vision_num_layers"] > 0 and values["moe_shared_expert_gate"],
        values["vision_family"]: values["vision_num_layers"] > 0,  # the library's word is ours
        "glm4_moe": experts and values["moe_router_score_function"] == "sigmoid",
        "gpt_oss": experts and values["softmax_type"] == "learnable",
        "qwen3_5_moe_text": values["moe_shared_expert_gate"],
        "qwen3_moe": experts and values["qk_layernorm"] == "head",
        "olmoe": experts and values["qk_layernorm"] == "all_heads",
        "mixtral": experts,
        "gemma3_text": values["norm_position"] == "both",
        "olmo3": (after or values["qk_layernorm"] == "all_heads") and values["window_size"] is not None,
        "olmo2": after or values["qk_layernorm"] == "all_heads",
        "qwen3_5_text": values["linear_attention_freq"] is not None,
        "smollm3": values["no_rope_freq"] is not None,
        "qwen3": values["qk_layernorm"] == "head",
        "qwen2": biases == (True, False),
        "mistral": values["window_size"] is not None,
    }
    return FAMILIES[next((name for name, fits in chosen.items() if fits), "llama")]
