"""Collation against a slow reference, its batch, and mock packs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.engine.rows.batch import PackedBatch, VisionInputs
from megacp.prepare.packs.writer import Segment
from megacp.training.data import tables
from megacp.training.data.collate import collate
from megacp.training.data.mock import MASKS, MockRules, mock_batch
from megacp.training.data.reader import Pack, PackedDataset
from megacp.training.data.tables import padded_lengths
from tests.reference import collate as reference
from tests.reference.packs import branched
from tests.training.data.datasets import write_dataset


def make_pack(index: int, documents: list[reference.Document], weighted: bool) -> Pack:
    segments = np.zeros(len(documents), tables.SEGMENT_DTYPE)
    branches = []
    for row, (tokens, _, padded_length, starts) in zip(segments, documents, strict=True):
        row["true_length"], row["padded_length"] = len(tokens), padded_length
        row["prefix_length"], row["num_branches"] = (
            starts[0] if starts else len(tokens),
            len(starts),
        )
        row["first_branch"] = len(branches) if starts else 0
        branches += [(a, b - a, b) for a, b in zip(starts, (*starts, len(tokens))[1:], strict=True)]
    tokens = np.array([t for document in documents for t in document[0]], np.uint16)
    weights = np.array([w for document in documents for w in document[1]], np.float32)
    table = np.array(branches, tables.BRANCH_DTYPE) if branches else None
    return Pack(index, tokens, weights if weighted else None, segments, table)


@st.composite
def document(
    draw: st.DrawFn, weighted: bool, branched: bool, pad_multiple: int
) -> reference.Document:
    few = draw(st.booleans())  # so that branches begin alike
    tokens = draw(st.lists(st.integers(0, 1 if few else 65_000), min_size=1, max_size=12))
    places = (
        st.sets(st.integers(1, len(tokens) - 1), max_size=3)
        if branched and len(tokens) > 1
        else st.just(set())
    )
    starts = tuple(sorted(draw(places)))
    weight = st.sampled_from([0.0, 0.5, 1.0, 2.0]) if weighted else st.just(1.0)
    weights = draw(st.lists(weight, min_size=len(tokens), max_size=len(tokens)))
    return tokens, weights, int(padded_lengths(len(tokens), pad_multiple)), starts


@st.composite
def microbatch(draw: st.DrawFn) -> tuple[list[list[reference.Document]], bool, str]:
    mask = draw(st.sampled_from(["packed", "causal"]))
    weighted, pad_multiple = draw(st.booleans()), draw(st.sampled_from([1, 4]))
    branched = mask == "packed" and draw(st.booleans())
    pack = st.lists(document(weighted, branched, pad_multiple), min_size=1, max_size=4)
    return draw(st.lists(pack, min_size=1, max_size=3)), weighted, mask


@settings(max_examples=50, deadline=None)
@given(microbatch())
def test_collate_is_the_token_by_token_twin(
    case: tuple[list[list[reference.Document]], bool, str],
) -> None:
    packs, weighted, mask = case
    batch = collate([make_pack(7 + i, pack, weighted) for i, pack in enumerate(packs)], mask)
    expected = reference.collate(packs, mask)
    for name, values in expected.items():
        assert getattr(batch, name).tolist() == values, name
    assert not batch.span.any()
    assert batch.pack_ids == tuple(range(7, 7 + len(packs)))


def test_the_last_token_of_a_document_predicts_nothing_but_runs_on_under_a_causal_mask() -> None:
    # catches a label that leaks the next document's first token
    pack = make_pack(
        0, [([10, 11, 12], [1.0] * 3, 4, ()), ([20, 21], [1.0] * 2, 4, ())], weighted=False
    )
    packed, causal = collate([pack]), collate([pack], "causal")
    assert packed.tokens.tolist() == [10, 11, 12, 0, 20, 21, 0, 0]
    assert packed.labels.tolist() == [11, 12, 0, 0, 21, 0, 0, 0]
    assert packed.loss_weights.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    assert packed.document.tolist() == [0, 0, 0, -1, 1, 1, -1, -1]
    assert causal.labels.tolist() == [11, 12, 20, 0, 21, 0, 0, 0]
    assert causal.loss_weights.tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    assert causal.position_ids.tolist() == [0, 1, 2, 0, 3, 4, 0, 1]


def test_branches_restart_at_the_prefix_and_do_not_predict_each_other() -> None:
    pack = make_pack(
        0, [([1, 2, 3, 4, 5, 6, 7], [0.0, 1.0, 1.0, 0.5, 1.0, 0.25, 1.0], 8, (3, 5))], weighted=True
    )
    batch = collate([pack])
    assert batch.leave.tolist() == [7, 7, 7, 5, 5, 7, 7, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 0]
    assert batch.labels.tolist() == [2, 3, 0, 5, 0, 7, 0, 0]
    assert (
        batch.loss_weights.tolist() == [1, 1, 0, 1, 0, 1, 0, 0] and batch.weight_sum == 4
    )  # of the token predicted
    with pytest.raises(ValueError, match=r"packs \[0\] have branches.*--attention-mask causal"):
        collate([pack], "causal")


def test_a_prefix_predicts_what_all_its_branches_begin_with() -> None:
    alike = ([1, 2, 3, 9, 5, 9, 7], [1.0, 1.0, 1.0, 0.5, 1.0, 0.0, 1.0], 8, (3, 5))
    differing = ([1, 2, 3, 9, 5, 8, 7], [1.0] * 7, 8, (3, 5))
    batch = collate([make_pack(0, [alike, differing], weighted=True)])
    assert batch.labels.tolist() == [2, 3, 9, 5, 0, 7, 0, 0] + [2, 3, 0, 5, 0, 7, 0, 0]
    assert batch.loss_weights.tolist() == [1, 1, 0.5, 1, 0, 1, 0, 0] + [1, 1, 0, 1, 0, 1, 0, 0]


def test_what_the_store_writes_is_what_collate_reads(tmp_path: Path) -> None:
    # branches of a later pack must come from its own rows of branches.npy
    first = [Segment(np.arange(6), branch_starts=(2, 4)), Segment(np.arange(3))]
    second = [
        Segment(np.arange(3)),
        Segment(np.arange(7), branch_starts=(3, 6), weights=np.full(7, 0.5, np.float32)),
    ]
    write_dataset(tmp_path, [[first, second]], pad_multiple=4)
    dataset = PackedDataset(tmp_path)
    batch = collate([dataset.pack(1), dataset.pack(0)])
    short = ([0, 1, 2], [1.0] * 3, 4, ())
    later, earlier = (list(range(7)), [0.5] * 7, 8, (3, 6)), (list(range(6)), [1.0] * 6, 8, (2, 4))
    for name, values in reference.collate([[short, later], [earlier, short]], "packed").items():
        assert getattr(batch, name).tolist() == values, name


ROOT = Path(__file__).parents[3]
NOT_ROWS = ("pack_ids", "vision", "pack_lengths")


def make(length: int = 5, **changes: np.ndarray) -> PackedBatch:
    values: dict[str, np.ndarray] = {
        "tokens": np.arange(length, dtype=np.int64),
        "labels": np.arange(1, length + 1, dtype=np.int64),
        "loss_weights": np.ones(length, np.float32),
        "position_ids": np.arange(length, dtype=np.int64),
        "leave": np.full(length, length, np.int32),
        "span": np.zeros(length, np.int32),
        "position_axes": np.repeat(np.arange(length)[:, None], 3, axis=1),
    }
    return PackedBatch(**{**values, **changes}, pack_ids=(7,))


def test_what_is_no_batch_is_refused() -> None:
    for changes, told in (
        ({"leave": np.array([4, 4, 4, 4, 0], np.int32)}, "loss_weights of padding tokens"),
        ({"loss_weights": np.array([1, 1, np.nan, 1, 1], np.float32)}, "finite and not negative"),
        ({"span": np.zeros(4, np.int32)}, r"span must be int32 \[5\], but is int32 \(4,\)"),
        (
            {"position_axes": np.zeros((5, 2), np.int64)},
            r"position_axes must be int64 \[5, 3\], but is int64 \(5, 2\)",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            make(**changes)


def test_the_fingerprint_sees_every_field_and_is_the_same_in_another_process() -> None:
    batch = make()
    prints = {batch.fingerprint(), dataclasses.replace(batch, pack_ids=(8,)).fingerprint()}
    names = [field.name for field in dataclasses.fields(PackedBatch) if field.name not in NOT_ROWS]
    for name in names:
        changed = getattr(batch, name).copy()
        changed[3] += 1
        prints.add(dataclasses.replace(batch, **{name: changed}).fingerprint())
    assert len(prints) == 2 + len(names) and all(-(2**63) <= one < 2**63 for one in prints)
    code = "from tests.training.data.test_collate import make; print(make().fingerprint())"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert int(other.stdout) == make().fingerprint()


def test_padding_is_inert_and_at_the_end() -> None:
    batch = make(5)
    padded = batch.with_padding_to(4)
    assert len(padded) == 8 and padded.document.tolist()[5:] == [-1, -1, -1]
    assert padded.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert padded.position_axes.tolist() == [[place] * 3 for place in padded.position_ids]
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
"""Return two units of one and two crops, with one and two pooled tokens, all on this rank."""


def test_the_fingerprint_covers_what_ranks_share_of_the_images_and_no_pixels() -> None:
    batch = dataclasses.replace(make(5), vision=IMAGES)
    prints = {make(5).fingerprint(), batch.fingerprint()}
    for change in ({"feature_rows": np.array([1, 3, 4])}, {"cum_crop_bounds": np.array([2, 3])}):
        prints.add(
            dataclasses.replace(batch, vision=dataclasses.replace(IMAGES, **change)).fingerprint()
        )
    assert len(prints) == 4
    nothing = dataclasses.replace(
        IMAGES, patches=np.zeros((0, 4, 6), np.float32), pooling=np.zeros((0, 2), np.int64)
    )
    assert dataclasses.replace(batch, vision=nothing).fingerprint() == batch.fingerprint()
    assert batch.with_padding_to(8).vision is batch.vision


def test_a_dropped_document_is_inert_and_the_rest_stays() -> None:
    leave = np.array([2, 2, 4, 4, 0], np.int32)
    weights = np.array([1, 1, 1, 1, 0], np.float32)
    batch = make(5, leave=leave, loss_weights=weights, span=np.array([1, 1, 2, 2, 0], np.int32))
    left = dataclasses.replace(batch, vision=IMAGES).without_documents([0])
    assert left.leave.tolist() == [0, 0, 4, 4, 0] and left.loss_weights.tolist() == [0, 0, 1, 1, 0]
    assert left.labels.tolist()[:2] == [0, 0] and left.span.tolist() == [0, 0, 2, 2, 0]
    assert left.tokens is batch.tokens and left.vision is not None
    assert batch.without_documents([]).fingerprint() == batch.fingerprint()


def test_tokens_are_named_by_pack_and_place_whichever_packs_share_the_row() -> None:
    rules = MockRules(vocab_size=50, seq_length=24, mask="mixed", ragged=True)
    joined = mock_batch([3, 8], rules)
    alone = [mock_batch([number], rules) for number in (3, 8)]
    assert joined.pack_lengths == tuple(len(batch) for batch in alone)
    names = joined.token_names
    assert np.array_equal(names, np.concatenate([batch.token_names for batch in alone]))
    assert len(np.unique(names)) == len(names)
    assert np.array_equal(joined.with_padding_to(64).token_names[: len(joined)], names)
    assert len(joined.with_padding_to(64).token_names) == 64


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [2, 3, 7, 64])
def test_every_mask_makes_lawful_rows_of_any_length(mask: str, length: int) -> None:
    for index in range(40):
        batch = mock_batch([index, index + 1], MockRules(13, length, mask, ragged=True))
        assert 0 < len(batch) <= 2 * length
        assert batch.tokens.max() < 13 and batch.labels.max() < 13
        assert not batch.span[batch.document < 0].any()


def test_a_pack_depends_on_seed_and_number_alone() -> None:
    rules = MockRules(50, 40, "mixed", ragged=True, seed=5)
    assert mock_batch([3, 4], rules).fingerprint() == mock_batch([3, 4], rules).fingerprint()
    others = [
        mock_batch([4, 5], rules),
        mock_batch([3, 4], MockRules(50, 40, "mixed", ragged=True, seed=6)),
    ]
    assert mock_batch([3, 4], rules).fingerprint() not in [other.fingerprint() for other in others]


def test_masks_hold_what_their_names_say() -> None:
    rows = {
        mask: [mock_batch([i], MockRules(50, 64, mask, ragged=True)) for i in range(30)]
        for mask in MASKS
    }
    documents = {
        mask: max(int(batch.document.max()) for batch in batches) for mask, batches in rows.items()
    }
    branching = {
        mask for mask, batches in rows.items() if any(branched(batch) for batch in batches)
    }
    spanned = {mask for mask, batches in rows.items() if any(batch.span.any() for batch in batches)}
    assert documents["causal"] == 0 and all(
        count > 0 for mask, count in documents.items() if mask != "causal"
    )
    assert branching == {"branches", "tree", "mixed"}
    assert spanned == {"image", "mixed"}


def test_the_next_token_can_be_guessed_three_times_in_four() -> None:
    tokens = MockRules(1000, 4096).pack(0).tokens
    assert 0.7 < np.mean((tokens[1:] - tokens[:-1]) % 1000 == 1) < 0.8
