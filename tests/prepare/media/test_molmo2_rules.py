"""The crops, patches, pooling and tokens of Molmo2 match the transformers library."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.engine.rows.image_shards import BOUNDARY_DTYPE, compute_image_shard_boundaries, units_of
from megacp.training.data.vision.molmo2 import (
    Molmo2Rules,
    frame_layout,
    image_layout,
    image_patches,
    pooling_windows,
)
from tests.prepare.media.pictures import TINY, WordTokenizer, noise
from tests.reference import molmo2_processor as reference
from tests.reference.packing import least_largest_cost

MOLMO2 = Molmo2Rules().with_token_ids(WordTokenizer)
RULES = {
    "tiny": TINY,
    "no margins, odd pooling": dataclasses.replace(
        TINY, overlap_margins=(0, 0), image_pooling=(3, 2), image_size=20
    ),
    "uneven margins": dataclasses.replace(TINY, overlap_margins=(2, 1), image_size=24, max_crops=9),
    "one crop": dataclasses.replace(TINY, max_crops=1),
    "Molmo2": MOLMO2,
}
SIZES = {
    "tiny": [(int(w), int(h)) for w, h in np.random.default_rng(0).integers(1, 120, (150, 2))],
    "Molmo2": [
        (378, 378),
        (100, 100),
        (640, 480),
        (1, 1),
        (2000, 300),
        (77, 1500),
        (1024, 768),
        (113, 112),
    ],
}
# One of 255 levels divided by a deviation of 0.5, with a margin for float32 rounding.
ONE_LEVEL = 2 / 255 * 1.001


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_pixels_and_pooling_are_those_of_the_transformers_library(name: str) -> None:
    rules = RULES[name]
    for number, (width, height) in enumerate(SIZES.get(name, SIZES["tiny"][:40])):
        pixels = noise(width, height, number)
        patches, pooling, _ = reference.process_image(pixels, rules)
        mine = image_patches(pixels, rules)  # [crops, patches, patch pixels]
        layout = image_layout(width, height, rules)
        assert mine.dtype == np.float32
        assert mine.shape == patches.shape
        assert len(mine) == layout.num_crops
        assert np.array_equal(layout.pooling, pooling), (width, height)
        assert np.abs(mine - patches).max() <= ONE_LEVEL, (width, height)


def spelled(text: str, rules: Molmo2Rules) -> list[int]:
    ids = {text: rules.token_ids[name] for name, text in Molmo2Rules.token_texts.items()}
    return [ids[word] for word in re.findall("<[^>]*>", text)]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("low_res_columns", [None, False, True])
def test_tokens_are_those_of_the_transformers_library(
    columns: bool, low_res_columns: bool | None
) -> None:
    for name in ("tiny", "no margins, odd pooling"):
        rules = dataclasses.replace(
            RULES[name], use_column_tokens=columns, low_res_column_tokens=low_res_columns
        )
        for width, height in SIZES["tiny"][:30]:
            _, pooling, grid = reference.process_image(noise(width, height), rules)
            layout = image_layout(width, height, rules)
            assert np.array_equal(layout.pooling, pooling)
            assert layout.tokens.tolist() == spelled(reference.image_text(grid, rules), rules)
            assert int((layout.tokens == rules.token_ids["image_patch"]).sum()) == len(
                layout.pooling
            )


@pytest.mark.parametrize("columns", [False, True])
def test_a_frame_is_one_crop_whose_tokens_are_those_of_the_library(columns: bool) -> None:
    rules = dataclasses.replace(TINY, video_column_tokens=columns)
    patches, pooling, grid = reference.process_video(noise(30, 20)[None], rules)
    layout = frame_layout(rules)
    assert layout.num_crops == len(patches) == 1 and np.array_equal(layout.pooling, pooling)
    text = reference.video_text([1, *grid], [0.0], rules)
    assert text.startswith("0.0 <frame_start>") and layout.tokens.tolist() == spelled(text, rules)


# ---- rules


def test_rules_survive_json_and_unknown_keys_or_types_are_named() -> None:
    assert Molmo2Rules.from_dict(MOLMO2.to_dict()) == MOLMO2
    assert Molmo2Rules.from_dict({"patch_size": 7, "video_fps": 3}).patch_size == 7
    with pytest.raises(ValueError, match="unknown keys patchsize; known are image_size"):
        Molmo2Rules.from_dict({"patchsize": 7})
    with pytest.raises(ValueError, match="`patch_size` is '7'; `use_column_tokens` is 1"):
        Molmo2Rules.from_dict({"patch_size": "7", "use_column_tokens": 1})


def test_all_wrong_rules_are_listed_at_once_with_their_flags() -> None:
    with pytest.raises(ValueError) as error:
        Molmo2Rules.from_dict(
            {
                "image_size": 0,
                "max_crops": 0,
                "video_fps": 0.0,
                "image_pooling": [0, 2],
                "time_mode": "x",
            }
            | {
                "image_std": [0.0, 1.0, 1.0],
                "token_ids": {"image_patch": 3, "image_col": 3, "cat": 1},
            }
        )
    for part in (
        "--image-size is 0",
        "--max-crops is 0",
        "--video-fps is 0.0",
        "--image-pooling is (0, 2)",
        "--time-mode is 'x', but must be per-frame or off",
        "--image-std are",
        "--image-token-ids contains cat",
        "but must be different",
    ):
        assert part in str(error.value)
    with pytest.raises(
        ValueError,
        match="--image-token-ids are .*4000000000.*, but must be different and in the range 0 to 2147483646",
    ):
        Molmo2Rules.from_dict({"token_ids": {"image_patch": 4_000_000_000}})
    with pytest.raises(ValueError, match="unknown keys 14, foo; known are"):
        Molmo2Rules.from_dict({14: 2, "foo": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="`token_ids` is {5: 7}"):
        Molmo2Rules.from_dict({"token_ids": {5: 7}})
    with pytest.raises(ValueError, match="--image-size 378 is not a multiple of --patch-size 16"):
        Molmo2Rules.from_dict({"patch_size": 16})
    with pytest.raises(ValueError, match=r"--overlap-margins .* leave nothing of 4"):
        Molmo2Rules.from_dict({"image_size": 16, "patch_size": 4})


def test_image_tokens_are_given_found_in_the_tokenizer_or_put_above_it() -> None:
    assert sorted(MOLMO2.token_ids.values()) == list(range(257, 265))
    tokenizer = SimpleNamespace(vocab_size=50, token_id={"<im_patch>": 7, "<im_end>": 9}.get)
    ids = Molmo2Rules(token_ids={"image_start": 60}).with_token_ids(tokenizer).token_ids
    assert (ids["image_patch"], ids["image_end"], ids["image_start"]) == (7, 9, 60)
    assert sorted(ids.values())[3:] == [61, 62, 63, 64, 65] and set(ids) == set(
        Molmo2Rules.token_texts
    )


def test_a_grid_that_does_not_divide_is_filled_up_at_its_end() -> None:
    windows, size = pooling_windows(np.arange(9).reshape(3, 3), (2, 2))
    assert size == (2, 2) and windows.tolist() == [
        [0, 1, 3, 4],
        [2, -1, 5, -1],
        [6, 7, -1, -1],
        [8, -1, -1, -1],
    ]


def test_a_frame_of_the_models_size_keeps_its_pixels_and_their_ends_are_one() -> None:
    rules = Molmo2Rules(image_size=4, patch_size=2, overlap_margins=(0, 0)).with_token_ids(
        WordTokenizer
    )
    pixels = np.arange(0, 240, 5, dtype=np.uint8).reshape(4, 4, 3)
    pixels[0, 0] = 0
    pixels[3, 3] = 255
    patches = rules.pixels_of_frames(rules.fitted(pixels, 1)[None, None])[0][0]  # [4, 2 * 2 * 3]
    expected = pixels.reshape(2, 2, 2, 2, 3).swapaxes(1, 2).reshape(4, 12) / 127.5 - 1.0
    np.testing.assert_allclose(patches, expected, atol=1e-6)
    assert patches.min() == -1.0 and patches.max() == 1.0


UNITS = st.lists(st.integers(1, 9), max_size=8)


def shards(images: list[int], ranks: int) -> list[list[int]]:
    """Return the images of each unit of each rank, and check the table of boundaries.

    Each image has 10 pooled tokens.
    """
    ends = np.cumsum(images, dtype=np.int64)  # [units]
    bounds = ends, ends * 10
    table = compute_image_shard_boundaries(*bounds, ranks)
    assert table.dtype == BOUNDARY_DTYPE and np.array_equal(
        table["end_pool_idx"], 10 * table["end_image_idx"]
    )
    parts = [units_of(table, bounds[0], rank) for rank in range(ranks)]
    in_order = list(itertools.chain(*parts))
    assert in_order == list(range(len(images))), "every unit once, in ascending order"
    return [[images[unit] for unit in part] for part in parts]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(UNITS, st.integers(1, 6))
def test_the_largest_cost_is_the_optimum_and_no_rank_starves_needlessly(
    images: list[int], ranks: int
) -> None:
    parts = shards(images, ranks)
    assert max(map(sum, parts)) == least_largest_cost(images, ranks)
    assert sum(not part for part in parts) == max(0, ranks - len(images))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), max_size=12), st.integers(1, 8))
@pytest.mark.slow
def test_every_field_of_the_table_counted_by_hand(units: list[tuple[int, int]], ranks: int) -> None:
    crops = [c for c, _ in units]
    pooled = [p for _, p in units]
    bounds = np.cumsum(crops, dtype=np.int64), np.cumsum(pooled, dtype=np.int64)
    table = compute_image_shard_boundaries(*bounds, ranks)
    # A rank's range must begin and end between units.
    edges = {(sum(crops[:unit]), sum(pooled[:unit])) for unit in range(len(units) + 1)}
    before = (0, 0)
    largest = 0
    for row in table.tolist():
        start_image, end_image, start_pool, end_pool, most = row
        assert (start_image, start_pool) == before and (end_image, end_pool) in edges
        before = (end_image, end_pool)
        largest = max(largest, end_pool - start_pool)
        assert most == table["max_num_tokens"][0]
    assert before == (sum(crops), sum(pooled)) and largest == table["max_num_tokens"][0]


@pytest.mark.parametrize(
    ("images", "ranks", "expected"),
    [
        ([1, 2], 2, [[1], [2]]),
        ([1, 3], 3, [[1], [3], []]),
        ([2, 1, 1, 3], 4, [[2], [1], [1], [3]]),
        ([2, 1, 3, 1], 4, [[2], [1], [3], [1]]),
        ([], 3, [[], [], []]),
        ([5], 4, [[5], [], [], []]),
        ([9] + [1] * 128, 2, [[9] + [1] * 60, [1] * 68]),
        ([1, 1, 64, 1, 1], 2, [[1, 1, 64], [1, 1]]),
    ],
)
def test_cases_that_a_greedy_split_gets_wrong(
    images: list[int], ranks: int, expected: list[list[int]]
) -> None:
    found = shards(images, ranks)
    assert max(map(sum, found)) == max(map(sum, expected))
    assert [len(part) == 0 for part in found] == [len(part) == 0 for part in expected]
    if len(images) <= ranks:
        assert found == expected
