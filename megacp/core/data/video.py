"""Videos as frames at known times: which frames are taken, the text of their times, and the decoding of a range.

Key property: frames and times are those of the transformers library's Molmo2 video processor. A frame is decoded from
the key frame before it. Its pixels are then the same in every range, and several ranks may decode one video. A frame
that the decoder calls damaged ends in an ImageError, never in FFmpeg's grey.

A still image, also a GIF of one frame, is a video of one frame: a record gives frames as images that way. Frames are
counted in the order in which they are shown. FFmpeg gets the container's name, which the first bytes tell, so that no
playlist among the "videos" can make it open other files.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from megacp.core.data.geometry import ImageRules, frame_patches, load_pixels
from megacp.core.data.pixels import ImageError, is_still, refuse_no_media

_CONTAINERS = {
    "mov": (4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    "matroska": (0, (b"\x1a\x45\xdf\xa3",)),
    "gif": (0, (b"GIF87a", b"GIF89a")),
    "avi": (8, (b"AVI ",)),
    "ogg": (0, (b"OggS",)),
    "flv": (0, (b"FLV\x01",)),
    "mpeg": (0, (b"\0\0\x01\xba",)),
    "mpegts": (0, (b"\x47",)),
    "asf": (0, (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",)),
}
"""FFmpeg's name of a container: where its mark stands, and the mark."""
_RATE_TOLERANCE = 0.1
"""Part by which the rate in a header may differ from that of the frames before it is not believed."""
_CUT_SECONDS, _CUT_FRAMES, _CUT_SHARE = 1.0, 2, 0.02
"""By how much headers are off in whole files."""
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)
"""Of an AVI whose writer could not go back to its beginning."""
_MPEG4_FRAME = b"\0\0\1\xb6"
"""What begins a frame in MPEG-4 part 2; packets of DivX hold a frame and the one that is shown before it."""
_WITHOUT_TIMES, _REORDERED = ("avi",), ("h264", "hevc")
"""Containers that count frames as they are stored, and codecs that store them in another order than they are shown."""
_WITHOUT_KEY_FRAMES = ("gif",)
"""Containers in which every frame claims to be a key frame and may yet need those before it."""


@dataclass(frozen=True)
class VideoInfo:
    """What a video says of itself."""

    num_frames: int
    fps: float
    """Mean frames a second; `video_fps` of the rules where the file does not say."""
    width: int
    height: int


@dataclass(frozen=True)
class _Timeline:
    """Times of the frames in the units of the stream, in the order in which they are shown."""

    frames: list[int]
    keys: list[int]
    """Those at which decoding can begin."""
    guessed: bool = False
    """Whether the times of packets are guesses that come out of order; those at which frames leave the decoder do not.
    """


def sample_frames(num_frames: int, fps: float, rules: ImageRules) -> list[int]:
    """Numbers of the frames that are taken, rising, at least one; evenly spread over the video.

    As Molmo2's processor, with its float32 (its rule can name one frame behind the last: that one is left out).
    """
    target = rules.max_frames
    if fps > rules.video_fps:
        target = min(target, int(num_frames / fps * rules.video_fps))
    step = num_frames / max(min(target, num_frames), 1)
    numbers = (np.arange(math.ceil(num_frames / step)) * step).astype(np.float32).astype(np.int64)
    kept: list[int] = numbers[numbers < num_frames].tolist()
    return kept


def time_text(index: int, seconds: float, rules: ImageRules) -> str:
    """The text before the `index`-th taken frame."""
    if rules.time_mode == "off":
        return ""
    return f"{' ' if index else ''}{seconds:.1f} "


def _container(data: bytes) -> str:
    refuse_no_media(data)
    for name, (place, marks) in _CONTAINERS.items():
        if data[place:].startswith(marks) if place == 0 else data[place : place + 4] in marks:
            return name
    names = ", ".join(_CONTAINERS)
    raise ImageError(f"the file is no video that is read here ({names}): it begins with {data[:8]!r}")


@contextmanager
def _opened(data: bytes, rules: ImageRules) -> Iterator[tuple[Any, Any]]:
    """(container, video stream); whatever FFmpeg says inside the block becomes an ImageError."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need the package av: pip install 'megacp[data]'") from error
    name = _container(data)
    try:
        with av.open(io.BytesIO(data), format=name) as container:
            if not container.streams.video:
                raise ImageError("the file has no video stream")
            stream = container.streams.video[0]
            _refuse_large(stream, rules)
            stream.codec_context.thread_count = 1  # ranks and workers share the cores already
            yield container, stream
    except ImageError:
        raise
    except EOFError as error:
        raise ImageError(f"the video has no frames: the {name} file ends before the first") from error
    except Exception as error:  # foreign bytes: FFmpeg's errors are of many classes
        raise ImageError(f"the {name} video is cut short or damaged ({' '.join(str(error).split())})") from error


def _refuse_large(shown: Any, rules: ImageRules) -> None:
    """ImageError for a stream or a frame (they may differ) above the limit."""
    if (pixels := shown.width * shown.height) > rules.max_pixels:
        raise ImageError(
            f"frames of {shown.width} x {shown.height} = {pixels} pixels, "
            f"more than --max-pixels {rules.max_pixels} of the rules"
        )


def _timeline(container: Any, stream: Any) -> _Timeline:
    """Read the packets without decoding them."""
    times, at_keys, codec = set(), set(), stream.codec_context.name
    guessed = container.format.name in _WITHOUT_TIMES and codec in _REORDERED
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        if packet.pts is None:
            raise ImageError(
                "the frames of the video have no times; put it into a container that keeps them, such as MP4"
            )
        times.add(packet.pts)
        if packet.is_keyframe:
            at_keys.add(packet.pts)
        guessed = guessed or (codec == "mpeg4" and bytes(packet).count(_MPEG4_FRAME) > 1)
    if not times:
        raise ImageError("the video has no frames")
    frames, keys = sorted(times), sorted(at_keys)
    if container.format.name in _WITHOUT_KEY_FRAMES or not keys:
        keys = frames[:1]
    return _Timeline(frames, keys, guessed)


def _info(timeline: _Timeline, stream: Any, rules: ImageRules) -> VideoInfo:
    fps = float(stream.average_rate or 0.0) or rules.video_fps
    count, first, last = len(timeline.frames), timeline.frames[0], timeline.frames[-1]
    if count > 1 and stream.time_base:
        true = (count - 1) / float((last - first) * stream.time_base)
        fps = fps if abs(fps / true - 1) <= _RATE_TOLERANCE else true
    return VideoInfo(count, fps, stream.width, stream.height)


def _gif_end(container: Any, data: bytes) -> str | None:
    return None if data.rstrip(b"\0").endswith(b";") else "it does not end with its trailer"  # GIF89a, 27


def _avi_end(container: Any, data: bytes) -> str | None:
    """A whole AVI has either all bytes of its chunks or frames up to the time that its header says."""
    place = 0
    while data[place : place + 4] == b"RIFF" and place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if size in _UNKNOWN_SIZES or place + 8 + size > len(data):
            break
        place += 8 + size + size % 2
    else:
        return None
    promised = {stream.index: stream.frames for stream in container.streams.video if stream.frames}
    end: Counter[int] = Counter()  # in the header's unit: where frames are left out, there is time without one
    for packet in container.demux():
        if packet.dts is not None:
            end[packet.stream.index] = max(end[packet.stream.index], packet.dts + 1)
    for index, length in promised.items():
        if length - end[index] > max(_CUT_FRAMES, _CUT_SHARE * length):
            return f"it ends at frame {end[index]}, its header says {length}"
    return None


def _timed_end(container: Any, data: bytes) -> str | None:
    seconds, end = (container.duration or 0) / 1e6, 0.0
    begin = min(container.start_time or 0, 0) / 1e6  # both count from 0, also where the first frame comes later
    for packet in container.demux():
        if packet.pts is not None and packet.time_base:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base) - begin)
    cut = seconds - end > max(_CUT_SECONDS, _CUT_SHARE * seconds)
    return f"it ends at {end:.1f} s, its header says {seconds:.1f} s" if cut else None


_ENDS: dict[str, Callable[[Any, bytes], str | None]] = {
    "gif": _gif_end,
    "avi": _avi_end,
    "matroska": _timed_end,
    "flv": _timed_end,
}
"""Of containers of which FFmpeg opens half a file: what is missing at the end, by the length that the header states.

The container is at its beginning.
"""


def _refuse_cut(container: Any, data: bytes) -> None:
    """ImageError for a file that ends before what its header says."""
    name = _container(data)
    if name in _ENDS and (reason := _ENDS[name](container, data)):
        raise ImageError(f"the {name} video is cut short: {reason}")


def video_info(data: bytes, rules: ImageRules) -> VideoInfo:
    """Frames, rate and size of an encoded video, without decoding one; ImageError, also for half a file."""
    if is_still(data):
        height, width, _ = load_pixels(data, rules).shape
        return VideoInfo(1, rules.video_fps, width, height)
    with _opened(data, rules) as (container, stream):
        _refuse_cut(container, data)
    with _opened(data, rules) as (container, stream):
        return _info(_timeline(container, stream), stream, rules)


def video_pixels(data: bytes, rules: ImageRules, frames: Sequence[int] | None = None) -> Iterator[np.ndarray]:
    """uint8 [h, w, 3] of each of some of the taken frames (`sample_frames`, counted from 0), upright; ImageError.

    `frames` rise; None = all. Numbers behind the last are left out.
    """
    if is_still(data):
        if frames is None or 0 in frames:
            yield load_pixels(data, rules)
        return
    with _opened(data, rules) as (container, stream):
        timeline = _timeline(container, stream)
        info = _info(timeline, stream, rules)
    taken = sample_frames(info.num_frames, info.fps, rules)
    times = [timeline.frames[taken[i]] for i in (range(len(taken)) if frames is None else frames) if i < len(taken)]
    for key, group in itertools.groupby(times, lambda time: _key_before(timeline, time)):  # skips what lies between
        yield from _decode(data, rules, timeline, key, list(group))


def decode_video(data: bytes, rules: ImageRules, frames: Sequence[int] | None = None) -> np.ndarray:
    """float32 [frames, patches_per_crop, 3 * patch ** 2] of some of the taken frames, as `video_pixels`; ImageError."""
    found = [frame_patches(pixels, rules) for pixels in video_pixels(data, rules, frames)]
    none = np.zeros((0, rules.patches_per_crop, rules.patch_dim), np.float32)
    return np.concatenate(found or [none])


def _key_before(timeline: _Timeline, time: int) -> int:
    """Index into `keys` of the last one not behind `time`; -1 when the video does not begin with one."""
    return bisect.bisect_right(timeline.keys, time) - 1


def _beginnings(key: int) -> Iterator[int]:
    """Key frames to decode from, ever farther back: all together cost no more than twice what the last does."""
    step = 1
    while key > 0:
        yield key
        key, step = key - step, 2 * step
    yield 0


def _decode(data: bytes, rules: ImageRules, timeline: _Timeline, key: int, times: list[int]) -> Iterator[np.ndarray]:
    """Pixels of the frames at `times` (rising, all behind key frame number `key`), uint8 [h, w, 3].

    A seek may land behind the key frame it was asked for, and a key frame may yet need frames before it: then from
    an earlier one.
    """
    left = list(times)
    for begin in _beginnings(key):
        with _opened(data, rules) as (container, stream):
            delay = None
            if begin > 0:
                delay = _read_beginning(container, stream, timeline)
                container.seek(timeline.keys[begin], stream=stream)
            for time, frame in _timed_frames(container.decode(stream), timeline, begin, delay):
                if time > left[0]:
                    break
                if frame.is_corrupt and (time >= timeline.keys[begin] or time == left[0]):
                    if begin > 0:
                        break
                    seconds = float((time - timeline.frames[0]) * stream.time_base)
                    raise ImageError(f"the video is damaged: its frame at {seconds:.2f} s cannot be decoded as a whole")
                if time == left[0]:
                    _refuse_large(frame, rules)
                    pixels = frame.to_ndarray(format="rgb24")
                    yield np.rot90(pixels, getattr(frame, "rotation", 0) // 90)  # degrees against the clock
                    del left[0]
                    if not left:
                        return
    raise ImageError(f"the video is cut short or damaged: not all frames up to time {times[-1]} can be decoded")


def _read_beginning(container: Any, stream: Any, timeline: _Timeline) -> int | None:
    """Decode the first frame; the `_delay` that it shows, if there is one.

    A stream names its writer there alone, and FFmpeg mends the errors of known ones: without, 4:4:4 of an old x264 is
    green.
    """
    frame = next(container.decode(stream), None)
    return None if frame is None else _delay(frame, timeline)


def _delay(first: Any, timeline: _Timeline) -> int | None:
    """How much later frames leave the decoder than they are shown, by the first frame of the video."""
    return None if first.dts is None else first.dts - timeline.frames[0]


def _timed_frames(
    frames: Iterable[Any], timeline: _Timeline, begin: int, delay: int | None
) -> Iterator[tuple[int, Any]]:
    """Frames as they are shown, each with its time; `begin`: 0 when they begin with the first frame of the video."""
    last = timeline.frames[0] - 1 if begin == 0 else None
    for frame in frames:
        time = frame.pts
        if timeline.guessed:
            delay = _delay(frame, timeline) if delay is None and begin == 0 else delay
            time = frame.dts - delay if frame.dts is not None and delay is not None else None
            if time is None and last is not None:  # the decoder has held it until the end
                following = bisect.bisect_right(timeline.frames, last)
                time = timeline.frames[following] if following < len(timeline.frames) else None
        if time is not None:
            last = time
            yield time, frame
