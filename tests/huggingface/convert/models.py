"""Tiny random models, created and saved by the transformers library, one for each convertible
variant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megacp.huggingface.convert.molmo2 import MOLMO2
from megacp.huggingface.convert.processor import write_processor
from megacp.huggingface.convert.qwen3_5 import QWEN3_5_VL
from megacp.huggingface.convert.tensors import Info
from megacp.huggingface.convert.tokenizer import Given, write_tokenizer
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.training.data.vision.molmo2 import Molmo2Rules
from megacp.training.data.vision.qwen3_5 import Qwen35Rules
from tests.prepare.media.pictures import TINY

# The byte tokenizer's vocabulary, followed by the image tokens of TINY.
BYTES, EXTRA = 257, 8

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, **BANDS}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def llama(**changes: Any) -> Any:
    import transformers

    values = {**SIZES, "rope_parameters": rope(500.0), "rms_norm_eps": 1e-5, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))


def qwen3(**changes: Any) -> Any:
    import transformers

    values = {**SIZES, "head_dim": 16, "rope_parameters": rope(10_000.0), **changes}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values))


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
BY_KIND = dict.fromkeys(("sliding_attention", "full_attention"), rope(500.0))
BY_TURNS = [("full" if i % 2 else "sliding") + "_attention" for i in range(7)]
BY_THETA = {
    "sliding_attention": rope(100.0),
    "full_attention": rope(500.0, rope_type="linear", factor=4.0),
}
# the scale of the embedding, sqrt(64), is a float32 in the library
GEMMA3 = {
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "head_dim": 16,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
}
QWEN3_5 = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWEN3_5 |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
KINDS = ["full_attention", "linear_attention", "linear_attention"]
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 16}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
GLM |= {
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "attention_bias": True,
    "use_qk_norm": True,
    "head_dim": 16,
}
GLM |= {"num_mtp_layers": 0}
SHARED = {"shared_expert_intermediate_size": 28}
NO_IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


def sizes_of(kind: str) -> dict[str, Any]:
    """Return the library's sizes of a model, without the width of a dense MLP if it has none."""
    return {
        name: size
        for name, size in SIZES.items()
        if kind != "Qwen3_5Moe" or name != "intermediate_size"
    }


def made(name: str, **changes: Any) -> Any:
    import transformers

    values = {**sizes_of(name), **NO_IDS, "rope_parameters": rope(500.0), **changes}
    config = name + "Text" * (name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe"))
    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{config}Config")(**values)
    )


def molmo2(**changes: Any) -> Any:
    """Return a model with grouped queries in its text part and nearly all widths different."""
    import transformers

    tower = {"num_attention_heads": 4, "num_key_value_heads": 4}
    vision = {
        **tower,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "head_dim": 6,
    }
    adapter = {
        **tower,
        "hidden_size": 24,
        "head_dim": 6,
        "intermediate_size": 40,
        "text_hidden_size": 32,
    }
    text = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "head_dim": 10,
        "vocab_size": BYTES,
        "additional_vocab_size": EXTRA,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "rope_parameters": rope(5_000.0),
        **changes,
    }
    config = transformers.Molmo2Config(
        vision_config={
            **vision,
            "image_size": [16, 16],
            "patch_size": 4,
            "hidden_act": "gelu_pytorch_tanh",
        },
        adapter_config={**adapter, "vision_feature_layer": [-1, -3]},
        text_config=text,
        **{field: TINY.token_ids[name] for field, name in MOLMO2.token_fields.items()},
    )
    return transformers.Molmo2ForConditionalGeneration(config)


def qwen3_5(kind: str = "Qwen3_5", **changes: Any) -> Any:
    """Return a model whose vision tower has 12 x 12 positions."""
    import transformers

    given = {
        **sizes_of(kind),
        **NO_IDS,
        **QWEN3_5,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "vocab_size": BYTES,
    }
    rotary = rope(500.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 36,
        "num_heads": 4,
        "patch_size": 4,
    }
    tower |= {"out_hidden_size": 48, "num_position_embeddings": 144}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**given, "rope_parameters": rotary, **changes},
        vision_config=tower,
        image_token_id=250,
        video_token_id=251,
        vision_start_token_id=252,
        vision_end_token_id=253,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


MODELS = {
    "llama 2": llama,
    "llama 2 tied": lambda: llama(tie_word_embeddings=True),
    "llama 3 tied": lambda: llama(tie_word_embeddings=True, rope_parameters=LLAMA3),
    "llama 3 with biases": lambda: llama(
        attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3
    ),
    "llama linear": lambda: llama(rope_parameters=rope(500.0, rope_type="linear", factor=4.0)),
    "qwen3": qwen3,
    "qwen3 tied": lambda: qwen3(tie_word_embeddings=True, attention_bias=True),
    "qwen2": lambda: made("Qwen2"),
    "qwen2 tied, yarn": lambda: made("Qwen2", tie_word_embeddings=True, rope_parameters=YARN),
    "qwen2 with windows": lambda: made(
        "Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen2 with another width": lambda: made("Qwen2", head_dim=10),
    "mistral": lambda: made("Mistral", sliding_window=None, head_dim=16),
    "mistral yarn": lambda: made("Mistral", sliding_window=None, rope_parameters=YARN),
    "mistral with windows": lambda: made("Mistral", sliding_window=9),
    "phi3": lambda: made("Phi3"),
    "phi3 tied, all groups": lambda: made("Phi3", tie_word_embeddings=True, num_key_value_heads=4),
    "olmo2": lambda: made("Olmo2"),
    "olmo2 tied with biases": lambda: made("Olmo2", tie_word_embeddings=True, attention_bias=True),
    "olmo3": lambda: made("Olmo3", sliding_window=8, num_hidden_layers=5, rope_parameters=BY_KIND),
    "gemma3_text": lambda: made("Gemma3", rope_parameters=BY_THETA, **GEMMA3),
    "gemma3_text untied, every second layer": lambda: made(
        *("Gemma3",),
        rope_parameters=BY_KIND,
        **GEMMA3 | {"tie_word_embeddings": False, "attention_bias": True, "layer_types": BY_TURNS},
    ),
    "olmo3 yarn": lambda: made(
        "Olmo3", sliding_window=8, rope_parameters=BY_KIND | {"full_attention": YARN}
    ),
    "qwen3_5_text": lambda: made("Qwen3_5", head_dim=16, num_hidden_layers=4, **QWEN3_5),
    "qwen3_5_text tied, other kinds": lambda: made(
        *("Qwen3_5",), head_dim=16, tie_word_embeddings=True, layer_types=KINDS, **QWEN3_5
    ),
    "mixtral": lambda: made("Mixtral", num_local_experts=4, sliding_window=9, head_dim=16),
    "olmoe": lambda: made("Olmoe", num_experts=6, num_experts_per_tok=3),
    "olmoe tied, renormalised": lambda: made(
        *("Olmoe",),
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": lambda: made(
        "Qwen3Moe", mlp_only_layers=[1], norm_topk_prob=True, head_dim=16, **EXPERTS
    ),
    "qwen3_moe stacked": lambda: made(
        "Qwen3Moe", decoder_sparse_step=2, tie_word_embeddings=True, **EXPERTS
    ),
    "mixtral stacked": lambda: made("Mixtral", num_local_experts=4),
    "glm4_moe": lambda: made("Glm4Moe", **GLM),
    "glm4_moe stacked, weights as they are": lambda: made(
        *("Glm4Moe",),
        **GLM
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "gpt_oss": lambda: made("GptOss", rope_parameters=YARN | {"truncate": False}, **GPT_OSS),
    "gpt_oss tied, one kind of layers": lambda: made(
        *("GptOss",),
        **GPT_OSS | {"attention_bias": False, "tie_word_embeddings": True, "sliding_window": 128},
        layer_types=KINDS[:1] * 3,
    ),
    "gpt_oss of 32": lambda: made(
        "GptOss", **GPT_OSS | {"hidden_size": 64, "intermediate_size": 96}
    ),
    "smollm3": lambda: made("SmolLM3", no_rope_layer_interval=2),
    "smollm3 untied, odd layers": lambda: made(
        "SmolLM3",
        no_rope_layers=[0, 0, 1],
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
    ),
    "qwen3_5 with images": qwen3_5,
    "qwen3_5_moe_text": lambda: made(
        "Qwen3_5Moe", head_dim=16, num_hidden_layers=4, **QWEN3_5, **EXPERTS, **SHARED
    ),
    "qwen3_5_moe with images, stacked": lambda: qwen3_5("Qwen3_5Moe", **EXPERTS, **SHARED),
    "molmo2 released": molmo2,
    "molmo2 native": lambda: molmo2(attention_bias=True),
}


def correct(model: Any) -> None:
    """Randomise the correction that routers add when they choose experts, if there is one."""
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Save one of MODELS with random weights far from their initial values; return the model."""
    torch.manual_seed(sum(map(ord, name)))
    model = MODELS[name]().to(dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key and key.endswith("weight") else 0.0, 0.2)
        correct(model)
    if "images" in name:
        c, folder = model.config, Path(folder)
        folder.mkdir()
        ids = {name: getattr(c, field) for field, name in QWEN3_5_VL.token_fields.items()}
        write_processor(Qwen35Rules(patch_size=4, resize_pixels=(64, 4096), token_ids=ids), folder)
    if "molmo2" in name:
        folder.mkdir()
        write_processor(TINY, folder)
        write_tokenizer(given("byte", images=True), folder, 512, ())
    model.save_pretrained(
        folder, save_original_format=not name.endswith(("native", "stacked")), **options
    )
    return model.eval()


def packed(rows: int, columns: int, seed: int, count: int = 3) -> dict[str, torch.Tensor]:
    """Return random matrices in 4 bits with scales from 2^-7 to 2^-2."""
    drawn = torch.Generator().manual_seed(seed)
    blocks = torch.randint(
        0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=drawn
    )
    return {
        "_blocks": blocks,
        "_scales": torch.randint(120, 126, blocks.shape[:3], dtype=torch.uint8, generator=drawn),
    }


def given(specification: str, images: bool = False) -> Given:
    images_by_text = {Molmo2Rules.token_texts[name]: i for name, i in TINY.token_ids.items()}
    return Given(
        load_tokenizer(specification, engine="reference"), images_by_text if images else {}
    )


class Tensors:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.infos = {
            name: Info(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name][start:stop]
