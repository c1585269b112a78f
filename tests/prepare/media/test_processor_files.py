"""Rules from processor files equal the attributes of the transformers library's processors."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.media.processor_files import (
    IMAGES,
    PROCESSOR,
    VIDEOS,
    FolderRules,
    read_processor,
)
from megacp.training.data.vision.decoding import RULES
from tests.prepare.media.pictures import WordTokenizer

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

SIDES = {"shortest_edge": 1024, "longest_edge": 65536}
QWEN_IMAGE = {
    "size": SIDES,
    "patch_size": 16,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.25] * 3,
}
QWEN_VIDEO = {**QWEN_IMAGE, "size": {"shortest_edge": 4096, "longest_edge": 262144}, "fps": 4}
MOLMO_IMAGE = {"size": {"height": 56, "width": 56}, "overlap_margins": [1, 1], "max_crops": 3}
MOLMO_STEPS = {"do_rescale": True, "do_normalize": True}
MOLMO_VIDEO = {"size": [56, 56], "num_frames": 9, "max_fps": 1.5, **MOLMO_STEPS}
Files = dict[str, Any]


def written(folder: Path, files: Files) -> Path:
    for name in (IMAGES, VIDEOS, PROCESSOR):
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def library(module: str, name: str, folder: Path) -> Any:
    cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return cls.from_pretrained(folder)


def by_library(folder: Path, family: str) -> dict[str, Any]:
    """Return the rules of a folder according to the library's processors."""
    if family == "qwen3_5":
        image = library(
            "qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil", folder
        )
        video = library("qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor", folder)
        own = {
            "merge_size": image.merge_size,
            "resize_pixels": [image.size.shortest_edge, image.size.longest_edge],
            "video_resize_pixels": [video.size.shortest_edge, video.size.longest_edge],
            "video_fps": video.fps,
            "min_frames": video.min_frames,
            "max_frames": video.max_frames,
        }
    else:
        image = library("molmo2.image_processing_molmo2", "Molmo2ImageProcessor", folder)
        video = library("molmo2.video_processing_molmo2", "Molmo2VideoProcessor", folder)
        assert (image.size.height, video.size.height) == (image.size.width, image.size.height)
        own = {
            "image_size": image.size.height,
            "max_crops": image.max_crops,
            "overlap_margins": list(image.overlap_margins),
            "image_pooling": list(image.pooling_size),
            "video_pooling": list(video.pooling_size),
            "max_frames": video.num_frames,
            "video_fps": video.max_fps,
        }
    assert image.patch_size == video.patch_size
    for part in (image, video):
        assert part.do_rescale and part.do_normalize and abs(part.rescale_factor * 255 - 1) < 1e-9
    return {
        "patch_size": image.patch_size,
        "image_mean": triple(image.image_mean),
        "image_std": triple(image.image_std),
        **own,
    }


def triple(value: Any) -> list[float]:
    return [value] * 3 if isinstance(value, int | float) else list(value)


def read(folder: Path, family: str) -> FolderRules:
    found = read_processor(folder, family)
    assert found is not None
    return found


SAME_AS_LIBRARY: dict[str, tuple[str, Files]] = {
    "two files": ("qwen3_5", {IMAGES: QWEN_IMAGE, VIDEOS: QWEN_VIDEO}),
    "older names of sizes beside size": (
        "qwen3_5",
        {IMAGES: {**QWEN_IMAGE, "min_pixels": 2048, "max_pixels": 99_999}, VIDEOS: QWEN_VIDEO},
    ),
    "older names inside size too": (
        "qwen3_5",
        {
            IMAGES: {
                **QWEN_IMAGE,
                "size": {"min_pixels": 1, "max_pixels": 2},
                "min_pixels": 2048,
                "max_pixels": 9999,
            },
            VIDEOS: QWEN_VIDEO,
        },
    ),
    "older names of sizes mean nothing for videos": (
        "qwen3_5",
        {IMAGES: QWEN_IMAGE, VIDEOS: {**QWEN_VIDEO, "min_pixels": 1, "max_pixels": 4096}},
    ),
    "what is missing": (
        "qwen3_5",
        {
            IMAGES: {"patch_size": 16, "image_mean": 0.5, "image_std": 0.5},
            VIDEOS: {"max_frames": 31, "cap_pixels_per_frame": None, "num_frames": None},
        },
    ),
    "a missing mean of images, which is not that of videos": (
        "qwen3_5",
        {
            IMAGES: {"patch_size": 16, "size": SIDES},
            VIDEOS: {
                "image_mean": [0.48145466, 0.4578275, 0.40821073],
                "image_std": [0.26862954, 0.26130258, 0.27577711],
            },
        },
    ),
    "one number for three colours": (
        "qwen3_5",
        {IMAGES: {**QWEN_IMAGE, "image_mean": 0.25}, VIDEOS: {**QWEN_VIDEO, "image_mean": 0.25}},
    ),
    "both inside the file of version 5": (
        "qwen3_5",
        {PROCESSOR: {"image_processor": QWEN_IMAGE, "video_processor": QWEN_VIDEO}},
    ),
    "the file of version 5 before the older ones": (
        "qwen3_5",
        {
            PROCESSOR: {"image_processor": QWEN_IMAGE, "video_processor": QWEN_VIDEO},
            IMAGES: {"size": {"shortest_edge": 1, "longest_edge": 2}},
            VIDEOS: {"fps": 9},
        },
    ),
    "one inside, one beside": (
        "qwen3_5",
        {PROCESSOR: {"video_processor": QWEN_VIDEO}, IMAGES: QWEN_IMAGE},
    ),
    "videos by the file of images": (
        "qwen3_5",
        {IMAGES: {**QWEN_IMAGE, "fps": 3, "max_frames": 40}},
    ),
    "crops": ("molmo2", {IMAGES: MOLMO_IMAGE, VIDEOS: MOLMO_VIDEO}),
    "crops by one number": ("molmo2", {IMAGES: {**MOLMO_IMAGE, "size": 56}, VIDEOS: MOLMO_VIDEO}),
    "frames of videos by the file of images": (
        "molmo2",
        {IMAGES: {**MOLMO_IMAGE, **MOLMO_STEPS, "pooling_size": [2, 1], "num_frames": 5}},
    ),
}


@pytest.mark.parametrize("name", SAME_AS_LIBRARY)
def test_rules_of_a_folder_are_the_attributes_of_the_library(name: str, tmp_path: Path) -> None:
    family, files = SAME_AS_LIBRARY[name]
    told = read(written(tmp_path, files), family)
    expected = by_library(tmp_path, family)
    assert {rule: told.values[rule] for rule in expected} == expected


def test_an_image_has_the_tokens_of_the_library_by_the_folder(tmp_path: Path) -> None:
    """An image of 96 x 64 pixels has 3 x 2 windows of 32 x 32 pixels."""
    told = read(written(tmp_path, {IMAGES: QWEN_IMAGE, VIDEOS: QWEN_VIDEO}), "qwen3_5")
    rules = told.with_ids({}).with_token_ids(WordTokenizer)
    image = library("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil", tmp_path)
    assert image.get_number_of_image_patches(64, 96) == 4 * 6
    assert len(rules.layout_of_image(96, 64).pooling) == 6


def test_switches_of_the_processor_as_a_whole_follow_its_signature(tmp_path: Path) -> None:
    """`image_use_col_tokens` is true if it is missing, and false if it is null."""
    files = {IMAGES: MOLMO_IMAGE, VIDEOS: MOLMO_VIDEO}
    assert read(written(tmp_path, files), "molmo2").values["use_column_tokens"] is True
    whole = {
        "image_use_col_tokens": None,
        "video_use_col_tokens": True,
        "use_single_crop_col_tokens": False,
    }
    values = read(written(tmp_path, {**files, PROCESSOR: whole}), "molmo2").values
    assert values["use_column_tokens"] is False and values["video_column_tokens"] is True
    assert values["low_res_column_tokens"] is False


def test_what_is_not_used_is_told_once_a_file(tmp_path: Path) -> None:
    image = {
        **QWEN_IMAGE,
        "do_center_crop": True,
        "crop_size": {"height": 8, "width": 8},
        "do_pad": False,
    }
    files = {
        IMAGES: image,
        VIDEOS: {**QWEN_VIDEO, "max_pixels": 4096, "processor_class": "Qwen3VLProcessor"},
    }
    notes = read(written(tmp_path, files), "qwen3_5").notes
    assert notes == (
        f"{VIDEOS}: not used, as in the library: max_pixels 4096",
        f"{IMAGES}: not used, as in the library: crop_size {{'height': 8, 'width': 8}}, "
        f"do_center_crop True",
    )
    whole = {"image_processor": QWEN_IMAGE, "video_processor": QWEN_VIDEO}
    notes = read(written(tmp_path, {PROCESSOR: whole, **files}), "qwen3_5").notes
    assert len(notes) == 2 and all(
        "is not used: processor_config.json has" in note for note in notes
    )
    assert read(written(tmp_path, {PROCESSOR: whole, IMAGES: QWEN_IMAGE}), "qwen3_5").notes == ()


def test_a_folder_without_settings_of_videos_says_so(tmp_path: Path) -> None:
    """With this class name, the library uses another class for videos."""
    image = {**QWEN_IMAGE, "image_processor_type": "Qwen2VLImageProcessor"}
    told = read(written(tmp_path, {IMAGES: image}), "qwen3_5")
    assert told.notes == (
        f"there is no {VIDEOS}: videos use the defaults of the library's Qwen3VLVideoProcessor",
    )
    assert (
        told.values["video_resize_pixels"] == [131072, 786432] and told.values["video_fps"] == 2.0
    )
    # the library would use all frames here, which our rules cannot express
    told = read(written(tmp_path, {IMAGES: {**QWEN_IMAGE, "do_sample_frames": False}}), "qwen3_5")
    assert f"there is no {VIDEOS}: videos use" in told.notes[0] and told.values["video_fps"] == 2.0
    assert read_processor(written(tmp_path, {}), "qwen3_5") is None


REFUSED: dict[str, tuple[str, str, Files, str]] = {
    "no normalisation": (
        "qwen3_5",
        IMAGES,
        {"do_normalize": False},
        "do_normalize is False, but megacp supports only",
    ),
    "no resizing": ("qwen3_5", VIDEOS, {"do_resize": False}, "do_resize is False"),
    "no RGB": ("qwen3_5", IMAGES, {"do_convert_rgb": False}, "do_convert_rgb is False"),
    "another scale": (
        "qwen3_5",
        IMAGES,
        {"rescale_factor": 1 / 127.5},
        "rescale_factor is 0.00784",
    ),
    "another filter": (
        "qwen3_5",
        VIDEOS,
        {"resample": 2},
        "resample is 2, but megacp supports only 3",
    ),
    "all frames": ("qwen3_5", VIDEOS, {"do_sample_frames": False}, "do_sample_frames is False"),
    "a number of frames": (
        "qwen3_5",
        VIDEOS,
        {"num_frames": 8},
        "num_frames is 8, but megacp supports only null",
    ),
    "capped frames": (
        "qwen3_5",
        VIDEOS,
        {"cap_pixels_per_frame": True},
        "cap_pixels_per_frame is True",
    ),
    "pairs of frames": ("qwen3_5", VIDEOS, {"temporal_patch_size": 1}, "temporal_patch_size is 1"),
    "another patch": (
        "qwen3_5",
        VIDEOS,
        {"patch_size": 14},
        "patch_size is 14, but preprocessor_config.json patch_size",
    ),
    "half a size": (
        "qwen3_5",
        IMAGES,
        {"size": {"shortest_edge": 9}},
        "size is .*expected shortest_edge and longest",
    ),
    "a size of sides": (
        "qwen3_5",
        IMAGES,
        {"size": 448},
        "size is 448; expected shortest_edge and longest_edge",
    ),
    "an older size alone": (
        "qwen3_5",
        IMAGES,
        {"size": {"min_pixels": 1, "max_pixels": 2}},
        "expected shortest_edge",
    ),
    "an older size as text": (
        "qwen3_5",
        IMAGES,
        {"max_pixels": "9"},
        "max_pixels is '9'; expected shortest_edge",
    ),
    "sizes in disorder": (
        "qwen3_5",
        VIDEOS,
        {"size": {"shortest_edge": 9, "longest_edge": 3}},
        "in order",
    ),
    "another class": (
        "qwen3_5",
        IMAGES,
        {"image_processor_type": "CLIPImageProcessor"},
        "expected Qwen2VLImageProc",
    ),
    "another class of videos": (
        "qwen3_5",
        VIDEOS,
        {"video_processor_type": "Qwen2VLVideoProcessor"},
        "expected Qwen3",
    ),
    "no rate": ("qwen3_5", VIDEOS, {"fps": 0}, "fps is 0; expected a number above 0"),
    "no deviation": (
        "qwen3_5",
        IMAGES,
        {"image_std": [0.5, 0.5, 0.0]},
        "image_std is .*expected three numbers",
    ),
    "two colours": (
        "qwen3_5",
        IMAGES,
        {"image_mean": [0.5, 0.5]},
        "image_mean is .*expected three numbers",
    ),
    "no square": (
        "molmo2",
        IMAGES,
        {"size": {"height": 56, "width": 28}},
        "supports only squares",
    ),
    "the shorter side": (
        "molmo2",
        IMAGES,
        {"size": 56, "default_to_square": False},
        "supports only squares",
    ),
    "frames by rate": ("molmo2", VIDEOS, {"fps": 2}, "fps is 2, but megacp supports only null"),
    "videos as bytes": (
        "molmo2",
        VIDEOS,
        {"do_rescale": None},
        "do_rescale is null, but megacp supports only True",
    ),
    "a null for a size of videos": (
        "qwen3_5",
        VIDEOS,
        {"size": None},
        "size is null; expected shortest_edge and",
    ),
    "a null for a rate": (
        "qwen3_5",
        VIDEOS,
        {"fps": None},
        "fps is null; expected a number above 0",
    ),
    "a null for a step": (
        "qwen3_5",
        IMAGES,
        {"do_normalize": None},
        "do_normalize is null, but megacp supports only",
    ),
    "crops without a patch": (
        "molmo2",
        IMAGES,
        {"patch_size": 15},
        "patch_size is 14, .*patch_size is 15",
    ),
    "plain frames": (
        "molmo2",
        PROCESSOR,
        {"use_frame_special_tokens": False},
        "use_frame_special_tokens is False",
    ),
    "a null for plain frames": (
        "molmo2",
        PROCESSOR,
        {"use_frame_special_tokens": None},
        "special_tokens is null",
    ),
    "margins over all": (
        "molmo2",
        IMAGES,
        {"overlap_margins": [2, 2]},
        "leave nothing of 4 patches",
    ),
}


def test_videos_that_the_library_would_not_normalise_are_refused(tmp_path: Path) -> None:
    """The library's video class of Molmo2 has no defaults for these steps."""
    video = {name: value for name, value in MOLMO_VIDEO.items() if name != "do_normalize"}
    written(tmp_path, {IMAGES: MOLMO_IMAGE, VIDEOS: video})
    assert not library(
        "molmo2.video_processing_molmo2", "Molmo2VideoProcessor", tmp_path
    ).do_normalize
    with pytest.raises(
        ValueError, match="do_normalize is missing, which the library reads as False"
    ):
        read_processor(tmp_path, "molmo2")


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_no_rule_expresses_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    family, file, change, told = REFUSED[name]
    image, video = (QWEN_IMAGE, QWEN_VIDEO) if family == "qwen3_5" else (MOLMO_IMAGE, MOLMO_VIDEO)
    files: Files = {IMAGES: image, VIDEOS: video, PROCESSOR: {}}
    files[file] = {**files[file], **change}
    with pytest.raises(ValueError, match=told):
        read_processor(written(tmp_path, files), family)


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    8,
    14,
    16,
    56,
    0.5,
    1.5,
    4.0,
    "8",
    [],
    [1, 1],
    [2, 2],
    [0.5] * 3,
]
VALUES += [
    [0.1, 0.2, 0.3],
    {"height": 56, "width": 56},
    {"shortest_edge": 1024, "longest_edge": 4096},
    {"height": 56},
]
VALUES += [{"min_pixels": 64, "max_pixels": 9999}, {}, 65536, 99_999, -1, 1e308, 1 / 255]
NAMES = {
    "qwen3_5": "size min_pixels max_pixels patch_size merge_size image_mean image_std do_rescale resample fps",
    "molmo2": "size patch_size image_mean image_std max_crops overlap_margins pooling_size num_frames max_fps",
}


@pytest.mark.parametrize("family", NAMES)
def test_whatever_is_taken_is_what_the_library_reads(family: str, tmp_path: Path) -> None:
    """Random fields with random values are read like the library, or raise a ValueError."""
    drawn = random.Random(0)
    base = (QWEN_IMAGE, QWEN_VIDEO) if family == "qwen3_5" else (MOLMO_IMAGE, MOLMO_VIDEO)
    taken = 0
    for _ in range(400):
        image, video = (dict(part) for part in base)
        for _ in range(drawn.randint(1, 2)):
            name, value = drawn.choice(NAMES[family].split()), drawn.choice(VALUES)
            for part in drawn.choice([(image,), (video,), (image, video)]):
                part[name] = value
        files: Files = {IMAGES: image, VIDEOS: video}
        if drawn.random() < 0.5:
            files = {PROCESSOR: {"image_processor": image, "video_processor": video}}
        written(tmp_path, files)
        try:
            told = read(tmp_path, family)
        except ValueError:
            continue
        taken += 1
        expected = by_library(tmp_path, family)
        assert {rule: told.values[rule] for rule in expected} == expected, files
        assert RULES[family].from_dict(dict(told.values))
    assert taken > 50
