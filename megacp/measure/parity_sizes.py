"""Model sizes of a parity check: a few models by name, and any run's model made small enough for one process.

Key property: making a model small keeps all that a layout can be wrong about: heads, groups, options, ties, towers and
at least one layer a stage. Only widths, depth and vocabulary shrink. Rejected: refusing a large model, after which the
check is run on another model than the one that will be trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megacp.config.run import RunConfig, Value

_SIZES: dict[str, Value] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "vocab_size": 211,
}
_TOWER: dict[str, Value] = {
    "init_method_std": 0.15,  # with 0.02 the tower's gradients are lost in the rounding of the text's
    "vision_num_layers": 3,
    "vision_hidden_size": 32,
    "vision_ffn_hidden_size": 48,
    "vision_num_attention_heads": 8,
    "vision_head_dim": 4,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -2),
    "connector_num_attention_heads": 8,
    "connector_head_dim": 4,
    "connector_ffn_hidden_size": 48,
}
MODELS: dict[str, dict[str, Value]] = {
    "tiny_llm": _SIZES,
    "tiny_llama": {
        **_SIZES,
        "untie_embeddings_and_output_weights": True,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 8.0,
        "rope_original_max_positions": 64,
    },
    "tiny_qwen3": {**_SIZES, "qk_layernorm": True, "kv_channels": 16},
    "tiny_biased": {
        **_SIZES,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
        "hidden_dropout": 0.1,
    },
    "tiny_vlm": {**_SIZES, "untie_embeddings_and_output_weights": True, "additional_vocab_size": 8, **_TOWER},
}
"""Models by name: the plain decoder (tied, grouped queries), Llama's and Qwen3's options, every bias with dropout, and
a decoder with a vision tower.
"""
IMAGE_SIZES = ("vision_patch_size", "vision_image_size")
"""What stored images are bound to."""


def named_sizes(name: str, config: RunConfig) -> dict[str, Value]:
    """The sizes of a model of `MODELS`, with heads and layers enough for any tp and any number of stages.

    A tower that the config has and the named model has not is made small, not taken away.
    """
    sizes, tp = MODELS[name], config.parallel.tensor_model_parallel_size
    groups, heads = int(sizes["num_query_groups"] or 1), int(sizes["num_attention_heads"] or 1)
    wide = math.lcm(groups, max(tp, 1))
    towers = {} if "vision_num_layers" in sizes or not config.vision.vision_num_layers else small_tower(config)
    grown = {
        name: math.lcm(int(value), max(tp, 1))
        for name, value in sizes.items()
        if name.startswith(("vision_num_attention", "connector_num_attention", "vision_ffn", "connector_ffn"))
        and isinstance(value, int)
    }
    return {
        **sizes,
        **towers,
        **grown,
        "num_query_groups": wide,
        "num_attention_heads": wide * (heads // groups),
        "ffn_hidden_size": math.lcm(int(sizes["ffn_hidden_size"] or 1), max(tp, 1)),
        "num_layers": max(int(sizes["num_layers"] or 1), _stages(config)),
    }


def small_sizes(config: RunConfig) -> dict[str, Value]:
    """The config's own model with small widths, few layers and a small vocabulary; heads and options stay."""
    m = config.model
    least: Mapping[str, int] = {
        "num_layers": max(int(_SIZES["num_layers"] or 1), _stages(config)),
        "hidden_size": 64,
        "ffn_hidden_size": math.lcm(96, config.parallel.tensor_model_parallel_size),
        "vocab_size": 211,
    }
    sizes: dict[str, Value] = {name: min(getattr(m, name), value) for name, value in least.items()}
    sizes["kv_channels"] = min(m.head_dim, 8)
    return {**sizes, **small_tower(config)} if config.vision.vision_num_layers else sizes


def small_tower(config: RunConfig) -> dict[str, Value]:
    """The tower of the config in the sizes of tiny_vlm; its heads stay, and which feature comes first."""
    v, tp = config.vision, config.parallel.tensor_model_parallel_size
    layers = min(v.vision_num_layers, int(_TOWER["vision_num_layers"] or 1))  # type: ignore[arg-type]
    features = (-1, -min(2, layers))
    is_last_first = max(v.feature_layers) == v.feature_layers[0]
    kept = {"vision_num_attention_heads", "connector_num_attention_heads"}
    return {
        **{name: value for name, value in _TOWER.items() if name not in kept},
        "vision_num_layers": layers,
        "vision_feature_layers": features if is_last_first else features[::-1],
        "vision_ffn_hidden_size": math.lcm(48, tp),
        "connector_ffn_hidden_size": math.lcm(48, tp),
    }


def _stages(config: RunConfig) -> int:
    p = config.parallel
    return p.pipeline_model_parallel_size * p.num_virtual_stages_per_pipeline_rank
