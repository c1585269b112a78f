"""From an image or a video that a record names to the bytes that are stored and the tokens that
stand for them.

Nothing outside of `--image-root`, `--image-urls` and the record itself is opened. Each image and
each taken frame is decoded once.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from megacp.prepare.records.documents import Placed, RecordPart
from megacp.prepare.records.record import Media, RecordError, Rendered, SamplePart
from megacp.storage.files import TooLargeError, open_below, read_within
from megacp.storage.url import UnreachableError, Url, is_url
from megacp.training.data.vision.decoding import load_pixels, video_info, video_pixels
from megacp.training.data.vision.rules import ImageError, VisionRules

ALLOWED = "allowed are URLs below --image-urls"
LARGEST_ITEM = (1 << 31) - 1
"""Bytes of an item: the index of images.bin counts them in int32."""
LIMITS = {"image": 64 << 20, "video": 512 << 20}
"""Bytes of the largest file of each kind that is read, unless --max-image-bytes or
--max-video-bytes says otherwise.
"""
_LIMIT_FLAGS = {"image": "--max-image-bytes", "video": "--max-video-bytes"}
_CLIMBS = re.compile(r"(^|[/\\])[\s\0]*\.[\s\0]*\.[\s\0]*($|[/\\;])")
"""`..` as servers read it: they take `\\` for `/`, and leave out blanks and what follows a
semicolon.
"""


def _climbs(path: str) -> bool:
    """Whether a part of a path is `..` once all its escapes are read, those of escapes too."""
    while (plain := unquote(path)) != path:
        path = plain
    return _CLIMBS.search(path) is not None


@dataclass(frozen=True)
class _Below:
    """A middleware of the web client, which hands it each URL as it is asked for, of redirects
    too.
    """

    places: tuple[str, ...]

    async def __call__(self, request: Any, handler: Any) -> Any:
        """Ask for it; ValueError, before anything is sent, where it lies below none of the
        places.
        """
        url = request.url
        tops = [type(url)(place) for place in self.places if place.startswith("http")]
        server = url.scheme, url.host, url.port  # a port that is not written is that of the scheme
        inside = tuple(top.raw_path for top in tops if (top.scheme, top.host, top.port) == server)
        if not url.raw_path.startswith(inside) or _climbs(url.raw_path):
            raise ValueError(f"leads to {url}, {ALLOWED} or --image-root")
        return await handler(request)


class MediaReader:
    """Reads what records name, by one set of rules and below one directory."""

    def __init__(
        self,
        rules: VisionRules,
        root: str | None,
        urls: Sequence[str] = (),
        limits: Mapping[str, int] = LIMITS,
    ) -> None:
        """Set what may be read.

        `root`: a directory or a URL. `urls`: below which records may name images by URLs of their
        own. `limits`: bytes of the largest `image` and `video` that a path or a URL names.
        """
        self._rules, self._urls, self._limits = rules, tuple(urls), limits
        self._root = root if root is None or is_url(root) else os.path.realpath(root)
        self._places = tuple(
            str(place).rstrip("/") + "/" for place in (*urls, root) if is_url(place)
        )

    def expand(
        self,
        pieces: Iterable[SamplePart],
        members: Mapping[str, bytes],
        items: list[bytes],
        seen: dict[Media, list[RecordPart]] | None = None,
    ) -> tuple[RecordPart, ...]:
        """`pieces` with each image and video replaced by its units and the texts between them.

        The bytes to store are appended to `items`. RecordError names the place in the record and
        what is wrong. `seen`: what images and videos of the record became before; those that are
        named alike are the same again.
        """
        seen = {} if seen is None else seen
        parts: list[RecordPart] = []
        found: list[list[RecordPart]] = []
        for piece in pieces:
            if piece.media is None:
                parts.append(piece)
                continue
            try:
                if (named := replace(piece.media, key="")) not in seen:
                    seen[named] = self._expanded(piece.media, members, items)
                expanded = [*seen[named]]
            except ImageError as error:
                raise RecordError(f"{_shown(piece.media)}: {error}") from error
            found.append(expanded)
            if parts and isinstance(parts[0], Rendered):
                continue
            last, first = parts[-1] if parts else None, expanded[0]
            if isinstance(last, SamplePart) and isinstance(first, SamplePart) and last.text:
                if (
                    last.weight == first.weight
                ):  # one text to the tokenizer, as it is in a written prompt
                    expanded[0] = SamplePart(last.text + (first.text or ""), first.weight)
                    parts.pop()
            parts += expanded
        if parts and isinstance(parts[0], Rendered):
            parts[0] = _with_times(parts[0], found)
            parts += [part for of_place in found for part in of_place if isinstance(part, Placed)]
        return tuple(parts)

    def _expanded(
        self, media: Media, members: Mapping[str, bytes], items: list[bytes]
    ) -> list[RecordPart]:
        data = self._bytes(media, members)
        items.append(data)
        if media.kind == "image":
            height, width, _ = load_pixels(data, self._rules).shape
            return [Placed(self._rules.layout_of_image(width, height), len(items) - 1, -1)]
        num_frames, fps = video_info(data, self._rules)
        sizes = {
            frame.shape[1::-1] for frame in video_pixels(data, self._rules)
        }  # every taken frame can be decoded
        taken = self._rules.sampled(num_frames, fps)
        parts: list[RecordPart] = []
        for i, (text, layout) in enumerate(self._rules.layouts_of_video(taken, fps, sizes)):
            if text:
                parts.append(SamplePart(text, 0.0))
            parts.append(Placed(layout, len(items) - 1, i))
        return parts

    def _bytes(self, media: Media, members: Mapping[str, bytes]) -> bytes:
        if media.source == "path":
            data = self._from_path(str(media.value), media.kind)
        elif media.source == "base64":
            text = str(media.value)
            text = (
                text.partition(",")[2] if text.startswith("data:") else text
            )  # data:image/png;base64,...
            try:
                data = base64.b64decode("".join(text.split()), validate=True)
            except ValueError as error:
                raise ImageError(f"it is not base64 ({error})") from error
        elif media.source == "member":
            name = _member(str(media.value), members)
            if name is None:
                there = (
                    ", ".join(sorted(members))
                    or "none: it is not from a .tar, or its group has no other files"
                )
                raise ImageError(f"the record has no such member; it has {there}")
            data = members[name]
        else:
            assert isinstance(media.value, bytes), "checked when the record was parsed"
            data = media.value
        return data

    def _from_path(self, value: str, kind: str = "image") -> bytes:
        limit = self._limits[kind]
        is_named, elsewhere = (
            is_url(value),
            f"is a URL or absolute, {ALLOWED}, paths below --image-root",
        )
        absolute = value.startswith("/")
        at_url = absolute and is_url(self._root)
        if value.startswith("file:") or "\0" in value or at_url or (is_named and not self._urls):
            raise ImageError(f"it {elsewhere}")
        if self._root is None and not is_named:
            raise ImageError("a path needs --image-root")
        if _climbs(value):
            raise ImageError("the path climbs with `..`, allowed are paths inside of --image-root")
        path = value if is_named else os.path.join(str(self._root), value)
        try:
            if is_url(path):
                url = Url(path, _Below(self._places))
                if url.lists and not path.startswith(self._places):
                    raise ValueError(elsewhere)
                return url.content(limit)
            path = os.path.realpath(path)
            if os.path.commonpath((path, str(self._root))) != self._root:
                raise ImageError(
                    f"it {elsewhere}" if absolute else "a symbolic link leads out of --image-root"
                )
            with open_below(str(self._root), path) as stream:
                return read_within(stream, path, limit)
        except TooLargeError:
            raise ImageError(
                f"it has more than {limit:,} bytes: {_LIMIT_FLAGS[kind]} N allows more"
            ) from None
        except UnreachableError as error:
            if not is_named:  # a store that does not answer has not lost this image alone
                raise
            raise ImageError(str(error)) from error
        except (FileNotFoundError, NotADirectoryError):
            raise ImageError(
                "there is none" if is_named else f"no such file under --image-root {self._root}"
            ) from None
        except OSError as error:
            raise ImageError(f"it cannot be read ({error.strerror})") from error
        except UnicodeEncodeError:
            raise ImageError("the path holds half a character, which no file is named by") from None
        except ValueError as error:  # no regular file, too large, or not fetched
            raise ImageError(f"it {str(error).removeprefix(path).strip()}") from error


def _with_times(rendered: Rendered, found: Sequence[Sequence[RecordPart]]) -> Rendered:
    """A conversation in which each unit of a video has the place of the video, behind its time,
    which is not learned.

    `found`: what became of the image or video at each place.
    """
    whole, text, stop = rendered.text or "", "", 0
    places: list[tuple[int, int]] = []
    moved: list[
        tuple[int, int, int]
    ] = []  # of each text around the places: from, to, and how far it moves
    for (start, after), parts in zip(rendered.places, found, strict=True):
        moved.append((stop, start, len(text) - stop))
        text += whole[stop:start]
        for part in parts:
            if isinstance(part, Placed):
                places.append((len(text), len(text) + after - start))
            text += whole[start:after] if isinstance(part, Placed) else part.text or ""
        stop = after
    moved.append((stop, len(whole), len(text) - stop))
    cut = [
        (max(a, start) + by, min(b, stop) + by, w)
        for a, b, w in rendered.learned
        for start, stop, by in moved
    ]
    learned = tuple((a, b, w) for a, b, w in cut if a < b)
    return replace(rendered, text=text + whole[stop:], learned=learned, places=tuple(places))


def _shown(media: Media) -> str:
    named = media.source in ("path", "member")
    return f"`{media.key}` {str(media.value)[:100]!r}" if named else f"`{media.key}`"


def _member(name: str, members: Mapping[str, bytes]) -> str | None:
    """The member that a record calls `name`: its whole name, or what follows the first dot of its
    last component.
    """
    if name in members:
        return name
    return next(
        (full for full in members if PurePosixPath(full).name.partition(".")[2] == name), None
    )


def unnamed_members(pieces: Iterable[SamplePart], members: Mapping[str, bytes]) -> list[str]:
    """The tar members that none of a record's pieces names: they would be lost in silence."""
    media = [piece.media for piece in pieces if piece.media is not None]
    named = {str(one.value) for one in media if one.source == "member"}
    return sorted(set(members) - {_member(name, members) for name in named})
