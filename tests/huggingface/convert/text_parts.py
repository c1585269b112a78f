"""Tiny random models with an unsupported vision tower, whose text model is converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megacp.huggingface.convert.text_part import TEXT_PARTS
from tests.huggingface.convert.models import NO_IDS, SIZES, rope

TEXT: dict[str, Any] = {**SIZES, **NO_IDS, "num_hidden_layers": 2, "rope_parameters": rope(500.0)}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOWER |= {"image_size": 28, "patch_size": 7}
CLIP = TOWER | {"model_type": "clip_vision_model"}
SIGLIP = TOWER | {"model_type": "siglip_vision_model"}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 8}
QWEN = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
QWEN2_5 = QWEN | {"intermediate_size": 36, "out_hidden_size": 48}
AXES = TEXT | {"rope_parameters": rope(500.0, mrope_section=[2, 2, 2])}
INTERLEAVED = TEXT | {
    "head_dim": 16,
    "rope_parameters": rope(500.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
}
GEMMA = {name: value for name, value in TEXT.items() if name != "rope_parameters"}
GEMMA |= {
    "head_dim": 16,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "num_hidden_layers": 7,
    "hidden_size": 64,
}
IMAGE, VIDEO = (
    {"image_token_id": 90},
    {"video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
)
INDEX = {"image_token_index": 90}
MADE: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": GEMMA, "vision_config": TOWER, "mm_tokens_per_image": 4, **INDEX},
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 16},
        "vision_config": PIXTRAL,
        **INDEX,
    },
    "llava": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP, **INDEX},
    "llava_next": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": CLIP, **INDEX},
    "llava_onevision": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": SIGLIP,
        **INDEX,
    },
    "internvl": {"text_config": TEXT | {"model_type": "qwen3"}, "vision_config": TOWER, **IMAGE},
    "idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, **IMAGE},
    "smolvlm": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, **IMAGE},
    "qwen2_vl": {
        **{"text_config": AXES, **IMAGE, **VIDEO},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 48,
            "num_heads": 4,
            "patch_size": 4,
        },
    },
    "qwen2_5_vl": {"text_config": AXES, "vision_config": QWEN2_5, **IMAGE, **VIDEO},
    "qwen3_vl": {
        **{"text_config": INTERLEAVED, **IMAGE, **VIDEO},
        "vision_config": QWEN2_5 | {"deepstack_visual_indexes": [0]},
    },
}


def made(name: str, **changes: Any) -> Any:
    """Return a random float64 model of the library with a tower."""
    import transformers

    cls = getattr(transformers, TEXT_PARTS[name].cls)
    torch.manual_seed(0)
    model = cls(cls.config_class(**MADE[name] | changes)).double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key and key.endswith("weight") else 0.0, 0.2)
    return model.eval()


def saved(name: str, folder: Path, **options: Any) -> Path:
    made(name).save_pretrained(folder, **options)
    return folder
