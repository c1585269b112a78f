"""Read the images and videos that records name: stored bytes, and placeholder tokens.

The reader opens nothing outside `--image-root`, `--image-urls` and the record itself. It decodes
each image and each sampled frame once.
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

from megacp.prepare.media.requests import refuse_other_frames, refuse_other_size
from megacp.prepare.records.documents import Placed, RecordPart
from megacp.prepare.records.record import Media, RecordError, Rendered, SamplePart
from megacp.storage.files import TooLargeError, open_below, read_within
from megacp.storage.url import UnreachableError, Url, is_url
from megacp.training.data.vision.decoding import load_pixels, video_info, video_pixels
from megacp.training.data.vision.rules import ImageError, VisionRules

ALLOWED = "allowed are URLs below --image-urls"
# Maximum bytes of an item: the index of images.bin counts them in int32.
LARGEST_ITEM = (1 << 31) - 1
# Default maximum bytes of a file, by kind.
LIMITS = {"image": 64 << 20, "video": 512 << 20}
_LIMIT_FLAGS = {"image": "--max-image-bytes", "video": "--max-video-bytes"}
# `..` as servers read it: they treat `\` as `/`, and drop blanks and the text after a semicolon.
_CLIMBS = re.compile(r"(^|[/\\])[\s\0]*\.[\s\0]*\.[\s\0]*($|[/\\;])")


def _climbs(path: str) -> bool:
    """Whether a component of a path is `..` after all percent escapes are decoded."""
    # An escape may itself be escaped, so decode until nothing changes.
    while (plain := unquote(path)) != path:
        path = plain
    return _CLIMBS.search(path) is not None


def _local_path(value: str) -> str:
    """Return the path of a file:// URL; return paths and other URLs unchanged."""
    if not value.startswith("file://"):
        return value
    path = value.removeprefix("file://")
    if path.startswith("localhost/"):
        path = path.removeprefix("localhost")
    # Qwen's reader takes the path literally, but other programs write %20 for a blank.
    return path if os.path.exists(path) else unquote(path)


@dataclass(frozen=True)
class _Below:
    """A middleware of the web client that only lets requests below `places` pass.

    The client also calls it for every redirect.
    """

    places: tuple[str, ...]

    async def __call__(self, request: Any, handler: Any) -> Any:
        """Send a request.

        Raise ValueError, before anything is sent, if its URL is outside the allowed places.
        """
        url = request.url
        tops = [type(url)(place) for place in self.places if place.startswith("http")]
        # Compare parsed parts, not text: `port` is the default of the scheme if a URL has none.
        server = url.scheme, url.host, url.port
        inside = tuple(top.raw_path for top in tops if (top.scheme, top.host, top.port) == server)
        if not url.raw_path.startswith(inside) or _climbs(url.raw_path):
            raise ValueError(f"leads to {url}, {ALLOWED} or --image-root")
        return await handler(request)


class MediaReader:
    """Reads the images and videos of records by one set of rules."""

    def __init__(
        self,
        rules: VisionRules,
        root: str | None,
        urls: Sequence[str] = (),
        limits: Mapping[str, int] = LIMITS,
    ) -> None:
        """Set the places that may be read.

        Relative paths are read below `root`, a directory or a URL. Records may also name URLs below
        `urls`. `limits` gives the maximum bytes of an `image` and a `video` file.
        """
        self._rules = rules
        self._urls = tuple(urls)
        self._limits = limits
        self._root = root
        if root is not None and not is_url(root):
            self._root = os.path.realpath(root)
        # With the final slash, `https://a/photos` does not allow `https://a/photosmore`.
        allowed = [place for place in (*urls, root) if is_url(place)]
        self._places = tuple(str(place).rstrip("/") + "/" for place in allowed)

    def expand(
        self,
        pieces: Iterable[SamplePart],
        members: Mapping[str, bytes],
        items: list[bytes],
        seen: dict[Media, list[RecordPart]] | None = None,
    ) -> tuple[RecordPart, ...]:
        """Return `pieces` with each image and video replaced by its units and the texts in between.

        The stored bytes are appended to `items`. `seen` maps earlier images and videos of the
        record to their parts, which are used again for equal references. Raise RecordError with the
        place in the record and the problem.
        """
        if seen is None:
            seen = {}
        parts: list[RecordPart] = []
        found: list[list[RecordPart]] = []
        for piece in pieces:
            if piece.media is None:
                parts.append(piece)
                continue
            # The key is the place in the record; the same image may be named at several places.
            named = replace(piece.media, key="")
            try:
                if named not in seen:
                    seen[named] = self._expanded(piece.media, members, items)
            except ImageError as error:
                raise RecordError(f"{_shown(piece.media)}: {error}") from error
            expanded = list(seen[named])
            found.append(expanded)
            if parts and isinstance(parts[0], Rendered):
                continue
            # A video begins with the time of its first frame. Join it to the text before it, which
            # the tokenizer would see as one text in a written prompt.
            last = parts[-1] if parts else None
            first = expanded[0]
            if isinstance(last, SamplePart) and isinstance(first, SamplePart) and last.text:
                if last.weight == first.weight:
                    expanded[0] = SamplePart(last.text + (first.text or ""), first.weight)
                    parts.pop()
            parts += expanded
        # A rendered conversation stays one text; its units follow it.
        if parts and isinstance(parts[0], Rendered):
            parts[0] = _with_times(parts[0], found)
            for of_place in found:
                parts += [part for part in of_place if isinstance(part, Placed)]
        return tuple(parts)

    def _expanded(
        self, media: Media, members: Mapping[str, bytes], items: list[bytes]
    ) -> list[RecordPart]:
        """Return the units of an image or a video, with the time texts of frames in between."""
        data = self._bytes(media, members)
        items.append(data)
        item = len(items) - 1
        requests = dict(media.requests)
        if media.kind == "image":
            height, width, _ = load_pixels(data, self._rules).shape  # [height, width, 3]
            refuse_other_size(self._rules, "image", requests, (width, height))
            return [Placed(self._rules.layout_of_image(width, height), item, -1)]
        num_frames, fps = video_info(data, self._rules)
        # Decode every sampled frame now, so that a damaged video fails here and not in training.
        sizes = {frame.shape[1::-1] for frame in video_pixels(data, self._rules)}  # (width, height)
        taken = self._rules.sampled(num_frames, fps)
        refuse_other_frames(self._rules, requests, num_frames, fps)
        for size in sizes:
            refuse_other_size(self._rules, "video", requests, size, len(taken))
        layouts = self._rules.layouts_of_video(taken, fps, sizes)
        parts: list[RecordPart] = []
        for i, (text, layout) in enumerate(layouts):
            if text:
                parts.append(SamplePart(text, 0.0))
            parts.append(Placed(layout, item, i))
        return parts

    def _bytes(self, media: Media, members: Mapping[str, bytes]) -> bytes:
        """Return the bytes of an image or a video; raise ImageError if they are not available."""
        if media.source == "path":
            return self._from_path(str(media.value), media.kind)
        if media.source == "base64":
            text = str(media.value)
            if text.startswith("data:"):  # data:image/png;base64,...
                text = text.partition(",")[2]
            try:
                return base64.b64decode("".join(text.split()), validate=True)
            except ValueError as error:
                raise ImageError(f"it is not base64 ({error})") from error
        if media.source == "member":
            name = _member(str(media.value), members)
            if name is None:
                names = ", ".join(sorted(members))
                if not names:
                    names = "none: it is not from a .tar, or its group has no other files"
                raise ImageError(f"the record has no such member; it has {names}")
            return members[name]
        assert isinstance(media.value, bytes), "checked when the record was parsed"
        return media.value

    def _from_path(self, value: str, kind: str = "image") -> bytes:
        """Read a file by its path below the root or by its URL; raise ImageError if that fails."""
        limit = self._limits[kind]
        value = _local_path(value)
        is_named = is_url(value)
        outside = f"is a URL or an absolute path; {ALLOWED} and paths below --image-root"
        # An absolute path may name a file below a root directory, but not below a root URL.
        absolute = value.startswith("/")
        at_url = absolute and is_url(self._root)
        if value.startswith("file:") or "\0" in value or at_url or (is_named and not self._urls):
            raise ImageError(f"it {outside}")
        if self._root is None and not is_named:
            raise ImageError("a path needs --image-root")
        if _climbs(value):
            raise ImageError("the path climbs with `..`; it must stay inside --image-root")
        path = value if is_named else os.path.join(str(self._root), value)
        try:
            if is_url(path):
                # `_Below` checks requests of the web client. Stores that can list files do not use
                # that client, so check their paths here.
                url = Url(path, _Below(self._places))
                if url.lists and not path.startswith(self._places):
                    raise ValueError(outside)
                return url.content(limit)
            path = os.path.realpath(path)
            if os.path.commonpath((path, str(self._root))) != self._root:
                if absolute:
                    raise ImageError(f"it {outside}")
                raise ImageError("a symbolic link leads out of --image-root")
            # `open_below` follows no link, so a link created after this check leads nowhere.
            with open_below(str(self._root), path) as stream:
                return read_within(stream, path, limit)
        except TooLargeError:
            flag = _LIMIT_FLAGS[kind]
            raise ImageError(f"it has more than {limit:,} bytes: {flag} N allows more") from None
        except UnreachableError as error:
            # If the root itself does not answer, the record is not at fault: end the build.
            if not is_named:
                raise
            raise ImageError(str(error)) from error
        except (FileNotFoundError, NotADirectoryError):
            if is_named:
                raise ImageError("there is no file at this URL") from None
            raise ImageError(f"no such file under --image-root {self._root}") from None
        except OSError as error:
            raise ImageError(f"it cannot be read ({error.strerror})") from error
        except UnicodeEncodeError:
            raise ImageError(
                "the path contains half of a surrogate pair, which no file name can have"
            ) from None
        except ValueError as error:  # not a regular file, too large, or outside the allowed URLs
            raise ImageError(f"it {str(error).removeprefix(path).strip()}") from error


def _with_times(rendered: Rendered, found: Sequence[Sequence[RecordPart]]) -> Rendered:
    """Return a conversation whose video placeholders are repeated for each unit, after its time.

    `found` are the parts of the image or video at each place. Times have no loss.
    """
    whole = rendered.text or ""
    text = ""
    stop = 0
    places: list[tuple[int, int]] = []
    # The texts between places: start and stop in the old text, and the shift to the new one.
    moved: list[tuple[int, int, int]] = []
    for (start, after), parts in zip(rendered.places, found, strict=True):
        moved.append((stop, start, len(text) - stop))
        text += whole[stop:start]
        for part in parts:
            if isinstance(part, Placed):
                places.append((len(text), len(text) + after - start))
                text += whole[start:after]
            else:
                text += part.text or ""
        stop = after
    moved.append((stop, len(whole), len(text) - stop))
    text += whole[stop:]
    # Cut each learned range at the places, and move the remaining ranges like their text.
    learned: list[tuple[int, int, float]] = []
    for first, last, weight in rendered.learned:
        for low, high, shift in moved:
            begin = max(first, low)
            end = min(last, high)
            if begin < end:
                learned.append((begin + shift, end + shift, weight))
    return replace(rendered, text=text, learned=tuple(learned), places=tuple(places))


def _shown(media: Media) -> str:
    """Return the place of a reference in its record, with the path or member that it names."""
    if media.source in ("path", "member"):
        return f"`{media.key}` {str(media.value)[:100]!r}"
    return f"`{media.key}`"


def _member(name: str, members: Mapping[str, bytes]) -> str | None:
    """Return the full name of the tar member that a record calls `name`, or None.

    `name` is the full name, or the part of the file name after its first dot.
    """
    if name in members:
        return name
    for full in members:
        # the part after the first dot, as in WebDataset: `jpg` of `d/1.jpg`
        if PurePosixPath(full).name.partition(".")[2] == name:
            return full
    return None


def unnamed_members(pieces: Iterable[SamplePart], members: Mapping[str, bytes]) -> list[str]:
    """Return the tar members that no piece of a record names; they would be lost silently."""
    media = [piece.media for piece in pieces if piece.media is not None]
    named = {str(one.value) for one in media if one.source == "member"}
    return sorted(set(members) - {_member(name, members) for name in named})
