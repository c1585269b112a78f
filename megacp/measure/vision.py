"""What dealing images to ranks costs: load of the busiest rank, bytes of features, packs under two budgets.

Key property: counted from the tables and routes that training uses, beside a least possible load that is found another
way (a table of all partitions) and beside the split by number of images that a short loop would make; only
`feature_traffic` needs ranks, to show that the counts are what is sent. Rejected: timing encoders, which on a small
machine measures the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megacp.batch import PackedBatch, VisionInputs
from megacp.config.run import RunConfig, Value, with_values
from megacp.context_parallel.layout import LAYOUTS, Layout
from megacp.context_parallel.shard import mask_metadata, shard_batch
from megacp.context_parallel.vision import EXCHANGES, FeatureRoutes, add_features, feature_routes, place_features
from megacp.data.build.packing import two_budgets
from megacp.data.media.shards import (
    ImageShards,
    compute_image_shard_boundaries,
    longest_first,
    uniform_boundaries,
    unit_costs,
)
from megacp.data.synthetic.mixed import CROP_TOKENS, FRAME_TOKENS
from megacp.distributed.grid import GridShape, build_grid
from megacp.training.images import vision_cost

MOLMO2: dict[str, Value] = {
    "vision_num_layers": 25,
    "hidden_size": 2560,
    "ffn_hidden_size": 9728,
    "vocab_size": 151_936,
}
"""The model whose FLOPs weigh units: Molmo2-4B."""
KINDS = ("images", "mixed", "image, video")
PACK_CROPS, MOST_CROPS, FRAMES = 128, 9, (8, 129)
BUDGETS = ((16_384, 128), (16_384, 160), (36_864, 256), (36_864, 384))
"""Tokens and crops of a pack."""

Units = tuple[np.ndarray, np.ndarray]
"""Crops and pooled tokens of each unit, int64 [u]."""


@dataclass(frozen=True)
class Load:
    """How a way of dealing loads the ranks, over some packs."""

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
    """What the features of a row cost to send once, per ranks together and for the busiest of them."""

    routed: int
    gathered: int
    busiest_routed: int
    busiest_gathered: int


def synthetic_units(rng: np.random.Generator, kind: str) -> Units:
    """Units of a pack of about 128 crops, of a kind in `KINDS`: images of 1 to 9 crops, videos whose frames are units.

    Half the documents of `mixed` are videos of 8 to 128 frames, cut where the pack is full; `image, video` is an image
    of 9 crops before 128 frames.
    """
    crops: list[int] = [MOST_CROPS] + [1] * 128 if kind == "image, video" else []
    frames: list[bool] = [False] + [True] * 128 if kind == "image, video" else []
    while sum(crops) < PACK_CROPS:
        left = PACK_CROPS - sum(crops)
        video = kind == "mixed" and rng.random() < 0.5
        new = [1] * min(left, int(rng.integers(*FRAMES))) if video else [int(rng.integers(1, MOST_CROPS + 1))]
        crops, frames = crops + new, frames + [video] * len(new)
    units = np.array(crops, np.int64)
    return units, np.where(frames, FRAME_TOKENS, units * CROP_TOKENS)


def greedy_by_images(crops: np.ndarray, cp: int) -> list[int]:
    """Where each rank's units end if ranks are filled one by one to an equal share of images: the plain loop."""
    share, held, stops = int(crops.sum()) / cp, 0, []
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


def vision_loads(kind: str, cp: int, packs: int, seed: int = 0) -> dict[str, Load]:
    """`Load` by way of dealing (`WAYS`) over `packs` synthetic packs."""
    cost = vision_cost(with_values(RunConfig(), MOLMO2))
    rows: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    for number in range(packs):
        units = synthetic_units(np.random.default_rng([seed, number]), kind)
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


def with_vision(row: PackedBatch) -> PackedBatch:
    """A row of `data/synthetic/mixed.py` whose image tokens are pooled features: each stretch of them is a unit.

    Every token of a stretch holds a feature; an image has a crop for each 144 of them, a frame one.
    """
    inside = row.span > 0
    begins = inside & ~np.r_[False, inside[:-1] & (row.document[1:] == row.document[:-1])]
    starts = np.flatnonzero(begins)
    tokens = np.bincount(np.cumsum(begins)[inside] - 1, minlength=len(starts))
    vision = VisionInputs(
        cum_crop_bounds=np.cumsum(-(-tokens // CROP_TOKENS)),
        cum_token_pooling_bounds=np.cumsum(tokens),
        feature_rows=np.flatnonzero(inside),
        boundaries=None,
        first_crop=0,
        patches=np.zeros((0, 1, 1), np.float32),
        pooling=np.zeros((0, 1), np.int64),
    )
    return dataclasses.replace(row, vision=vision)


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
    """What `feature_traffic` of all ranks together must be, by exchange: features out, their gradients back."""
    counted = feature_bytes(routes, width * torch.float32.itemsize)
    return {"routed": 2 * counted.routed, "all_gather": 2 * counted.gathered}


def mixed_documents(rng: np.random.Generator, count: int) -> Units:
    """Crops and tokens: half images of 2 to 9 crops with questions, 40 % videos of 8 to 128 frames, the rest text."""
    kind, crops, frames = rng.random(count), rng.integers(2, MOST_CROPS + 1, count), rng.integers(*FRAMES, count)
    pictures = 100 + crops * CROP_TOKENS + rng.integers(1, 9, count) * 60
    text = np.clip(rng.lognormal(6, 1, count), 10, 8192).astype(np.int64)
    video, plain = kind >= 0.5, kind >= 0.9
    tokens = np.where(plain, text, np.where(video, frames * (FRAME_TOKENS + 7) + 100, pictures))
    return np.where(plain, 0, np.where(video, frames, crops)), tokens


def packs_over_bound(documents: Units, budgets: tuple[int, int]) -> float:
    """Packs under two budgets (tokens, crops) over what no packing can go below; documents that do not fit left out.

    The bound: all tokens or all crops over their budget, or the documents of which no two fit together.
    """
    crops, tokens = documents
    fits = (tokens <= budgets[0]) & (crops <= budgets[1])
    amounts: Mapping[int, np.ndarray] = {budgets[0]: tokens[fits], budgets[1]: crops[fits]}
    bound = max(
        max(-(-int(amount.sum()) // most), int(np.count_nonzero(2 * amount > most))) for most, amount in amounts.items()
    )
    return len(two_budgets(tokens[fits], crops[fits], *budgets)) / bound
