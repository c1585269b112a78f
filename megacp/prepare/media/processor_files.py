"""How a model folder says that images and videos become patches: its processor files as rules of a
vision family.

The transformers library decides which file counts, what a missing field means and which fields act.
A field that acts and that the rules cannot express is refused by its name. A field that the library
ignores is reported.
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
Content = Mapping[str, Any]
"""An object of a JSON file."""

_MOST_COUNT = 2**31 - 1
_MOST_PIXELS = 2**48
_MOST_NUMBER = 1e6
_LEAST_DEVIATION = 1e-6


class OtherProcessorError(ValueError):
    """The files describe the processor of another family."""


@dataclass(frozen=True)
class Setting:
    """A field of the library that becomes a rule."""

    rule: str
    default: Any
    """The library's value where the field is missing. A null is not missing: the library keeps it,
    and fails.
    """
    read: Callable[[Any], Any]
    """The rule's value, as JSON has it. ValueError says what was expected."""


@dataclass(frozen=True)
class ProcessorPart:
    """A processor class of the library, for images or for videos."""

    cls: str
    """Its name in the files, without the ending `Fast` or `Pil`."""
    size: Setting
    """The field `size`; its reader takes the whole part, since older fields may override it."""
    settings: Mapping[str, Setting]
    only: Mapping[str, tuple[Any, Any]]
    """Field -> the one value that our rules express, and the library's where the field is missing.
    """
    further: tuple[str, ...] = ()
    """Fields that the reader of `size` takes too."""

    @property
    def all_settings(self) -> dict[str, Setting]:
        """All fields that become rules."""
        return {"size": self.size, **self.settings}

    @property
    def names(self) -> set[str]:
        """Names of all fields that act."""
        return {*self.all_settings, *self.only, *self.further}


@dataclass(frozen=True)
class ProcessorFiles:
    """The processor files of a vision family."""

    images: ProcessorPart
    videos: ProcessorPart
    switches: Mapping[str, tuple[str, bool | None]] = field(default_factory=dict)
    """Fields of the processor as a whole -> our rule, and the library's value where the field is
    missing.
    """
    only: Mapping[str, bool] = field(default_factory=dict)
    """Such fields that can have one value here, which is also the library's where the field is
    missing.
    """
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Rules that follow from the family's processor, whatever the files say."""


@dataclass(frozen=True)
class FolderRules:
    """The rules that a folder's processor files describe."""

    folder: Path
    family: str
    values: Mapping[str, Any]
    """Rules by name as a manifest has them, without ids of tokens and without limits of our own."""
    fields: Mapping[str, str]
    """Each of these rules -> the file and the field that say it."""
    notes: tuple[str, ...]
    """A line for each file or field that is not used."""

    @property
    def files(self) -> list[str]:
        """Names of the folder's files that say any of the rules."""
        said = {place.partition(" ")[0].removesuffix(":") for place in self.fields.values()}
        return [
            name for name in PROCESSOR_NAMES if name in said and os.path.lexists(self.folder / name)
        ]

    def with_ids(self, token_ids: Mapping[str, int]) -> VisionRules:
        """Return these rules with ids of image tokens. ValueError for ids that cannot be."""
        return RULES[self.family].from_dict({**self.values, "token_ids": dict(token_ids)})

    def differences(self, given: Content) -> list[str]:
        """List the rules in `given`, by name as a manifest has them, that differ from the
        folder's.
        """
        usual = RULES[self.family]().to_dict()
        found = []
        for name, said in self.values.items():
            value = given.get(name, usual[name])
            if _plain(value) != _plain(said):
                flag = flag_of(self.family, name)
                found.append(
                    f"{flag} is {_as_flag(value)}, {self.fields[name]} says {_as_flag(said)}"
                )
        return found


def flag_of(family: str, rule: str) -> str:
    """Return the flag of `preprocess_data.py build` for a rule."""
    named = {one.name: one for one in dataclasses.fields(RULES[family])}  # type: ignore[arg-type]
    return str(named[rule].metadata["flag"] or f"--{rule.replace('_', '-')}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_flag(value: Any) -> str:
    """Return a value as the command line has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def _shown(value: Any) -> str:
    """Return a value of a file for a message; long ones are cut."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(name: str) -> str:
    """Return the name of a field for a message: without control characters, long ones cut."""
    return name if name.isprintable() and len(name) <= 60 else _shown(name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(low: int = 1) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= _MOST_COUNT:
            raise ValueError(f"expected a whole number of at least {low}")
        return value

    return read


def _rate(value: Any) -> float:
    if not _is_number(value) or not 0 < value <= _MOST_NUMBER:
        raise ValueError("expected a number above 0")
    return float(value)


def _colours(least: float) -> Callable[[Any], list[float]]:
    """Return the reader of a number for each of red, green and blue; one number counts for all
    three.
    """

    def read(value: Any) -> list[float]:
        numbers = [value] * 3 if _is_number(value) else value
        is_sound = isinstance(numbers, list) and len(numbers) == 3
        if not is_sound or not all(
            _is_number(one) and least <= one <= _MOST_NUMBER for one in numbers
        ):
            raise ValueError(f"expected three numbers of at least {least:g}")
        return [float(one) for one in numbers]

    return read


def _pair(low: int) -> Callable[[Any], list[int]]:
    def read(value: Any) -> list[int]:
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError("expected two whole numbers")
        return [_count(low)(one) for one in value]

    return read


_EDGES = ("shortest_edge", "longest_edge")
_OLDER_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_WORDS_OF_EDGES = "expected shortest_edge and longest_edge: the least and most pixels"


def _pixels(part: Content, default: list[int], has_older: bool) -> list[int]:
    """Return the least and the most pixels; fields of older files override `size` in the class for
    images.
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
                size.pop(older, None)
    if {*size} != {*_EDGES}:
        raise ValueError(_WORDS_OF_EDGES)
    found = [size[edge] for edge in _EDGES]
    if (
        not all(type(pixels) is int and 1 <= pixels <= _MOST_PIXELS for pixels in found)
        or found[0] > found[1]
    ):
        raise ValueError(f"{_WORDS_OF_EDGES}, two whole numbers in order")
    return found


def _image_pixels(part: Content) -> list[int]:
    return _pixels(part, [3136, 1003520], has_older=True)


def _video_pixels(part: Content) -> list[int]:
    return _pixels(part, [131072, 786432], has_older=False)


def _square(part: Content) -> int:
    """Return the side of a crop: of an object, of two numbers, or of one where the library makes it
    a square.
    """
    if "size" not in part:
        return 378
    size = part["size"]
    if type(size) is int and part.get("default_to_square", True) is True:
        size = [size, size]
    if isinstance(size, dict) and {*size} == {"height", "width"}:
        size = [size["height"], size["width"]]
    if not isinstance(size, list) or len(size) != 2 or size[0] != size[1]:
        raise ValueError("megacp can only express squares, as height and width")
    return _count()(size[0])


_HALF = [0.5, 0.5, 0.5]
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_DEVIATION = [0.26862954, 0.26130258, 0.27577711]
"""OpenAI's, which the library's class for images in windows has where a file is silent."""


def _normalized(mean: list[float], deviation: list[float]) -> dict[str, Setting]:
    return {
        "image_mean": Setting("image_mean", mean, _colours(-_MOST_NUMBER)),
        "image_std": Setting("image_std", deviation, _colours(_LEAST_DEVIATION)),
    }


_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_PIXELS_ONLY: dict[str, tuple[Any, Any]] = {
    **{name: (True, True) for name in _STEPS},
    "rescale_factor": (1 / 255, 1 / 255),
    "input_data_format": (None, None),
}
_BILINEAR = 2
_BICUBIC = 3
_WINDOWS_ONLY: dict[str, tuple[Any, Any]] = {
    **_PIXELS_ONLY,
    "resample": (_BICUBIC, _BICUBIC),
    "temporal_patch_size": (2, 2),
}
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
            # the library's class for videos has no values of its own for these two, so it leaves
            # both steps out
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
PROCESSOR_FILES: dict[str, ProcessorFiles] = {"molmo2": _CROPS, "qwen3_5": _WINDOWS}
"""The files of each vision family."""

_SILENT = frozenset(
    (
        "processor_class",
        "image_processor_type",
        "video_processor_type",
        "feature_extractor_type",
        "auto_map",
    )
    + (
        "data_format",
        "return_tensors",
        "device",
        "disable_grouping",
        "return_metadata",
        "default_to_square",
    )
    + (
        "max_video_tokens",
        "image_seq_length",
        "_valid_processor_keys",
        "use_fast",
        "transformers_version",
    )
    + ("image_processor", "video_processor", "chat_template")
)
"""Fields that never decide a number, or that other fields decide about."""


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
"""Rules that the tower's config says too: where, and what the library takes where config.json is
silent.
"""


def misfit_of_config(told: FolderRules) -> str | None:
    """Return how a folder's processor contradicts the tower in its config.json; None where both
    agree.
    """
    content = read_object(told.folder / "config.json")
    problems = []
    for rule, (paths, usual) in _SIZES_OF_CONFIG[told.family].items():
        path, size = paths[0], usual
        for candidate in paths:
            section, _, name = candidate.partition(".")
            inside = content.get(section)
            if isinstance(inside, dict) and inside.get(name) is not None:
                path, size = candidate, inside[name]
        sides = size if isinstance(size, list) else [size]
        if any(side != told.values[rule] for side in sides):
            problems.append(
                f"{told.fields[rule]} is {told.values[rule]}, {path} of config.json is "
                f"{_shown(size)}"
            )
    return "; ".join(problems) or None


_NamedPart = tuple[str, dict[str, Any]]
"""Part of a processor: where it is, for messages, and its fields."""


def read_processor(folder: Path, family: str) -> FolderRules | None:
    """Read the processor files of a folder for a vision family; None where the folder has none for
    images.

    ValueError names the file and each field that the rules cannot express; OtherProcessorError, a
    ValueError, where the files are of another family's processor.
    """
    files = PROCESSOR_FILES[family]
    whole = read_object(folder / PROCESSOR) if os.path.lexists(folder / PROCESSOR) else {}
    notes: list[str] = []
    image = _part(folder, IMAGES, whole, "image_processor", notes)
    video = _part(folder, VIDEOS, whole, "video_processor", notes)
    if image is None:
        if video is None:
            return None
        raise ValueError(
            f"{folder} has {video[0]} and no {IMAGES}: the library cannot load such a folder"
        )
    others = _other_class(image, "image_processor_type", files.images.cls)
    if video is not None:
        others += _other_class(video, "video_processor_type", files.videos.cls)
    if others:
        raise OtherProcessorError(
            f"{folder}: {'; '.join(others)}, --vision-family {family} has another processor"
        )
    values, fields, problems = _read_parts(image, video, files, notes)
    problems += _read_switches(whole, files, values, fields, notes)
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    found = FolderRules(folder, family, values, fields, tuple(notes))
    try:
        found.with_ids({})  # checks the numbers together
    except ValueError as error:
        raise ValueError(
            f"{folder}: its processor files say what no rules can have: {error}"
        ) from error
    return found


def _read_parts(
    image: _NamedPart, video: _NamedPart | None, files: ProcessorFiles, notes: list[str]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the rules of both parts, the field of each, and the problems: fields at fault, rules
    said differently.
    """
    values, fields, problems = _read_part(image, files.images)
    if video is None:
        video_values, video_fields = _without_videos(image, values, files, notes)
        _note_names(*image, files.images.names | files.videos.names, notes)
        return {**video_values, **values}, {**video_fields, **fields}, problems
    video_values, video_fields, of_videos = _read_part(video, files.videos)
    problems += of_videos
    for rule in values.keys() & video_values.keys():
        if values[rule] != video_values[rule]:
            one, other = (_shown(each[rule]) for each in (video_values, values))
            problems.append(f"{video_fields[rule]} is {one}, {fields[rule]} is {other}")
    _note_names(*video, files.videos.names, notes)
    _note_names(*image, files.images.names, notes)
    return {**video_values, **values}, {**video_fields, **fields}, problems


def _part(folder: Path, name: str, whole: Content, key: str, notes: list[str]) -> _NamedPart | None:
    """Return a part inside `processor_config.json`, which counts first, or the older file; None for
    neither.

    ValueError for a part that is not an object.
    """
    path = folder / name
    inside = whole.get(key)
    if inside is None:
        return (name, read_object(path)) if os.path.lexists(path) else None
    if not isinstance(inside, dict):
        raise ValueError(f"{folder / PROCESSOR}: {key} is {_shown(inside)}, expected an object")
    if os.path.lexists(path) and not _is_same(path, inside):
        notes.append(f"{name} is not used: {PROCESSOR} has {key}, which the library reads instead")
    return f"{PROCESSOR}: {key}", inside


def _is_same(path: Path, inside: Content) -> bool:
    """Whether a file of older versions says what the part inside `processor_config.json` says."""
    try:
        outside = read_object(path)
    except (ValueError, OSError):
        return False
    return all(outside.get(key) == inside.get(key) for key in {*outside, *inside} - _SILENT)


def _other_class(part: _NamedPart, key: str, expected: str) -> list[str]:
    """Return the reason why a part is of another class than `expected`, if it names one."""
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
    """Return the rules of a part, the field that says each of them, and what the rules cannot
    express.
    """
    where, content = part
    values: dict[str, Any] = {}
    fields: dict[str, str] = {}
    problems: list[str] = []
    for name, setting in spec.all_settings.items():
        fields[setting.rule] = f"{where} {name}"
        given = content.get(name)
        try:
            if name == "size":
                values[setting.rule] = setting.read(content)
            else:
                values[setting.rule] = setting.read(given) if name in content else setting.default
        except ValueError as error:
            names = [
                name,
                *(further for further in spec.further if name == "size" and further in content),
            ]
            told = ", ".join(f"{one} is {_shown(content.get(one))}" for one in names)
            problems.append(f"{where}: {told}; {error}")
    for name, (expected, usual) in spec.only.items():
        given = content.get(name, usual)
        if _acts_otherwise(given, expected):
            told = (
                f"is {_shown(given)}"
                if name in content
                else f"is missing, which the library reads as {usual}"
            )
            problems.append(f"{where}: {name} {told}, megacp can only express {_shown(expected)}")
    return values, fields, problems


def _acts_otherwise(value: Any, expected: Any) -> bool:
    """Whether a value differs from the only one that can be expressed; true is not 1, and a null is
    false.
    """
    if expected is False and value is None:
        return False
    if isinstance(expected, float) and _is_number(value):
        return not math.isclose(value, expected, rel_tol=1e-9)
    return type(value) is not type(expected) or bool(value != expected)


def _without_videos(
    image: _NamedPart, values: Content, files: ProcessorFiles, notes: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return rules of videos for a folder without settings of videos, and the place of each.

    The library reads those of images for videos too, by a class whose name follows from that for
    images.
    """
    where, content = image
    cls = content.get("image_processor_type")
    inferred = (
        files.videos.cls if cls is None else str(cls).replace("ImageProcessor", "VideoProcessor")
    )
    if inferred == files.videos.cls:
        found, fields, problems = _read_part(image, files.videos)
        if not problems and all(values.get(rule, value) == value for rule, value in found.items()):
            return found, fields
    notes.append(
        f"there is no {VIDEOS}: videos follow the defaults of the library's {files.videos.cls}"
    )
    usual = f"the library's {files.videos.cls}"
    found = {files.videos.size.rule: files.videos.size.read({})}
    found |= {setting.rule: setting.default for setting in files.videos.settings.values()}
    return found, dict.fromkeys(found, usual)


def _read_switches(
    whole: Content,
    files: ProcessorFiles,
    values: dict[str, Any],
    fields: dict[str, str],
    notes: list[str],
) -> list[str]:
    """Add the rules that the processor as a whole says; return what the rules cannot express."""
    problems = []
    for name, (rule, usual) in files.switches.items():
        # a null is false to the library, but where it means that another field decides
        given = whole.get(name, usual)
        value = bool(given) if given is None and usual is not None else given
        if value is not None and not isinstance(value, bool):
            problems.append(f"{PROCESSOR}: {name} is {_shown(given)}, expected true or false")
        values[rule] = value
        fields[rule] = f"{PROCESSOR} {name}"
    for name, expected in files.only.items():
        if (given := whole.get(name, expected)) is not expected:
            problems.append(
                f"{PROCESSOR}: {name} is {_shown(given)}, megacp can only express "
                f"{_shown(expected)}"
            )
    for rule, value in files.constants.items():
        values[rule] = value
        fields[rule] = "the library's processor"
    _note_names(PROCESSOR, whole, {*files.switches, *files.only}, notes)
    return problems


def _note_names(where: str, content: Content, used: set[str], notes: list[str]) -> None:
    """Add a line about fields with a value that nothing reads here; the library's classes ignore
    them as well.
    """
    left = [
        name
        for name, value in content.items()
        if name not in used | _SILENT and value not in (None, False)
    ]
    if left:
        told = listed([f"{printable(name)} {_shown(content[name])}" for name in sorted(left)], 10)
        notes.append(f"{where}: not used, as in the library: {told}")
