"""Images of a row: bounds and places over its packs, spans, decoding per rank, and bad images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.image_shards import REPLICATE
from megacp.engine.rows.rank import DataRank
from megacp.training.data.collate import collate
from megacp.training.data.images import ImageLoading
from megacp.training.data.loader import LoaderOptions, PackedLoader
from megacp.training.data.mock import MockDecoder, MockImages, MockRules
from megacp.training.data.reader import Pack
from megacp.training.data.vision.rules import ImageError, Pixels

IMAGES = MockImages(patches_per_crop=6, patch_dim=5, image_patch=50)
RULES = MockRules(50, 80, "mixed", ragged=True, images=IMAGES)


class BrokenDecoder(MockDecoder):
    """Refuses some items of some packs, and records its calls."""

    def __init__(self, broken: Sequence[int] = ()) -> None:
        super().__init__(IMAGES)
        self.broken, self.asked = set(broken), set[int]()

    def image(self, data: bytes) -> Pixels:
        self._note(data)
        return super().image(data)

    def video(self, data: bytes, frames: Sequence[int]) -> Pixels:
        self._note(data)
        return super().video(data, frames)

    def _note(self, data: bytes) -> None:
        item = int.from_bytes(data[16:24], "little")
        self.asked.add(item)
        if item in self.broken:
            raise ImageError("half a JPEG")


def rows_of_ranks(packs: list[Pack], ranks: int, strategy: str = "stored") -> list[PackedBatch]:
    loading = ImageLoading(MockDecoder(IMAGES), 0, ranks, strategy=strategy)
    return [
        collate(packs, loading=dataclasses.replace(loading, cp_rank=rank)) for rank in range(ranks)
    ]


def spans_by_hand(
    packs: list[Pack], attention: str
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the span of each token, the places, and both bounds, one token at a time."""
    span, places, images, pooled = list[int](), list[int](), list[int](), list[int]()
    document, number, parts = 0, 0, dict[tuple[int, int], int]()
    for pack in packs:
        taken, crops = 0, 0
        for index, segment in enumerate(pack.segments):
            document += 1
            row = [0] * int(segment["padded_length"])
            for unit in pack.images.units[pack.images.units["segment"] == index]:
                number += 1
                for token in range(unit["start"], unit["start"] + unit["num_tokens"]):
                    part = parts.setdefault((document, int(unit["branch"])), len(parts) + 1)
                    row[token] = {"example": part, "image": number, "causal": 0}[attention]
                    if pack.tokens[taken + token] == IMAGES.image_patch:
                        places.append(len(span) + token)
                crops, before = int(unit["image_stop"]), crops
                images.append((images[-1] if images else 0) + crops - before)
                pooled.append(len(places))
            taken += int(segment["true_length"])
            span += row
    return span, places, images, pooled


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 500), st.integers(1, 3), st.sampled_from(["example", "image", "causal"]))
def test_a_row_of_packs_knows_its_images_like_the_token_by_token_twin(
    first: int, count: int, attention: str
) -> None:
    packs = [RULES.pack(first + i) for i in range(count)]
    batch = collate(packs, image_attention=attention)
    span, places, images, pooled = spans_by_hand(packs, attention)
    assert batch.span.tolist() == span and batch.vision.feature_rows.tolist() == places
    assert batch.vision.cum_crop_bounds.tolist() == images
    assert batch.vision.cum_token_pooling_bounds.tolist() == pooled
    assert np.array_equal(
        batch.tokens[batch.vision.feature_rows], np.full(len(places), IMAGES.image_patch)
    )
    for number in np.unique(batch.span[batch.span > 0]):
        assert len(np.unique(batch.document[batch.span == number])) == 1


def features(batch: PackedBatch) -> np.ndarray:
    """Return simple features instead of the model's, float64 [m]: sums of each window's patches."""
    flat = (
        batch.vision.patches.reshape(-1, batch.vision.patches.shape[-1]).astype(np.float64).sum(1)
    )
    windows = np.where(batch.vision.pooling >= 0, np.append(flat, 0)[batch.vision.pooling], 0)
    return np.sort(windows, 1).sum(1)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 500), st.integers(1, 2), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_all_ranks_together_hold_each_image_once_under_every_strategy(
    first: int, count: int, ranks: int
) -> None:
    packs = [RULES.pack(first + i) for i in range(count)]
    (whole,) = rows_of_ranks(packs, 1)
    for strategy in ("stored", "computed"):
        parts = rows_of_ranks(packs, ranks, strategy)
        found = np.concatenate([features(part) for part in parts])
        np.testing.assert_allclose(found, features(whole), rtol=1e-12)
        for rank, part in enumerate(parts):
            vision = part.vision
            row = vision.boundaries[rank]
            assert len(vision.patches) == row["end_image_idx"] - row["start_image_idx"]
            assert len(vision.pooling) == row["end_pool_idx"] - row["start_pool_idx"]
            stored = (
                strategy == "stored"
                and count == 1
                and packs[0].images
                and ranks in packs[0].images.boundaries
            )
            assert vision.strategy == (
                "stored" if stored else "computed" if strategy == "stored" else strategy
            )
            assert part.fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_holds_all_images_where_they_are_replicated_each_with_its_own_patches(
    ranks: int,
) -> None:
    packs = [RULES.pack(number) for number in range(6)]
    (whole,) = rows_of_ranks(packs, 1)
    for part in rows_of_ranks(packs, ranks, REPLICATE):
        vision = part.vision
        assert vision.strategy == REPLICATE and part.fingerprint() == whole.fingerprint()
        np.testing.assert_array_equal(features(part), features(whole))
        crops, ends = np.append(0, vision.cum_crop_bounds), vision.cum_token_pooling_bounds
        unit = np.searchsorted(ends, np.arange(len(vision.pooling)), side="right")[
            :, None
        ]  # of each window
        crop = vision.pooling // vision.patches.shape[1]
        own = (crops[unit] <= crop) & (crop < crops[unit + 1])
        assert (
            len(ends) > 6
            and len(vision.patches) == crops[-1]
            and (own | (vision.pooling < 0)).all()
        )


def test_a_rank_decodes_its_images_and_no_others_and_other_stages_none() -> None:
    packs = [RULES.pack(3)]
    asked = []
    for rank in range(4):
        decoder, idle = BrokenDecoder(), BrokenDecoder()
        collate(packs, loading=ImageLoading(decoder, rank, 4))
        asked.append(decoder.asked)
        empty = collate(packs, loading=ImageLoading(idle, rank, 4, decodes=False)).vision
        assert not idle.asked and empty.patches.shape == (0, 6, 5)
    items = set(packs[0].images.units["item"].tolist())
    assert set().union(*asked) == items and all(len(one) < len(items) for one in asked)


def test_a_bad_image_ends_the_run_or_drops_its_document_alone() -> None:
    packs = [dataclasses.replace(RULES.pack(i), sources=("a.jsonl",)) for i in (2, 3)]
    batch = collate(packs)
    loading = ImageLoading(BrokenDecoder([1]))
    with pytest.raises(
        ValueError, match=r"pack \d, record of a.jsonl at byte 0: (image|video) 1: half a JPEG"
    ):
        collate(packs, loading=loading)
    left = collate(packs, loading=dataclasses.replace(loading, on_bad_image="skip"))
    bad = [document for document, _ in left.vision.bad_documents]
    owners = [
        first + int(unit["segment"])
        for first, pack in ((0, packs[0]), (len(packs[0].segments), packs[1]))
        for unit in pack.images.units[pack.images.units["item"] == 1]
    ]
    assert bad == sorted(set(owners)) and all(
        "half a JPEG" in why for _, why in left.vision.bad_documents
    )
    assert np.isfinite(features(left)).all() and left.fingerprint() == batch.fingerprint()
    dropped = left.without_documents(bad)
    assert np.array_equal(dropped.leave, np.where(np.isin(batch.document, bad), 0, batch.leave))


def test_an_image_of_another_size_than_the_dataset_says_is_a_bad_one() -> None:

    class Larger(MockDecoder):
        def image(self, data: bytes) -> Pixels:
            patches, pooling = super().image(data)
            return np.concatenate((patches, patches)), pooling

    packs = [RULES.pack(3)]
    with pytest.raises(
        ValueError, match=r"it decodes to .*\(4, 6, 5\).*the dataset has \(\(2, 6, 5\)"
    ):
        collate(packs, loading=ImageLoading(Larger(IMAGES)))


def test_counts_that_differ_name_the_record_and_both_counts() -> None:
    pack = dataclasses.replace(RULES.pack(3), sources=("a.jsonl",))
    count = int(pack.images.units[0]["pooled_stop"])
    of_images, of_text = (
        np.flatnonzero(pack.tokens == IMAGES.image_patch),
        np.flatnonzero(pack.tokens < 50),
    )
    for place, token, told in (
        (
            of_images[0],
            7,
            rf"a.jsonl at byte 0.* has {count} image features and {count - 1} image-patch",
        ),
        (of_text[0], IMAGES.image_patch, r"image features and \d+ image-patch tokens \(id 50\)"),
    ):
        tokens = pack.tokens.copy()
        tokens[place] = token
        with pytest.raises(ValueError, match=told):
            collate([dataclasses.replace(pack, tokens=tokens)])


def test_the_loader_decodes_ahead_in_its_threads_and_steps_do_not_depend_on_it() -> None:
    rows = []
    for threads in (0, 2):
        options = LoaderOptions(2, 4, num_threads=threads, image_attention="image")
        images = ImageLoading(MockDecoder(IMAGES), 1, 2)
        with PackedLoader(RULES, options, DataRank(), 0, images) as loader:
            rows.append([batch for _ in range(3) for batch in loader.next_step()])
    for one, two in zip(*rows, strict=True):
        assert one.fingerprint() == two.fingerprint()
        assert np.array_equal(one.vision.patches, two.vision.patches)
        assert len(one.vision.boundaries) == 2
