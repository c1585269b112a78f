"""Configs of published models, as their folders have them: taken whole, with the published number of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from megacp.core.config.checks import check
from megacp.core.config.run import RunConfig, flatten, with_values
from megacp.core.models.costs import model_parameters
from megacp.huggingface.convert.families import of_config, of_values

ANY = {"torch_dtype": "bfloat16", "transformers_version": "4.5", "use_cache": True, "initializer_range": 0.02}
ANY |= {"hidden_act": "silu", "attention_dropout": 0.0, "rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2}
QWEN = {"max_window_layers": 28, "use_sliding_window": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-7B-Instruct": (
        {
            **QWEN,
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "max_position_embeddings": 32768,
            "vocab_size": 152064,
            "use_mrope": False,
            "tie_word_embeddings": False,
        },
        7_615_616_512,
    ),
    "Phi-4": (
        {
            "model_type": "phi3",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "rope_theta": 250000,
            "sliding_window": None,
            "attention_bias": False,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "vocab_size": 100352,
        },
        14_659_507_200,
    ),
    "SmolLM3-3B": (
        {
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "layer_types": ["full_attention"] * 36,
            "use_sliding_window": False,
            "sliding_window": None,
            "attention_bias": False,
            "mlp_bias": False,
            "pretraining_tp": 2,
            "vocab_size": 128256,
        },
        3_075_098_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_taken_whole(name: str) -> None:
    content, parameters = PUBLISHED[name]
    content = {**ANY, **content}
    values = of_config(content).values(content)
    config = with_values(RunConfig(), {**values, "hf_model_type": content["model_type"]})
    assert check(config, 1) == []
    assert model_parameters(config.model) == parameters
    assert of_values(flatten(config)).name == content["model_type"]
