"""Measures context parallelism: the balance and traffic of token layouts, and the time of attention
compared with a dense mask.

Balance and traffic are computed from plans, in one process for any number of ranks. Times are CPU
seconds of real ranks with one thread each, which take turns. Other programs on the machine hardly
affect CPU seconds.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.mixed_rows import mixed_row
from bench.report import Goal, Part, Seconds, take_turns, timed
from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.kv_exchange import needed_rows
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.states import recur
from megacp.attention.ops.mask import Metadata, Reach, allowed, tile_table
from megacp.attention.ops.recurrence import gated_delta_rule
from megacp.distributed.collectives import barrier
from megacp.distributed.grid import build_grid
from megacp.distributed.heap import keep_in_heap
from megacp.distributed.shape import GridShape
from megacp.dry_run.report import table
from megacp.engine.backends.recurrent import STATE_TEMPORARIES
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.shard import mask_metadata, shard_batch
from megacp.training.data.mock import MockRules, mock_batch
from megacp.verify.spawn import RankPool

HEADS, GROUPS, WIDTH = 8, 4, 64
DEGREES = (2, 4, 8, 16)
LENGTHS, QUICK_LENGTHS = (8_192, 36_864, 131_072), (4_096,)
AREA_GOALS = {2: 1.03, 4: 1.03, 8: 1.03, 16: 1.07}
DENSE_GOAL, WINDOW_GOAL = 5.0, 1.3
STATE_GOALS = {"cp 1": 0.6, "cp 2": 0.9}


def plans_of(row: PackedBatch, layout: str, cp: int) -> list[AttentionPlan]:
    """Return every rank's plan for a row, padded for the layout."""
    metadata = mask_metadata(
        row.with_padding_to(LAYOUTS[layout].padded_length(mask_metadata(row), cp, 1))
    )
    indices = LAYOUTS[layout].deal(metadata, cp)
    first = AttentionPlan(indices, metadata, 0)
    return [first, *(AttentionPlan(indices, metadata, rank, first.order) for rank in range(1, cp))]


def area_per_rank(plans: Sequence[AttentionPlan]) -> np.ndarray:
    """Return the number of allowed pairs of each rank's queries, int64 `[cp]`."""
    cost = plans[0].metadata.own_table.keys_per_query
    return np.array([cost[plan.local].sum() for plan in plans])


def remote_rows(plans: Sequence[AttentionPlan]) -> int:
    """Return the number of K/V rows that ranks need from other ranks, summed over ranks."""
    return sum(
        int(needed.sum() - needed[plan.local].sum())
        for plan, needed in zip(plans, needed_rows(plans[0]), strict=True)
    )


def layout_part(quick: bool) -> Part:
    """Measure for every layout the ratio of the largest attention area to the mean, and the share
    of rows needed from other ranks.
    """
    lengths, seeds = (QUICK_LENGTHS, 2) if quick else (LENGTHS, 5)
    packs = {
        f"mixed {tokens:,}": [mixed_row(tokens, seed) for seed in range(seeds)]
        for tokens in lengths
    }
    packs[f"causal {lengths[0]:,}"] = [mock_batch([0], MockRules(64, lengths[0], "causal"))]
    entries, goals = [], []
    lines = [["area largest / mean, remote rows needed", *LAYOUTS]]
    for name, rows in packs.items():
        for cp in DEGREES:
            cells = []
            for layout in LAYOUTS:
                dealt = [plans_of(row, layout, cp) for row in rows]
                areas = [area_per_rank(plans) for plans in dealt]
                worst = max(float(area.max() / area.mean()) for area in areas)
                others = sum(cp * (len(plans[0].metadata) - len(plans[0].local)) for plans in dealt)
                share = sum(remote_rows(plans) for plans in dealt) / others
                entries.append(
                    {"pack": name, "cp": cp, "layout": layout, "area": worst, "remote_share": share}
                )
                cells.append(f"{worst:.3f} {share:>6.1%}")
                if layout == "balanced":
                    goals.append(
                        Goal(
                            f"{name}, cp {cp}, balanced: area largest / mean", worst, AREA_GOALS[cp]
                        )
                    )
            lines.append([f"{name}, cp {cp}", *cells])
    return Part({"layouts": entries}, goals, table(lines))


_grid = functools.cache(build_grid)


def _tensors(tokens: int) -> list[Tensor]:
    """Return q, k, v and the output gradient in fp32, with the same values in every run."""
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, WIDTH, generator=g) for heads in (HEADS, GROUPS, GROUPS, HEADS)
    ]


def attention_work(
    rank: int, world_size: int, batch: PackedBatch, transport: str, layout: str, window: int = 0
) -> Seconds:
    """Time one rank's forward and backward pass of attention on its shard of the row."""
    axis = _grid(GridShape(cp=world_size), rank).cp
    plan = shard_batch(batch, axis, LAYOUTS[layout]).plan.within(Reach(window))
    way = select_transport(transport, "auto", axis, torch.device("cpu"))
    *inputs, dout = _tensors(len(plan.local))

    def step() -> None:
        leaves = [x.clone().requires_grad_() for x in inputs]
        way.attend(leaves[0], leaves[1], leaves[2], plan, WIDTH**-0.5).backward(dout)

    step()  # builds tables and index tensors, like the first layer of a model
    barrier(axis)
    return timed(step)[1]


def dense_work(rank: int, world_size: int, batch: PackedBatch) -> Seconds:
    """Time `scaled_dot_product_attention` with the whole mask on one process.

    The dtype is fp32, which the CPU kernel supports directly.
    """
    meta = mask_metadata(batch)
    hidden = torch.from_numpy(~allowed(meta, meta))
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    q, k, v, dout = (
        x.transpose(0, 1).unsqueeze(0) for x in _tensors(len(batch))
    )  # [T, heads, d] -> [1, heads, T, d]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return timed(
        lambda: scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).backward(dout)
    )[1]


def state_work(rank: int, world_size: int, tokens: int, ours: bool) -> Seconds:
    """Time the forward and backward pass of a gated delta rule on one document.

    The code is ours or transformers' fallback.
    """
    axis, g = _grid(GridShape(cp=world_size), rank).cp, torch.Generator().manual_seed(0)
    row = Metadata.of_documents(np.zeros(tokens, int))
    plan = AttentionPlan(LAYOUTS["contiguous"].deal(row, world_size), row, rank)
    shapes = (tokens, 2, 128), (tokens, 2, 128), (tokens, 4, 128), (tokens, 4), (tokens, 4)
    q, k, v, decay, beta = (torch.rand(shape, generator=g)[plan.local] for shape in shapes)

    def step() -> None:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, -decay, beta)]
        if ours:
            recur(gated_delta_rule, plan, axis, *leaves).sum().backward()
            return
        from transformers.models.qwen3_5.modeling_qwen3_5 import (
            torch_chunk_gated_delta_rule as fallback,
        )

        fallback(*(x[None] for x in leaves), use_qk_l2norm_in_kernel=True)[0].sum().backward()

    # Our backend requests this setting; with the library's code, glibc chooses it by itself.
    keep_in_heap(STATE_TEMPORARIES)
    step()
    barrier(axis)
    return timed(step)[1]


def states_part(quick: bool) -> Part:
    """Measure the total work of a gated delta rule on one and two ranks, relative to transformers'
    fallback on one process.
    """
    rounds, tokens = (1, 256) if quick else (5, 4_096)

    def way(pool: RankPool, ours: bool) -> Callable[[], float]:
        return lambda: sum(one.cpu for one in pool.run(state_work, tokens, ours))

    with RankPool(1) as one, RankPool(2) as two:
        taken = take_turns(
            {"library": way(one, False), "cp 1": way(one, True), "cp 2": way(two, True)}, rounds
        )
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    goals = [
        Goal(
            f"{tokens:,} tokens, 4 heads of 128: {name} / library: work",
            median[name] / median["library"],
            goal,
        )
        for name, goal in STATE_GOALS.items()
    ]
    return Part({"states": taken}, goals)


def time_part(quick: bool) -> Part:
    """Measure the total work of attention relative to a dense mask on one process, and of a window
    relative to full causal attention.
    """
    rounds, length = (1, 1_024) if quick else (3, 8_192)
    rows = [mixed_row(length, seed) for seed in range(1 if quick else 3)]
    causal, window = [mock_batch([0], MockRules(64, length, "causal"))], length // 16

    def way(
        pool: RankPool, rows: Sequence[PackedBatch], attention: Callable[..., Seconds], *way: object
    ) -> Callable[[], float]:
        """Return a function that measures the CPU seconds of all ranks for all rows."""
        return lambda: sum(one.cpu for row in rows for one in pool.run(attention, row, *way))

    with RankPool(1) as one, RankPool(2) as two:
        ways = {
            "dense mask": way(one, rows, dense_work),
            "tiles, cp 1": way(one, rows, attention_work, "p2p", "contiguous"),
            "tiles, cp 2": way(two, rows, attention_work, "kv_exchange", "balanced"),
            "causal": way(one, causal, attention_work, "p2p", "contiguous"),
            "window": way(one, causal, attention_work, "p2p", "contiguous", window),
        }
        taken = take_turns(ways, rounds)
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    what = f"{len(rows)} x {length:,} mixed tokens: dense SDPA / tiles"
    goals = [
        Goal(
            f"{what}, cp {cp}: work",
            median["dense mask"] / median[f"tiles, cp {cp}"],
            DENSE_GOAL,
            ">=",
        )
        for cp in (1, 2)
    ]
    row = mask_metadata(causal[0])
    part, whole = (tile_table(row, row, Reach(n)).area for n in (window, 0))
    what = f"{length:,} causal tokens, window of {window} / none: work (area {part / whole:.4f})"
    goals.append(Goal(what, median["window"] / median["causal"], WINDOW_GOAL * part / whole))
    return Part({"time": taken}, goals)
