"""Mock packs: the same for everyone, of every mask kind, and something a model can learn."""

from __future__ import annotations

import numpy as np
import pytest

from megacp.core.data.mock import MASKS, MockRules, mock_batch


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


def test_the_next_token_can_be_guessed_three_times_in_four() -> None:
    """Would catch mock data on which no loss can fall, so that a broken optimizer goes unseen."""
    tokens = MockRules(1000, 4096).pack(0).tokens
    assert 0.7 < np.mean((tokens[1:] - tokens[:-1]) % 1000 == 1) < 0.8
