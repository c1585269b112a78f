"""Load-balancing terms and corrections of the choice: the inputs on which they may depend.

Their values are compared with a reference in tests/engine/models/test_language.py, and on any grid
in test_grids.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from megacp.attention.ops.mask import Metadata
from megacp.engine.config.run import with_values
from megacp.engine.expert_parallel.router import SCORES, choose, in_groups
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.step.decision import Decision
from megacp.engine.step.step import ParallelModel
from megacp.training.loop.state import RunState, load
from tests.ranks import grid, run_ranks
from tests.reference.packs import random_batch
from tests.reference.training import BALANCE, MOE, SIGMOID, Values, config_of, step_batches, train
from tests.training.runs import save

ONE_LAYER: Values = {**MOE, **BALANCE, "num_layers": 1, "moe_layer_freq": "1"}


def packed(lengths: list[int], first: int) -> PackedBatch:
    """Return a row of documents and padding; document number n is the same in every row."""
    rngs = [np.random.default_rng(first + place) for place in range(len(lengths))]
    number = np.repeat([*range(len(lengths)), -1], [*lengths, 5])
    tokens, labels = (
        np.concatenate(
            [
                *(rng.integers(0, 53, n) for rng, n in zip(rngs, lengths, strict=True)),
                np.zeros(5, np.int64),
            ]
        )
        for _ in range(2)
    )
    row = random_batch(rngs[0], len(tokens), weights="all")
    return dataclasses.replace(
        row,
        **{"tokens": tokens, "labels": labels, "loss_weights": (number >= 0).astype(np.float32)},
        position_ids=np.concatenate([np.arange(n) for n in (*lengths, 5)]),
        leave=Metadata.of_documents(number).leave.astype(np.int32),
    )


def test_a_term_is_that_of_its_documents_in_whichever_rows_they_stand() -> None:
    lengths = [9, 1, 17, 6]
    found = []
    for cuts in ([0, 4], [0, 2, 4], [0, 1, 2, 3, 4]):
        rows = [packed(lengths[a:b], a) for a, b in zip(cuts, cuts[1:], strict=False)]
        (report,), *_ = train(grid(), config_of(ONE_LAYER, {}), [rows])
        found.append(report)
    assert found[0][2] > 0.1
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-12)


def test_a_layer_that_is_computed_again_counts_no_token_twice_and_adds_no_term_twice() -> None:
    steps, found = [step_batches(2, 1), step_batches(2, 2)], []
    for recompute in ("none", "selective", "full"):
        config = config_of({**ONE_LAYER, **SIGMOID, "recompute_granularity": recompute}, {})
        reports, gradients, weights, _ = train(grid(), config, steps)
        assert reports[0][-1] == reports[1][-1] == 0, "validation is counted"
        found.append(
            (reports, *(values.tolist() for _, values in (gradients[1] | weights).values()))
        )
    assert found[0] == found[1] == found[2]


STAGES: Values = {**MOE, **SIGMOID, **BALANCE, "num_layers": 4, "moe_layer_freq": "1"}


def reports_of(rank: int, world_size: int, schedule: str, virtual: int) -> list[tuple[float, ...]]:
    """Return loss, norm and expert figures of a step of two microbatches, over one stage per rank."""
    values = {"pipeline_schedule": schedule, "num_virtual_stages_per_pipeline_rank": virtual}
    shape = {"pp": world_size, "ep": 1}
    return train(grid(**shape), config_of({**STAGES, **values}, shape), [step_batches(2, 2)])[0]


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 2), ("zero_bubble", 1)])
def test_no_schedule_loses_a_term_or_a_count(schedule: str, virtual: int) -> None:
    """The gradients of the terms are not lost either; the norm includes them."""
    expected = reports_of(0, 1, "1f1b", 1)
    assert expected[0][2] > 0.1 and expected[0][-1] == 0
    np.testing.assert_allclose(
        run_ranks(reports_of, 2, schedule, virtual), [expected] * 2, rtol=1e-10
    )


def test_a_skipped_step_moves_no_correction() -> None:
    model = ParallelModel(config_of({**ONE_LAYER, **SIGMOID}, {}), grid())
    (correction,) = model.balance.corrections
    rows = step_batches(1, 1)
    counted = sum(row.real_tokens for row in rows)
    model.train(rows, 1, 10.0, counted, lambda loss, norm: Decision(False))
    assert not correction.any()
    model.train(rows, 2, 10.0, counted)
    assert correction.unique().tolist() == pytest.approx([-0.05, 0.05])


def test_counts_and_corrections_of_a_bfloat16_model_are_exact(tmp_path: Path) -> None:
    """In bfloat16, 307 tokens would become 308, and a correction would change when it is saved."""
    values = {
        **ONE_LAYER,
        **SIGMOID,
        "num_experts": 4,
        "moe_router_topk": 4,
        "moe_router_group_topk": 2,
    }
    values |= {"moe_router_num_groups": 2, "dtype": "bfloat16", "save": str(tmp_path)}
    config = config_of(values, {})
    model = ParallelModel(config, grid())
    batch = random_batch(np.random.default_rng(1), 307, 53)
    assert model.train([batch], 1, batch.weight_sum, 307).experts["dropped"] == 0
    (correction,) = model.balance.corrections
    correction.copy_(torch.tensor([0.1, -0.001, 1e-9, 3.0]))
    state = RunState(seed=config.training.seed)
    save(model, state, config)
    other = ParallelModel(config, grid())
    load(other, state, with_values(config, {"load": str(tmp_path)}))
    assert correction.dtype == torch.float32 and torch.equal(
        other.balance.corrections[0], correction
    )


def test_equal_scores_in_groups_are_chosen_by_number() -> None:
    scores = torch.zeros(64, 32)
    scores[:, 20] = 1
    assert choose(in_groups(scores, 8, 3), 6).tolist() == [[0, 1, 2, 3, 4, 20]] * 64


def test_a_group_counts_by_its_two_best() -> None:
    row = torch.tensor([[9.0, 0, 0, 0, 5, 5, 0, 0, -1, -1, -1, -1]])
    assert choose(in_groups(row, 3, 1), 3).tolist() == [[4, 5, 6]]


@pytest.mark.parametrize("function", SCORES)
def test_a_score_counts_the_same_wherever_it_stands(function: str) -> None:
    """torch's sigmoid rounds the last elements of a tensor differently.

    Ties between experts would then be resolved by the end of the row.
    """
    choice = SCORES[function].choice
    for dtype in (torch.float32, torch.float64):
        scores = torch.linspace(-4, 4, 2048, dtype=dtype)
        assert torch.equal(choice(scores), torch.cat([choice(part) for part in scores.split(7)]))
