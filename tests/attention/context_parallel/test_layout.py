"""Layouts deal every token once, and a sharded row can be reassembled."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.steps import Subject
from megacp.attention.context_parallel.a2a import HeadsForSequence, key_copies
from megacp.attention.context_parallel.balance import density_order, keys_crossing, row_area
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.plan import AttentionPlan, key_order
from megacp.attention.context_parallel.transport import WholeAttention
from megacp.attention.ops.flex import FlexKernel, flex_backward
from megacp.attention.ops.mask import Metadata, Reach, allowed, tile_table
from megacp.distributed.grid import Axis
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.choose import needed_share, resolve_auto
from megacp.engine.rows.shard import LocalBatch, shard_batch
from tests.attention.context_parallel.test_attention import (
    Case,
    attend,
    batch_of,
    compare,
    on_ranks,
    qkv_and_gradient,
)
from tests.attention.ops.test_flex import dense
from tests.ranks import grid, run_ranks
from tests.reference.packs import dense_mask, metadata, random_batch, video_batch

FIELDS = ("tokens", "labels", "loss_weights", "position_ids")


def cp_axis(size: int, rank: int) -> Axis:
    """Return an axis without communication."""
    return Axis("cp", size, rank, tuple(range(size)), group=None if size == 1 else object())  # type: ignore[arg-type]


def random_row(tokens: int, seed: int) -> PackedBatch:
    """Draw rows with all features; a single token is a document."""
    rng = np.random.default_rng([tokens, seed])
    if tokens > 1:
        return random_batch(
            rng, tokens, documents=1 + seed % 5, branches=True, images=True, padding=seed % 2 == 0
        )
    return video_batch(0, 0, 0, after=1)


def plain(*lengths: int) -> Metadata:
    """Return causal documents of these lengths."""
    return Metadata.of_documents(np.repeat(np.arange(len(lengths)), lengths))


def all_shards(batch: PackedBatch, name: str, cp: int, tp: int) -> list[LocalBatch]:
    layout = LAYOUTS[name]
    return [
        shard_batch(batch, cp_axis(cp, rank), layout, tp=tp).to(torch.device("cpu"), key=5)
        for rank in range(cp)
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(1, 90),
    st.integers(0, 99),
)
def test_a_layout_is_a_permutation_dealt_in_equal_parts(
    name: str, cp: int, tp: int, tokens: int, seed: int
) -> None:
    layout = LAYOUTS[name]
    row = random_row(tokens, seed)
    padded = row.with_padding_to(layout.padded_length(metadata(row), cp, tp))
    dealt = layout.deal(metadata(padded), cp)
    assert dealt.shape == (cp, len(padded) // cp) and (len(padded) // cp) % tp == 0
    assert np.array_equal(np.sort(dealt.reshape(-1)), np.arange(len(padded)))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(0, 99),
)
def test_shards_put_together_are_the_padded_row(
    name: str, cp: int, tp: int, tokens: int, seed: int
) -> None:
    """Shard followed by gather is the identity for everything that belongs to a token."""
    batch = random_row(tokens, seed)
    shards = all_shards(batch, name, cp, tp)
    padded = batch.with_padding_to(sum(shard.num_tokens for shard in shards))
    assert len({shard.num_tokens for shard in shards}) == 1 and shards[0].num_tokens % tp == 0
    if name != "zigzag_document" or cp == 1:
        assert len(padded) - tokens < LAYOUTS[name].multiple(cp, tp)
    order = np.argsort(shards[0].plan.indices.reshape(-1))
    for field in (*FIELDS, "token_names"):
        gathered = torch.cat([getattr(shard, field) for shard in shards]).numpy()
        expected = np.arange(len(padded)) if field == "token_names" else getattr(padded, field)
        assert np.array_equal(gathered[order], expected) and gathered.dtype == expected.dtype
    together = shards[0].plan.arrival(cp, torch.device("cpu"))
    gathered = torch.cat([shard.tokens for shard in shards])
    assert np.array_equal(gathered[together].numpy(), padded.tokens[shards[0].plan.order])
    assert torch.equal(
        gathered[together][shards[0].plan.departure(cp, torch.device("cpu"))], gathered
    )


def test_zigzag_gives_each_rank_one_early_and_one_late_chunk_of_equal_causal_area() -> None:
    expected = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert LAYOUTS["zigzag"].deal(plain(16), 4).tolist() == expected
    batch = random_batch(np.random.default_rng(0), 64, documents=1)
    areas = {shard.plan.table_of_row.area for shard in all_shards(batch, "zigzag", 4, 1)}
    assert areas == {64 * 65 // 2 // 4}


def test_zigzag_per_document_fills_each_document_and_keeps_the_order_of_its_chunks() -> None:
    """The order is the one of packed kernels with padded cumulative lengths; filler comes from the
    end of the row.
    """
    meta = plain(5, 8)
    layout = LAYOUTS["zigzag_document"]
    assert layout.padded_length(meta, 2, 1) == 8 + 8
    row = Metadata.of_documents(np.repeat([0, 1, -1], [5, 8, 3]))
    # chunks of two: 0-1, 2-3, 4 and filler 13, fillers 14-15; then 5-6, 7-8, 9-10, 11-12
    assert layout.deal(row, 2).tolist() == [
        [0, 1, 14, 15, 5, 6, 11, 12],
        [2, 3, 4, 13, 7, 8, 9, 10],
    ]
    inside = Metadata.of_documents(np.array([0, 0, -1, -1, 1, 1, 1, 1]))
    assert layout.padded_length(inside, 2, 1) == 8, "padding that the row has serves as filler"


@pytest.mark.parametrize("cp", [2, 3, 4, 8, 16])
def test_balanced_deals_one_causal_document_as_zigzag_and_one_bidirectional_one_in_stretches(
    cp: int,
) -> None:
    n = 16 * cp
    zigzag = LAYOUTS["zigzag"].deal(plain(n), cp)
    assert np.array_equal(LAYOUTS["balanced"].deal(plain(n), cp), np.sort(zigzag))
    both_ways = Metadata.of_documents(np.zeros(n, int), span=1)
    assert np.array_equal(LAYOUTS["balanced"].deal(both_ways, cp), np.arange(n).reshape(cp, -1))


@pytest.mark.parametrize("reach", [Reach(256), Reach(64), Reach(0, 128)], ids=str)
def test_balanced_evens_out_the_area_of_all_layers_together(reach: Reach) -> None:
    rng, mix = np.random.default_rng(0), {Reach(): 1, reach: 5}
    lengths = (rng.lognormal(5.5, 1.2, 40) + 8).astype(int)
    row = Metadata.of_documents(np.repeat(np.arange(40), lengths)[:8192])
    area = row_area(row, mix)[LAYOUTS["balanced"].deal(row, 8, mix)].sum(1)
    assert area.sum() == tile_table(row, row).area + 5 * tile_table(row, row, reach).area
    assert area.max() / area.mean() <= 1.03


@pytest.mark.parametrize("cp", [2, 4, 8, 16])
def test_balanced_evens_out_the_area_of_mixed_packs(cp: int) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        row = metadata(
            random_batch(rng, 4096, documents=20, branches=True, images=True, padding=True)
        )
        cost = tile_table(row, row).keys_per_query
        areas = cost[LAYOUTS["balanced"].deal(row, cp)].sum(1)
        assert areas.max() <= 1.03 * areas.mean(), (seed, areas)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(0, 999))
def test_the_keys_that_cross_a_cut_are_counted_exactly(tokens: int, seed: int) -> None:
    row = metadata(random_row(tokens, seed))
    order = density_order(row, tile_table(row, row).keys_per_query)
    lined_up = row.take(order)
    mask = allowed(lined_up, lined_up)
    expected = [
        mask[cut:, :cut].any(0).sum() + mask[:cut, cut:].any(0).sum() for cut in range(tokens + 1)
    ]
    assert keys_crossing(lined_up).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 60),
    st.integers(0, 99),
)
def test_tables_of_all_sources_and_of_the_row_cover_the_mask_once(
    name: str, cp: int, tokens: int, seed: int
) -> None:
    batch = random_row(tokens, seed)
    shards = all_shards(batch, name, cp, 1)
    meta = shards[0].plan.metadata
    whole = allowed(meta, meta)
    assert sum(shard.plan.table_of_row.area for shard in shards) == whole.sum()
    for shard in shards:
        plan = shard.plan
        assert np.array_equal(dense_mask(plan.table_of_row), whole[plan.local][:, plan.order])
        for source in range(cp):
            expected = whole[plan.local][:, plan.indices[source]]
            assert np.array_equal(dense_mask(plan.table(source)), expected)
        assert plan.table(0) is plan.table(0), "a table is computed once for all layers"
        pairs = plan.grouped(2) if cp > 1 else plan
        assert np.array_equal(dense_mask(pairs.table_of_row), whole[pairs.local][:, pairs.order])


def test_frames_that_see_each_other_across_text_are_sorted_together() -> None:
    """The number of tiles grows with the number of frames, not with its square; if sorting saves
    nothing, the order is natural.
    """
    for frames in (8, 64):
        row = metadata(video_batch(frames, 3, 6))
        plan = AttentionPlan(np.arange(len(row))[None], row, 0)
        assert plan.table_of_row.num_tiles <= 6 * frames
        assert tile_table(row, row).num_tiles > frames * frames / 2
        assert np.array_equal(plan.local, plan.order)
        dense = allowed(row, row)
        assert np.array_equal(dense_mask(plan.table_of_row), dense[plan.order][:, plan.order])
    for same in (
        plain(5, 9),
        metadata(random_batch(np.random.default_rng(3), 40, documents=2, branches=True)),
    ):
        assert np.array_equal(key_order(same), np.arange(len(same)))


def test_values_of_one_rank_are_put_into_the_order_of_the_row_and_those_of_a_part_are_refused() -> (
    None
):
    row = video_batch(frames=6, text=2, tokens_of_frame=10)
    (whole,) = all_shards(row, "contiguous", 1, 1)
    assert (np.diff(whole.plan.local) < 0).any(), "the plan sorts such a row"
    assert whole.in_row_order(whole.tokens).tolist() == row.tokens.tolist()
    with pytest.raises(ValueError, match="needs the whole row on one rank, but 2 cp ranks"):
        all_shards(row, "contiguous", 2, 1)[0].in_row_order(whole.tokens)


AUTO = {"cp_comm_type": "auto", "cp_layout": "auto"}


def config_of(cp: int, heads: int = 8, groups: int = 2, **values: Any) -> RunConfig:
    sizes = {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "hidden_size": 8 * heads,
        "seq_length": 512,
    }
    return with_values(RunConfig(), {**sizes, "context_parallel_size": cp, **AUTO, **values})


def causal(tokens: int, documents: int) -> PackedBatch:
    row = random_batch(np.random.default_rng(0), tokens, documents=1)
    length = tokens // documents
    return dataclasses.replace(
        row, leave=np.repeat((1 + np.arange(documents)) * length, length).astype(np.int32)
    )


def uneven() -> PackedBatch:
    """A long document follows short ones, whose tokens see fewer keys."""
    row = causal(512, 1)
    return dataclasses.replace(
        row, leave=np.append(np.arange(96) // 8 * 8 + 8, np.full(416, 512)).astype(np.int32)
    )


@pytest.mark.parametrize(
    ("row", "values", "chosen"),
    [
        (causal(512, 32), {}, ("kv_exchange", "balanced")),
        (causal(512, 1), {}, ("p2p", "zigzag")),
        (causal(512, 1), {"cp": 8}, ("a2a", "contiguous")),
        (
            causal(512, 1),
            {"cp": 8, "heads": 12, "groups": 4},
            ("p2p", "zigzag"),
        ),  # 12 heads do not divide by 8
        (causal(512, 1), {"cp": 8, "cp_comm_type": "all_gather"}, ("all_gather", "zigzag")),
        (causal(512, 32), {"cp_layout": "zigzag"}, ("kv_exchange", "zigzag")),
        (uneven(), {}, ("p2p", "balanced")),
        (causal(512, 32), {"cp": 1}, ("p2p", "zigzag")),
    ],
)
def test_the_rule(row: PackedBatch, values: dict[str, Any], chosen: tuple[str, str]) -> None:
    config = config_of(**{"cp": 4, **values})
    found, line = resolve_auto(config, lambda: [row])
    assert (found.parallel.cp_comm_type, found.parallel.cp_layout) == chosen
    assert (line is None) == (found.parallel.context_parallel_size == 1)


def test_nothing_is_read_where_nothing_is_left_to_choose() -> None:
    config = config_of(4, cp_comm_type="a2a", cp_layout="zigzag")
    assert resolve_auto(config, lambda: pytest.fail("rows were read")) == (config, None)  # type: ignore[arg-type]


def test_the_share_is_that_of_the_dense_mask() -> None:
    meta = metadata(
        random_batch(np.random.default_rng(1), 48, documents=3, branches=True, images=True)
    )
    indices = LAYOUTS["balanced"].deal(meta, 4)
    rows = sum(
        int(np.delete(allowed(meta.take(mine), meta).any(0), mine).sum()) for mine in indices
    )
    assert needed_share((meta, indices)) == rows / (4 * 36)


def test_a_measurement_refuses_auto() -> None:
    with pytest.raises(ValueError, match="--cp-comm-type"):
        Subject(0, 1, config_of(2), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world_size", "heads", "hierarchies"),
    [
        (
            2,
            (6, 3),
            [(1, 2)],
        ),  # 3 groups over 2 ranks: a copy of each K/V head for each of its query heads
        pytest.param(
            4, (12, 2), [(2, 2), (4, 1), (1, 4)], marks=pytest.mark.slow
        ),  # 2 groups over 4 ranks
        pytest.param(6, (12, 4), [(2, 3), (3, 2)], marks=pytest.mark.slow),  # 4 groups over 6 ranks
        pytest.param(8, (8, 1), [(2, 4), (8, 1)], marks=pytest.mark.slow),  # one K/V head for all
    ],
    ids=str,
)
def test_key_heads_need_not_divide_by_the_ranks(
    world_size: int, heads: tuple[int, int], hierarchies: list[tuple[int, int]]
) -> None:
    cases = [Case("a2a", "balanced", mask, heads=heads) for mask in ("holes", "causal")]
    cases += [
        Case("a2a+p2p", layout, "holes", heads=heads, hierarchy=h)
        for h in hierarchies
        for layout in LAYOUTS
    ]
    compare(run_ranks(on_ranks, world_size, cases), cases, 1e-12)


def test_copies_are_as_few_as_divide_by_the_ranks() -> None:
    found = [
        key_copies(*sizes) for sizes in ((8, 8, 2), (8, 2, 2), (8, 2, 8), (12, 4, 6), (8, 1, 4))
    ]
    assert found == [1, 1, 4, 3, 4]
    with pytest.raises(ValueError, match="8 heads among 3 ranks"):
        key_copies(8, 2, 3)


def test_gradients_of_copies_are_summed_wider_than_they_travel() -> None:
    results = run_ranks(copies_on_rank, 4)
    for dv in results:
        assert torch.equal(dv, torch.full_like(dv, 260.0))


def copies_on_rank(rank: int, world_size: int) -> torch.Tensor:
    """dv of tokens that see only themselves, with 8 query heads and one copied K/V head: 256, 1, 1,
    1.
    """
    cp = grid(cp=world_size).cp
    batch = shard_batch(batch_of(Case("", "", "one-token documents", 4)), cp, LAYOUTS["contiguous"])
    q, k, v = (
        torch.ones(1, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 1, 1)
    )
    dout = torch.tensor([256.0, 0, 1, 0, 1, 0, 1, 0], dtype=torch.bfloat16)[None, :, None].expand(
        1, 8, 8
    )
    transport = HeadsForSequence(cp, WholeAttention(FlexKernel((Once(), flex_backward), 8)))
    return torch.autograd.grad(transport.attend(q, k, v, batch.plan, 1.0), v, dout)[0]


class Once:
    """`flex_attention`, differentiated by autograd, with a count of its calls."""

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def __call__(self, *qkv: torch.Tensor, **options: object) -> torch.Tensor:
        self.calls.append(torch.is_grad_enabled())
        return dense(*qkv, **options)


def whole_on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[list, list[bool]]]:
    """Return `on_ranks` with a kernel that autograd differentiates, and the number of its calls."""
    found, cp = [], grid(cp=world_size).cp
    for case in cases:
        batch, kernel = shard_batch(batch_of(case), cp, LAYOUTS[case.layout]), Once()
        transport = HeadsForSequence(cp, WholeAttention(FlexKernel((kernel, flex_backward), 8)))
        results = attend(batch, transport, qkv_and_gradient(case, batch.num_tokens * world_size))
        found.append(([(batch.plan.local, results)], kernel.calls))
    return found


def test_a_kernel_that_autograd_differentiates_runs_once() -> None:
    cases = [Case("a2a", "balanced", mask, heads=(4, 2)) for mask in ("holes", "causal")]
    ranks = run_ranks(whole_on_ranks, 2, cases)
    for number, case in enumerate(cases):
        compare([rank[number][0] for rank in ranks], [case], 1e-12)
        assert all(rank[number][1] == [True] for rank in ranks)
