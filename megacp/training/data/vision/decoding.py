"""Decoding of images and videos to RGB pixels, and detection of damaged or unsupported files.

The result depends only on the bytes. Images become upright 8-bit RGB. For 16-bit grey, only the
high byte is used, as Pillow does for 16-bit colour. CMYK is converted with Pillow's formula. Alpha
and transparent colours are blended with white.

A frame's pixels do not depend on which other frames are decoded, so several ranks may decode the
same video. If the container has accurate times, decoding starts at the key frame before the wanted
frame, otherwise at the first frame. A frame that the decoder reports as damaged raises ImageError;
FFmpeg would replace it with grey. The container format is determined from the first bytes and
passed to FFmpeg, so a playlist disguised as a video cannot make FFmpeg open other files. A still
image is treated as a video with one frame.
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
"""First bytes of image files, by the name of the Pillow plugin that reads them."""
_VIDEO = re.compile(
    rb"(?P<mov>....(?:ftyp|moov|mdat|wide|free|skip))|(?P<matroska>\x1a\x45\xdf\xa3)|(?P<gif>GIF8[79]a)"
    rb"|(?P<avi>.{8}AVI )|(?P<ogg>OggS)|(?P<flv>FLV\x01)|(?P<mpeg>\0\0\x01\xba)|(?P<mpegts>\x47)"
    rb"|(?P<asf>\x30\x26\xb2\x75\x8e\x66\xcf\x11)",
    re.DOTALL,
)
"""First bytes of video containers, by FFmpeg's names."""
_COLOURS = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "RGBA", "LA", "PA", "RGBa", "La")
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")
_RATE_TOLERANCE = 0.1
"""Maximum relative difference between the frame rate in a header and the actual frame rate."""
_CUT_SECONDS = 1.0
_CUT_SHARE = 0.02
"""Tolerances for the length in the header of a complete file: seconds, and fraction of the length.
"""
KEPT_BYTES = 512 << 20
"""Maximum bytes of cached videos and frames in a decoder, in addition to the most recent video."""
_SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""Containers, by FFmpeg's names, with accurate times for all frames and reliable key frames."""


RULES: dict[str, type[VisionRules]] = {rules.family: rules for rules in (Molmo2Rules, Qwen35Rules)}
"""Rules of each vision family, by its name in --vision-family and in manifests."""


def rules_from_dict(values: Mapping[str, Any]) -> VisionRules:
    """Return the rules of the family in `values`, which defaults to the first family.

    Raise ValueError for an unknown family, or as `VisionRules.from_dict` does.
    """
    family = values.get("family", next(iter(RULES)))
    if family not in RULES:
        raise ValueError(
            f"image rules: --vision-family is {family!r}, but must be one of {', '.join(RULES)}"
        )
    own = {key: value for key, value in values.items() if key != "family"}
    return RULES[family].from_dict(own)


def _kind(data: bytes, known: re.Pattern[bytes]) -> str:
    """Return the name of the file type; raise ImageError if it is not among the `known` types."""
    found = known.match(data)
    if found:
        return str(found.lastgroup)
    raise ImageError(
        f"{len(data)} bytes are not a file of type {', '.join(known.groupindex)}: the file begins "
        f"with {data[:9]!r}"
    )


def _refuse_large(width: int, height: int, rules: VisionRules) -> None:
    """Raise ImageError for more pixels than --max-pixels."""
    pixels = width * height
    if pixels > rules.max_pixels:
        raise ImageError(
            f"{width} x {height} = {pixels} pixels, more than --max-pixels {rules.max_pixels} in "
            "the image rules"
        )


def is_still(data: bytes) -> bool:
    """Return whether the bytes are an image file other than a GIF, which may also be a video."""
    found = _IMAGE.match(data)
    return found is not None and found.lastgroup != "Gif"


def load_pixels(data: bytes, rules: VisionRules) -> np.ndarray:
    """Return an upright RGB image, uint8 [height, width, 3].

    Raise ImageError with the reason if the bytes cannot be decoded.
    """
    kind = _kind(data, _IMAGE)
    try:
        plugin = importlib.import_module(f"PIL.{kind}ImagePlugin")
        exif = importlib.import_module("PIL.ImageOps")
    except ImportError as error:
        raise ValueError("images need the package pillow: pip install -e '.[data]'") from error
    name = kind.upper()
    try:
        # a JPEG may contain more pictures after the first one; they are ignored
        image = getattr(plugin, f"{kind}ImageFile")(io.BytesIO(data))
        _refuse_large(image.width, image.height, rules)
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            raise ImageError(
                f"the {name} has {frames} frames or pages, but an image must have one; a GIF or "
                "MP4 can be used as a video"
            )
        if image.mode not in (*_COLOURS, *_GREY_16):
            raise ImageError(
                f"the {name} has pixels of kind {image.mode}, but allowed are "
                f"{', '.join(_COLOURS)} and I;16"
            )
        image.load()
        # Ignore damaged EXIF data. If only rewriting it fails, the pixels are already rotated.
        with suppress(Exception):
            exif.exif_transpose(image, in_place=True)
        return np.ascontiguousarray(_rgb(image))
    except ImageError:
        raise
    except Exception as error:  # on untrusted bytes, the plugins may raise anything
        raise ImageError(f"the {name} is truncated or damaged ({error!r})") from error


def _rgb(image: Any) -> np.ndarray:
    """Return an image of any supported mode as RGB, uint8 [height, width, 3]."""
    from PIL import Image

    if image.mode in _GREY_16:
        grey = np.asarray(image)
        key = image.info.get("transparency")
        high = (grey >> 8).astype(np.uint8)
        if isinstance(key, int):  # this grey is transparent, so replace it with white
            high[grey == key] = 255
        return np.repeat(high[..., None], 3, axis=2)  # [h, w] -> [h, w, 3]
    if image.mode in ("RGBa", "La"):  # colours premultiplied by alpha
        image = image.convert(image.mode[:-1] + "A")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


@contextmanager
def _opened(data: bytes, rules: VisionRules) -> Iterator[tuple[Any, Any]]:
    """Yield (container, video stream). FFmpeg errors in the block become ImageErrors."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need the package av: pip install -e '.[data]'") from error
    name = _kind(data, _VIDEO)
    try:
        with av.open(io.BytesIO(data), format=name) as container:
            if not container.streams.video:
                raise ImageError("the file has no video stream")
            stream = container.streams.video[0]
            _refuse_large(stream.width, stream.height, rules)
            stream.codec_context.thread_count = 1  # ranks and workers already use all cores
            yield container, stream
    except ImageError:
        raise
    except Exception as error:  # on untrusted bytes, FFmpeg raises errors of many classes
        raise ImageError(f"the {name} video is truncated or damaged ({error!r})") from error


def _timeline(data: bytes, rules: VisionRules) -> tuple[list[int], list[int], float]:
    """Return the times of all frames, the times of key frames for seeking, and the frame rate.

    Times are sorted, in the stream's units. They are read from packets, without decoding. Raise
    ImageError for damaged files, and for truncated files that FFmpeg would accept.
    """
    name = _kind(data, _VIDEO)
    times = set[int]()
    keys = set[int]()
    end = 0.0  # seconds at the end of the last packet
    with _opened(data, rules) as (container, stream):
        # times in headers count from 0, even if the first frame is later
        begin = min(container.start_time or 0, 0) / 1e6
        for packet in container.demux():
            if packet.pts is not None and packet.time_base:
                stop = packet.pts + (packet.duration or 0)
                end = max(end, float(stop * packet.time_base) - begin)
            # skip sound, and packets without a visible frame
            if packet.stream is not stream or not packet.size or packet.is_discard:
                continue
            if packet.pts is None:
                raise ImageError(
                    "the video's frames have no times; use a container with times, such as MP4"
                )
            times.add(packet.pts)
            if packet.is_keyframe:
                keys.add(packet.pts)
        # FFmpeg opens truncated files with these containers, so check the header or the trailer.
        seconds = (container.duration or 0) / 1e6
        if name in ("matroska", "flv") and seconds - end > max(_CUT_SECONDS, _CUT_SHARE * seconds):
            raise ImageError(
                f"the {name} video is truncated: it ends at {end:.1f} s, but its header says "
                f"{seconds:.1f} s"
            )
        size = 8 + int.from_bytes(data[4:8], "little")  # size of a RIFF file, from its header
        if name == "avi" and len(data) < size < 0xFFFFFFFF:
            raise ImageError(
                f"the avi video is truncated: it has {len(data)} bytes, but its header says {size}"
            )
        # specification of GIF89a, section 27: the trailer is a semicolon
        if name == "gif" and not data.rstrip(b"\0").endswith(b";"):
            raise ImageError("the gif video is truncated: it does not end with its trailer")
        if not times:
            raise ImageError("the video has no frames")
        rising = sorted(times)
        fps = float(stream.average_rate or 0.0) or rules.video_fps
        if len(rising) > 1 and stream.time_base:
            true = (len(rising) - 1) / float((rising[-1] - rising[0]) * stream.time_base)
            if abs(fps / true - 1) > _RATE_TOLERANCE:  # the header is wrong
                fps = true
        return rising, sorted(keys) if container.format.name in _SEEKABLE else [], fps


def video_info(data: bytes, rules: VisionRules) -> tuple[int, float]:
    """Return a video's number of frames and its mean frame rate, without decoding.

    The frame rate of a still image is `video_fps`. Raise ImageError if the video cannot be read.
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
    """Yield some of the sampled frames (`rules.sampled`), upright, uint8 [h, w, 3].

    `frames` are increasing indices into the sampled frames; None yields all. Indices after the last
    frame are ignored. `fit` is applied to each frame and the number of sampled frames. Raise
    ImageError if the video cannot be decoded.
    """
    if is_still(data):
        if frames is None or 0 in frames:
            yield fit(load_pixels(data, rules), 1)
        return
    times, keys, fps = _timeline(data, rules)
    taken = rules.sampled(len(times), fps)
    count = itertools.repeat(len(taken))
    chosen = range(len(taken)) if frames is None else frames
    wanted = [taken[i] for i in chosen if i < len(taken)]
    # Group the frames by the key frame before them, so that decoding can skip frames in between.
    for key, group in itertools.groupby(
        wanted, lambda number: bisect.bisect_right(keys, times[number]) - 1
    ):
        left = list(group)
        if key > 0:
            yield from map(fit, _decoded(data, rules, times, left, keys[key]), count)
        if left:  # the seek went past the frame, or the key frame depends on earlier frames
            yield from map(fit, _decoded(data, rules, times, left), count)
        if left:
            raise ImageError("the video is truncated or damaged: not all frames can be decoded")


def _decoded(
    data: bytes, rules: VisionRules, times: list[int], left: list[int], key: int | None = None
) -> Iterator[np.ndarray]:
    """Yield the pixels of the frames in `left`, and remove each from the list.

    Decoding starts at the key frame at time `key`, or at the first frame. It ends early if a frame
    cannot be decoded from this start.
    """
    number_at = {time: number for number, time in enumerate(times)}
    with _opened(data, rules) as (container, stream):
        if key is not None:
            # Decode the first frame before seeking, because only the start of a stream contains the
            # encoder's name, with which FFmpeg works around known encoders' bugs.
            next(container.decode(stream), None)
            container.seek(key, stream=stream)
        for count, frame in enumerate(container.decode(stream)):
            number = count if key is None else number_at.get(frame.pts, -1)
            # after a seek, a corrupt or skipped frame means that the start was wrong
            was_wrong_start = (
                key is not None and frame.is_corrupt and number_at.get(key, 0) <= number
            )
            if number > left[0] or was_wrong_start:
                return
            if number < left[0]:
                continue
            if frame.is_corrupt:
                seconds = float((times[number] - times[0]) * stream.time_base)
                raise ImageError(
                    f"the video is damaged: its frame at {seconds:.2f} s is incomplete"
                )
            _refuse_large(frame.width, frame.height, rules)  # may differ from the stream's size
            pixels = frame.to_ndarray(format="rgb24")
            del left[0]
            # the rotation is counterclockwise, in degrees
            yield np.rot90(pixels, getattr(frame, "rotation", 0) // 90)
            if not left:
                return


def _size(video: tuple[bytes, dict[int, np.ndarray]]) -> int:
    """Return the size in bytes of a file and its frames. Another thread may be adding frames."""
    return len(video[0]) + sum(frame.nbytes for frame in [*video[1].values()])


class RulesDecoder:
    """Decoder for one set of rules; several threads may share it.

    It caches the frames of recently used videos, because a step often needs frames of the same
    video several times.
    """

    def __init__(self, rules: VisionRules) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        # file -> its fitted frames, uint8 [h, w, 3]; the most recently used file is last
        self._videos: dict[bytes, dict[int, np.ndarray]] = {}
        self.patch_shape = rules.patch_shape

    def image(self, data: bytes) -> Pixels:
        """Return all crops of an image, and its pooling windows.

        Shapes: float32 [c, patches, patch_dim], int64 [m, window]. Raise ImageError if the image
        cannot be decoded.
        """
        return self._rules.pixels_of_image(load_pixels(data, self._rules))

    def video(self, data: bytes, frames: Sequence[int]) -> Pixels:
        """Return the crops of some units of the sampled frames, and their pooling windows.

        Shapes: float32 [crops, patches, patch_dim], int64 [m, window]. Units after the last frame
        are ignored. In an incomplete unit, the last frame is repeated. Raise ImageError if the
        video cannot be decoded.
        """
        rules = self._rules
        step = rules.frames_of_unit
        with self._lock:  # move the video to the end
            known = self._videos[data] = self._videos.pop(data, {})
        missing = []
        for unit in frames:
            missing += [i for i in range(unit * step, (unit + 1) * step) if i not in known]
        if missing:
            decoded = video_pixels(data, rules, missing, rules.fitted)
            known.update(zip(missing, decoded, strict=False))
        with self._lock:  # remove the least recently used videos, but not this one
            while sum(map(_size, [*self._videos.items()][:-1])) > KEPT_BYTES:
                del self._videos[next(iter(self._videos))]
        shown = []
        for unit in frames:
            first = unit * step
            if first in known:
                shown.append([known.get(i, known[first]) for i in range(first, first + step)])
        if not shown:
            return np.zeros((0, *self.patch_shape), np.float32), np.zeros((0, 1), np.int64)
        return rules.pixels_of_frames(np.array(shown))
