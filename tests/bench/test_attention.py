"""The figures of context parallelism mean what they say, and the balanced layout reaches its goals on mixed packs."""

from __future__ import annotations

import numpy as np
import pytest

from bench.attention import AREA_GOALS, area_per_rank, plans_of, remote_rows
from bench.mixed_rows import mixed_row
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.ops.mask import allowed
from tests.reference.packs import random_batch


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_area_and_remote_rows_are_counted_as_a_dense_mask_says(layout: str) -> None:
    batch = random_batch(np.random.default_rng(5), 48, documents=4, branches=True, images=True, padding=True)
    plans = plans_of(batch, layout, 4)
    mask = allowed(plans[0].metadata, plans[0].metadata)
    seen = 0
    for plan in plans:
        columns = mask[plan.local].any(0)
        columns[plan.local] = False
        seen += columns.sum()
    assert remote_rows(plans) == seen
    assert area_per_rank(plans).tolist() == [mask[plan.local].sum() for plan in plans]


@pytest.mark.slow
@pytest.mark.parametrize("cp", AREA_GOALS)
def test_balanced_reaches_its_goals_on_mixed_packs(cp: int) -> None:
    for seed in range(3):
        area = area_per_rank(plans_of(mixed_row(8_192, seed), "balanced", cp))
        assert area.max() / area.mean() <= AREA_GOALS[cp]


def test_a_mixed_row_is_full_and_made_of_documents_that_fit_it() -> None:
    for tokens in (1, 100, 8_192):
        row = mixed_row(tokens, 3)
        assert len(row) == tokens and (mask_metadata(row).document >= 0).all()
    lengths = np.bincount(mixed_row(36_864, 0).document)
    assert lengths.max() <= 36_864 // 3 and len(lengths) > 8
