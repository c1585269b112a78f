"""What the rules of a vision family say: how images and videos become patches and tokens, whatever
the family.

A family is a frozen dataclass of builtin types below `VisionRules`, stored in the manifest, and a
row of `decoding.RULES`. Its fields are flags of the preprocessing command.
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
"""Tokens are stored in at most 4 bytes, and there is one id more than the largest."""
Pixels = tuple[np.ndarray, np.ndarray]
"""float32 [c, patches of a crop, patch_dim]; int64 [pooled tokens, window] into its patches, -1 =
outside.
"""
_T = TypeVar("_T")


def rule(default: _T, text: str, flag: str | None = None) -> _T:
    """A field of rules with what --help says of its flag, which has the field's name where no other
    is given.
    """
    said = {"help": text, "flag": flag}
    if isinstance(default, dict):
        return dataclasses.field(
            default_factory=lambda: copy.copy(default), hash=False, metadata=said
        )
    return dataclasses.field(default=default, metadata=said)


class ImageError(ValueError):
    """Why an image or a video cannot be used; the caller adds which one."""


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """What an image or a frame becomes; cached, and shared by all of one size."""

    num_crops: int
    tokens: np.ndarray
    """int64 [n]: ids, one of a pooled feature's where such a feature goes."""
    pooling: np.ndarray
    """int64 [pooled, window]: indices into [num_crops * patches_per_crop], -1 = outside; as the
    tokens stand.
    """
    grid: tuple[int, int] | None = None
    """Rows and columns of its pooled tokens, where their positions have three axes."""


class VisionRules(ABC):
    """The rules of one family. A unit is what is encoded by itself: an image, or `frames_of_unit`
    taken frames.
    """

    family: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    """What `model_type` of a config.json is for models of the family."""
    is_named: ClassVar[bool] = True
    """Whether stored rules name their family; those of the first do not, as when there was no
    other.
    """
    token_texts: ClassVar[Mapping[str, str]]
    """The special tokens by the names used here, and their texts in the tokenizers of the family.
    """
    placeholder: ClassVar[tuple[str, ...]]
    """Special tokens that stand for an image in a chat template, from which a processor makes all
    its tokens.
    """
    frames_of_unit: ClassVar[int]
    max_pixels: int
    video_fps: float
    max_frames: int
    token_ids: dict[str, int]

    @property
    @abstractmethod
    def patch_shape(self) -> tuple[int, int]:
        """Patches of a crop, and numbers of a patch."""

    @abstractmethod
    def misfit(self, vision: VisionConfig) -> str | None:
        """How these rules differ from a tower of the family, and the flags for it; None where they
        fit.
        """

    @abstractmethod
    def layout_of_image(self, width: int, height: int) -> ImageLayout:
        """What an image of this size (upright) becomes; the rules must have all token ids.
        ImageError.
        """

    @abstractmethod
    def layouts_of_video(
        self, frames: Sequence[int], fps: float, sizes: Collection[tuple[int, int]]
    ) -> list[tuple[str, ImageLayout]]:
        """The units of the taken `frames` of widths and heights `sizes`, each behind its text.
        ImageError.
        """

    @abstractmethod
    def sampled(self, num_frames: int, fps: float) -> list[int]:
        """Numbers of the frames that are taken, rising, at least one; evenly spread over the
        video.
        """

    @abstractmethod
    def fitted(self, pixels: np.ndarray, count: int) -> np.ndarray:
        """One of `count` taken frames, uint8 [h, w, 3], in the size from which patches are cut."""

    @abstractmethod
    def pixels_of_image(self, pixels: np.ndarray) -> Pixels:
        """uint8 [h, w, 3] as normalized crops with their pooling."""

    @abstractmethod
    def pixels_of_frames(self, frames: np.ndarray) -> Pixels:
        """Fitted frames, uint8 [units, frames_of_unit, h, w, 3], as normalized crops with their
        pooling.
        """

    def crop_boxes(
        self, width: int, height: int
    ) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
        """Height and width of an image's canvas; left, top and side of each crop that shows a part
        of it.
        """
        return (height, width), []

    def with_token_ids(self, tokenizer: Any) -> Self:
        """These rules with an id for every special token: as given, else the tokenizer's for its
        text, else a free one.

        Free ids begin above the vocabulary. `tokenizer` has `vocab_size` and maybe
        `token_id(text)`.
        """
        find = getattr(tokenizer, "token_id", lambda text: None)
        ids: dict[str, int] = {}
        following = max([tokenizer.vocab_size, *(i + 1 for i in self.token_ids.values())])
        for name, text in self.token_texts.items():
            given = self.token_ids.get(name, find(text))
            ids[name] = following if given is None else given
            following += given is None
        return dataclasses.replace(self, token_ids=ids)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """The rules for JSON: tuples as lists, and with the family where rules are to name it."""
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        named = {"family": self.family} if self.is_named else {}
        return named | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse; absent keys have their defaults. ValueError: unknown keys, wrong types, or
        wrong numbers.
        """
        defaults = dataclasses.asdict(cls())  # type: ignore[call-overload]
        if unknown := sorted({str(key) for key in values} - set(defaults)):
            raise ValueError(
                f"image rules: unknown keys {', '.join(unknown)}; known are {', '.join(defaults)}"
            )
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        if wrong := [
            f"`{key}` is {value!r}"
            for key, value in given.items()
            if not _alike(value, defaults[key])
        ]:
            raise ValueError(f"image rules of the wrong type: {'; '.join(wrong)}")
        return cls(**given)

    def common_problems(self, least: Mapping[str, int]) -> list[str]:
        """What cannot be of the fields that all families have, and of those in `least` with their
        least values.
        """
        found = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}, it must be at least {low}"
            for name, low in least.items()
            if np.min(getattr(self, name)) < low
        ]
        mean, std = (getattr(self, f"image_{name}") for name in ("mean", "std"))
        if not 0 < self.video_fps < float("inf"):
            found.append(f"--video-fps is {self.video_fps}, it must be a number above 0")
        if not np.isfinite([*mean, *std]).all() or min(std) <= 0:
            found.append(f"--image-mean, --image-std are {mean}, {std}, they must be finite")
        if unknown := sorted(set(self.token_ids) - set(self.token_texts)):
            found.append(
                f"--image-token-ids names {', '.join(unknown)}, known are "
                f"{', '.join(self.token_texts)}"
            )
        ids = list(self.token_ids.values())
        if len(set(ids)) < len(ids) or min(ids, default=0) < 0 or max(ids, default=0) > LARGEST_ID:
            found.append(
                f"--image-token-ids are {self.token_ids}, they must differ and be 0 to {LARGEST_ID}"
            )
        return found


def _alike(value: Any, default: Any) -> bool:
    """Whether a value from a file has the type of the field with this default."""
    if isinstance(default, tuple):
        return (
            isinstance(value, tuple)
            and len(value) == len(default)
            and all(_alike(v, default[0]) for v in value)
        )
    if isinstance(default, dict):
        return isinstance(value, dict) and all(
            isinstance(k, str) and type(v) is int for k, v in value.items()
        )
    others = {float: (int,), type(None): (bool,)}
    return type(value) in (type(default), *others.get(type(default), ()))
