"""Figures of context parallelism: balance, traffic, tiles, memory and time, each beside its goal (`make bench`).

    python tools/bench_cp.py [--quick] [--json FILE] [--plot DIR] [--only layouts memory time]

Packs: `megacp/data/synthetic/mixed.py` (half images with branches, videos, text; several seeds) and one causal
document. What layouts cost is counted from plans for 2 to 16 ranks; memory and time are measured on 1, 2 and 4
processes with one thread each. Times are processor seconds summed over ranks, medians of runs that take turns: total
work, which other programs on the machine move little. Wall seconds are in the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megacp.batch import PackedBatch
from megacp.config.run import RunConfig, Value, with_values
from megacp.context_parallel.layout import LAYOUTS
from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.shard import mask_metadata
from megacp.data.synthetic.mixed import mixed_row
from megacp.distributed.spawn import RankPool
from megacp.measure import layouts as figures
from megacp.measure.attention import (
    Work,
    activation_peak,
    attention_work,
    dense_work,
    kept_bytes,
    ring_of_dense_blocks,
)
from megacp.ops.mask import CAUSAL, tile_table

DEGREES = (2, 4, 8, 16)
LENGTHS, QUICK_LENGTHS = (8_192, 36_864, 131_072), (4_096,)
SEEDS, QUICK_SEEDS = 5, 2
"""Mixed packs of each length; the area shown is the worst pack's, rows and bounds are summed over packs."""
AREA_GOALS = {2: 1.03, 4: 1.03, 8: 1.03, 16: 1.07}
BOUND_GOAL, LEAST_BOUND = 1.6, 0.01
"""Remote rows over their lower bound; undefined where the bound is less than this share of all remote rows, that is,
where next to nothing must be cut.
"""
TRANSPORTS = ("p2p", "all_gather", "kv_exchange", "a2a")
MEMORY_GOAL, DENSE_GOAL, RING_GOAL, PLANNING_GOAL = 1.05, 5.0, 4.0, 2.0
SIZES: dict[str, Value] = {
    "hidden_size": 512,
    "ffn_hidden_size": 1536,
    "num_attention_heads": figures.HEADS,
    "num_query_groups": figures.GROUPS,
    "vocab_size": 512,
    "global_batch_size": 1,
}
"""The model whose memory is measured: heads as wide as in the other figures."""


@dataclasses.dataclass
class Goal:
    """One figure beside its goal; `relation` is <=, >= or =. An undefined value neither meets nor misses it."""

    name: str
    value: float | None
    relation: str
    limit: float

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached."""
        if self.value is None:
            return None
        return {"<=": self.value <= self.limit, ">=": self.value >= self.limit, "=": self.value == self.limit}[
            self.relation
        ]

    def line(self) -> str:
        """As text."""
        value = "-" if self.value is None else f"{self.value:.3f}"
        word = {None: "not defined", True: "met", False: "MISSED"}[self.met]
        return f"  {self.name:<84}{value:>8}  goal {self.relation:>2} {self.limit:<5g} {word}"


Part = tuple[dict[str, Any], list[Goal]]
"""What a part adds to the JSON, and its goals."""


def causal_row(tokens: int) -> PackedBatch:
    """One document of text."""
    zeros = np.zeros(tokens, np.int32)
    positions = np.arange(tokens, dtype=np.int64)
    row = dataclasses.replace(mixed_row(tokens), position_ids=positions, document=zeros, branch=zeros, span=zeros)
    return dataclasses.replace(row, loss_weights=np.ones(tokens, np.float32))


def packs(quick: bool) -> dict[str, list[PackedBatch]]:
    """The packs by name."""
    lengths, seeds = (QUICK_LENGTHS, QUICK_SEEDS) if quick else (LENGTHS, SEEDS)
    mixed = {f"mixed {tokens:,}": [mixed_row(tokens, seed) for seed in range(seeds)] for tokens in lengths}
    return {**mixed, f"causal {lengths[0]:,}": [causal_row(lengths[0])]}


def layout_part(quick: bool, plot: Path | None) -> Part:
    """Counts for every pack, layout and degree, and the goals of the balanced layout."""
    entries: list[dict[str, Any]] = []
    goals = []
    for name, rows in packs(quick).items():
        empty = 0
        for cp in DEGREES:
            bounds = [figures.remote_rows_bound(mask_metadata(row), cp) for row in rows]
            for layout in LAYOUTS:
                plans = [plans_of(row, layout, cp) for row in rows]
                entry = {"pack": name, "cp": cp, "layout": layout, **summary(plans, bounds)}
                if layout == "balanced":
                    tiles = {t: dataclasses.asdict(figures.tile_figures(plans[0], t)) for t in figures.COUNTED}
                    entry["tiles"] = tiles
                    empty += sum(one["empty_calls"] for one in tiles.values())
                    goals += layout_goals(entry)
                    if plot is not None and cp == 8:
                        draw(plot / f"{name.replace(' ', '_').replace(',', '')}_cp8.png", f"{name} tokens", plans[0])
                entries.append(entry)
        goals.append(Goal(f"{name}, balanced: kernel calls on empty tiles", empty, "=", 0))
        if len(rows[0]) == max(QUICK_LENGTHS if quick else LENGTHS) and name.startswith("mixed"):
            times = [figures.planning_seconds(mask_metadata(row), LAYOUTS["balanced"], 8) for row in rows]
            seconds = statistics.median(time.cpu for time in times)
            entries[-1]["planning"] = [dataclasses.asdict(time) for time in times]
            goals.append(Goal(f"{name}, cp 8, balanced: processor seconds to plan", seconds, "<=", PLANNING_GOAL))
    return {"layouts": entries}, goals


def plans_of(row: PackedBatch, layout: str, cp: int) -> list[AttentionPlan]:
    """The plans of all ranks for a row, padded as the layout needs it."""
    padded = row.with_padding_to(LAYOUTS[layout].padded_length(mask_metadata(row), cp, 1))
    return figures.plans_of(mask_metadata(padded), LAYOUTS[layout], cp)


def summary(plans: Sequence[list[AttentionPlan]], bounds: Sequence[int]) -> dict[str, Any]:
    """Figures of one layout over some packs; the ratio to the bound where it speaks of such a layout."""
    found = [figures.layout_figures(ranks) for ranks in plans]
    area = max(one.area_max_over_mean for one in found)
    others = sum(len(ranks) * (len(ranks[0].metadata) - len(ranks[0].local)) for ranks in plans)
    remote, bound = sum(one.remote_rows for one in found), sum(bounds)
    defined = area <= 1 + figures.AREA_SLACK and bound >= LEAST_BOUND * others
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
    farthest = max((one["pairs_over_allowed"] for one in tiles), key=lambda ratio: abs(ratio - 1))
    return [
        Goal(f"{where}: attention area max / mean", entry["area_max_over_mean"], "<=", AREA_GOALS[entry["cp"]]),
        Goal(f"{where}: remote rows / lower bound ({shares})", entry["over_bound"], "<=", BOUND_GOAL),
        Goal(f"{where}: pairs computed / allowed, {len(tiles)} transports", farthest, "=", 1.0),
    ]


def memory_part(quick: bool) -> Part:
    """Over one process: what attention keeps on all ranks, and the most a model allocates on the fullest, times cp."""
    row, long = mixed_row(1_024 if quick else 4_096), mixed_row(1_024 if quick else 8_192)
    layers = 2 if quick else 8
    found: dict[str, Any] = {}
    goals = []
    sizes = with_values(RunConfig(), {**SIZES, "num_layers": layers, "seq_length": len(row)})
    with RankPool(1) as pool:
        (kept_alone,) = pool.run(kept_bytes, long, "p2p", "contiguous")
        (peak_alone,) = pool.run(activation_peak, sizes, row)
    for cp in (2,) if quick else (2, 4):
        with RankPool(cp) as pool:
            for transport in TRANSPORTS:
                values = {"context_parallel_size": cp, "cp_comm_type": transport, "cp_layout": "balanced"}
                kept = pool.run(kept_bytes, long, transport, "balanced")
                peaks = pool.run(activation_peak, with_values(sizes, values), row)
                where = f"{transport}, cp {cp}"
                found[where] = {"kept": kept, "kept_alone": kept_alone, "peaks": peaks, "peak_alone": peak_alone}
                goals += [
                    Goal(f"{where}: kept for backward by attention, sum", sum(kept) / kept_alone, "<=", MEMORY_GOAL),
                    Goal(f"{where}: peak of activations x cp", max(peaks) * cp / peak_alone, "<=", MEMORY_GOAL),
                ]
                print(f"  {goals[-1].line()}", file=sys.stderr)
    found |= {"tokens": len(row), "layers": layers, "tokens_of_attention": len(long)}
    return {"memory": found}, goals


def time_part(quick: bool) -> Part:
    """Total work against a dense mask on one process, and against a ring of dense blocks."""
    rounds, length, part = (1, 2_048, 512) if quick else (3, 8_192, 2_048)
    mixed = [mixed_row(length, seed) for seed in range(1 if quick else 3)]
    rings = {"causal": [causal_row(2 * part)], "mixed": [mixed_row(2 * part, seed) for seed in range(len(mixed))]}
    ways = {"causal": ("p2p", "zigzag"), "mixed": ("kv_exchange", "balanced")}
    taken: dict[str, list[dict[str, float]]] = {}
    with RankPool(1) as one, RankPool(2) as two:

        def measure(name: str, pool: RankPool, function: Any, rows: Sequence[PackedBatch], *arguments: str) -> None:
            works: list[list[Work]] = [pool.run(function, row, *arguments) for row in rows]
            every = {
                "work": sum(work.cpu_seconds for ranks in works for work in ranks),
                "slowest_rank": sum(max(work.cpu_seconds for work in ranks) for ranks in works),
                "wall": sum(max(work.seconds for work in ranks) for ranks in works),
            }
            taken.setdefault(name, []).append(every)
            print(f"  {name}: {every['work']:.2f} processor seconds, {every['wall']:.2f} s", file=sys.stderr)

        for _ in range(rounds):
            measure("dense mask", one, dense_work, mixed)
            measure("tiles, cp 1", one, attention_work, mixed, "p2p", "contiguous")
            measure("tiles, cp 2", two, attention_work, mixed, "kv_exchange", "balanced")
            for name, rows in rings.items():
                measure(f"{name}: dense ring", two, ring_of_dense_blocks, rows)
                measure(f"{name}: tiles", two, attention_work, rows, *ways[name])

    def ratio(slow: str, fast: str, kind: str = "work") -> float:
        return statistics.median(one[kind] for one in taken[slow]) / statistics.median(one[kind] for one in taken[fast])

    what = f"{len(mixed)} x {length:,} mixed tokens: dense SDPA / tiles"
    goals = [Goal(f"{what}, cp {cp}: work", ratio("dense mask", f"tiles, cp {cp}"), ">=", DENSE_GOAL) for cp in (1, 2)]
    for name in rings:
        what, pair = (
            f"2 x {part:,} {name} tokens: ring of dense blocks / tiles",
            (f"{name}: dense ring", f"{name}: tiles"),
        )
        goals.append(Goal(f"{what}: work", ratio(*pair), ">=", RING_GOAL))
        goals.append(Goal(f"{what}: work of the slowest rank", ratio(*pair, "slowest_rank"), ">=", RING_GOAL))
    densities = [mask_metadata(row).own_table.area / length**2 for row in mixed]
    return {"time": {"seconds": taken, "densities_of_mixed": densities}}, goals


def draw(path: Path, title: str, plans: list[AttentionPlan]) -> None:
    """The mask's tiles coloured by the rank that computes them, and a bar of area per rank."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.collections import PolyCollection

    found, size = figures.layout_figures(plans), len(plans[0].metadata)
    colours = pyplot.get_cmap("turbo")(np.linspace(0.05, 0.95, len(plans)))
    figure, (mask, bars) = pyplot.subplots(1, 2, figsize=(12, 7.5), width_ratios=[3, 1], layout="constrained")
    for plan, colour in zip(plans, colours, strict=True):
        # thin edges close the seams between neighbouring tiles; snapping would make gaps of few tokens a pixel wide
        style = {"facecolors": [colour], "edgecolors": [colour], "linewidths": 0.3, "snap": False}
        mask.add_collection(PolyCollection(tile_shapes(plan), **style))
    mask.set(xlim=(0, size), ylim=(size, 0), aspect="equal", title="tiles of the mask by rank")
    mask.set(xlabel="key (place in the pack)", ylabel="query (place in the pack)")
    area = figures.area_per_rank(plans)
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
    """Corners of this rank's tiles in places of the pack: rectangles, and triangles below the diagonal."""
    tokens = np.sort(plan.local)
    shapes = []
    for row in tile_table(plan.metadata.take(tokens), plan.metadata).rows:
        places = tokens[row.q_start : row.q_stop]
        gaps = np.flatnonzero(np.diff(places) != 1) + 1
        for part in np.split(places, gaps):
            top, bottom = int(part[0]), int(part[-1]) + 1
            for tile in row.tiles:
                left, right = tile.k_start, tile.k_stop
                corners = [(left, top), (left, bottom), (right, bottom)]
                shapes.append(corners if tile.kind == CAUSAL else [*corners, (right, top)])
    return shapes


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Layouts side by side: area max/mean and share of remote rows."""
    lines = [f"  {'area max / mean, remote rows needed':<36}" + "".join(f"{name:>20}" for name in LAYOUTS)]
    for pack, cp in dict.fromkeys((entry["pack"], entry["cp"]) for entry in entries):
        cells = {entry["layout"]: entry for entry in entries if (entry["pack"], entry["cp"]) == (pack, cp)}
        texts = [f"{cells[n]['area_max_over_mean']:.3f} {cells[n]['remote_share']:>6.1%}" for n in LAYOUTS]
        lines.append(f"  {f'{pack}, cp {cp}':<36}" + "".join(f"{text:>20}" for text in texts))
    return "\n".join(lines)


PARTS = ("layouts", "memory", "time")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description="Figures of context parallelism beside their goals.")
    parser.add_argument("--quick", action="store_true", help="short packs and one round: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture of each pack's tiles by rank there")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {"quick": arguments.quick, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    goals: list[Goal] = []
    parts = {
        "layouts": lambda: layout_part(arguments.quick, arguments.plot),
        "memory": lambda: memory_part(arguments.quick),
        "time": lambda: time_part(arguments.quick),
    }
    for name in (part for part in PARTS if part in arguments.only):
        found, reached = parts[name]()
        result |= found
        goals += reached
        if name == "layouts":
            print(table(result["layouts"]), flush=True)
        print("\n".join([f"\n{name}", *(goal.line() for goal in reached)]), flush=True)
    result["goals"] = [{**dataclasses.asdict(goal), "met": goal.met} for goal in goals]
    defined = [goal for goal in goals if goal.met is not None]
    print(f"\n{sum(bool(goal.met) for goal in defined)} of {len(defined)} goals met")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
