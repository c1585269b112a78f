"""The cost of dealing images to ranks: load of the busiest rank, bytes of features, packs under two budgets.

Loads are counted from the tables and routes of training. Beside them stands the least possible load, by a table of all
partitions. So does the split by number of images that a short loop would make. Only `feature_traffic` needs ranks: it
shows that the counted bytes are those that are sent.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.report import Goal, Part
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.context_parallel.layout import LAYOUTS, Layout
from megacp.core.context_parallel.shard import mask_metadata, shard_batch
from megacp.core.context_parallel.vision import EXCHANGES, FeatureRoutes, add_features, feature_routes, place_features
from megacp.core.data.batch import PackedBatch
from megacp.core.data.image_shards import (
    ImageShards,
    compute_image_shard_boundaries,
    longest_first,
    uniform_boundaries,
    unit_costs,
)
from megacp.core.data.synthetic.mixed import mixed_row
from megacp.core.data.synthetic.units import KINDS, Units, mixed_documents, synthetic_units, with_vision
from megacp.core.distributed.grid import GridShape, build_grid
from megacp.core.distributed.spawn import RankPool
from megacp.core.planner.report import table
from megacp.core.training.images import vision_cost
from megacp.prepare.build.packing import two_budgets

MOLMO2: dict[str, Value] = {
    "vision_num_layers": 25,
    "hidden_size": 2560,
    "ffn_hidden_size": 9728,
    "vocab_size": 151_936,
}
"""Units are weighed by FLOPs of this model: Molmo2-4B."""
BUDGETS = ((16_384, 128), (16_384, 160), (36_864, 256), (36_864, 384))
"""Tokens and crops of a pack."""


@dataclass(frozen=True)
class Load:
    """The load of the ranks under one way of dealing, over some packs."""

    over_mean: float
    """Largest cost of a rank over the mean, mean of packs."""
    over_optimum: float
    """Largest cost over the least possible of contiguous ranges, mean of packs."""
    worst: float
    """The same, of the worst pack."""
    starved: int
    """Ranks without a unit while there were enough, all packs together."""


@dataclass(frozen=True)
class FeatureBytes:
    """Bytes that the features of a row cost to send once, over all ranks and for the busiest."""

    routed: int
    gathered: int
    busiest_routed: int
    busiest_gathered: int


def greedy_by_images(crops: np.ndarray, cp: int) -> list[int]:
    """Where each rank's units end if ranks are filled one by one to an equal share of images: the plain loop."""
    share, held = int(crops.sum()) / cp, 0
    stops: list[int] = []
    for unit, number in enumerate(crops.tolist()):
        held += number
        if held >= share and len(stops) < cp - 1:
            stops.append(unit + 1)
            held = 0
    return stops + [len(crops)] * (cp - len(stops))


def least_largest_cost(costs: np.ndarray, cp: int) -> int:
    """The optimum over contiguous ranges by dynamic programming, O(cp u^2)."""
    running = np.concatenate(([0], np.cumsum(costs)))
    last = running[:, None] - running[None, :]  # cost of units j..i on one rank
    last[np.triu_indices(len(running), 1)] = running[-1]  # j > i is no range
    best = running
    for _ in range(cp - 1):
        best = np.maximum(best[None, :], last).min(1)
    return int(best[-1])


def rank_costs(costs: np.ndarray, crops: np.ndarray, shards: ImageShards) -> list[np.ndarray]:
    """Costs of the units of each rank."""
    bounds = np.cumsum(crops)
    return [costs[shards.units(bounds, rank)] for rank in range(len(shards.boundaries))]


def dealt(units: Units, costs: np.ndarray, cp: int) -> dict[str, list[np.ndarray]]:
    """Costs of each rank's units by the way of dealing: the stored tables (which weigh crops), the same function by
    FLOPs, longest first by FLOPs, equal numbers of units, and the plain loop.
    """
    bounds = np.cumsum(units[0]), np.cumsum(units[1])
    ways = {
        "stored": ImageShards(compute_image_shard_boundaries(*bounds, cp), "stored"),
        "by FLOPs": ImageShards(compute_image_shard_boundaries(*bounds, cp, costs), "computed"),
        "longest first": longest_first(*bounds, cp, costs),
        "uniform": ImageShards(uniform_boundaries(*bounds, cp), "uniform"),
    }
    found = {name: rank_costs(costs, units[0], shards) for name, shards in ways.items()}
    return found | {"greedy": np.split(costs, greedy_by_images(units[0], cp)[:-1])}


WAYS = ("stored", "by FLOPs", "longest first", "uniform", "greedy")


def vision_loads(kind: str, cp: int, packs: int) -> dict[str, Load]:
    """`Load` by way of dealing (`WAYS`) over `packs` synthetic packs."""
    cost = vision_cost(with_values(RunConfig(), MOLMO2))
    rows: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    for number in range(packs):
        units = synthetic_units(np.random.default_rng([0, number]), kind)
        costs = unit_costs(np.cumsum(units[0]), np.cumsum(units[1]), cost)
        least, mean = least_largest_cost(costs, cp), float(costs.sum()) / cp
        for way, parts in dealt(units, costs, cp).items():
            largest = max(int(part.sum()) for part in parts)
            starved = sum(not len(part) for part in parts) - max(0, cp - len(costs))
            rows[way].append((largest / mean, largest / least, starved))
    loads = {}
    for way, found in rows.items():
        over_mean, over_least, starved_ranks = zip(*found, strict=True)
        loads[way] = Load(float(np.mean(over_mean)), float(np.mean(over_least)), max(over_least), sum(starved_ranks))
    return loads


def routes_of(row: PackedBatch, layout: Layout, cp: int) -> FeatureRoutes:
    """Routes of the features of `with_vision(...)` as rank 0 sees them."""
    assert row.vision is not None
    padded = row.with_padding_to(layout.padded_length(mask_metadata(row), cp, 1))
    bounds = row.vision.cum_crop_bounds, row.vision.cum_token_pooling_bounds
    indices = layout.deal(mask_metadata(padded), cp)
    return feature_routes(indices, row.vision.feature_rows, compute_image_shard_boundaries(*bounds, cp), 0)


def feature_bytes(routes: FeatureRoutes, feature_size: int) -> FeatureBytes:
    """Bytes that ranks send in one forward, for features of `feature_size` bytes."""
    away = routes.counts.sum(1) - routes.counts.diagonal()
    cp = len(away)
    each = routes.largest * (cp - 1) * feature_size
    return FeatureBytes(int(away.sum()) * feature_size, each * cp, int(away.max()) * feature_size, each)


def feature_traffic(rank: int, world_size: int, row: PackedBatch, width: int) -> dict[tuple[str, str], int]:
    """Bytes this rank sends forward and backward, by layout and exchange: fp32 features `width` wide, over cp ranks."""
    axis = build_grid(GridShape(cp=world_size), rank).cp
    found = {}
    for layout in LAYOUTS.values():
        for exchange in EXCHANGES:
            local = shard_batch(row, axis, layout, exchange=exchange)
            assert local.vision is not None
            features = torch.ones(local.vision.num_features, width, requires_grad=True)
            axis.traffic.clear()
            placed, rows = place_features(features, local.vision)
            x = add_features(torch.zeros(local.num_tokens, width), placed, rows, axis, False)
            x.sum().backward()
            found[layout.name, exchange] = axis.traffic.total
    return found


def expected_traffic(routes: FeatureRoutes, width: int) -> dict[str, int]:
    """The sum of `feature_traffic` over all ranks, by exchange: features out, their gradients back."""
    counted = feature_bytes(routes, width * torch.float32.itemsize)
    return {"routed": 2 * counted.routed, "all_gather": 2 * counted.gathered}


def packs_over_bound(documents: Units, budgets: tuple[int, int]) -> float:
    """Packs under two budgets (tokens, crops) over a lower bound for any packing; documents that do not fit left out.

    The bound: all tokens or all crops over their budget, or the documents of which no two fit together.
    """
    crops, tokens = documents
    fits = (tokens <= budgets[0]) & (crops <= budgets[1])
    amounts = ((tokens[fits], budgets[0]), (crops[fits], budgets[1]))
    bound = max(
        max(-(-int(amount.sum()) // most), int(np.count_nonzero(2 * amount > most))) for amount, most in amounts
    )
    return len(two_budgets(tokens[fits], crops[fits], *budgets)) / bound


DEGREES, REAL_DEGREES = (2, 4, 8, 16), (2, 4)
WIDTH = 32
"""Elements of a feature wherever bytes are counted; ratios do not depend on it."""


def load_part(quick: bool) -> Part:
    """How evenly images load the ranks, by way of dealing."""
    packs = 10 if quick else 200
    entries: list[dict[str, Any]] = []
    goals = []
    rows = [[f"FLOPs max/mean (over optimum), {packs} packs", *WAYS]]
    for cp in DEGREES:
        found = {kind: vision_loads(kind, cp, packs) for kind in KINDS}
        for kind, loads in found.items():
            rows.append(
                [f"{kind}, cp {cp}", *(f"{load.over_mean:.3f} ({load.over_optimum:.3f})" for load in loads.values())]
            )
            entries += [{"kind": kind, "cp": cp, "way": w, **dataclasses.asdict(load)} for w, load in loads.items()]
        by_flops, stored = ([loads[way] for loads in found.values()] for way in ("by FLOPs", "stored"))
        where = f"cp {cp}, worst pack: largest cost over the least possible"
        goals += [
            Goal(f"{where}, ranges by FLOPs", max(load.worst for load in by_flops), 1.0),
            Goal(f"{where}, stored ranges", max(load.worst for load in stored), 1.05),
            Goal(f"cp {cp}: ranks that stored ranges starve", sum(load.starved for load in stored), 0.0),
        ]
    starved = sum(entry["starved"] for entry in entries if entry["way"] == "greedy")
    note = f"  the plain loop leaves {starved} ranks without work while there is some"
    return Part({"loads": entries}, goals, f"{table(rows)}\n{note}")


def byte_part(quick: bool) -> Part:
    """Bytes of the routed exchange beside all-gather, counted for every layout, and on real ranks."""
    length, packs = (4_096, 3) if quick else (36_864, 4)
    batches = [with_vision(mixed_row(length, seed)) for seed in range(packs)]
    entries, goals = [], []
    rows = [[f"routed / all-gather, {packs} x {length:,} tokens", *LAYOUTS]]
    for cp in DEGREES:
        cells = []
        for name, layout in LAYOUTS.items():
            counted = [feature_bytes(routes_of(batch, layout, cp), WIDTH * 4) for batch in batches]
            share = sum(one.routed for one in counted) / sum(one.gathered for one in counted)
            busiest = max(one.busiest_routed / one.busiest_gathered for one in counted)
            entries.append({"cp": cp, "layout": name, "share": share, "busiest_share": busiest})
            cells.append(f"{share:.3f} ({busiest:.3f})")
            goals.append(Goal(f"cp {cp}, {name}: bytes routed over all-gather, times cp", share * cp, 1.05))
        rows.append([f"cp {cp}, all (busiest rank, worst)", *cells])
    real, more = _real_bytes(batches[0] if quick else with_vision(mixed_row(8_192, seed=1)))
    return Part({"bytes": entries, "bytes_on_ranks": real}, goals + more, table(rows))


def _real_bytes(row: PackedBatch) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Traffic of real ranks beside the count from routes."""
    entries: list[dict[str, Any]] = []
    goals = []
    for cp in REAL_DEGREES:
        with RankPool(cp) as pool:
            ranks = pool.run(feature_traffic, row, WIDTH, timeout=300.0)
        found = [
            {
                "cp": cp,
                "layout": name,
                "exchange": exchange,
                "sent": sum(r[name, exchange] for r in ranks),
                "counted": n,
            }
            for name, layout in LAYOUTS.items()
            for exchange, n in expected_traffic(routes_of(row, layout, cp), WIDTH).items()
        ]
        wrong = sum(entry["sent"] != entry["counted"] for entry in found)
        goals.append(Goal(f"{cp} real ranks: layouts and exchanges with other traffic than counted", wrong, 0.0))
        entries += found
    return entries, goals


def pack_part(quick: bool) -> Part:
    """Packs under two budgets beside a lower bound for any packing."""
    entries, goals = [], []
    for budgets in BUDGETS:
        for count in (1_000,) if quick else (1_000, 4_000):
            ratios = [
                packs_over_bound(mixed_documents(np.random.default_rng(seed), count), budgets)
                for seed in range(1 if quick else 3)
            ]
            entries.append({"tokens": budgets[0], "crops": budgets[1], "documents": count, "ratios": ratios})
            where = f"{count:,} documents into {budgets[0]:,} tokens and {budgets[1]} crops"
            goals.append(Goal(f"{where}: packs over the lower bound", max(ratios), 1.05))
    return Part({"packs": entries}, goals)
