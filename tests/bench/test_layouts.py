"""The figures of context parallelism mean what they say, and the balanced layout reaches its goals on mixed packs."""

from __future__ import annotations

import numpy as np
import pytest

from bench import layouts as figures
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.data.synthetic.mixed import mixed_row
from megacp.core.ops.mask import Metadata, allowed
from tests.reference.packs import metadata, random_batch


def test_the_bound_is_reached_where_the_best_layout_is_known() -> None:
    """One bidirectional document: every rank needs all of it, whatever the layout."""
    n = 64
    both_ways = Metadata(np.zeros(n, int), np.zeros(n, int), np.ones(n, int), np.arange(n))
    for cp in (2, 4, 8):
        found = figures.layout_figures(figures.plans_of(both_ways, LAYOUTS["balanced"], cp))
        assert found.remote_rows == figures.remote_rows_bound(both_ways, cp) == (cp - 1) * n
        assert found.remote_share == 1.0 and found.ranks_per_document == cp


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cp", [2, 4, 8, 16])
def test_balanced_reaches_its_goals_on_mixed_packs(seed: int, cp: int) -> None:
    meta = mask_metadata(mixed_row(8_192, seed))
    plans = figures.plans_of(meta, LAYOUTS["balanced"], cp)
    found = figures.layout_figures(plans)
    assert found.area_max_over_mean <= (1.03 if cp <= 8 else 1.07)
    for transport in figures.COUNTED:
        tiles = figures.tile_figures(plans, transport)
        assert tiles.used_over_allowed == 1.0 <= tiles.computed_over_allowed and tiles.empty_calls == 0


def test_remote_rows_are_counted_as_a_dense_mask_says() -> None:
    meta = metadata(random_batch(np.random.default_rng(5), 48, documents=4, branches=True, images=True, padding=True))
    for layout in ("zigzag", "balanced"):
        plans = figures.plans_of(meta, LAYOUTS[layout], 4)
        mask = allowed(meta, meta)
        expected = 0
        for plan in plans:
            seen = mask[plan.local].any(0)
            seen[plan.local] = False
            expected += seen.sum()
        assert figures.layout_figures(plans).remote_rows == expected
        assert figures.area_per_rank(plans).tolist() == [mask[plan.local].sum() for plan in plans]


def test_a_mixed_row_is_full_and_made_of_documents_that_fit_it() -> None:
    for tokens in (1, 100, 8_192):
        row = mixed_row(tokens, 3)
        assert len(row) == tokens and (row.document >= 0).all()
        assert np.array_equal(mixed_row(tokens, 3).span, row.span)
    lengths = np.bincount(mixed_row(36_864, 0).document)
    assert lengths.max() <= 36_864 // 3 and len(lengths) > 8
