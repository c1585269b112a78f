"""The text model inside a folder whose vision tower we do not have: its config and tensors, as a
text folder has them.

A row of `TEXT_PARTS` says what such a folder's class has where its config is silent. The tower, the
projector and their fields are left out. Tokens of images stay in the vocabulary, as ordinary
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megacp.huggingface.convert.config_json import Values, shown
from megacp.huggingface.convert.tensors import Info, Source
from megacp.huggingface.convert.words import SIZES

_TEXT_NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
"""How names of the text model begin in such folders, older ones and those of the library: how they
begin in ours.
"""
_PARTS = (
    "vision_tower",
    "vision_model",
    "visual",
    "multi_modal_projector",
    "connector",
    "image_newline",
)
NOT_TEXT = tuple(f"{begin}{part}" for begin in ("", "model.") for part in _PARTS)
"""How names of the tower and of what joins it to the text model begin."""
_FIELDS = frozenset(
    (
        "vision_config",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "vision_aspect_ratio",
    )
    + (
        "image_token_index",
        "image_token_id",
        "video_token_index",
        "video_token_id",
        "vision_token_id",
    )
    + ("boi_token_index", "eoi_token_index", "vision_start_token_id", "vision_end_token_id")
    + (
        "ignore_index",
        "image_seq_length",
        "image_grid_pinpoints",
        "mm_tokens_per_image",
        "use_image_newline_parameter",
    )
    + (
        "projector_hidden_act",
        "multimodal_projector_bias",
        "spatial_merge_size",
        "downsample_ratio",
        "scale_factor",
    )
)
"""Fields of a whole model's config that are about images."""
_OF_TEXT = frozenset(SIZES) | {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
}
"""Fields that say what a text model computes."""
PROCESSORS = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
"""Files about images."""
_SECTIONS = ("mrope_section", "mrope_interleaved")
"""Parameters of rotary positions on three axes. In a text these are equal, which is the usual
rotary embedding.
"""


@dataclass(frozen=True)
class TextPart:
    """A class of the library with a tower and a text model."""

    cls: str
    """The library's class of the whole model."""
    text: str
    """The `model_type` of its text model where the config does not say."""
    tied: bool = False
    """Whether the whole model ties its head where the config does not say."""
    asks_text: bool = False
    """Whether a text model that says it is tied is believed where the whole model does not say so.
    """
    families: Mapping[str, str] = field(default_factory=dict)
    """A `model_type` that only such text models have -> the family that computes the same."""
    defaults: Values = field(default_factory=dict)
    """Sizes of the text model where its config is silent, as far as they are not those of its
    family.
    """
    flat: bool = False
    """Whether fields of the text model are at the top in older configs."""


def _of_llava(
    cls: str, text: str = "llama", tied: bool = False, asks_text: bool = False
) -> TextPart:
    return TextPart(f"{cls}ForConditionalGeneration", text, tied, asks_text)


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
    """Return the config.json of a text folder with the text model of `content`.

    Raises ValueError for a `text_config` that is no object, or is missing.
    """
    outside = {name: value for name, value in content.items() if name not in _FIELDS}
    inside = outside.pop("text_config", None)
    if inside is None and part.flat:
        inside = {"model_type": part.text}
    elif not isinstance(inside, Mapping):
        raise ValueError(f"config.json: text_config is {shown(inside)}, expected an object")
    else:
        # the library reads the text model's sizes from `text_config` only, also if they are missing
        # there
        outside = {name: value for name, value in outside.items() if name not in _OF_TEXT}
    kind = inside.get("model_type", part.text)
    found = {**part.defaults, **outside, **inside}
    # the whole model's words on these come first, as in the library
    found |= {
        name: value
        for name, value in outside.items()
        if name.endswith("_token_id") and value is not None
    }
    tied = content.get("tie_word_embeddings", part.tied)
    if tied is not False or not part.asks_text:
        found["tie_word_embeddings"] = tied
    elif "tie_word_embeddings" in inside:
        found["tie_word_embeddings"] = inside["tie_word_embeddings"]
    else:
        found.pop("tie_word_embeddings", None)
    found["model_type"] = part.families.get(kind, kind) if isinstance(kind, str) else kind
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), Mapping):
            found[name] = _on_one_axis(found[name])
    return found


def _on_one_axis(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a rotary embedding without the sections of its axes."""
    found = {name: value for name, value in rope.items() if name not in _SECTIONS}
    for name in ("type", "rope_type"):
        if found.get(name) == "mrope":
            found[name] = "default"
    return found


class TextTensors:
    """The tensors of a text model, by the names they have in a folder of their own."""

    def __init__(self, source: Source) -> None:
        """Raises ValueError when two tensors would have one name."""
        self._source = source
        self._names: dict[str, str] = {}
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
        """Rows of a tensor."""
        return self._source.rows(self._names[name], start, stop)


def left_out(content: Mapping[str, Any], names: Sequence[str]) -> str:
    """Say in a line what of a folder is not taken; `names` are those of its tensors that are left
    out.
    """
    return (
        f"{content['model_type']}: the text model is taken; the vision tower and its {len(names)} "
        "tensors are not "
        "(images cannot be trained, an export is a folder of the text model)"
    )
