"""The global norm: every parameter once, non-finite values seen by all."""

from __future__ import annotations

import math

import pytest
import torch

from megacp.core.distributed.grid import single_axis
from megacp.core.optim.clip import clip_scale, global_norm, sum_of_squares
from tests.ranks import grid, run_ranks


def _norm(rank: int, world_size: int, values: list[list[tuple[list[float], bool]]]) -> float:
    shards = [(torch.tensor(x), counted) for x, counted in values[rank]]
    return global_norm(shards, grid(tp=world_size).world)


def test_a_parameter_that_two_ranks_hold_is_counted_once() -> None:
    both = ([4.0], True), ([4.0], False)
    assert run_ranks(_norm, 2, [[([3.0], True), both[0]], [([0.0], True), both[1]]]) == [5.0, 5.0]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_value_in_an_uncounted_copy_on_one_rank_shows_on_all(bad: float) -> None:
    norms = run_ranks(_norm, 2, [[([3.0], True)], [([1.0], True), ([bad], False)]])
    assert not any(math.isfinite(norm) for norm in norms)


def test_partial_sums_are_added_in_float64() -> None:
    assert sum_of_squares(torch.full((300_000,), 1e17)).item() == pytest.approx(3e39, rel=1e-5)
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    bound = 4 * 4096**0.5 * 2.0**-24  # sums of 4,096 terms in float32 (Higham and Mary, 2019, theorem 2.8)
    assert sum_of_squares(x).item() == pytest.approx(x.double().square().sum().item(), rel=bound)
    assert sum_of_squares(x.double()).item() == pytest.approx(x.double().square().sum().item(), rel=1e-13)
    found = [sum_of_squares(torch.full((n,), 3.0)).item() for n in (0, 1, 4096, 5000)]
    assert found == pytest.approx([0, 9, 36_864, 45_000], rel=bound), "the end of a slice is no whole row"
    assert not math.isfinite(sum_of_squares(torch.full((4096,), 1e30)).item()), "skipped, as a non-finite one is"


def test_the_scale_clips_only_above_the_limit() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_scale(4.0, 0.0) == 1.0
    assert global_norm([(torch.tensor([3.0, 4.0]), True)], single_axis("world")) == 5.0
