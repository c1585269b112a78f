"""Pieces of a record: stretches of text with a loss weight each, images and videos as it names them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megacp.prepare.records.record import RecordError, RecordRules, described, text_at

MEDIA_TYPES = ("image", "video")
MEDIA_SOURCES = ("path", "base64", "member", "bytes")


@dataclass(frozen=True)
class Media:
    """An image or a video as a record names it; nothing has been read yet."""

    kind: str
    """image or video."""
    source: str
    """One of MEDIA_SOURCES, or `frames`."""
    value: str | bytes
    key: str
    """Where it stands in the record."""
    frames: tuple[Media, ...] = ()
    """The images of a video that is given as such."""
    fps: float | None = None
    """Frames a second of `frames`; None = as the rules sample."""


@dataclass(frozen=True)
class SamplePart:
    """A stretch of text, an image or a video, or (both None) the tokenizer's end-of-document token; its loss weight."""

    text: str | None
    weight: float
    media: Media | None = None

    @property
    def is_end(self) -> bool:
        """Whether it is the end-of-document token."""
        return self.text is None and self.media is None


END = SamplePart(None, 1.0)


@dataclass(frozen=True)
class Rendered(SamplePart):
    """A whole conversation as a chat template writes it, to be tokenized as one text."""

    learned: tuple[tuple[int, int, float], ...] = ()
    """Characters start..stop and their loss weight, in order; all others are not learned."""
    places: tuple[tuple[int, int], ...] = ()
    """Characters start..stop that stand for an image; the images follow in the same order as pieces of their own."""
    shared: int = 0
    """Of a branch: characters at its beginning that are its record's, which all branches share."""


@dataclass(frozen=True)
class Sample:
    """One document: `prefix`, then each of `branches` as an alternative continuation of it."""

    prefix: tuple[SamplePart, ...]
    branches: tuple[tuple[SamplePart, ...], ...] = ()
    talks: bool = False
    """Whether it was made of messages, its own or a branch's."""


def media_at(part: dict[str, Any], kind: str, where: str, rules: RecordRules) -> Media:
    """The image or video (`kind`) that a part of a record names; RecordError says what is wrong with it."""
    if not rules.media:
        raise RecordError(
            f"`{where}` is of type {kind}: this build makes text datasets, images need the vision build "
            "(--image-root, --image-rules or another flag for images)"
        )
    # nulls are what Parquet fills in for absent keys
    given = {key: part[key] for key in (*MEDIA_SOURCES, kind, "frames", "url") if part.get(key) is not None}
    allowed = (*MEDIA_SOURCES, "frames") if kind == "video" else MEDIA_SOURCES
    if "url" in given:
        raise RecordError(f"`{where}.url`: nothing is downloaded; give one of {', '.join(allowed)}")
    if len(given) != 1 or not {*given} <= {*allowed, kind}:
        found = ", ".join(given) or "none"
        raise RecordError(f"`{where}` of type {kind} needs exactly one of {', '.join(allowed)}, found {found}")
    ((key, value),) = given.items()
    rules.refuse_lost(part, ("type", key, "fps") if key == "frames" else ("type", key), f"`{where}`")
    where = f"{where}.{key}"
    if key == kind and isinstance(value, dict):
        key, value = _stored(value, where, rules)
    if key == "frames":
        return _frames(part, value, where, rules)
    if key == "bytes":
        if not isinstance(value, bytes):
            raise RecordError(f"`{where}` is {described(value)}, it must be bytes (only Parquet has them; use base64)")
        return Media(kind, key, value, where)
    if not text_at(value, where):
        raise RecordError(f"`{where}` is empty")
    return Media(kind, "path" if key == kind else key, value, where)


def _stored(value: dict[str, Any], where: str, rules: RecordRules) -> tuple[str, Any]:
    """The source of the `Image` feature of Hugging Face datasets, {bytes, path}; `path` only names bytes."""
    rules.refuse_lost(value, ("bytes", "path"), f"`{where}`")
    if value.get("bytes") is not None:
        return "bytes", value["bytes"]
    if value.get("path") is None:
        raise RecordError(f"`{where}` has neither `bytes` nor `path`")
    return "path", value["path"]


def _frames(part: dict[str, Any], value: Any, where: str, rules: RecordRules) -> Media:
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{where}`: a video with no frames, it must be a list of images, found {described(value)}")
    fps = part.get("fps")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf):
        raise RecordError(f"`{where.rpartition('.')[0]}.fps` is {described(fps)}, it must be a number above 0")
    images = []
    for i, item in enumerate(value):
        item = {"path": item} if isinstance(item, str) else item
        if not isinstance(item, dict):
            raise RecordError(f"`{where}[{i}]` must be a path or an object, found {described(item)}")
        images.append(media_at(item, "image", f"{where}[{i}]", rules))
    return Media("video", "frames", "", where, tuple(images), None if fps is None else float(fps))
