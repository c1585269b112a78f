"""Rows in Transformer Engine's packed form: its order of tokens is ours, or the reason says why not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.backends.thd import Sequences, thd_sequences
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.ops.mask import Metadata
from tests.backends.engine_math import thd_get_partitioned_indices
from tests.backends.engine_stub import engine, needs_engine


def padded_row(document: list[int], cp: int, layout: str, span: int = 0, branch: int = 0) -> Metadata:
    def metadata(documents: np.ndarray) -> Metadata:
        n = len(documents)
        return Metadata(documents, np.full(n, branch), np.full(n, span), np.arange(n))

    row = np.array(document)
    missing = LAYOUTS[layout].padded_length(metadata(row), cp, 1) - len(row)
    return metadata(np.append(row, np.full(missing, -1)))


def plan_of(metadata: Metadata, cp: int, layout: str, rank: int = 0) -> AttentionPlan:
    return AttentionPlan(LAYOUTS[layout].deal(metadata, cp), metadata, rank)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 9), st.sampled_from([2, 3, 4, 8]))
def test_zigzag_in_each_document_is_transformer_engines_order(lengths: list[int], padding: int, cp: int) -> None:
    document = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    metadata = padded_row(document, cp, "zigzag_document")
    plan = plan_of(metadata, cp, "zigzag_document")
    sequences = thd_sequences(plan)
    assert isinstance(sequences, Sequences)
    for rank in range(1, cp):
        other = thd_sequences(plan_of(metadata, cp, "zigzag_document", rank))
        assert isinstance(other, Sequences) and other.cu_padded.tolist() == sequences.cu_padded.tolist()
    places = torch.from_numpy(sequences.cu_padded)
    token = np.concatenate(
        [
            np.append(np.flatnonzero(metadata.document == i), -np.ones(p - n))
            for i, (n, p) in enumerate(zip(sequences.true, sequences.padded, strict=True))
        ]
    ).astype(int)
    for rank in range(cp):
        wanted = token[thd_get_partitioned_indices(places, len(metadata), cp, rank).numpy()]
        held = np.where(metadata.document[plan.indices[rank]] >= 0, plan.indices[rank], -1)
        np.testing.assert_array_equal(held, wanted)


@needs_engine
@pytest.mark.parametrize("world", [2, 4])
def test_its_own_function_deals_a_row_as_our_layout_does(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data loader function of Transformer Engine; it asks torch.distributed for the size and the rank alone."""
    document = [i for i, n in enumerate((16, 8, 32)) for _ in range(n)]
    metadata = padded_row(document, world, "zigzag_document")
    row = torch.arange(len(metadata))
    monkeypatch.setattr(dist, "get_world_size", lambda group: world)
    for rank in range(world):
        plan = plan_of(metadata, world, "zigzag_document", rank)
        sequences = thd_sequences(plan)
        assert isinstance(sequences, Sequences) and not sequences.has_padding
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        with engine():
            from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
                get_batch_on_this_cp_rank,
            )

            theirs, _, _ = get_batch_on_this_cp_rank(torch.from_numpy(sequences.cu_padded), row, row, row)
        assert theirs.tolist() == plan.local.tolist()


def test_lengths_are_true_and_padded_and_the_rest_is_a_sequence_without_tokens() -> None:
    plan = plan_of(padded_row([0] * 5 + [1] * 8 + [-1] * 11, 2, "zigzag_document"), 2, "zigzag_document")
    sequences = thd_sequences(plan)
    assert isinstance(sequences, Sequences)
    assert sequences.cu_lengths.tolist() == [0, 5, 13, 13]
    assert sequences.cu_padded.tolist() == [0, 8, 16, 24]
    assert sequences.cu_lengths.dtype == sequences.cu_padded.dtype == np.int32
    assert sequences.longest == 8 and sequences.has_padding


def test_one_rank_takes_a_row_as_it_stands() -> None:
    plan = plan_of(padded_row([-1, 0, 0, 0, -1, 1, 1], 1, "contiguous"), 1, "contiguous")
    sequences = thd_sequences(plan)
    assert isinstance(sequences, Sequences)
    assert sequences.true.tolist() == [0, 3, 2] and sequences.padded.tolist() == [1, 4, 2]


@pytest.mark.parametrize("padding", [0, 6])
def test_zigzag_over_the_row_serves_one_document(padding: int) -> None:
    plan = plan_of(padded_row([0] * 26 + [-1] * padding, 4, "zigzag"), 4, "zigzag")
    sequences = thd_sequences(plan)
    assert isinstance(sequences, Sequences) and sequences.true.tolist() == [26] and sequences.padded.tolist() == [32]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
def test_another_order_is_refused_with_the_flag_to_change(layout: str) -> None:
    plan = plan_of(padded_row([0] * 10 + [1] * 22, 2, layout), 2, layout)
    reason = thd_sequences(plan)
    assert isinstance(reason, str) and "--cp-layout zigzag_document" in reason


@pytest.mark.parametrize(
    "span, branch, word", [(1, 0, "image spans"), (0, 1, "branches"), (1, 1, "spans and branches")]
)
def test_other_masks_than_causal_documents_are_named(span: int, branch: int, word: str) -> None:
    plan = plan_of(padded_row([0] * 16, 2, "zigzag_document", span, branch), 2, "zigzag_document")
    reason = thd_sequences(plan)
    assert isinstance(reason, str) and word in reason


def test_padding_with_a_span_hands_over_the_row_all_the_same() -> None:
    metadata = padded_row([0] * 8, 2, "zigzag_document")
    metadata = Metadata(
        np.append(metadata.document, [-1] * 4),
        *(np.append(x, [0] * 4) for x in (metadata.branch, metadata.span)),
        np.arange(12),
    )
    assert isinstance(thd_sequences(plan_of(metadata, 2, "zigzag_document")), Sequences)


def test_a_row_of_padding_is_no_row_for_it() -> None:
    assert thd_sequences(plan_of(padded_row([-1] * 8, 2, "zigzag"), 2, "zigzag")) == "the row holds padding alone"
