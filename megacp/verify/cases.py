"""Tiny models for `megacp.verify.parity`: variants of decoders, experts and vision towers."""

from __future__ import annotations

from megacp.engine.config.run import Value

# Sizes of every tiny model. The embedding is tied to the output weights, and query heads share
# groups of keys and values. The vocabulary size is prime, so it must be padded for every tp.
TINY_SIZES: dict[str, int] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "vocab_size": 211,
}
# A vision tower and its connector, to be added to any decoder.
TINY_TOWER: dict[str, Value] = {
    # With 0.02, rounding errors in the decoder's gradients would hide the tower's gradients.
    "init_method_std": 0.15,
    "vision_num_layers": 3,
    "vision_hidden_size": 32,
    "vision_ffn_hidden_size": 48,
    "vision_num_attention_heads": 8,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -2),
    "connector_ffn_hidden_size": 48,
}

# The decoders below differ from TINY_SIZES in these options.
_UNTIED: dict[str, Value] = {**TINY_SIZES, "untie_embeddings_and_output_weights": True}
_BIASES: dict[str, Value] = {
    "add_qkv_bias": True,
    "add_attention_output_bias": True,
    "add_mlp_bias": True,
}
_LLAMA3: dict[str, Value] = {
    "rope_scaling": "llama3",
    "rope_scaling_factor": 8.0,
    "rope_original_max_positions": 64,
}
# Both rope scalings have a short original context, so that even a tiny row is longer.
_YARN: dict[str, Value] = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_max_positions": 16,
}
# Windows of 20 tokens are shorter than a row and do not divide context-parallel blocks evenly.
# Every third layer has full attention.
_GEMMA3: dict[str, Value] = {
    "apply_layernorm_1p": True,
    "mlp_activation": "geglu",
    "softmax_scale": 0.25,
    "embedding_multiplier": 8.0,
    "window_size": 20,
    "window_attn_skip_freq": "3",
    "window_rotary_base": 1e3,
}
# The gated delta rule in three of four layers, and positions of image tokens in three dimensions.
_QWEN3_5: dict[str, Value] = {
    "vision_family": "qwen3_5",
    "image_attention": "causal",
    "apply_layernorm_1p": True,
    "init_method_std": 0.08,
    # Keys and values differ in size, so that swapped dimensions cause an error.
    "linear_attention_freq": "4",
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "attention_output_gate": True,
    # Half of the 16 channels rotate: 4 angles, for time (2), row (1) and column (1).
    "rotary_percent": 0.5,
    "kv_channels": 16,
    "mrope_section": (2, 1, 1),
}
_MAMBA2: dict[str, Value] = {
    "linear_attention_rule": "mamba2",
    "linear_attention_freq": "2",
    "init_method_std": 0.08,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_MOE: dict[str, Value] = {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 40,
    "moe_layer_freq": "2",
    "moe_shared_expert_intermediate_size": 96,
    "moe_shared_expert_gate": True,
    "init_method_std": 0.08,
}
# Experts in every layer with biases everywhere, and attention with learnable sinks.
_GPT_OSS: dict[str, Value] = {
    "mlp_activation": "clamped_swiglu",
    "softmax_type": "learnable",
    "window_size": 20,
    "window_attn_skip_freq": "2",
    **_BIASES,
    **_YARN,
    **_MOE,
    "moe_router_bias": True,
    "yarn_correction_range_round_to_int": False,
    # gpt-oss has no shared expert, so these values override _MOE.
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_layer_freq": "1",
}

# The models that `--model` selects by name. `tiny_biased` is the only model with dropout.
MODELS: dict[str, dict[str, Value]] = {
    "tiny_llm": {**TINY_SIZES},
    "tiny_llama": {**_UNTIED, **_LLAMA3},
    "tiny_olmo2": {**_UNTIED, "norm_position": "after", "qk_layernorm": "all_heads"},
    "tiny_gemma3": {**TINY_SIZES, **_GEMMA3, "qk_layernorm": "head", "norm_position": "both"},
    "tiny_smollm3": {**TINY_SIZES, **_YARN, "no_rope_freq": "2"},
    "tiny_mamba2": {**TINY_SIZES, **_MAMBA2},
    "tiny_moe": {**TINY_SIZES, **_MOE},
    "tiny_gpt_oss": {**TINY_SIZES, **_GPT_OSS},
    "tiny_biased": {**TINY_SIZES, **_BIASES, "qk_layernorm": "head", "hidden_dropout": 0.1},
    "tiny_vlm": {**_UNTIED, **TINY_TOWER, "additional_vocab_size": 8},
    "tiny_qwen3_5": {
        **_UNTIED,
        **TINY_TOWER,
        **_QWEN3_5,
        "additional_vocab_size": 8,
        "qk_layernorm": "head",
    },
}
