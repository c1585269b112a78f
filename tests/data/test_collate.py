"""Collation against its slow twin, and the sentences of the mask and the loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.data import tables
from megacp.core.data.collate import collate
from megacp.core.data.reader import Pack, PackedDataset
from megacp.core.data.tables import padded_lengths
from megacp.prepare.build.writer import Segment
from tests.data.datasets import write_dataset
from tests.reference import collate as reference


def make_pack(index: int, documents: list[reference.Document], weighted: bool) -> Pack:
    segments = np.zeros(len(documents), tables.SEGMENT_DTYPE)
    branches = []
    for row, (tokens, _, padded_length, starts) in zip(segments, documents, strict=True):
        row["true_length"], row["padded_length"] = len(tokens), padded_length
        row["prefix_length"], row["num_branches"] = starts[0] if starts else len(tokens), len(starts)
        row["first_branch"] = len(branches) if starts else 0
        branches += [(a, b - a) for a, b in zip(starts, (*starts, len(tokens))[1:], strict=True)]
    tokens = np.array([t for document in documents for t in document[0]], np.uint16)
    weights = np.array([w for document in documents for w in document[1]], np.float32)
    table = np.array(branches, tables.BRANCH_DTYPE) if branches else None
    return Pack(index, tokens, weights if weighted else None, segments, table)


@st.composite
def document(draw: st.DrawFn, weighted: bool, branched: bool, pad_multiple: int) -> reference.Document:
    few = draw(st.booleans())  # so that branches begin alike
    tokens = draw(st.lists(st.integers(0, 1 if few else 65_000), min_size=1, max_size=12))
    places = st.sets(st.integers(1, len(tokens) - 1), max_size=3) if branched and len(tokens) > 1 else st.just(set())
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
def test_collate_is_the_token_by_token_twin(case: tuple[list[list[reference.Document]], bool, str]) -> None:
    packs, weighted, mask = case
    batch = collate([make_pack(7 + i, pack, weighted) for i, pack in enumerate(packs)], mask)
    expected = reference.collate(packs, mask)
    for name, values in expected.items():
        assert getattr(batch, name).tolist() == values, name
    assert not batch.span.any()
    assert batch.pack_ids == tuple(range(7, 7 + len(packs)))


def test_the_last_token_of_a_document_predicts_nothing_but_runs_on_under_a_causal_mask() -> None:
    # catches a label that leaks the next document's first token
    pack = make_pack(0, [([10, 11, 12], [1.0] * 3, 4, ()), ([20, 21], [1.0] * 2, 4, ())], weighted=False)
    packed, causal = collate([pack]), collate([pack], "causal")
    assert packed.tokens.tolist() == [10, 11, 12, 0, 20, 21, 0, 0]
    assert packed.labels.tolist() == [11, 12, 0, 0, 21, 0, 0, 0]
    assert packed.loss_weights.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    assert packed.document.tolist() == [0, 0, 0, -1, 1, 1, -1, -1]
    assert causal.labels.tolist() == [11, 12, 20, 0, 21, 0, 0, 0]
    assert causal.loss_weights.tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    assert causal.position_ids.tolist() == [0, 1, 2, 0, 3, 4, 0, 1]


def test_branches_restart_at_the_prefix_and_do_not_predict_each_other() -> None:
    pack = make_pack(0, [([1, 2, 3, 4, 5, 6, 7], [0.0, 1.0, 1.0, 0.5, 1.0, 0.25, 1.0], 8, (3, 5))], weighted=True)
    batch = collate([pack])
    assert batch.branch.tolist() == [0, 0, 0, 1, 1, 2, 2, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 0]
    assert batch.labels.tolist() == [2, 3, 0, 5, 0, 7, 0, 0]
    assert batch.loss_weights.tolist() == [1, 1, 0, 1, 0, 1, 0, 0] and batch.weight_sum == 4  # of the token predicted
    with pytest.raises(ValueError, match=r"packs \[0\] have branches.*--attention-mask causal"):
        collate([pack], "causal")


def test_a_prefix_predicts_what_all_its_branches_begin_with() -> None:
    """Would catch a shared first token that is never learned, and one that only some branches begin with."""
    alike = ([1, 2, 3, 9, 5, 9, 7], [1.0, 1.0, 1.0, 0.5, 1.0, 0.0, 1.0], 8, (3, 5))
    differing = ([1, 2, 3, 9, 5, 8, 7], [1.0] * 7, 8, (3, 5))
    batch = collate([make_pack(0, [alike, differing], weighted=True)])
    assert batch.labels.tolist() == [2, 3, 9, 5, 0, 7, 0, 0] + [2, 3, 0, 5, 0, 7, 0, 0]
    assert batch.loss_weights.tolist() == [1, 1, 0.5, 1, 0, 1, 0, 0] + [1, 1, 0, 1, 0, 1, 0, 0]


def test_what_the_store_writes_is_what_collate_reads(tmp_path: Path) -> None:
    # branches of a later pack must come from its own rows of branches.npy
    first = [Segment(np.arange(6), branch_starts=(2, 4)), Segment(np.arange(3))]
    second = [Segment(np.arange(3)), Segment(np.arange(7), branch_starts=(3, 6), weights=np.full(7, 0.5, np.float32))]
    write_dataset(tmp_path, [[first, second]], pad_multiple=4)
    dataset = PackedDataset(tmp_path)
    batch = collate([dataset.pack(1), dataset.pack(0)])
    short = ([0, 1, 2], [1.0] * 3, 4, ())
    later, earlier = (list(range(7)), [0.5] * 7, 8, (3, 6)), (list(range(6)), [1.0] * 6, 8, (2, 4))
    for name, values in reference.collate([[short, later], [earlier, short]], "packed").items():
        assert getattr(batch, name).tolist() == values, name
