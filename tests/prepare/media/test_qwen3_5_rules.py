"""The sizes, patches, tokens and times of Qwen3.5 match the transformers library."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from megacp.training.data.vision.decoding import rules_from_dict
from megacp.training.data.vision.molmo2 import Molmo2Rules
from megacp.training.data.vision.qwen3_5 import Qwen35Rules
from megacp.training.data.vision.rules import ImageError
from tests.prepare.media.pictures import WordTokenizer, noise
from tests.reference import qwen_processor as reference

QWEN = Qwen35Rules().with_token_ids(WordTokenizer)
SMALL = dataclasses.replace(
    QWEN, patch_size=4, resize_pixels=(300, 6000), video_resize_pixels=(2000, 30_000), max_frames=12
)
MEAN = dataclasses.replace(
    SMALL, image_mean=(0.4, 0.5, 0.6), image_std=(0.2, 0.25, 0.3), merge_size=3
)
# Tolerance for rounding: the library's processor without torchvision scales before it subtracts.
ROUNDED = 1e-6


def two_levels(rules: Qwen35Rules) -> float:
    """Return the tolerance: torch's 16-bit weights may change a byte by one in each of two passes."""
    return 2 / 255 / min(rules.image_std) + ROUNDED


def spelled(text: str, rules: Qwen35Rules) -> list[int]:
    ids = {text: rules.token_ids[name] for name, text in Qwen35Rules.token_texts.items()}
    return [ids[word] for word in re.findall(r"<\|[^>]*\|>", text)]


def sizes(count: int, seed: int, least: int = 1) -> list[tuple[int, int]]:
    """Return widths and heights from tiny to large; most images are not square."""
    drawn = np.random.default_rng(seed).uniform(np.log(least), np.log(300), (count, 2))
    return [(int(w), int(h)) for w, h in np.exp(drawn) if 1 / 200 <= int(w) / int(h) <= 200]


@pytest.mark.parametrize("rules", [QWEN, SMALL, MEAN], ids=["Qwen3.5", "small", "other mean"])
def test_patches_grids_and_tokens_of_images_are_those_of_the_transformers_library(
    rules: Qwen35Rules,
) -> None:
    chosen = sizes(205, 0) if rules is SMALL else [(1, 1), (640, 480), (37, 221), *sizes(8, 1)]
    assert rules is not SMALL or len(chosen) >= 200
    for number, (width, height) in enumerate(chosen):
        pixels = noise(width, height, number)
        expected, grid = reference.process_image(pixels, rules)
        layout = rules.layout_of_image(width, height)
        patches, pooling = rules.pixels_of_image(pixels)
        assert patches.dtype == np.float32 and patches.shape == (
            layout.num_crops,
            *rules.patch_shape,
        )
        assert [1, *np.array(layout.grid) * rules.merge_size] == grid, (width, height)
        assert patches[:, 0].shape == expected.shape
        assert np.abs(patches[:, 0] - expected).max() <= two_levels(rules), (width, height)
        assert np.array_equal(pooling, layout.pooling)
        assert np.array_equal(pooling.ravel(), np.arange(len(expected))), (
            "a token's patches follow each other"
        )
        assert layout.tokens.tolist() == spelled(reference.image_text(grid, rules), rules)


def test_without_a_resize_every_number_of_a_patch_is_that_of_the_library() -> None:
    for rules, side in ((QWEN, 320), (SMALL, 48), (MEAN, 48)):
        pixels = noise(side, side, side)
        expected, _ = reference.process_image(pixels, rules)
        assert np.abs(rules.pixels_of_image(pixels)[0][:, 0] - expected).max() <= ROUNDED
        frames = np.stack([noise(32, 32, number) for number in range(2)] * 2)
        square = dataclasses.replace(QWEN, patch_size=8, video_resize_pixels=(1, 1 << 20))
        expected, _ = reference.process_video(frames, square)
        assert np.array_equal(
            square.pixels_of_frames(frames.reshape(2, 2, 32, 32, 3))[0][:, 0], expected
        )


@pytest.mark.parametrize("rules", [QWEN, SMALL], ids=["Qwen3.5", "small"])
def test_frames_patches_grids_times_and_tokens_of_videos_are_those_of_the_library(
    rules: Qwen35Rules,
) -> None:
    rng = np.random.default_rng(5)
    for width, height in sizes(22, 2, least=4):
        num_frames = int(rng.integers(2, 60))
        fps = float(rng.choice([2.0, 3.7, 24.0, 29.97]))
        taken = rules.sampled(num_frames, fps)
        assert taken == reference.sampled_frames(num_frames, fps, rules)
        frames = np.stack([noise(width, height, number) for number in taken])
        expected, grid = reference.process_video(frames, rules)
        units = rules.layouts_of_video(taken, fps, {(width, height)})
        assert [len(units), *np.array(units[0][1].grid) * rules.merge_size] == grid, (
            width,
            height,
            len(taken),
        )
        text = reference.video_text(grid, taken, fps, rules)
        assert re.findall("<[0-9.]+ seconds>", text) == [time for time, _ in units]
        tokens = np.concatenate([layout.tokens for _, layout in units]).tolist()
        assert tokens == spelled(text, rules)
        # Units are pairs of frames; an odd number of frames repeats the last one.
        padded = [*frames, frames[-1]][: 2 * len(units)]
        fitted = np.stack([rules.fitted(frame, len(taken)) for frame in padded])
        patches, pooling = rules.pixels_of_frames(fitted.reshape(-1, 2, *fitted.shape[1:]))
        assert np.abs(patches[:, 0] - expected).max() <= two_levels(rules), (width, height)
        assert len(patches) == sum(layout.num_crops for _, layout in units) and pooling.size == len(
            patches
        )


def test_frames_of_long_and_short_videos_are_those_of_the_library() -> None:
    for num_frames in (1, 2, 3, 5, 17, 100, 1001, 5000):
        for fps in (0.5, 1.0, 2.0, 23.976, 60.0):
            for rules in (QWEN, SMALL):
                assert rules.sampled(num_frames, fps) == reference.sampled_frames(
                    num_frames, fps, rules
                )


def test_what_the_library_refuses_is_refused() -> None:
    with pytest.raises(
        ImageError, match="2010 x 10: one side is more than 200 times as long as the other"
    ):
        QWEN.layout_of_image(2010, 10)
    with pytest.raises(ValueError, match="must be smaller than 200"):
        reference.process_image(noise(2010, 10), QWEN)
    with pytest.raises(ImageError, match="a video needs 2 frames, but it has 1"):
        QWEN.layouts_of_video([0], 2.0, {(40, 40)})
    with pytest.raises(ImageError, match="the frames of the video have different sizes"):
        QWEN.layouts_of_video([0, 1], 2.0, {(40, 40), (40, 41)})


def test_rules_survive_json_by_the_name_of_their_family() -> None:
    assert rules_from_dict(QWEN.to_dict()) == QWEN and QWEN.to_dict()["family"] == "qwen3_5"
    assert rules_from_dict({"patch_size": 7}) == Molmo2Rules(patch_size=7), (
        "rules without a family belong to Molmo2"
    )
    with pytest.raises(
        ValueError, match="--vision-family is 'llava', but must be one of molmo2, qwen3_5"
    ):
        rules_from_dict({"family": "llava"})
    with pytest.raises(
        ValueError, match="unknown keys max_crops; known are patch_size, merge_size"
    ):
        rules_from_dict({"family": "qwen3_5", "max_crops": 3})
    with pytest.raises(
        ValueError,
        match="--merge-size is 0.*--video-resize-pixels is .5, 4., but the minimum must not be above",
    ):
        Qwen35Rules(merge_size=0, video_resize_pixels=(5, 4))
