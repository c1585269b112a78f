"""Features reach their tokens and gradients return, for every layout and distribution of images."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.distributed.grid import Axis
from megacp.engine.rows.batch import PackedBatch, VisionInputs
from megacp.engine.rows.image_shards import compute_image_shard_boundaries
from megacp.engine.rows.shard import LocalBatch, shard_batch
from megacp.engine.rows.vision import add_features, place_features
from tests.ranks import grid, run_ranks
from tests.reference.packs import random_batch, video_batch

WIDTH = 5
CASES = ("mixed", "one image", "text", "video", "documents")
WORLDS = [2, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in (4, 8))]


def row_with_images(case: str, ranks: int) -> PackedBatch:
    """Return a row with features of units of uneven size; the table distributes the units over
    `ranks`.
    """
    rng = np.random.default_rng(CASES.index(case))
    if case == "video":
        batch = video_batch(frames=9, text=2, tokens_of_frame=4)
    else:
        batch = random_batch(
            rng, 67, documents=5 if case == "documents" else 3, branches=True, images=True
        )
    counts = {"mixed": [2, 1, 4, 1, 1, 9, 3, 1, 2], "one image": [11], "text": [], "video": [4] * 9}
    tokens = np.array(counts.get(case, rng.integers(1, 4, 13)), np.int64)
    places = np.sort(rng.choice(len(batch), int(tokens.sum()), replace=False))
    if case == "video":
        places = np.flatnonzero(batch.span)
    bounds = np.cumsum(1 + tokens // 3), np.cumsum(tokens)
    vision = VisionInputs(
        cum_crop_bounds=bounds[0],
        cum_token_pooling_bounds=bounds[1],
        feature_rows=places,
        boundaries=compute_image_shard_boundaries(*bounds, ranks) if case == "mixed" else None,
        patches=np.zeros((0, 4, 6), np.float32),
        pooling=np.zeros((0, 4), np.int64),
    )
    return dataclasses.replace(batch, vision=vision)


def vectors(count: int, seed: int) -> torch.Tensor:
    return torch.randn(
        count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def encoded_here(batch: PackedBatch, axis: Axis) -> np.ndarray:
    """Return the features that this rank encodes, in its order."""
    vision = batch.vision
    assert vision is not None
    table = vision.boundaries
    if table is None:
        table = compute_image_shard_boundaries(
            vision.cum_crop_bounds, vision.cum_token_pooling_bounds, axis.size
        )
    row = table[axis.rank]
    return np.arange(row["start_pool_idx"], row["end_pool_idx"])


def send_and_return(rank: int, world: int) -> list[tuple[Any, ...]]:
    """Return for every layout and case: row with features, its places, adjoint identity, bytes
    sent, and expected bytes.
    """
    axis = grid(cp=world).cp
    found = []
    for name in sorted(LAYOUTS):
        for case in CASES:
            batch = row_with_images(case, world)
            local = shard_batch(batch, axis, LAYOUTS[name])
            assert batch.vision is not None and local.vision is not None
            mine = encoded_here(batch, local.vision.axis)
            features = vectors(batch.vision.num_features, 1)[mine].requires_grad_()
            axis.traffic.clear()
            placed, rows = place_features(features, local.vision)
            sent = axis.traffic.total()
            x = add_features(
                torch.zeros(local.num_tokens, WIDTH, dtype=torch.float64), placed, rows, axis, False
            )
            weight = vectors(local.num_tokens, 10 + rank)
            (x * weight).sum().backward()
            assert features.grad is not None, (
                "a rank that encodes nothing takes part in backward too"
            )
            identity = (x.detach() * weight).sum() - (features.detach() * features.grad).sum()
            found.append(
                (
                    x.detach().numpy(),
                    local.token_names.numpy(),
                    identity.item(),
                    sent,
                    expected_bytes(local),
                )
            )
    return found


def expected_bytes(local: LocalBatch) -> int:
    assert local.vision is not None
    routes = local.vision.routes
    mine = routes.cp_rank
    return int(routes.counts[mine].sum() - routes.counts[mine, mine]) * WIDTH * 8


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.slow
def test_features_arrive_at_their_tokens_and_gradients_return(world: int) -> None:
    ranks = run_ranks(send_and_return, world)
    number = 0
    for _ in sorted(LAYOUTS):
        for case in CASES:
            batch = row_with_images(case, world)
            assert batch.vision is not None
            results = [rank[number] for rank in ranks]
            row = np.zeros((sum(len(x) for x, *_ in results), WIDTH))
            for x, places, *_ in results:
                row[places] = x
            expected = np.zeros_like(row)
            expected[batch.vision.feature_rows] = vectors(batch.vision.num_features, 1).numpy()
            assert np.array_equal(row, expected), (world, case)
            assert abs(sum(identity for _, _, identity, *_ in results)) < 1e-10
            assert all(sent == formula for *_, sent, formula in results), case
            number += 1


def under_sequence_parallelism(rank: int, world: int) -> tuple[Any, ...]:
    ranks = grid(tp=2, cp=world // 2)
    batch = row_with_images("mixed", world // 2)
    layout = LAYOUTS["zigzag"]
    local = shard_batch(batch, ranks.cp, layout, tp=2)
    assert batch.vision is not None and local.vision is not None
    features = vectors(batch.vision.num_features, 1)[
        encoded_here(batch, local.vision.axis)
    ].requires_grad_()
    placed, rows = place_features(features, local.vision)
    slice_length = local.num_tokens // 2
    x = add_features(
        torch.zeros(slice_length, WIDTH, dtype=torch.float64), placed, rows, ranks.tp, True
    )
    places = local.token_names[ranks.tp.rank * slice_length :][:slice_length].numpy()
    weight = vectors(500, 3)[places]
    (x * weight).sum().backward()
    assert features.grad is not None
    wanted = vectors(500, 3)[batch.vision.feature_rows[encoded_here(batch, local.vision.axis)]]
    return (
        x.detach().numpy(),
        places,
        (features.grad - wanted).abs().max().item() if len(wanted) else 0.0,
    )


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_under_sequence_parallelism_each_tp_rank_adds_its_own_and_all_hold_the_whole_gradient(
    world: int,
) -> None:
    batch = row_with_images("mixed", world // 2)
    assert batch.vision is not None
    results = run_ranks(under_sequence_parallelism, world)
    row = np.zeros((sum(len(x) for x, *_ in results), WIDTH))
    for x, places, error in results:
        row[places] += x
        assert error == 0.0
    expected = np.zeros_like(row)
    expected[batch.vision.feature_rows] = vectors(batch.vision.num_features, 1).numpy()
    assert np.array_equal(row, expected)


def over_data_and_context(rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
    axis = grid(dp=2, cp=world // 2).over("dp", "cp")
    batch = row_with_images("mixed", world)
    local = shard_batch(batch, axis, LAYOUTS["balanced"])
    assert batch.vision is not None and local.vision is not None
    features = vectors(batch.vision.num_features, 1)[encoded_here(batch, local.vision.axis)]
    placed, rows = place_features(features, local.vision)
    x = add_features(
        torch.zeros(local.num_tokens, WIDTH, dtype=torch.float64), placed, rows, axis, False
    )
    return x.numpy(), local.token_names.numpy()


def test_a_row_over_dp_times_cp_deals_its_images_over_all_of_them() -> None:
    """Dynamic context parallelism."""
    batch = row_with_images("mixed", 4)
    results = run_ranks(over_data_and_context, 4)
    row = np.zeros((sum(len(x) for x, _ in results), WIDTH))
    for x, places in results:
        row[places] = x
    assert batch.vision is not None
    assert np.array_equal(
        row[batch.vision.feature_rows], vectors(batch.vision.num_features, 1).numpy()
    )
    assert np.count_nonzero(row.any(1)) == batch.vision.num_features
