"""Rules of a vision family: how images and videos become patches and tokens.

A family's rules are a frozen dataclass derived from `VisionRules`, with fields of builtin types and
a row in `decoding.RULES`. The manifest stores the values. The fields are flags of the preprocessing
command.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from megacp.engine.config.vision import VisionConfig

LARGEST_ID = (1 << 31) - 2
"""Largest token id. Ids and the number of ids are stored in at most 4 bytes."""
Pixels = tuple[np.ndarray, np.ndarray]
"""Patches, float32 [c, patches per crop, patch_dim], and pooling windows, int64 [pooled tokens,
window] with patch indices, -1 = outside.
"""
_T = TypeVar("_T")


def rule(default: _T, text: str, flag: str | None = None) -> _T:
    """Return a dataclass field with the help text and name of its flag.

    By default, the flag is named after the field.
    """
    metadata = {"help": text, "flag": flag}
    if isinstance(default, dict):
        return dataclasses.field(
            default_factory=lambda: copy.copy(default), hash=False, metadata=metadata
        )
    return dataclasses.field(default=default, metadata=metadata)


class ImageError(ValueError):
    """Error for an image or a video that cannot be used. The caller adds the file name."""


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """Tokens and crops of an image or a frame. Images of equal size share a cached layout."""

    num_crops: int
    tokens: np.ndarray
    """Token ids, int64 [n], with a placeholder id for each pooled feature."""
    pooling: np.ndarray
    """Patch indices in [num_crops * patches_per_crop], -1 = outside: int64 [pooled, window], in
    token order.
    """
    grid: tuple[int, int] | None = None
    """Rows and columns of the pooled tokens, if their positions have three axes."""


class VisionRules(ABC):
    """Rules of one family.

    A unit is encoded separately from all others: an image, or `frames_of_unit` sampled frames of a
    video.
    """

    family: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` in config.json of this family's models."""
    is_named: ClassVar[bool] = True
    """Whether stored rules contain the family's name. Those of the first family do not, because
    they are older than the second family.
    """
    token_texts: ClassVar[Mapping[str, str]]
    """Texts of the special tokens in the family's tokenizers, by their names in the rules."""
    placeholder: ClassVar[tuple[str, ...]]
    """Special tokens that represent an image in a chat template. A processor replaces them with all
    tokens of the image.
    """
    frames_of_unit: ClassVar[int]
    max_pixels: int
    video_fps: float
    max_frames: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    token_ids: dict[str, int]

    @property
    @abstractmethod
    def patch_shape(self) -> tuple[int, int]:
        """Number of patches per crop, and of values per patch."""

    @abstractmethod
    def misfit(self, vision: VisionConfig) -> str | None:
        """Return how these rules differ from the family's tower, and the flags to change.

        Return None if they fit.
        """

    @abstractmethod
    def layout_of_image(self, width: int, height: int) -> ImageLayout:
        """Return the layout of an upright image of this size. The rules must have all token ids.

        Raise ImageError if the size is not supported.
        """

    @abstractmethod
    def layouts_of_video(
        self, frames: Sequence[int], fps: float, sizes: Collection[tuple[int, int]]
    ) -> list[tuple[str, ImageLayout]]:
        """Return the units of the sampled `frames`, each with the text before it.

        `sizes` are the frames' widths and heights. Raise ImageError if they are not supported.
        """

    @abstractmethod
    def sampled(self, num_frames: int, fps: float) -> list[int]:
        """Return the numbers of the frames to use: increasing, at least one, evenly spaced."""

    @abstractmethod
    def fitted(self, pixels: np.ndarray, count: int) -> np.ndarray:
        """Return one of `count` sampled frames, uint8 [h, w, 3], resized to whole patches."""

    @abstractmethod
    def pixels_of_image(self, pixels: np.ndarray) -> Pixels:
        """Return normalized crops of an image, uint8 [h, w, 3], with their pooling windows."""

    @abstractmethod
    def pixels_of_frames(self, frames: np.ndarray) -> Pixels:
        """Return normalized crops of fitted frames, with their pooling windows.

        `frames` is uint8 [units, frames_of_unit, h, w, 3].
        """

    def resized_to(
        self,
        size: tuple[int, int],
        num_frames: int = 0,
        pixels: tuple[float | None, float | None] = (None, None),
    ) -> tuple[int, int] | None:
        """Return the width and height to which an image, or each of `num_frames` taken frames, is
        resized; None if the family cuts crops of a fixed size.

        `pixels` are other limits for the image or frame; None stands for the limit of these rules.
        """
        return None

    def crop_boxes(
        self, width: int, height: int
    ) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
        """Return height and width of an image's canvas, and left, top and side length of its crops.

        Crops of the whole image, such as a low-resolution crop, are not included.
        """
        return (height, width), []

    def with_token_ids(self, tokenizer: Any) -> Self:
        """Return these rules with an id for every special token.

        The id comes from the rules, else from the tokenizer (for the token's text), else it is a
        free id above the vocabulary. `tokenizer` has `vocab_size` and optionally `token_id(text)`.
        """
        find = getattr(tokenizer, "token_id", lambda text: None)
        ids: dict[str, int] = {}
        following = max([tokenizer.vocab_size, *(i + 1 for i in self.token_ids.values())])
        for name, text in self.token_texts.items():
            known = self.token_ids.get(name, find(text))
            if known is None:
                known = following
                following += 1
            ids[name] = known
        return dataclasses.replace(self, token_ids=ids)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Return the rules as JSON values: tuples become lists; the family is added if needed."""
        values: dict[str, Any] = {"family": self.family} if self.is_named else {}
        for name, value in dataclasses.asdict(self).items():  # type: ignore[call-overload]
            values[name] = list(value) if isinstance(value, tuple) else value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the rules for values from `to_dict`; absent keys get their defaults.

        Raise ValueError for unknown keys, wrong types or invalid numbers.
        """
        defaults = dataclasses.asdict(cls())  # type: ignore[call-overload]
        unknown = sorted({str(key) for key in values} - set(defaults))
        if unknown:
            raise ValueError(
                f"image rules: unknown keys {', '.join(unknown)}; known are {', '.join(defaults)}"
            )
        given: dict[str, Any] = {}
        wrong = []
        for key, value in values.items():
            given[key] = tuple(value) if isinstance(value, list) else value
            if not _alike(given[key], defaults[key]):
                wrong.append(f"`{key}` is {given[key]!r}")
        if wrong:
            raise ValueError(f"image rules of the wrong type: {'; '.join(wrong)}")
        return cls(**given)

    def common_problems(self, least: Mapping[str, int]) -> list[str]:
        """Return the problems of fields that all families share, one line per problem.

        `least` contains the minimum of fields that have one.
        """
        found = []
        for name, low in least.items():
            value = getattr(self, name)
            if np.min(value) < low:
                found.append(f"--{name.replace('_', '-')} is {value}, but must be at least {low}")
        mean = self.image_mean
        std = self.image_std
        if not 0 < self.video_fps < float("inf"):
            found.append(f"--video-fps is {self.video_fps}, but must be a number above 0")
        if not np.isfinite([*mean, *std]).all() or min(std) <= 0:
            found.append(
                f"--image-mean and --image-std are {mean} and {std}, but must be finite, and "
                "--image-std above 0"
            )
        unknown = sorted(set(self.token_ids) - set(self.token_texts))
        if unknown:
            found.append(
                f"--image-token-ids contains {', '.join(unknown)}, but known names are "
                f"{', '.join(self.token_texts)}"
            )
        ids = list(self.token_ids.values())
        if len(set(ids)) < len(ids) or min(ids, default=0) < 0 or max(ids, default=0) > LARGEST_ID:
            found.append(
                f"--image-token-ids are {self.token_ids}, but must be different and in the range 0 "
                f"to {LARGEST_ID}"
            )
        return found


def _alike(value: Any, default: Any) -> bool:
    """Return whether a value from a file has the type of the field with this default."""
    if isinstance(default, tuple):
        if not isinstance(value, tuple) or len(value) != len(default):
            return False
        return all(_alike(one, default[0]) for one in value)
    if isinstance(default, dict):
        if not isinstance(value, dict):
            return False
        return all(isinstance(name, str) and type(one) is int for name, one in value.items())
    # JSON may represent a float as an integer; a field that is None by default is a bool
    also_allowed = {float: (int,), type(None): (bool,)}
    return type(value) in (type(default), *also_allowed.get(type(default), ()))
