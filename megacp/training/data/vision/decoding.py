"""Encoded images and videos as RGB pixels: what is read, how each kind becomes RGB, and what is
refused.

The outcome depends on the bytes alone. Images become upright RGB of 8 bits: 16-bit grey by its high
byte, as 16-bit colour is by Pillow; CMYK by Pillow's formula; alpha and transparent colours over
white.

A frame has the same pixels whichever others are asked for, so several ranks may decode one video:
where containers have true times, decoding begins at the key frame before it, else at the first
frame. A frame that the decoder calls damaged ends in an ImageError, never in FFmpeg's grey. FFmpeg
gets the container's name, which the first bytes tell, so that no playlist among the "videos" can
make it open other files. A still image is a video of one frame.
"""

from __future__ import annotations

import bisect
import importlib
import io
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from megacp.training.data.vision.molmo2 import Molmo2Rules
from megacp.training.data.vision.qwen3_5 import Qwen35Rules
from megacp.training.data.vision.rules import ImageError, Pixels, VisionRules

_IMAGE = re.compile(
    rb"(?P<Jpeg>\xff\xd8\xff)|(?P<Png>\x89PNG\r\n\x1a\n)|(?P<Gif>GIF8[79]a)|(?P<Bmp>BM)|(?P<Tiff>II\*\0|MM\0\*)"
    rb"|(?P<WebP>RIFF....WEBP)|(?P<Avif>....ftypavi[fs])",
    re.DOTALL,
)
"""How a file begins that Pillow's plugin of this name reads."""
_VIDEO = re.compile(
    rb"(?P<mov>....(?:ftyp|moov|mdat|wide|free|skip))|(?P<matroska>\x1a\x45\xdf\xa3)|(?P<gif>GIF8[79]a)"
    rb"|(?P<avi>.{8}AVI )|(?P<ogg>OggS)|(?P<flv>FLV\x01)|(?P<mpeg>\0\0\x01\xba)|(?P<mpegts>\x47)"
    rb"|(?P<asf>\x30\x26\xb2\x75\x8e\x66\xcf\x11)",
    re.DOTALL,
)
"""How a container begins, by FFmpeg's names."""
_COLOURS = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "RGBA", "LA", "PA", "RGBa", "La")
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")
_RATE_TOLERANCE = 0.1
"""Relative difference up to which the rate in a header is believed beside that of the frames."""
_CUT_SECONDS, _CUT_SHARE = 1.0, 0.02
"""Seconds, and share of the length, by which headers are off in whole files."""
KEPT_BYTES = 512 << 20
"""Bytes of videos and their frames that a decoder keeps beside the last."""
_SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""Containers, as FFmpeg calls them, in which every frame has its true time and key frames are what
they claim.
"""


RULES: dict[str, type[VisionRules]] = {rules.family: rules for rules in (Molmo2Rules, Qwen35Rules)}
"""Rules of each vision family, by the name that --vision-family and a manifest give it."""


def rules_from_dict(values: Mapping[str, Any]) -> VisionRules:
    """The rules of the family that `values` name, of the first where they name none; ValueError as
    of `from_dict`.
    """
    family = values.get("family", next(iter(RULES)))
    if family not in RULES:
        raise ValueError(
            f"image rules: --vision-family is {family!r}, allowed are {', '.join(RULES)}"
        )
    return RULES[family].from_dict({key: value for key, value in values.items() if key != "family"})


def _kind(data: bytes, known: re.Pattern[bytes]) -> str:
    """The name by which `known` tells the file; ImageError for none of them."""
    if found := known.match(data):
        return str(found.lastgroup)
    raise ImageError(
        f"{len(data)} bytes are none of {', '.join(known.groupindex)}: the file begins with "
        f"{data[:9]!r}"
    )


def _refuse_large(width: int, height: int, rules: VisionRules) -> None:
    if (pixels := width * height) > rules.max_pixels:
        raise ImageError(
            f"{width} x {height} = {pixels} pixels, more than --max-pixels {rules.max_pixels} of "
            "the rules"
        )


def is_still(data: bytes) -> bool:
    """Whether the bytes are an image file and no GIF, which alone of these may be a video too."""
    found = _IMAGE.match(data)
    return found is not None and found.lastgroup != "Gif"


def load_pixels(data: bytes, rules: VisionRules) -> np.ndarray:
    """uint8 [height, width, 3], RGB, turned upright. ImageError says why the bytes cannot be
    used.
    """
    kind = _kind(data, _IMAGE)
    try:
        plugin, exif = (
            importlib.import_module(f"PIL.{module}")
            for module in (f"{kind}ImagePlugin", "ImageOps")
        )
    except ImportError as error:
        raise ValueError("images need the package pillow: pip install 'megacp[data]'") from error
    name = kind.upper()
    try:
        # of a JPEG with further pictures behind it the first
        image = getattr(plugin, f"{kind}ImageFile")(io.BytesIO(data))
        _refuse_large(image.width, image.height, rules)
        if (frames := getattr(image, "n_frames", 1)) > 1:
            raise ImageError(
                f"the {name} has {frames} frames or pages, an image has one; a GIF or MP4 may be a "
                "video"
            )
        if image.mode not in (*_COLOURS, *_GREY_16):
            raise ImageError(
                f"the {name} has pixels of kind {image.mode}, allowed are {', '.join(_COLOURS)} "
                "and I;16"
            )
        image.load()
        with suppress(
            Exception
        ):  # damaged EXIF counts as none; the pixels are turned before it is rewritten
            exif.exif_transpose(image, in_place=True)
        return np.ascontiguousarray(_rgb(image))
    except ImageError:
        raise
    except Exception as error:  # foreign bytes: the plugins raise whatever their parser runs into
        raise ImageError(f"the {name} is cut short or damaged ({error!r})") from error


def _rgb(image: Any) -> np.ndarray:
    from PIL import Image

    if image.mode in _GREY_16:
        grey = np.asarray(image)
        key = image.info.get("transparency")
        high = (grey >> 8).astype(np.uint8)
        if isinstance(key, int):  # the grey that stands for nothing, which white shows through
            high[grey == key] = 255
        return np.repeat(high[..., None], 3, axis=2)  # [h, w] -> [h, w, 3]
    if image.mode in ("RGBa", "La"):  # colours multiplied by alpha
        image = image.convert(image.mode[:-1] + "A")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


@contextmanager
def _opened(data: bytes, rules: VisionRules) -> Iterator[tuple[Any, Any]]:
    """(container, video stream); whatever FFmpeg says inside the block becomes an ImageError."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need the package av: pip install 'megacp[data]'") from error
    name = _kind(data, _VIDEO)
    try:
        with av.open(io.BytesIO(data), format=name) as container:
            if not container.streams.video:
                raise ImageError("the file has no video stream")
            stream = container.streams.video[0]
            _refuse_large(stream.width, stream.height, rules)
            stream.codec_context.thread_count = 1  # ranks and workers share the cores already
            yield container, stream
    except ImageError:
        raise
    except Exception as error:  # foreign bytes: FFmpeg's errors are of many classes
        raise ImageError(f"the {name} video is cut short or damaged ({error!r})") from error


def _timeline(data: bytes, rules: VisionRules) -> tuple[list[int], list[int], float]:
    """Times of all frames and of the key frames to which one may seek, in units of the stream,
    rising; frames a second.

    From the packets, none of which is decoded. ImageError, also for half a file that FFmpeg opens
    nevertheless.
    """
    name = _kind(data, _VIDEO)
    times = set[int]()
    keys = set[int]()
    end = 0.0  # seconds at which the last packet ends
    with _opened(data, rules) as (container, stream):
        begin = (
            min(container.start_time or 0, 0) / 1e6
        )  # headers count from 0, also where the first frame comes later
        for packet in container.demux():
            if packet.pts is not None and packet.time_base:
                end = max(
                    end, float((packet.pts + (packet.duration or 0)) * packet.time_base) - begin
                )
            if packet.stream is not stream or not packet.size or packet.is_discard:
                continue
            if packet.pts is None:
                raise ImageError(
                    "the frames of the video have no times; a container such as MP4 keeps them"
                )
            times.add(packet.pts)
            if packet.is_keyframe:
                keys.add(packet.pts)
        seconds = (container.duration or 0) / 1e6
        if name in ("matroska", "flv") and seconds - end > max(_CUT_SECONDS, _CUT_SHARE * seconds):
            raise ImageError(
                f"the {name} video is cut short: it ends at {end:.1f} s, its header says "
                f"{seconds:.1f} s"
            )
        size = 8 + int.from_bytes(data[4:8], "little")  # of a RIFF file, by its header
        if name == "avi" and len(data) < size < 0xFFFFFFFF:
            raise ImageError(
                f"the avi video is cut short: it has {len(data)} bytes, its header says {size}"
            )
        if name == "gif" and not data.rstrip(b"\0").endswith(b";"):  # GIF89a, 27
            raise ImageError("the gif video is cut short: it does not end with its trailer")
        if not times:
            raise ImageError("the video has no frames")
        rising = sorted(times)
        fps = float(stream.average_rate or 0.0) or rules.video_fps
        if len(rising) > 1 and stream.time_base:
            true = (len(rising) - 1) / float((rising[-1] - rising[0]) * stream.time_base)
            fps = fps if abs(fps / true - 1) <= _RATE_TOLERANCE else true
        return rising, sorted(keys) if container.format.name in _SEEKABLE else [], fps


def video_info(data: bytes, rules: VisionRules) -> tuple[int, float]:
    """Frames of an encoded video, not decoded, and its mean rate (`video_fps` where it does not
    say); ImageError.
    """
    if is_still(data):
        load_pixels(data, rules)
        return 1, rules.video_fps
    times, _, fps = _timeline(data, rules)
    return len(times), fps


def video_pixels(
    data: bytes,
    rules: VisionRules,
    frames: Sequence[int] | None = None,
    fit: Callable[[np.ndarray, int], np.ndarray] = lambda pixels, count: pixels,
) -> Iterator[np.ndarray]:
    """uint8 [h, w, 3] of each of some of the taken frames (`rules.sampled`, counted from 0),
    upright; ImageError.

    `frames` rise; None = all. Numbers behind the last are left out. `fit` gets each, and how many
    are taken.
    """
    if is_still(data):
        if frames is None or 0 in frames:
            yield fit(load_pixels(data, rules), 1)
        return
    times, keys, fps = _timeline(data, rules)
    taken = rules.sampled(len(times), fps)
    count = itertools.repeat(len(taken))
    wanted = [taken[i] for i in (range(len(taken)) if frames is None else frames) if i < len(taken)]
    # what lies between two groups of frames with a key frame before each is skipped
    for key, group in itertools.groupby(
        wanted, lambda number: bisect.bisect_right(keys, times[number]) - 1
    ):
        left = list(group)
        if key > 0:
            yield from map(fit, _decoded(data, rules, times, left, keys[key]), count)
        if left:  # a seek that landed behind the frame, or a key frame that needs those before it
            yield from map(fit, _decoded(data, rules, times, left), count)
        if left:
            raise ImageError("the video is cut short or damaged: not all frames can be decoded")


def _decoded(
    data: bytes, rules: VisionRules, times: list[int], left: list[int], key: int | None = None
) -> Iterator[np.ndarray]:
    """Pixels of the frames numbered `left`, which are taken off that list, from the key frame at
    time `key` on.
    """
    number_at = {time: number for number, time in enumerate(times)}
    with _opened(data, rules) as (container, stream):
        if key is not None:
            # a stream names its writer only in its first frame, and FFmpeg mends the errors of
            # known ones
            next(container.decode(stream), None)
            container.seek(key, stream=stream)
        for count, frame in enumerate(container.decode(stream)):
            number = count if key is None else number_at.get(frame.pts, -1)
            if number > left[0] or (
                key is not None and frame.is_corrupt and number_at.get(key, 0) <= number
            ):
                return
            if number < left[0]:
                continue
            if frame.is_corrupt:
                seconds = float((times[number] - times[0]) * stream.time_base)
                raise ImageError(
                    f"the video is damaged: its frame at {seconds:.2f} s cannot be decoded as a "
                    "whole"
                )
            _refuse_large(frame.width, frame.height, rules)  # not always those of the stream
            pixels = frame.to_ndarray(format="rgb24")
            del left[0]
            yield np.rot90(pixels, getattr(frame, "rotation", 0) // 90)  # degrees against the clock
            if not left:
                return


def _size(video: tuple[bytes, dict[int, np.ndarray]]) -> int:
    """Bytes of a file and its frames, which another thread may add to."""
    return len(video[0]) + sum(frame.nbytes for frame in [*video[1].values()])


class RulesDecoder:
    """The `Decoder` of one set of rules; several threads may share it.

    It keeps the frames of the videos that were asked for last: a step often has several questions
    about one.
    """

    def __init__(self, rules: VisionRules) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._videos: dict[
            bytes, dict[int, np.ndarray]
        ] = {}  # the file -> its fitted frames, uint8 [h, w, 3]
        self.patch_shape = rules.patch_shape

    def image(self, data: bytes) -> Pixels:
        """All crops of an image, float32 [c, patches, patch_dim], and its pooling int64 [m,
        window]; ImageError.
        """
        return self._rules.pixels_of_image(load_pixels(data, self._rules))

    def video(self, data: bytes, frames: Sequence[int]) -> Pixels:
        """Some units of the taken frames, rising, float32 [crops, patches, patch_dim], and their
        pooling; ImageError.

        Units behind the last are left out; of one that is not full, the last frame is shown again.
        """
        rules = self._rules
        step = rules.frames_of_unit
        with self._lock:  # the one asked for last stands last
            known = self._videos[data] = self._videos.pop(data, {})
        if missing := [
            i for unit in frames for i in range(unit * step, (unit + 1) * step) if i not in known
        ]:
            known.update(
                zip(missing, video_pixels(data, rules, missing, rules.fitted), strict=False)
            )
        with self._lock:
            while sum(map(_size, [*self._videos.items()][:-1])) > KEPT_BYTES:
                del self._videos[next(iter(self._videos))]
        firsts = [unit * step for unit in frames if unit * step in known]
        shown = [
            [known.get(i, known[first]) for i in range(first, first + step)] for first in firsts
        ]
        if not shown:
            return np.zeros((0, *self.patch_shape), np.float32), np.zeros((0, 1), np.int64)
        return rules.pixels_of_frames(np.array(shown))
