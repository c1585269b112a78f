"""PackedBatch: what it refuses, its hash, its padding."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megacp.core.data.batch import PackedBatch, VisionInputs
from megacp.core.data.mock import MockRules, mock_batch

ROOT = Path(__file__).parents[2]
NOT_ROWS = ("pack_ids", "vision", "pack_lengths")


def make(length: int = 5, **changes: np.ndarray) -> PackedBatch:
    values: dict[str, np.ndarray] = {
        "tokens": np.arange(length, dtype=np.int64),
        "labels": np.arange(1, length + 1, dtype=np.int64),
        "loss_weights": np.ones(length, np.float32),
        "position_ids": np.arange(length, dtype=np.int64),
        "document": np.zeros(length, np.int32),
        "branch": np.zeros(length, np.int32),
        "span": np.zeros(length, np.int32),
    }
    return PackedBatch(**{**values, **changes}, pack_ids=(7,))


def test_what_is_no_batch_is_refused() -> None:
    for changes, told in (
        ({"document": np.array([0, 0, 0, 0, -1], np.int32)}, "padding tokens have a loss weight"),
        ({"loss_weights": np.array([1, 1, np.nan, 1, 1], np.float32)}, "finite and not negative"),
        ({"span": np.zeros(4, np.int32)}, r"span must be int32 \[5\], got int32 \(4,\)"),
    ):
        with pytest.raises(ValueError, match=told):
            make(**changes)


def test_the_fingerprint_sees_every_field_and_is_the_same_in_another_process() -> None:
    """Would catch Python's hash(), which is salted per process, and a field that ranks do not compare."""
    batch = make()
    prints = {batch.fingerprint(), dataclasses.replace(batch, pack_ids=(8,)).fingerprint()}
    names = [field.name for field in dataclasses.fields(PackedBatch) if field.name not in NOT_ROWS]
    for name in names:
        changed = getattr(batch, name).copy()
        changed[3] += 1
        prints.add(dataclasses.replace(batch, **{name: changed}).fingerprint())
    assert len(prints) == 2 + len(names) and all(-(2**63) <= one < 2**63 for one in prints)
    code = "from tests.data.test_batch import make; print(make().fingerprint())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(other.stdout) == make().fingerprint()


def test_padding_is_inert_and_at_the_end() -> None:
    batch = make(5)
    padded = batch.with_padding_to(4)
    assert len(padded) == 8 and padded.document.tolist()[5:] == [-1, -1, -1]
    assert padded.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert padded.weight_sum == batch.weight_sum == 5.0
    assert not padded.tokens[5:].any() and not padded.labels[5:].any()
    assert batch.with_padding_to(5) is batch


IMAGES = VisionInputs(
    cum_crop_bounds=np.array([1, 3]),
    cum_token_pooling_bounds=np.array([1, 3]),
    feature_rows=np.array([1, 2, 4]),
    boundaries=None,
    patches=np.zeros((3, 4, 6), np.float32),
    pooling=np.array([[0, 3], [4, 11], [5, -1]]),
)
"""Two units of one and two crops, with one and two pooled tokens, all held here."""


def test_the_fingerprint_covers_what_ranks_share_of_the_images_and_no_pixels() -> None:
    """Would catch ranks that take each other's rows for different ones, or rows with other images for the same."""
    batch = dataclasses.replace(make(5), vision=IMAGES)
    prints = {make(5).fingerprint(), batch.fingerprint()}
    for change in ({"feature_rows": np.array([1, 3, 4])}, {"cum_crop_bounds": np.array([2, 3])}):
        prints.add(dataclasses.replace(batch, vision=dataclasses.replace(IMAGES, **change)).fingerprint())
    assert len(prints) == 4
    nothing = dataclasses.replace(IMAGES, patches=np.zeros((0, 4, 6), np.float32), pooling=np.zeros((0, 2), np.int64))
    assert dataclasses.replace(batch, vision=nothing).fingerprint() == batch.fingerprint()
    assert batch.with_padding_to(8).vision is batch.vision


def test_a_dropped_document_is_inert_and_the_rest_stays() -> None:
    document = np.array([0, 0, 1, 1, -1], np.int32)
    weights = np.array([1, 1, 1, 1, 0], np.float32)
    batch = make(5, document=document, loss_weights=weights, span=np.array([1, 1, 2, 2, 0], np.int32))
    left = dataclasses.replace(batch, vision=IMAGES).without_documents([0])
    assert left.document.tolist() == [-1, -1, 1, 1, -1] and left.loss_weights.tolist() == [0, 0, 1, 1, 0]
    assert left.labels.tolist()[:2] == [0, 0] and left.span.tolist() == [0, 0, 2, 2, 0]
    assert left.tokens is batch.tokens and left.vision is not None
    assert batch.without_documents([]).fingerprint() == batch.fingerprint()


def test_tokens_are_named_by_pack_and_place_whichever_packs_share_the_row() -> None:
    """Would catch dropout that depends on how many packs a row joins: on the micro batch, or on dp with dynamic cp."""
    rules = MockRules(vocab_size=50, seq_length=24, mask="mixed", ragged=True)
    joined = mock_batch([3, 8], rules)
    alone = [mock_batch([number], rules) for number in (3, 8)]
    assert joined.pack_lengths == tuple(len(batch) for batch in alone)
    names = joined.token_names
    assert np.array_equal(names, np.concatenate([batch.token_names for batch in alone]))
    assert len(np.unique(names)) == len(names)
    assert np.array_equal(joined.with_padding_to(64).token_names[: len(joined)], names)
    assert len(joined.with_padding_to(64).token_names) == 64
