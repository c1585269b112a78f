"""Convert the processor files in a model folder to image and video rules of a vision family.

Files are selected, and missing fields get defaults, as in the transformers library. A field that
the library uses but our rules cannot express is an error. Fields that the library ignores are
reported.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.prepare.tokenize.beside import read_object
from megacp.storage.wording import listed
from megacp.training.data.vision.decoding import RULES
from megacp.training.data.vision.rules import VisionRules

IMAGES = "preprocessor_config.json"
VIDEOS = "video_preprocessor_config.json"
PROCESSOR = "processor_config.json"
PROCESSOR_NAMES = (PROCESSOR, IMAGES, VIDEOS)
# An object from a JSON file.
Content = Mapping[str, Any]

# Values outside these bounds are certainly errors in a file.
_MOST_COUNT = 2**31 - 1
_MOST_PIXELS = 2**48
_MOST_NUMBER = 1e6
_LEAST_DEVIATION = 1e-6


class OtherProcessorError(ValueError):
    """The files describe the processor of another family."""


@dataclass(frozen=True)
class Setting:
    """A field of a processor file that becomes a rule."""

    rule: str
    default: Any
    """The library's default for a missing field; it does not apply to a null."""
    read: Callable[[Any], Any]
    """Function that converts a JSON value to the rule's value. It raises ValueError with the
    expected form.
    """


@dataclass(frozen=True)
class ProcessorPart:
    """A processor class of the library, either for images or for videos."""

    cls: str
    """The class name in the files, without the suffix `Fast` or `Pil`."""
    size: Setting
    """The field `size`. Its reader gets all fields of the part, because older fields may override
    `size`.
    """
    settings: Mapping[str, Setting]
    only: Mapping[str, tuple[Any, Any]]
    """Field -> (the only supported value, the library's default)."""
    further: tuple[str, ...] = ()
    """Additional fields that the reader of `size` uses."""

    @property
    def all_settings(self) -> dict[str, Setting]:
        """The fields that become rules."""
        return {"size": self.size, **self.settings}

    @property
    def names(self) -> set[str]:
        """Names of all fields that the library uses."""
        return {*self.all_settings, *self.only, *self.further}


@dataclass(frozen=True)
class ProcessorFiles:
    """The processor files of a vision family."""

    images: ProcessorPart
    videos: ProcessorPart
    switches: Mapping[str, tuple[str, bool | None]] = field(default_factory=dict)
    """Top-level field of processor_config.json -> (our rule, the library's default)."""
    only: Mapping[str, bool] = field(default_factory=dict)
    """Top-level field -> the only supported value, which is also the library's default."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Rules that follow from the processor class, independent of the files."""


@dataclass(frozen=True)
class FolderRules:
    """The rules defined by the processor files in a folder."""

    folder: Path
    family: str
    values: Mapping[str, Any]
    """Rules by name, as in a manifest; without token ids and our own limits."""
    fields: Mapping[str, str]
    """Rule -> the file and field that define it."""
    notes: tuple[str, ...]
    """One line per file or group of fields that is not used."""

    @property
    def files(self) -> list[str]:
        """Names of the files in the folder that define at least one rule."""
        # A place is `FILE FIELD` or `FILE: PART FIELD`.
        used = {place.partition(" ")[0].removesuffix(":") for place in self.fields.values()}
        found = [name for name in PROCESSOR_NAMES if name in used]
        return [name for name in found if os.path.lexists(self.folder / name)]

    def with_ids(self, token_ids: Mapping[str, int]) -> VisionRules:
        """Return these rules with the ids of image tokens; raise ValueError for invalid ids."""
        return RULES[self.family].from_dict({**self.values, "token_ids": dict(token_ids)})

    def differences(self, given: Content) -> list[str]:
        """Return a message for each rule in `given` that differs from the folder's rule.

        `given` contains rules by name, as in a manifest. Missing rules have the family's defaults.
        """
        usual = RULES[self.family]().to_dict()
        found = []
        for name, own in self.values.items():
            value = given.get(name, usual[name])
            if _plain(value) == _plain(own):
                continue
            flag = flag_of(self.family, name)
            found.append(f"{flag} is {_as_flag(value)}, but {self.fields[name]} is {_as_flag(own)}")
        return found


def flag_of(family: str, rule: str) -> str:
    """Return the flag of `preprocess_data.py build` that sets a rule."""
    rules = dataclasses.fields(RULES[family])  # type: ignore[arg-type]
    named = {one.name: one for one in rules}
    return str(named[rule].metadata["flag"] or f"--{rule.replace('_', '-')}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_flag(value: Any) -> str:
    """Format a value as on the command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def _shown(value: Any) -> str:
    """Format a file's value for a message, with at most 80 characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(name: str) -> str:
    """Format a field name for a message: at most 80 characters, without control characters."""
    return name if name.isprintable() and len(name) <= 60 else _shown(name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(low: int = 1) -> Callable[[Any], int]:
    """Return a reader for whole numbers of at least `low`."""

    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= _MOST_COUNT:
            raise ValueError(f"expected a whole number of at least {low}")
        return value

    return read


def _rate(value: Any) -> float:
    """Read a positive number."""
    if not _is_number(value) or not 0 < value <= _MOST_NUMBER:
        raise ValueError("expected a number above 0")
    return float(value)


def _colours(least: float) -> Callable[[Any], list[float]]:
    """Return a reader for three numbers (red, green, blue); a single number applies to all."""

    def is_valid(number: Any) -> bool:
        return _is_number(number) and least <= number <= _MOST_NUMBER

    def read(value: Any) -> list[float]:
        numbers = [value] * 3 if _is_number(value) else value
        is_triple = isinstance(numbers, list) and len(numbers) == 3
        if not is_triple or not all(map(is_valid, numbers)):
            raise ValueError(f"expected three numbers of at least {least:g}")
        return [float(one) for one in numbers]

    return read


def _pair(low: int) -> Callable[[Any], list[int]]:
    """Return a reader for two whole numbers of at least `low`."""

    def read(value: Any) -> list[int]:
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError("expected two whole numbers")
        return [_count(low)(one) for one in value]

    return read


# In the Qwen classes, `size` contains pixel counts of an image, although its keys suggest lengths.
_EDGES = ("shortest_edge", "longest_edge")
_OLDER_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_WORDS_OF_EDGES = (
    "expected shortest_edge and longest_edge, the minimum and maximum number of pixels"
)


def _pixels(part: Content, default: list[int], has_older: bool) -> list[int]:
    """Return the minimum and maximum pixel counts of an image or a video.

    With `has_older` (images), the fields min_pixels and max_pixels override `size`.
    """
    size = part.get("size")
    if "size" not in part or (size is None and has_older):
        size = dict(zip(_EDGES, default, strict=True))
    if not isinstance(size, dict):
        raise ValueError(_WORDS_OF_EDGES)
    size = dict(size)
    if has_older:
        for older, edge in _OLDER_EDGES.items():
            if part.get(older) is not None:
                size[edge] = part[older]
                # the older name may also be inside `size`, where it now has no effect
                size.pop(older, None)
    if set(size) != set(_EDGES):
        raise ValueError(_WORDS_OF_EDGES)
    found = [size[edge] for edge in _EDGES]
    # `type` and not `isinstance`: a JSON true is not a number of pixels
    in_range = all(type(pixels) is int and 1 <= pixels <= _MOST_PIXELS for pixels in found)
    if not in_range or found[0] > found[1]:
        raise ValueError(f"{_WORDS_OF_EDGES}, as two whole numbers in order")
    return found


def _image_pixels(part: Content) -> list[int]:
    return _pixels(part, [3136, 1003520], has_older=True)


def _video_pixels(part: Content) -> list[int]:
    return _pixels(part, [131072, 786432], has_older=False)


def _square(part: Content) -> int:
    """Return the side of a crop in pixels.

    `size` is an object with height and width, a list of two numbers, or one number that the library
    expands to a square.
    """
    if "size" not in part:
        return 378
    size = part["size"]
    if type(size) is int and part.get("default_to_square", True) is True:
        size = [size, size]
    if isinstance(size, dict) and {*size} == {"height", "width"}:
        size = [size["height"], size["width"]]
    if not isinstance(size, list) or len(size) != 2 or size[0] != size[1]:
        raise ValueError("megacp supports only squares, with equal height and width")
    return _count()(size[0])


_HALF = [0.5, 0.5, 0.5]
# The values of OpenAI's CLIP, which are the defaults of Qwen2VLImageProcessor.
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_DEVIATION = [0.26862954, 0.26130258, 0.27577711]


def _normalized(mean: list[float], deviation: list[float]) -> dict[str, Setting]:
    return {
        "image_mean": Setting("image_mean", mean, _colours(-_MOST_NUMBER)),
        "image_std": Setting("image_std", deviation, _colours(_LEAST_DEVIATION)),
    }


# megacp always performs these steps, so a file that disables one of them is an error.
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_PIXELS_ONLY: dict[str, tuple[Any, Any]] = {
    **{name: (True, True) for name in _STEPS},
    "rescale_factor": (1 / 255, 1 / 255),
    "input_data_format": (None, None),
}
# Pillow's numbers for resampling filters.
_BILINEAR = 2
_BICUBIC = 3
_WINDOWS_ONLY: dict[str, tuple[Any, Any]] = {
    **_PIXELS_ONLY,
    "resample": (_BICUBIC, _BICUBIC),
    "temporal_patch_size": (2, 2),
}
# Qwen3.5: patches of whole images, in windows that each become one token.
_MERGED = {"merge_size": Setting("merge_size", 2, _count())}
_WINDOWS = ProcessorFiles(
    images=ProcessorPart(
        "Qwen2VLImageProcessor",
        Setting("resize_pixels", None, _image_pixels),
        {
            "patch_size": Setting("patch_size", 14, _count()),
            **_MERGED,
            **_normalized(_CLIP_MEAN, _CLIP_DEVIATION),
        },
        _WINDOWS_ONLY,
        further=tuple(_OLDER_EDGES),
    ),
    videos=ProcessorPart(
        "Qwen3VLVideoProcessor",
        Setting("video_resize_pixels", None, _video_pixels),
        {
            "patch_size": Setting("patch_size", 16, _count()),
            **_MERGED,
            **_normalized(_HALF, _HALF),
            "fps": Setting("video_fps", 2.0, _rate),
            "min_frames": Setting("min_frames", 4, _count()),
            "max_frames": Setting("max_frames", 768, _count()),
        },
        {
            **_WINDOWS_ONLY,
            "do_sample_frames": (True, True),
            "num_frames": (None, None),
            "cap_pixels_per_frame": (False, False),
        },
    ),
)
# Molmo2: square crops, and pooled tokens.
_PATCHES = {"patch_size": Setting("patch_size", 14, _count()), **_normalized(_HALF, _HALF)}
_CROPS = ProcessorFiles(
    images=ProcessorPart(
        "Molmo2ImageProcessor",
        Setting("image_size", None, _square),
        {
            **_PATCHES,
            "max_crops": Setting("max_crops", 8, _count()),
            "overlap_margins": Setting("overlap_margins", [4, 4], _pair(0)),
            "pooling_size": Setting("image_pooling", [2, 2], _pair(1)),
        },
        {**_PIXELS_ONLY, "resample": (_BILINEAR, _BILINEAR)},
        further=("default_to_square",),
    ),
    videos=ProcessorPart(
        "Molmo2VideoProcessor",
        Setting("image_size", None, _square),
        {
            **_PATCHES,
            "pooling_size": Setting("video_pooling", [3, 3], _pair(1)),
            "num_frames": Setting("max_frames", 64, _count()),
            "max_fps": Setting("video_fps", 2.0, _rate),
        },
        {
            **_PIXELS_ONLY,
            # The library's video class has no defaults for these two fields, so it skips both steps
            # if the fields are missing.
            "do_rescale": (True, False),
            "do_normalize": (True, False),
            "resample": (_BILINEAR, _BILINEAR),
            "do_sample_frames": (True, True),
            "fps": (None, None),
        },
        further=("default_to_square",),
    ),
    switches={
        "image_use_col_tokens": ("use_column_tokens", True),
        "use_single_crop_col_tokens": ("low_res_column_tokens", None),
        "video_use_col_tokens": ("video_column_tokens", False),
    },
    only={"use_single_crop_start_token": True, "use_frame_special_tokens": True},
    constants={"time_mode": "per-frame"},
)
# Vision family -> its processor files.
PROCESSOR_FILES: dict[str, ProcessorFiles] = {"molmo2": _CROPS, "qwen3_5": _WINDOWS}

# Fields that are ignored without a note, because no rule depends on them or another field decides.
_SILENT = frozenset(
    {
        # class names
        "processor_class",
        "image_processor_type",
        "video_processor_type",
        "feature_extractor_type",
        "auto_map",
        # the format of the library's results
        "data_format",
        "return_tensors",
        "device",
        "disable_grouping",
        "return_metadata",
        # read together with `size`
        "default_to_square",
        # metadata, and fields without effect on pixels
        "max_video_tokens",
        "image_seq_length",
        "_valid_processor_keys",
        "use_fast",
        "transformers_version",
        # parts that are read separately
        "image_processor",
        "video_processor",
        "chat_template",
    }
)

# Rules that config.json also defines for the vision tower, with the possible paths of the field and
# the library's default.
_SIZES_OF_CONFIG: dict[str, dict[str, tuple[tuple[str, ...], int]]] = {
    "molmo2": {
        "image_size": (("vision_config.image_size", "vit_config.image_default_input_size"), 378),
        "patch_size": (("vision_config.patch_size", "vit_config.image_patch_size"), 14),
    },
    "qwen3_5": {
        "patch_size": (("vision_config.patch_size",), 16),
        "merge_size": (("vision_config.spatial_merge_size",), 2),
    },
}


def misfit_of_config(told: FolderRules) -> str | None:
    """Return how a folder's rules contradict the vision tower in its config.json, or None."""
    content = read_object(told.folder / "config.json")
    problems = []
    for rule, (paths, usual) in _SIZES_OF_CONFIG[told.family].items():
        path = paths[0]
        size = usual
        for candidate in paths:
            section, _, name = candidate.partition(".")
            inside = content.get(section)
            if isinstance(inside, dict) and inside.get(name) is not None:
                path = candidate
                size = inside[name]
        # the older config of Molmo2 gives the height and the width
        sides = size if isinstance(size, list) else [size]
        value = told.values[rule]
        if any(side != value for side in sides):
            place = told.fields[rule]
            problems.append(f"{place} is {value}, but {path} in config.json is {_shown(size)}")
    return "; ".join(problems) or None


# A processor part: its place, for messages, and its fields.
_NamedPart = tuple[str, dict[str, Any]]


def read_processor(folder: Path, family: str) -> FolderRules | None:
    """Return the rules in a folder's processor files, or None if the folder has no such files.

    Raise ValueError, with the file and every field that the rules cannot express, and its subclass
    OtherProcessorError if the files belong to the processor of another family.
    """
    files = PROCESSOR_FILES[family]
    whole: dict[str, Any] = {}
    if os.path.lexists(folder / PROCESSOR):
        whole = read_object(folder / PROCESSOR)
    notes: list[str] = []
    image = _part(folder, IMAGES, whole, "image_processor", notes)
    video = _part(folder, VIDEOS, whole, "video_processor", notes)
    if image is None:
        if video is None:
            return None
        raise ValueError(
            f"{folder} has {video[0]} but no {IMAGES}; add this file, because the library needs it"
        )
    # Check the classes first: the fields of another class would only cause misleading messages.
    wrong_classes = _other_class(image, "image_processor_type", files.images.cls)
    if video is not None:
        wrong_classes += _other_class(video, "video_processor_type", files.videos.cls)
    if wrong_classes:
        raise OtherProcessorError(
            f"{folder}: {'; '.join(wrong_classes)}; --vision-family {family} uses a different "
            "processor"
        )
    values, fields, problems = _read_parts(image, video, files, notes)
    problems += _read_switches(whole, files, values, fields, notes)
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    found = FolderRules(folder, family, values, fields, tuple(notes))
    # Each number is valid by itself; building the rules also checks their combination.
    try:
        found.with_ids({})
    except ValueError as error:
        raise ValueError(f"{folder}: its processor files contradict each other: {error}") from error
    return found


def _read_parts(
    image: _NamedPart, video: _NamedPart | None, files: ProcessorFiles, notes: list[str]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the rules of both parts, the place of each rule, and problems.

    Problems are unsupported fields, and rules that differ between the parts.
    """
    values, fields, problems = _read_part(image, files.images)
    if video is None:
        video_values, video_fields = _without_videos(image, values, files, notes)
        _note_names(*image, files.images.names | files.videos.names, notes)
        return {**video_values, **values}, {**video_fields, **fields}, problems
    video_values, video_fields, of_videos = _read_part(video, files.videos)
    problems += of_videos
    # For some rules, such as patch_size, the library has separate fields for images and videos.
    for rule in values.keys() & video_values.keys():
        if values[rule] != video_values[rule]:
            of_video = _shown(video_values[rule])
            of_image = _shown(values[rule])
            problems.append(
                f"{video_fields[rule]} is {of_video}, but {fields[rule]} is {of_image}; megacp "
                "supports only equal values"
            )
    _note_names(*video, files.videos.names, notes)
    _note_names(*image, files.images.names, notes)
    return {**video_values, **values}, {**video_fields, **fields}, problems


def _part(folder: Path, name: str, whole: Content, key: str, notes: list[str]) -> _NamedPart | None:
    """Return the part `key` of `processor_config.json`, or else the older file `name`, or None.

    Raise ValueError if the part is not an object.
    """
    path = folder / name
    inside = whole.get(key)
    if inside is None:
        if not os.path.lexists(path):
            return None
        return name, read_object(path)
    if not isinstance(inside, dict):
        raise ValueError(f"{folder / PROCESSOR}: {key} is {_shown(inside)}, expected an object")
    if os.path.lexists(path) and not _is_same(path, inside):
        notes.append(f"{name} is not used: {PROCESSOR} has {key}, which the library reads instead")
    return f"{PROCESSOR}: {key}", inside


def _is_same(path: Path, inside: Content) -> bool:
    """Return whether an older file has the same fields as a part of `processor_config.json`."""
    try:
        outside = read_object(path)
    except (ValueError, OSError):
        return False
    keys = {*outside, *inside} - _SILENT
    return all(outside.get(key) == inside.get(key) for key in keys)


def _other_class(part: _NamedPart, key: str, expected: str) -> list[str]:
    """Return a message if the class of a part is not `expected`; otherwise return []."""
    where, content = part
    name = content.get(key)
    if name is None:
        return []
    if isinstance(name, str) and name.removesuffix("Fast").removesuffix("Pil") == expected:
        return []
    return [f"{where}: {key} is {_shown(name)}, expected {expected}"]


def _read_part(
    part: _NamedPart, spec: ProcessorPart
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the rules of a part, the place of each rule, and messages about unsupported fields."""
    where, content = part
    values: dict[str, Any] = {}
    fields: dict[str, str] = {}
    problems: list[str] = []
    for name, setting in spec.all_settings.items():
        rule = setting.rule
        fields[rule] = f"{where} {name}"
        try:
            if name == "size":
                values[rule] = setting.read(content)
            elif name in content:
                values[rule] = setting.read(content[name])
            else:
                values[rule] = setting.default
        except ValueError as error:
            names = [name]
            if name == "size":
                # any field that the reader of `size` uses may be wrong
                names += [further for further in spec.further if further in content]
            given = ", ".join(f"{one} is {_shown(content.get(one))}" for one in names)
            problems.append(f"{where}: {given}; {error}")
    for name, (expected, usual) in spec.only.items():
        given = content.get(name, usual)
        if _acts_otherwise(given, expected):
            found = f"is {_shown(given)}"
            if name not in content:
                found = f"is missing, which the library reads as {usual}"
            problems.append(f"{where}: {name} {found}, but megacp supports only {_shown(expected)}")
    return values, fields, problems


def _acts_otherwise(value: Any, expected: Any) -> bool:
    """Return whether a value differs from the only supported value.

    A null equals false, as in the library, but true does not equal 1.
    """
    if expected is False and value is None:
        return False
    if isinstance(expected, float) and _is_number(value):
        return not math.isclose(value, expected, rel_tol=1e-9)
    return type(value) is not type(expected) or bool(value != expected)


def _without_videos(
    image: _NamedPart, values: Content, files: ProcessorFiles, notes: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the rules for videos, and their places, for a folder without video settings.

    The library then loads the image file into a video class, whose name it derives from the image
    class.
    """
    where, content = image
    videos = files.videos
    cls = content.get("image_processor_type")
    inferred = videos.cls
    if cls is not None:
        inferred = str(cls).replace("ImageProcessor", "VideoProcessor")
    if inferred == videos.cls:
        found, fields, problems = _read_part(image, videos)
        agrees = all(values.get(rule, value) == value for rule, value in found.items())
        if not problems and agrees:
            return found, fields
    # Our rules cannot express the library's choice, so use the defaults of the family's class.
    notes.append(f"there is no {VIDEOS}: videos use the defaults of the library's {videos.cls}")
    found = {videos.size.rule: videos.size.read({})}
    for setting in videos.settings.values():
        found[setting.rule] = setting.default
    return found, dict.fromkeys(found, f"the library's {videos.cls}")


def _read_switches(
    whole: Content,
    files: ProcessorFiles,
    values: dict[str, Any],
    fields: dict[str, str],
    notes: list[str],
) -> list[str]:
    """Add the rules of the top-level fields; return messages about unsupported fields."""
    problems = []
    for name, (rule, usual) in files.switches.items():
        given = whole.get(name, usual)
        # The library treats a null as false, unless null is the default: then another field
        # decides.
        value = given
        if given is None and usual is not None:
            value = False
        if value is not None and not isinstance(value, bool):
            problems.append(f"{PROCESSOR}: {name} is {_shown(given)}, expected true or false")
        values[rule] = value
        fields[rule] = f"{PROCESSOR} {name}"
    for name, expected in files.only.items():
        given = whole.get(name, expected)
        if given is not expected:
            found = f"{name} is {_shown(given)}"
            problems.append(f"{PROCESSOR}: {found}, but megacp supports only {_shown(expected)}")
    for rule, value in files.constants.items():
        values[rule] = value
        fields[rule] = "the library's processor"
    _note_names(PROCESSOR, whole, {*files.switches, *files.only}, notes)
    return problems


def _note_names(where: str, content: Content, used: set[str], notes: list[str]) -> None:
    """Add a note about fields that are not used, because the library also ignores them."""
    left = []
    for name in sorted(content.keys() - used - _SILENT):
        # a null or false field has no effect, so it needs no note
        if content[name] not in (None, False):
            left.append(f"{printable(name)} {_shown(content[name])}")
    if left:
        notes.append(f"{where}: not used, as in the library: {listed(left, 10)}")
