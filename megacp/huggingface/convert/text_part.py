"""Extracts the text model from a folder whose vision tower megacp does not support: its config and
tensors, in the form of a text folder.

Each entry of `TEXT_PARTS` has the library's defaults for one such class. The tower, the projector
and their fields are left out. Image tokens stay in the vocabulary as ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megacp.huggingface.convert.config_json import Values, shown
from megacp.huggingface.convert.tensors import Info, Source
from megacp.huggingface.convert.words import SIZES

# Prefixes of the text model's tensor names in such folders, older and current ones -> prefixes in a
# text folder.
_TEXT_NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
# Modules of such folders, except the text model.
_PARTS = (
    "vision_tower",
    "vision_model",
    "visual",
    "multi_modal_projector",
    "connector",
    "image_newline",
)
# Prefixes of the tensor names of the tower and the projector.
NOT_TEXT = _PARTS + tuple(f"model.{part}" for part in _PARTS)
# Image-related config fields.
_FIELDS = frozenset(
    {
        # the tower
        "vision_config",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "vision_aspect_ratio",
        # tokens of images
        "image_token_index",
        "image_token_id",
        "video_token_index",
        "video_token_id",
        "vision_token_id",
        "boi_token_index",
        "eoi_token_index",
        "vision_start_token_id",
        "vision_end_token_id",
        # the layout of an image
        "ignore_index",
        "image_seq_length",
        "image_grid_pinpoints",
        "mm_tokens_per_image",
        "use_image_newline_parameter",
        # the projector
        "projector_hidden_act",
        "multimodal_projector_bias",
        "spatial_merge_size",
        "downsample_ratio",
        "scale_factor",
    }
)
# Config fields that affect the text model's computation.
_OF_TEXT = frozenset(SIZES) | {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
}
# Image processor files.
PROCESSORS = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
# Parameters of rotary positions on three axes. For text, all axes have the same position, which
# gives the usual rotary embedding.
_SECTIONS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class TextPart:
    """A class of the library that combines a vision tower and a text model."""

    cls: str
    """The library's class of the whole model."""
    text: str
    """Default `model_type` of its text model."""
    tied: bool = False
    """Whether the whole model ties its head by default."""
    asks_text: bool = False
    """Whether `tie_word_embeddings` of the text model applies if the whole model has no such field
    or a false one.
    """
    families: Mapping[str, str] = field(default_factory=dict)
    """`model_type` that only such text models have -> the family with the same computation."""
    defaults: Values = field(default_factory=dict)
    """Default sizes of the text model that differ from its family's."""
    flat: bool = False
    """Whether older configs have the text model's fields at the top."""


def _of_llava(
    cls: str, text: str = "llama", tied: bool = False, asks_text: bool = False
) -> TextPart:
    """Return a class whose text model has the `model_type` of an ordinary text folder."""
    return TextPart(f"{cls}ForConditionalGeneration", text, tied, asks_text)


# Defaults of transformers' Qwen2VLTextConfig.
_QWEN2_VL: Values = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}
# `model_type` of the whole model -> its class.
TEXT_PARTS = {
    "gemma3": _of_llava("Gemma3", "gemma3_text", tied=True),
    "mistral3": _of_llava("Mistral3", "mistral", tied=True),
    "llava": _of_llava("Llava", asks_text=True),
    "llava_next": _of_llava("LlavaNext"),
    "llava_onevision": _of_llava("LlavaOnevision", "qwen2", asks_text=True),
    "internvl": _of_llava("InternVL", "qwen2", tied=True),
    "idefics3": _of_llava("Idefics3"),
    "smolvlm": _of_llava("SmolVLM"),
    "qwen2_vl": TextPart(
        cls="Qwen2VLForConditionalGeneration",
        text="qwen2_vl_text",
        asks_text=True,
        families={"qwen2_vl_text": "qwen2"},
        defaults=_QWEN2_VL,
        flat=True,
    ),
    "qwen2_5_vl": TextPart(
        cls="Qwen2_5_VLForConditionalGeneration",
        text="qwen2_5_vl_text",
        asks_text=True,
        families={"qwen2_5_vl_text": "qwen2"},
        defaults=_QWEN2_VL,
        flat=True,
    ),
    "qwen3_vl": TextPart(
        cls="Qwen3VLForConditionalGeneration",
        text="qwen3_vl_text",
        families={"qwen3_vl_text": "qwen3"},
        defaults={"max_position_embeddings": 128000, "rope_theta": 5e5},
    ),
}


def text_content(content: Mapping[str, Any], part: TextPart) -> dict[str, Any]:
    """Return the config.json of a text folder for the text model in `content`.

    Raise ValueError if `text_config` is missing or is not an object.
    """
    outside = {name: value for name, value in content.items() if name not in _FIELDS}
    inside = outside.pop("text_config", None)
    if inside is None and part.flat:
        inside = {"model_type": part.text}
    elif not isinstance(inside, Mapping):
        raise ValueError(f"config.json: text_config is {shown(inside)}, expected an object")
    else:
        # The library reads the text model's sizes only from `text_config`, even if it lacks them.
        outside = {name: value for name, value in outside.items() if name not in _OF_TEXT}
    kind = inside.get("model_type", part.text)
    found = {**part.defaults, **outside, **inside}
    # For token ids the whole model has priority, as in the library.
    for name, value in outside.items():
        if name.endswith("_token_id") and value is not None:
            found[name] = value
    # A false value of the whole model may be a default, so the text model decides for some classes.
    tied = content.get("tie_word_embeddings", part.tied)
    if tied is not False or not part.asks_text:
        found["tie_word_embeddings"] = tied
    elif "tie_word_embeddings" in inside:
        found["tie_word_embeddings"] = inside["tie_word_embeddings"]
    else:
        found.pop("tie_word_embeddings", None)
    if isinstance(kind, str):
        kind = part.families.get(kind, kind)
    found["model_type"] = kind
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), Mapping):
            found[name] = _on_one_axis(found[name])
    return found


def _on_one_axis(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters for text positions, which have one axis."""
    found = {name: value for name, value in rope.items() if name not in _SECTIONS}
    for name in ("type", "rope_type"):
        if found.get(name) == "mrope":
            found[name] = "default"
    return found


class TextTensors:
    """The tensors of a text model, by their names in a text folder."""

    def __init__(self, source: Source) -> None:
        """Rename the tensors of `source`. Raise ValueError if two of them get the same name."""
        self._source = source
        self._names: dict[str, str] = {}  # name in a text folder -> name in `source`
        for theirs in source.infos:
            name = theirs
            for begin, ours in _TEXT_NAMES:
                if theirs.startswith(begin):
                    name = ours + theirs.removeprefix(begin)
                    break
            if name in self._names:
                raise ValueError(
                    f"{theirs} and {self._names[name]} are the same tensor of the text model"
                )
            self._names[name] = theirs
        self.infos: dict[str, Info] = {
            name: source.infos[theirs] for name, theirs in self._names.items()
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor."""
        return self._source.rows(self._names[name], start, stop)


def left_out(content: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a message about the unused part of a folder; `names` are its unused tensors."""
    return (
        f"{content['model_type']}: only the text model is used, without the vision tower and its "
        f"{len(names)} tensors (images cannot be used in training, and an export is a text model)"
    )
