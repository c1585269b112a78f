"""Figures of context parallelism beside their goals: what layouts cost, memory of attention, time against a dense mask.

The rows are `data/synthetic/mixed.py` (half images with branches, videos, text; several seeds) and one causal document.
Layout costs are counted from plans; memory and time are measured on real ranks with one thread each.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import layouts
from bench.attention import (
    activation_peak,
    attention_per_tile,
    attention_work,
    dense_work,
    kept_bytes,
    ring_of_dense_blocks,
)
from bench.report import Goal, Part, Seconds, take_turns
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.data.batch import PackedBatch
from megacp.core.data.synthetic.mixed import branched_row, causal_row, mixed_row
from megacp.core.distributed.spawn import RankPool
from megacp.core.ops.mask import CAUSAL, tile_table
from megacp.core.planner.report import table

DEGREES = (2, 4, 8, 16)
LENGTHS, QUICK_LENGTHS = (8_192, 36_864, 131_072), (4_096,)
SEEDS, QUICK_SEEDS = 5, 2
"""Mixed packs of each length; the area shown is the worst pack's, rows and bounds are summed over packs."""
AREA_GOALS = {2: 1.03, 4: 1.03, 8: 1.03, 16: 1.07}
BOUND_GOAL, LEAST_BOUND = 1.6, 0.01
"""Remote rows over their lower bound; undefined where the bound is less than this share of all remote rows, that is,
where next to nothing must be cut.
"""
COMPUTED_GOAL = 1.01
"""Pairs that are computed over those that are allowed: what masked blocks of short tiles may add to long packs."""
TRANSPORTS = ("p2p", "all_gather", "kv_exchange", "a2a")
SHORT, SHORT_GOAL = (8, 12), 2.0
"""Tokens of the prefix and of each branch of a short document."""
MEMORY_GOAL, DENSE_GOAL, RING_GOAL, PLANNING_GOAL = 1.05, 5.0, 4.0, 2.0
SIZES: dict[str, Value] = {
    "hidden_size": 512,
    "ffn_hidden_size": 1536,
    "num_attention_heads": layouts.HEADS,
    "num_query_groups": layouts.GROUPS,
    "vocab_size": 512,
    "global_batch_size": 1,
}
"""The model whose memory is measured: heads as wide as in the other figures."""


def packs(quick: bool) -> dict[str, list[PackedBatch]]:
    """The packs by name."""
    lengths, seeds = (QUICK_LENGTHS, QUICK_SEEDS) if quick else (LENGTHS, SEEDS)
    mixed = {f"mixed {tokens:,}": [mixed_row(tokens, seed) for seed in range(seeds)] for tokens in lengths}
    return {**mixed, f"causal {lengths[0]:,}": [causal_row(lengths[0])]}


def layout_part(quick: bool, plot: Path | None) -> Part:
    """Counts for every pack, layout and degree, and the goals of the balanced layout; pictures go to `plot`."""
    entries: list[dict[str, Any]] = []
    goals = []
    lines = [["area max / mean, remote rows needed", *LAYOUTS]]
    for name, rows in packs(quick).items():
        empty_calls = 0
        for cp in DEGREES:
            bounds = [layouts.remote_rows_bound(mask_metadata(row), cp) for row in rows]
            cells = []
            for layout in LAYOUTS:
                plans = [plans_of(row, layout, cp) for row in rows]
                entry = {"pack": name, "cp": cp, "layout": layout, **summary(plans, bounds)}
                entries.append(entry)
                cells.append(f"{entry['area_max_over_mean']:.3f} {entry['remote_share']:>6.1%}")
                if layout == "balanced":
                    tiles = {t: dataclasses.asdict(layouts.tile_figures(plans[0], t)) for t in layouts.COUNTED}
                    entry["tiles"] = tiles
                    empty_calls += sum(one["empty_calls"] for one in tiles.values())
                    goals += layout_goals(entry)
                    if plot is not None and cp == 8:
                        draw(plot / f"{name.replace(' ', '_').replace(',', '')}_cp8.png", f"{name} tokens", plans[0])
            lines.append([f"{name}, cp {cp}", *cells])
        goals.append(Goal(f"{name}, balanced: kernel calls on empty tiles", empty_calls, 0, "="))
        if len(rows[0]) == max(QUICK_LENGTHS if quick else LENGTHS) and name.startswith("mixed"):
            times = [layouts.planning_seconds(mask_metadata(row), LAYOUTS["balanced"], 8) for row in rows]
            entries[-1]["planning"] = [dataclasses.asdict(time) for time in times]
            seconds = statistics.median(time.cpu for time in times)
            goals.append(Goal(f"{name}, cp 8, balanced: processor seconds to plan", seconds, PLANNING_GOAL))
    return Part({"layouts": entries}, goals, table(lines))


def plans_of(row: PackedBatch, layout: str, cp: int) -> list[AttentionPlan]:
    """The plans of all ranks for a row, padded as the layout needs it."""
    padded = row.with_padding_to(LAYOUTS[layout].padded_length(mask_metadata(row), cp, 1))
    return layouts.plans_of(mask_metadata(padded), LAYOUTS[layout], cp)


def summary(plans: Sequence[list[AttentionPlan]], bounds: Sequence[int]) -> dict[str, Any]:
    """Figures of one layout over some packs; the ratio to the bound where the bound holds for such a layout."""
    found = [layouts.layout_figures(ranks) for ranks in plans]
    area = max(one.area_max_over_mean for one in found)
    others = sum(len(ranks) * (len(ranks[0].metadata) - len(ranks[0].local)) for ranks in plans)
    remote, bound = sum(one.remote_rows for one in found), sum(bounds)
    defined = area <= 1 + layouts.AREA_SLACK and bound >= LEAST_BOUND * others
    return {
        "area_max_over_mean": area,
        "remote_share": remote / others,
        "bound_share": bound / others,
        "over_bound": remote / bound if defined else None,
        "ranks_per_document": statistics.mean(one.ranks_per_document for one in found),
        "each": [{**dataclasses.asdict(one), "bound": least} for one, least in zip(found, bounds, strict=True)],
    }


def layout_goals(entry: dict[str, Any]) -> list[Goal]:
    """Goals of the balanced layout for one pack and degree."""
    where, tiles = f"{entry['pack']}, cp {entry['cp']}, balanced", entry["tiles"].values()
    shares = f"{entry['remote_share']:.1%} / {entry['bound_share']:.1%}"
    farthest = max((one["used_over_allowed"] for one in tiles), key=lambda ratio: abs(ratio - 1))
    return [
        Goal(f"{where}: attention area max / mean", entry["area_max_over_mean"], AREA_GOALS[entry["cp"]]),
        Goal(f"{where}: remote rows / lower bound ({shares})", entry["over_bound"], BOUND_GOAL),
        Goal(f"{where}: pairs used / allowed, {len(tiles)} transports", farthest, 1.0, "="),
        Goal(f"{where}: pairs computed / allowed", max(one["computed_over_allowed"] for one in tiles), COMPUTED_GOAL),
    ]


def memory_part(quick: bool) -> Part:
    """Over one process: what attention keeps on all ranks, and the most a model allocates on the fullest, times cp."""
    row, long = mixed_row(512 if quick else 4_096), mixed_row(512 if quick else 8_192)
    layers = 2 if quick else 8
    found: dict[str, Any] = {"tokens": len(row), "layers": layers, "tokens_of_attention": len(long)}
    goals = []
    sizes = with_values(RunConfig(), {**SIZES, "num_layers": layers, "seq_length": len(row)})
    with RankPool(1) as pool:
        (kept_alone,) = pool.run(kept_bytes, long, "p2p", "contiguous")
        (peak_alone,) = pool.run(activation_peak, sizes, row)
    for cp in (2,) if quick else (2, 4):
        with RankPool(cp) as pool:
            for transport in TRANSPORTS:
                values: dict[str, Value] = {"context_parallel_size": cp, "cp_comm_type": transport}
                kept = pool.run(kept_bytes, long, transport, "balanced")
                peaks = pool.run(activation_peak, with_values(sizes, {**values, "cp_layout": "balanced"}), row)
                where = f"{transport}, cp {cp}"
                found[where] = {"kept": kept, "kept_alone": kept_alone, "peaks": peaks, "peak_alone": peak_alone}
                goals += [
                    Goal(f"{where}: kept for backward by attention, sum", sum(kept) / kept_alone, MEMORY_GOAL),
                    Goal(f"{where}: peak of activations x cp", max(peaks) * cp / peak_alone, MEMORY_GOAL),
                ]
                print(f"  {where} measured", file=sys.stderr)
    return Part({"memory": found}, goals)


def time_part(quick: bool) -> Part:
    """Total work against a dense mask on one process, and against a ring of dense blocks."""
    rounds, length, part = (1, 1_024, 256) if quick else (3, 8_192, 2_048)
    mixed = [mixed_row(length, seed) for seed in range(1 if quick else 3)]
    rings = {"causal": [causal_row(2 * part)], "mixed": [mixed_row(2 * part, seed) for seed in range(len(mixed))]}
    short = [branched_row(length // 64, *SHORT)]
    with RankPool(1) as one, RankPool(2) as two:
        ways = {
            "dense mask": functools.partial(work, one, mixed, dense_work),
            "tiles, cp 1": functools.partial(work, one, mixed, attention_work, "p2p", "contiguous"),
            "tiles, cp 2": functools.partial(work, two, mixed, attention_work, "kv_exchange", "balanced"),
        }
        for name, way in (("causal", ("p2p", "zigzag")), ("mixed", ("kv_exchange", "balanced"))):
            ways[f"{name}: dense ring"] = functools.partial(work, two, rings[name], ring_of_dense_blocks)
            ways[f"{name}: tiles"] = functools.partial(work, two, rings[name], attention_work, *way)
        for name, attention in (("a call per tile", attention_per_tile), ("blocks", attention_work)):
            ways[f"short: {name}"] = functools.partial(work, one, short, attention, "p2p", "contiguous")
        taken = take_turns(ways, rounds)

    def ratio(slow: str, fast: str, kind: str = "work") -> float:
        return statistics.median(one[kind] for one in taken[slow]) / statistics.median(one[kind] for one in taken[fast])

    what = f"{len(mixed)} x {length:,} mixed tokens: dense SDPA / tiles"
    goals = [Goal(f"{what}, cp {cp}: work", ratio("dense mask", f"tiles, cp {cp}"), DENSE_GOAL, ">=") for cp in (1, 2)]
    for name in rings:
        pair, what = (
            (f"{name}: dense ring", f"{name}: tiles"),
            f"2 x {part:,} {name} tokens: ring of dense blocks / tiles",
        )
        goals.append(Goal(f"{what}: work", ratio(*pair), RING_GOAL, ">="))
        goals.append(Goal(f"{what}: work of the slowest rank", ratio(*pair, "slowest_rank"), RING_GOAL, ">="))
    what = f"{length // 64} documents of {SHORT[0]} tokens and 3 branches of {SHORT[1]}: a call per tile / blocks"
    goals.append(Goal(f"{what}: work", ratio("short: a call per tile", "short: blocks"), SHORT_GOAL, ">="))
    densities = [mask_metadata(row).own_table.area / length**2 for row in mixed]
    return Part({"time": {"seconds": taken, "densities_of_mixed": densities}}, goals)


def work(pool: RankPool, rows: Sequence[PackedBatch], attention: Callable[..., Seconds], *way: str) -> dict[str, float]:
    """Seconds of an attention over some rows: processor time of all ranks, of the slowest, and wall time."""
    ranks: list[list[Seconds]] = [pool.run(attention, row, *way) for row in rows]
    return {
        "work": sum(one.cpu for row in ranks for one in row),
        "slowest_rank": sum(max(one.cpu for one in row) for row in ranks),
        "wall": sum(max(one.wall for one in row) for row in ranks),
    }


def draw(path: Path, title: str, plans: list[AttentionPlan]) -> None:
    """The mask's tiles coloured by the rank that computes them, and a bar of area per rank."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.collections import PolyCollection

    found, size = layouts.layout_figures(plans), len(plans[0].metadata)
    colours = pyplot.get_cmap("turbo")(np.linspace(0.05, 0.95, len(plans)))
    figure, (mask, bars) = pyplot.subplots(1, 2, figsize=(12, 7.5), width_ratios=[3, 1], layout="constrained")
    for plan, colour in zip(plans, colours, strict=True):
        # thin edges close the seams between neighbouring tiles; snapping would make gaps of few tokens a pixel wide
        tiles = PolyCollection(tile_shapes(plan), facecolors=[colour], edgecolors=[colour], linewidths=0.3, snap=False)
        mask.add_collection(tiles)
    mask.set(xlim=(0, size), ylim=(size, 0), aspect="equal", title="tiles of the mask by rank")
    mask.set(xlabel="key (index in the pack)", ylabel="query (index in the pack)")
    area = layouts.area_per_rank(plans)
    bars.barh(range(len(plans)), area / area.mean(), color=colours)
    bars.set(xlabel="attention area / mean", ylabel="rank", yticks=range(len(plans)), title="area of each rank")
    bars.axvline(1.0, color="black", linewidth=0.8)
    bars.invert_yaxis()
    figure.suptitle(
        f"{title}, cp {len(plans)}, balanced: area max / mean {found.area_max_over_mean:.3f}, "
        f"{found.remote_share:.1%} of remote K/V rows needed, a document on {found.ranks_per_document:.1f} ranks"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def tile_shapes(plan: AttentionPlan) -> list[list[tuple[int, int]]]:
    """Corners of this rank's tiles, by token indices of the pack: rectangles, and triangles below the diagonal."""
    tokens = np.sort(plan.local)
    shapes = []
    for row in tile_table(plan.metadata.take(tokens), plan.metadata).rows:
        queries = tokens[row.q_start : row.q_stop]  # a rank's neighbours may be far apart in the pack
        for part in np.split(queries, np.flatnonzero(np.diff(queries) != 1) + 1):
            top, bottom = int(part[0]), int(part[-1]) + 1
            for tile in row.tiles:
                left, right = tile.k_start, tile.k_stop
                corners = [(left, top), (left, bottom), (right, bottom)]
                shapes.append(corners if tile.kind == CAUSAL else [*corners, (right, top)])
    return shapes
