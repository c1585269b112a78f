"""The profile of a step: every operator has a class, phases and classes add up, and calls can be repeated alone."""

from __future__ import annotations

import pytest
import torch

from bench.profile.operators import (
    ATTENTION,
    COPIES,
    ELEMENTWISE,
    LOSS,
    OPTIMIZER,
    PRODUCTS,
    SUMS,
    UNKNOWN,
    Landmarks,
    OperatorClock,
)
from bench.profile.report import GRIDS, profile_part, profile_table, rank_figures
from bench.profile.steps import BETWEEN, ClockedStep, RankProfile, ThreadTime, profile_rank
from bench.steps import QUICK_SIZES
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.synthetic.mock import MockRules
from tests.ranks import run_ranks

TINY = {"num_layers": 2, "vocab_size": 200, "seq_length": 64, "hidden_size": 64, "ffn_hidden_size": 96}


def profiles(grid: str) -> list[RankProfile]:
    """Of tiny steps on a grid."""
    ranks, values = GRIDS[grid]
    config = with_values(RunConfig(), {**QUICK_SIZES, **TINY, **values})
    rules = MockRules(config.model.vocab_size, config.data.seq_length, "causal", seed=1)
    return run_ranks(profile_rank, ranks, config, rules, 1)


def check(rank: RankProfile) -> None:
    """All that must hold of one rank, whatever its grid."""
    (step,) = rank.clocked
    assert step.unknown == []
    assert {PRODUCTS, ATTENTION, ELEMENTWISE, COPIES, SUMS, OPTIMIZER} <= set(step.calls)
    assert step.python > 0.0 and sum(step.seconds.values()) + step.python == pytest.approx(step.step.cpu)
    for name in ("wall", "cpu", "ready", "process"):
        parts = [getattr(span, name) for span in step.phases.values()]
        assert sum(parts) == pytest.approx(getattr(step.step, name), abs=1e-6)
    assert {"forward", "backward", "optimizer", "norm", BETWEEN} <= set(step.phases)
    assert step.step.asleep <= step.step.wall
    assert set(rank.alone) == {PRODUCTS, ATTENTION} and min(rank.alone.values()) > 0.0
    assert sum(rank_figures(rank)["classes"].values()) == pytest.approx(step.step.process, rel=1e-6, abs=1e-6)


def test_every_operator_of_one_process_has_a_class_and_the_parts_add_up() -> None:
    """Would catch time that no line of the table shows."""
    (rank,) = profiles("1")
    check(rank)
    assert LOSS in rank.clocked[0].calls
    assert "collectives, posting" not in rank.clocked[0].calls


@pytest.mark.slow
@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid != "1"])
def test_every_operator_of_a_grid_has_a_class(grid: str) -> None:
    """Would catch an operator that only an exchange, a merge or a pipeline calls."""
    ranks = profiles(grid)
    for rank in ranks:
        check(rank)
    assert any(LOSS in rank.clocked[0].calls for rank in ranks)


def test_products_are_counted_with_their_shapes_and_run_again_alone() -> None:
    """Would catch a limit of other products than the step's: lost transposes, lost calls."""
    clock = OperatorClock(Landmarks(7, frozenset()), lambda: "forward")
    left, right = torch.randn(3, 4), torch.randn(5, 4)
    with clock:
        for _ in range(2):
            left @ right.t()
        torch.mm(left, right.t(), out=torch.empty(3, 5))
    counts = {(call.operator._overloadname, call.args[1].stride): n for call, n in clock.repeatable[PRODUCTS].items()}
    assert counts == {("default", (1, 4)): 2, ("out", (1, 4)): 1}
    assert all(call.alone(1) > 0.0 for call in clock.repeatable[PRODUCTS])


def test_a_tensor_as_wide_as_the_vocabulary_is_the_losss_and_one_in_a_buffer_of_gradients_is_a_sum() -> None:
    buffer, wide, small = torch.zeros(64), torch.ones(2, 7), torch.ones(4)
    phase = ["backward"]
    clock = OperatorClock(Landmarks(7, frozenset({buffer.untyped_storage().data_ptr()})), lambda: phase[0])
    with clock:
        wide.exp_()
        buffer[:4].add_(small)
        small.mul(2.0)
        small.erfinv()
        phase[0] = "norm"
        small.mul(2.0)
    assert [clock.calls[name] for name in (LOSS, SUMS, ELEMENTWISE, OPTIMIZER)] == [1, 1, 1, 1]
    assert clock.unknown == {"aten::erfinv"} and clock.calls[UNKNOWN] == 1


def test_the_table_shows_rank_0_and_the_mean() -> None:
    def rank(cpu: float) -> RankProfile:
        step = ClockedStep(
            ThreadTime(2.0, cpu, 0.25, cpu), {"forward": ThreadTime(2.0, cpu, 0.25, cpu)}, {PRODUCTS: cpu}, {}, []
        )
        return RankProfile(100, [step], [ThreadTime(1.0, cpu, 0.0, cpu)], {PRODUCTS: 0.5, ATTENTION: 0.0})

    shown = profile_table({"dp 2": [rank_figures(rank(0.5)), rank_figures(rank(1.0))]}, 100)
    lines = {title.strip(): cell for title, _, cell in (line.rpartition("  ") for line in shown.splitlines())}
    assert lines["wall"] == "2,000 / 2,000" and lines["on a core"] == "500 / 750"
    assert lines["asleep: waiting for ranks"] == "1,250 / 1,000"
    assert lines["processor over the limit"] == "1.50" and lines["tokens/s without the clock"] == "100"


@pytest.mark.slow
def test_the_part_of_the_benchmark_covers_every_grid() -> None:
    part = profile_part({**QUICK_SIZES, **TINY}, 1)
    assert list(part.figures["profile"]) == list(GRIDS)
    assert [len(ranks) for ranks in part.figures["profile"].values()] == [ranks for ranks, _ in GRIDS.values()]
    assert "operators without a class" not in part.table
