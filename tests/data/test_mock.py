"""Mock packs: the same for everyone, of every mask kind, and something a model can learn."""

from __future__ import annotations

import numpy as np
import pytest

from megacp.core.data.loader import DataRank, LoaderOptions, PackedLoader
from megacp.core.data.mock import MASKS, MockDataset, MockRules, mock_batch, mock_pack


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [2, 3, 7, 64])
def test_every_mask_makes_lawful_rows_of_any_length(mask: str, length: int) -> None:
    """Would catch an empty document, a branch outside its document, weights on padding."""
    for index in range(40):
        batch = mock_batch([index, index + 1], MockRules(13, length, mask, ragged=True))
        assert 0 < len(batch) <= 2 * length
        assert batch.tokens.max() < 13 and batch.labels.max() < 13
        assert not batch.span[batch.document < 0].any()


def test_a_pack_depends_on_seed_and_number_alone() -> None:
    """Would catch ranks that train on different rows, or steps that repeat one."""
    rules = MockRules(50, 40, "mixed", ragged=True, seed=5)
    assert mock_batch([3, 4], rules).fingerprint() == mock_batch([3, 4], rules).fingerprint()
    others = [mock_batch([4, 5], rules), mock_batch([3, 4], MockRules(50, 40, "mixed", ragged=True, seed=6))]
    assert mock_batch([3, 4], rules).fingerprint() not in [other.fingerprint() for other in others]


def test_masks_hold_what_their_names_say() -> None:
    """Would catch a parity check on images that never saw a span."""
    rows = {mask: [mock_batch([i], MockRules(50, 64, mask, ragged=True)) for i in range(30)] for mask in MASKS}
    documents = {mask: max(int(batch.document.max()) for batch in batches) for mask, batches in rows.items()}
    branched = {mask for mask, batches in rows.items() if any(batch.branch.any() for batch in batches)}
    spanned = {mask for mask, batches in rows.items() if any(batch.span.any() for batch in batches)}
    assert documents["causal"] == 0 and all(count > 0 for mask, count in documents.items() if mask != "causal")
    assert branched == {"branches", "mixed"}
    assert spanned == {"image", "mixed"}


def test_some_images_share_a_span_and_some_do_not() -> None:
    """Would catch a mask kind that tests only one of the two image rules."""
    shared, single = False, False
    for index in range(60):
        batch = mock_batch([index], MockRules(50, 64, "mixed"))
        for number in np.unique(batch.document[batch.document >= 0]):
            span = np.where(batch.document == number, batch.span, 0)
            starts = span[np.flatnonzero((span != 0) & (np.concatenate(([0], span[:-1])) != span))]
            shared |= len(starts) > len(set(starts.tolist()))
            single |= len(set(starts.tolist())) > 1
    assert shared and single


def test_ragged_packs_differ_in_length_and_weight_and_others_are_full() -> None:
    """Would catch a parity check whose rows are all alike."""
    ragged = [mock_batch([i], MockRules(50, 64, ragged=True)) for i in range(20)]
    full = [mock_batch([i], MockRules(50, 64)) for i in range(20)]
    assert len({len(batch) for batch in ragged}) > 5
    assert any((batch.document < 0).any() for batch in ragged)
    assert {len(batch) for batch in full} == {64}
    assert set(np.unique(np.concatenate([batch.loss_weights for batch in full]))) == {0.0, 1.0}
    assert len(np.unique(np.concatenate([batch.loss_weights for batch in ragged]))) > 100


def test_the_loader_reads_a_mock_dataset() -> None:
    """Would catch a mock that lacks something the loader needs."""
    dataset = MockDataset(vocab_size=50, seq_length=32, num_packs=10)
    with PackedLoader(dataset, LoaderOptions(2, 8, attention_mask="causal"), DataRank(1, 2)) as loader:
        assert [len(batch) for batch in loader.next_step()] == [64, 64]


def test_the_next_token_can_be_guessed_three_times_in_four() -> None:
    """Would catch mock data on which no loss can fall, so that a broken optimizer goes unseen."""
    tokens = mock_pack(0, MockRules(1000, 4096)).tokens
    assert 0.7 < np.mean((tokens[1:] - tokens[:-1]) % 1000 == 1) < 0.8
