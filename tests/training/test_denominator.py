"""Token-exact loss normalisation, agreement on the packs of a step, and pitfalls of tied weights."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megacp
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.ops.pointwise import keep_mask
from megacp.attention.ops.tile_kernels import TileKernel
from megacp.distributed import grid as grid_file
from megacp.distributed.collectives import all_reduce
from megacp.distributed.fake_world import recorded
from megacp.distributed.grid import Axis, build_grid
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.shard import LocalBatch, shard_batch
from megacp.engine.step import step
from megacp.engine.step.decision import Decision, finite_only
from megacp.engine.step.step import ParallelModel
from megacp.engine.tensor_parallel.vocabulary import weighted_loss
from megacp.train import main
from megacp.training.data.mock import MockRules, mock_batch
from megacp.training.loop.denominator import RankReport, agree_on_step
from tests.engine.tensor_parallel.test_linear import SIZES
from tests.ranks import RankError, grid, run_ranks
from tests.reference.training import QWEN3_5, Values, config_of, step_batches
from tests.training.runs import TINY


def eight_tokens() -> PackedBatch:
    """Eight tokens of one document; only the last three are counted."""
    weights, leave = (np.arange(8) >= 5).astype(np.float32), np.full(8, 8, np.int32)
    return PackedBatch(np.arange(8), np.arange(8), weights, np.arange(8), leave, 0 * leave, (0,))


def gradient_of_eight_tokens(
    rank: int, world_size: int, shape: dict[str, int], layout: str
) -> tuple[float, float]:
    """Return d/dw of the mean of `w * (place + 1)` over the counted tokens, and the same as an
    average of the ranks' means.
    """
    mine = grid(**shape)
    batch = eight_tokens()
    local = shard_batch(batch, mine.cp, LAYOUTS[layout])
    values = local.token_names.double() + 1
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    weighted_loss(
        w * values, local.loss_weights, agree_on_step([batch], mine).denominator
    ).backward()
    over = mine.over("dp", "cp")
    counted = local.loss_weights.sum().item()
    trap = (
        (values * local.loss_weights).sum() / counted
        if counted
        else torch.zeros((), dtype=torch.float64)
    )
    return all_reduce(w.grad, over).item(), all_reduce(trap, over).item() / mine.cp.size


@pytest.mark.parametrize(("cp", "trap"), [(2, 6.75), (4, 5.25)])
def test_the_last_three_of_eight_tokens_give_exactly_seven(cp: int, trap: float) -> None:
    """The right gradient is the mean of 6, 7 and 8. Averaging the ranks' means gives another number."""
    assert run_ranks(gradient_of_eight_tokens, cp, {"cp": cp}, "zigzag") == [(7.0, trap)] * cp
    assert {
        found for found, _ in run_ranks(gradient_of_eight_tokens, cp, {"cp": cp}, "contiguous")
    } == {7.0}
    assert gradient_of_eight_tokens(0, 1, {}, "zigzag")[0] == 7.0


def agreement(
    rank: int, world_size: int, shape: dict[str, int], wrong: int | None, stopper: int | None
) -> object:
    mine = grid(**shape)
    batches = step_batches(4, 1)[mine.dp.rank :: mine.dp.size]
    if rank == wrong:
        tokens = batches[-1].tokens.copy()
        tokens[3] += 1
        batches[-1] = dataclasses.replace(batches[-1], tokens=tokens)
    first = mine.tp.rank == mine.cp.rank == mine.pp.rank == 0
    report = RankReport(
        stop_reason=stopper is not None and rank >= stopper,
        flops=10.0 if first else 0.0,
        peak_bytes=100 - rank,
        data_wait=rank / 4,
    )
    try:
        found = agree_on_step(batches, mine, report)
    except ValueError as error:
        return str(error)
    return found.denominator, found.tokens, found.report


@pytest.mark.parametrize(
    "shape", [{"tp": 4}, {"dp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"dp": 4}], ids=str
)
def test_all_ranks_know_the_tokens_and_news_of_the_whole_step(shape: dict[str, int]) -> None:
    batches = step_batches(4, 1)
    weight = sum(batch.weight_sum for batch in batches)
    tokens = sum(int((batch.document >= 0).sum()) for batch in batches)
    assert tokens < sum(len(batch) for batch in batches), "padding belongs to the test"
    for stopper in (None, 2):
        report = RankReport(
            stop_reason=stopper is not None,
            flops=10.0 * shape.get("dp", 1),
            peak_bytes=100,
            data_wait=0.75,
        )
        assert run_ranks(agreement, 4, shape, None, stopper) == [(weight, tokens, report)] * 4


@pytest.mark.parametrize(
    ("shape", "wrong", "pair"),
    [({"tp": 2, "pp": 2}, 3, "0 and 3"), ({"dp": 2, "cp": 2}, 3, "2 and 3")],
    ids=str,
)
def test_every_rank_raises_when_peers_read_different_packs(
    shape: dict[str, int], wrong: int, pair: str
) -> None:
    """One token of one pack differs on one rank.

    Every rank must raise, so that no rank waits in a collective.
    """
    messages = run_ranks(agreement, 4, shape, wrong, None)
    assert len(set(messages)) == 1
    assert f"ranks {pair} of replica {int('dp' in shape)} read different packs" in str(messages[0])
    assert "--data-path" in str(messages[0])


def test_data_parallel_ranks_may_read_different_packs_and_order_matters_to_peers() -> None:
    assert isinstance(run_ranks(agreement, 4, {"dp": 4}, 2, None)[0], tuple)
    one, two = step_batches(2, 1)
    assert agree_on_step([one, two], grid()) == agree_on_step(
        [two, one], grid()
    )  # with a single rank, any order is right


def step_of_nothing(
    rank: int, world_size: int, shape: dict[str, int], values: Values
) -> list[object]:
    """Check a row whose tokens have no weight, and a row of only padding."""
    mine, found = grid(**shape), []
    model = ParallelModel(config_of({"vocab_size": 8, **values}, shape), mine)
    row = dataclasses.replace(eight_tokens(), loss_weights=np.zeros(8, np.float32))
    for batch in (row, row.without_documents([0])):
        agreed = agree_on_step([batch], mine)
        result = model.train([batch], 1, agreed.denominator, agreed.tokens)
        found.append((agreed.denominator, result.loss, result.grad_norm, result.decision.update))
    return found


@pytest.mark.parametrize("shape", [{}, {"cp": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("values", [{}, QWEN3_5], ids=["plain", "states"])
def test_a_step_without_counted_tokens_divides_by_one(
    shape: dict[str, int], values: Values
) -> None:
    ranks = max(shape.values(), default=1)
    assert run_ranks(step_of_nothing, ranks, shape, values) == [[(1.0, 0.0, 0.0, True)] * 2] * ranks


def cp_masks(rank: int, world_size: int) -> tuple[int, list[int], bytes]:
    model = ParallelModel(
        config_of({"hidden_dropout": 0.5}, {"cp": world_size}), grid(cp=world_size)
    )
    local = model.shard(step_batches(1, 1)[0], 1)
    return (
        local.key,
        local.token_names.tolist(),
        keep_mask(local.key, local.token_names, 32, 0.5).numpy().tobytes(),
    )


def test_context_parallel_peers_share_the_key_but_no_dropout_mask() -> None:
    results = run_ranks(cp_masks, 4)
    assert len({key for key, _, _ in results}) == 1
    assert len({mask for _, _, mask in results}) == 4
    assert len({place for _, places, _ in results for place in places}) == sum(
        len(places) for _, places, _ in results
    )


def test_dropout_is_keyed_by_seed_step_pack_and_place() -> None:
    batch = step_batches(1, 1)[0]

    def names(step: int, batch: PackedBatch = batch, **values: int) -> tuple[int, tuple[int, ...]]:
        local = ParallelModel(config_of(values, {}), grid()).shard(batch, step)
        return local.key, tuple(local.token_names.tolist())

    other = dataclasses.replace(batch, pack_ids=(7,))
    assert len({names(1), names(2), names(1, seed=5), names(1, other)}) == 4 and names(1) == names(
        1
    )
    assert names(1)[0] == names(1, other)[0], "the key does not know which packs share a row"


def ends_of_a_tied_model(
    rank: int, world_size: int, shape: dict[str, int], values: Values
) -> list[bytes]:
    """Return the bits of this rank's copies of the embedding table after three steps."""
    mine = grid(**shape)
    model = ParallelModel(config_of(values, shape), mine)
    for number in (1, 2, 3):
        batches = step_batches(4, number)
        model.train(
            batches[mine.dp.rank :: mine.dp.size], number, sum(b.weight_sum for b in batches), 0
        )
    tables = [
        p
        for c in model.chunks
        for p in c.parameters()
        if spec_of(p).pieces[0].name == "embedding.weight"
    ]
    return [table.detach().float().numpy().tobytes() for table in tables]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ({"pp": 2, "tp": 2}, {"dtype": "float32"}),
        ({"pp": 2, "cp": 2}, {"dtype": "bfloat16", "num_virtual_stages_per_pipeline_rank": 2}),
        ({"pp": 2, "dp": 2}, {"dtype": "float32", "num_virtual_stages_per_pipeline_rank": 2}),
        ({"pp": 4}, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_tied_tables_of_first_and_last_stage_stay_bitwise_equal(
    shape: dict[str, int], values: Values
) -> None:
    found = run_ranks(ends_of_a_tied_model, 4, shape, {"vocab_size": 2048, "lr": 1e-2, **values})
    stages = shape["pp"]
    per_stage = [found[i * (4 // stages) : (i + 1) * (4 // stages)] for i in range(stages)]
    assert all(len(tables) == 1 for tables in per_stage[0] + per_stage[-1])
    assert per_stage[0] == per_stage[-1]
    assert not any(tables for stage in per_stage[1:-1] for tables in stage)


def fail_on_one_rank(rank: int, world_size: int) -> None:
    model = ParallelModel(config_of({}, {"tp": 2}), grid(tp=2))
    model.train(step_batches(1, 1 + rank), 1, 1.0, 0)


def test_without_agreement_different_lengths_on_tp_peers_are_noticed_by_the_pool() -> None:
    with pytest.raises(RankError):
        run_ranks(fail_on_one_rank, 2, timeout=5)


def test_a_step_is_judged_by_loss_and_norm_and_validation_drops_nothing() -> None:
    batches, seen, losses = step_batches(2, 1), [], []

    def check(loss: float, norm: float) -> Decision:
        seen.append((loss, norm))
        return finite_only(loss, norm)

    for dropout in (0.0, 0.5):
        model = ParallelModel(config_of({"hidden_dropout": dropout}, {}), grid())
        losses.append(model.evaluate(batches, 7.0))
        result = model.train(batches, 1, 7.0, 0, check)
        assert seen[-1] == (result.loss, result.grad_norm) and result.grad_norm > 0
    assert losses[0] == losses[1] != result.loss


GRIDS: dict[str, dict[str, Any]] = {
    "one process": {},
    "full recomputation": {"recompute_granularity": "full"},
    "pp 2, two chunks": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "num_layers": 4,
    },
}


def _arrived(rank: int, world_size: int, values: dict[str, Any]) -> tuple[list[int], int]:
    """Return the rows of earlier microbatches on the device as each of four arrives, and the number
    left after the step.
    """
    model = ParallelModel(with_values(RunConfig(), {**SIZES, **values}), grid(pp=world_size))
    rules, here, alive = MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask="mixed"), [], []
    move = LocalBatch.to

    def moved(share: LocalBatch, device: torch.device, key: int) -> LocalBatch:
        gc.collect()
        alive.append(sum(row() is not None for row in here))
        batch = move(share, device, key)
        here.append(weakref.ref(batch))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalBatch, "to", moved)
        model.gradients([mock_batch([i], rules) for i in range(4)], 1, 100.0)
    gc.collect()
    return alive, sum(row() is not None for row in here)


@pytest.mark.parametrize("case", GRIDS)
def test_a_row_comes_to_the_device_once_and_leaves_with_its_last_chunk(case: str) -> None:
    world = GRIDS[case].get("pipeline_model_parallel_size", 1)
    for alive, left in run_ranks(_arrived, world, GRIDS[case]):
        assert len(alive) == 4 and left == 0
        assert max(alive) <= (1 if world == 2 else 0)


def _met(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[str, int]]:
    """Return names and sizes of the axes that a new model uses first."""
    met: list[tuple[str, int]] = []
    real = step.connect

    def connect(axes: Sequence[Axis], device: torch.device) -> None:
        met.extend((axis.name, axis.size) for axis in axes)
        real(axes, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "connect", connect)
        cp = values["context_parallel_size"]
        ParallelModel(
            with_values(RunConfig(), {**SIZES, **values}), grid(cp=cp, dp=world_size // cp)
        )
    return met


def _packs(rank: int, world_size: int, dynamic: bool) -> tuple[int, int, int]:
    rows = step.rows_of(
        with_values(RunConfig(), {"dynamic_context_parallel": dynamic}), grid(dp=world_size)
    )
    return rows.packs, rows.axis.size, rows.data_rank.size


def test_a_row_of_dynamic_context_parallelism_has_the_packs_of_all_its_ranks() -> None:
    assert (
        run_ranks(_packs, 2, True) == [(2, 2, 1)] * 2
        and run_ranks(_packs, 2, False) == [(1, 1, 2)] * 2
    )


def test_ranks_of_split_axes_meet_before_the_first_step() -> None:
    split = {
        "context_parallel_size": 4,
        "cp_comm_type": "a2a+p2p",
        "hierarchical_context_parallel_sizes": (2, 2),
    }
    for met in run_ranks(_met, 4, split):
        assert met == [("cp_inner", 2), ("cp_outer", 2)]
    for met in run_ranks(
        _met, 4, {"context_parallel_size": 2, "num_distributed_optimizer_instances": 2}
    ):
        assert len(met) == 2 and [size for _, size in met] == [2, 2]


class Groups(TorchDispatchMode):
    """Return the ranks of the groups of all collectives, except for messages."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = recorded(function, args, kwargs or {})
        if call is not None and call.peer < 0:
            self.seen.add(call.ranks)
        return function(*args, **(kwargs or {}))


def _strangers(
    rank: int, world_size: int, values: dict[str, Any]
) -> tuple[int, list[tuple[int, ...]]]:
    """Return the groups of a step's collectives, and those used for the first time."""
    config = with_values(RunConfig(), {**SIZES, **values})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            grid_file, "_near", lambda rank: None
        )  # neighbours would go from memory to memory
        here = build_grid(config.grid_shape(world_size), rank)
    model, groups = ParallelModel(config, here), Groups()
    row = mock_batch([0], MockRules(config.model.vocab_size, config.data.seq_length))
    with groups:
        model.train([row] * 2, 1, 2 * row.weight_sum, 2 * row.real_tokens)
    met = {axis.global_ranks for axis in here.in_steps()}
    return len(groups.seen), sorted(groups.seen - met)


@pytest.mark.parametrize(
    "values",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
        {"tensor_model_parallel_size": 2},
        {"context_parallel_size": 4, "num_experts": 4, "expert_model_parallel_size": 2},
    ],
    ids=str,
)
def test_the_ranks_of_every_collective_of_a_step_met_before_it(values: dict[str, Any]) -> None:
    for number, strangers in run_ranks(_strangers, 4, values):
        assert number > 1 and strangers == []


MOST_FRAMES = 15
"""Largest depth of the package's calls; one frame belongs to the code that keeps attention outputs.
"""


def own_frames() -> list[str]:
    """Return the functions of the package on the stack, from `Trainer.run` to the caller's caller."""
    frame, names = sys._getframe(2), list[str]()
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(Path(megacp.__file__).parent):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    names.reverse()
    return names[names.index("Trainer.run") :]


def test_few_frames_lie_between_the_loop_and_the_attention_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[list[str]] = []
    real = TileKernel.attend

    def attend(self: TileKernel, *rest: object) -> None:
        found.append(own_frames())
        real(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TileKernel, "attend", attend)
    assert main([*TINY, "--dtype", "float32", "--train-iters", "1", "--lr-warmup-iters", "0"]) == 0
    frames = [*found[0], "TileKernel.attend"]
    assert len(frames) <= MOST_FRAMES, frames
