"""Layouts deal every token once, and a cut row can be put together again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.batch import PackedBatch
from megacp.context_parallel.layout import LAYOUTS, select_layout
from megacp.context_parallel.shard import LocalBatch, shard_batch
from megacp.distributed.grid import Axis
from megacp.ops.mask import allowed
from tests.reference.packs import random_batch

FIELDS = ("tokens", "labels", "loss_weights", "position_ids")


def cp_axis(size: int, rank: int) -> Axis:
    """An axis that is never talked over."""
    return Axis("cp", size, rank, tuple(range(size)), group=None if size == 1 else object())  # type: ignore[arg-type]


def all_shards(batch: PackedBatch, name: str, cp: int, tp: int) -> list[LocalBatch]:
    layout = select_layout(name)
    return [
        shard_batch(batch, cp_axis(cp, rank), layout, multiple=layout.multiple(cp, tp), key=5) for rank in range(cp)
    ]


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 16), st.integers(1, 8), st.integers(1, 5))
def test_a_layout_is_a_permutation_dealt_in_equal_parts(name: str, cp: int, tp: int, times: int) -> None:
    layout = LAYOUTS[name]
    tokens = layout.multiple(cp, tp) * times
    dealt = layout.deal(tokens, cp)
    assert dealt.shape == (cp, tokens // cp) and (tokens // cp) % tp == 0
    assert np.array_equal(np.sort(dealt.reshape(-1)), np.arange(tokens))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 4),
    st.integers(2, 70),
    st.integers(0, 99),
)
def test_shards_put_together_are_the_padded_row(name: str, cp: int, tp: int, tokens: int, seed: int) -> None:
    batch = random_batch(np.random.default_rng(seed), tokens, documents=2, branches=True, images=True)
    shards = all_shards(batch, name, cp, tp)
    padded = batch.with_padding_to(LAYOUTS[name].multiple(cp, tp))
    assert len({shard.num_tokens for shard in shards}) == 1 and len(padded) - tokens < LAYOUTS[name].multiple(cp, tp)
    order = shards[0].plan.to_row_order(torch.device("cpu"))
    for field in (*FIELDS, "places"):
        gathered = torch.cat([getattr(shard, field) for shard in shards]).numpy()
        expected = np.arange(len(padded)) if field == "places" else getattr(padded, field)
        assert np.array_equal(gathered[order], expected) and gathered.dtype == expected.dtype
        assert np.array_equal(expected[shards[0].plan.to_rank_order(torch.device("cpu"))], gathered)


def test_zigzag_gives_each_rank_one_early_and_one_late_chunk_of_equal_causal_area() -> None:
    assert LAYOUTS["zigzag"].deal(16, 4).tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    batch = random_batch(np.random.default_rng(0), 64, documents=1)
    areas = {shard.plan.table_of_row.area for shard in all_shards(batch, "zigzag", 4, 1)}
    assert areas == {64 * 65 // 2 // 4}


def test_positions_and_labels_travel_with_their_tokens() -> None:
    """A row of two documents under zigzag: positions made from the rank, or for the whole row, would differ."""
    batch = random_batch(np.random.default_rng(1), 16, documents=2)
    for rank, shard in enumerate(all_shards(batch, "zigzag", 4, 1)):
        index = LAYOUTS["zigzag"].deal(16, 4)[rank]
        assert np.array_equal(shard.position_ids.numpy(), batch.position_ids[index])
        assert np.array_equal(shard.labels.numpy(), batch.labels[index])
        assert not np.array_equal(batch.position_ids[index], index) or rank == 0
    assert shard.key == 5


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from([1, 2, 4]), st.integers(2, 60), st.integers(0, 99))
def test_tables_of_all_sources_and_of_the_row_cover_the_mask_once(name: str, cp: int, tokens: int, seed: int) -> None:
    batch = random_batch(np.random.default_rng(seed), tokens, documents=2, branches=True, images=True, padding=True)
    shards = all_shards(batch, name, cp, 1)
    meta = shards[0].plan.metadata
    whole = allowed(meta, meta)
    assert sum(shard.plan.table_of_row.area for shard in shards) == whole.sum()
    for shard in shards:
        assert np.array_equal(shard.plan.table_of_row.to_dense(), whole[shard.plan.local])
        for source in range(cp):
            expected = whole[shard.plan.local][:, shard.plan.indices[source]]
            assert np.array_equal(shard.plan.table(source).to_dense(), expected)
        assert shard.plan.table(0) is shard.plan.table(0), "a table is computed once for all layers"


def test_padding_is_seen_by_nobody_and_counts_nothing() -> None:
    batch = random_batch(np.random.default_rng(2), 13, documents=2)
    shards = all_shards(batch, "zigzag", 4, 2)
    weights = torch.cat([shard.loss_weights for shard in shards])[shards[0].plan.to_row_order(torch.device("cpu"))]
    assert len(weights) == 16 and (weights[13:] == 0).all()
    meta = shards[0].plan.metadata
    mask = allowed(meta, meta)
    assert not mask[13:].any() and not mask[:, 13:].any()


def test_an_unknown_layout_is_refused_by_its_flag() -> None:
    with pytest.raises(ValueError, match="--cp-layout balanced is unknown; choose contiguous, zigzag"):
        select_layout("balanced")
