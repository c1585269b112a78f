"""Expert parallelism: process groups, the choice of experts, exchanged bytes, and recomputation of
a layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megacp.distributed import grid as grid_file
from megacp.distributed.grid import Axis, build_grid, single_axis
from megacp.distributed.shape import GridShape
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.expert_parallel import experts, layer
from megacp.engine.expert_parallel.exchange import to_experts, to_tokens
from megacp.engine.expert_parallel.route import Groups, Route
from megacp.engine.expert_parallel.router import SCORES, choose, logits
from megacp.engine.layers.table import A, B, lora_kind
from megacp.engine.models.block import Block, BlockInputs
from megacp.engine.step.step import ParallelModel
from megacp.engine.tensor_parallel.lora import is_of_a_pair
from megacp.training.checkpoint.commit import load_checkpoint
from tests.ranks import grid, run_ranks
from tests.reference.sharding import assemble, fill
from tests.reference.training import MOE, config_of, gradient_pieces, parameter_pieces, step_batches
from tests.training.runs import TINY, grid_flags, losses, run
from tests.training.test_saving import payload

TP2_CP3_DP2 = (
    [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)],
    [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)],
)


@pytest.mark.parametrize(
    ("shape", "ep", "edp"),
    [
        (
            GridShape(tp=2, cp=2, dp=2, ep=4),
            [(0, 1, 2, 3), (4, 5, 6, 7)],
            [(0, 4), (1, 5), (2, 6), (3, 7)],
        ),
        (
            GridShape(tp=2, dp=2, pp=2, ep=4),
            [(0, 1, 2, 3), (4, 5, 6, 7)],
            [(rank,) for rank in range(8)],
        ),
        (GridShape(tp=2, cp=3, dp=2, ep=4), *TP2_CP3_DP2),
    ],
)
def test_neighbours_in_a_stage_share_experts(
    shape: GridShape, ep: list[Any], edp: list[Any]
) -> None:
    found = [shape.experts(rank) for rank in range(shape.world_size)]
    assert sorted({one for one, _ in found}) == ep and sorted({one for _, one in found}) == edp
    assert all(rank in one and rank in other for rank, (one, other) in enumerate(found))


def groups_made(shape: GridShape, rank: int) -> list[tuple[int, ...]]:
    """Return the process groups that the ranks of a grid create."""
    made: list[tuple[int, ...]] = []

    def axis(
        name: str, members: tuple[int, ...], me: int, near: None, timeout: None, group: Any = None
    ) -> Axis:
        made.extend([members] * (len(members) > 1 and name != "world"))
        return Axis(name, len(members), members.index(me), members)

    with (
        mock.patch.multiple(
            grid_file,
            _axis=axis,
            _near=lambda rank: None,
            new_group=lambda *args: made.append((-1,)),
        ),
        mock.patch.multiple(
            dist, is_initialized=lambda: True, get_world_size=lambda: shape.world_size
        ),
    ):
        build_grid(shape, rank)
    return made


def test_all_ranks_make_equally_many_groups_and_at_most_two_for_experts() -> None:
    """torch names groups by the number that a rank has created before."""
    counts = set()
    for tp, cp, dp, pp in [
        (2, 2, 2, 1),
        (2, 1, 2, 2),
        (1, 2, 2, 3),
        (2, 3, 2, 1),
        (1, 1, 4, 1),
        (4, 1, 1, 2),
    ]:
        stage = tp * cp * dp
        for ep in (n for n in range(1, stage + 1) if stage % n == 0):
            shape, without = GridShape(tp, cp, dp, pp, ep), GridShape(tp, cp, dp, pp)
            more = {
                len(groups_made(shape, r)) - len(groups_made(without, r))
                for r in range(shape.world_size)
            }
            assert len(more) == 1, (shape, more)
            counts |= more
    assert counts == {0, 1, 2}


def test_equal_scores_are_chosen_by_the_number_of_the_expert() -> None:
    scores = torch.zeros(64, 128)
    scores[:, 100] = 1
    assert choose(scores, 3).tolist() == [[0, 1, 100]] * 64


def test_scores_of_bfloat16_are_as_exact_as_float32() -> None:
    x, weight = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for shape in ((7, 64), (5, 64))
    )
    found = logits(x.bfloat16(), weight.bfloat16())
    exact = x.bfloat16().double() @ weight.bfloat16().double().t()
    assert (
        found.dtype == torch.float32
        and (found - exact).abs().max() < 64 * 2**-23 * exact.abs().max()
    )


def test_outputs_of_experts_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16, so five slots of 256, 1, 1, 1, 1 sum to 260 only in a wider
    dtype.

    The same holds for gradients.
    """
    chosen = torch.arange(5).repeat(3, 1)  # [t, k]
    route = Route(chosen, torch.tensor([0, 2, 3]), 5, single_axis("ep"))
    of_expert = torch.tensor([256.0, 1, 1, 1, 1], dtype=torch.bfloat16)
    rows = of_expert.repeat_interleave(3).unsqueeze(1).repeat(1, 2)  # sorted by expert: [t k, h]
    assert to_tokens(rows, route, 4).tolist() == [[260.0] * 2, [0.0] * 2, [260.0] * 2, [260.0] * 2]
    x = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    to_experts(x, route).backward(rows)
    assert x.grad is not None and x.grad[:, 0].tolist() == [260.0, 0.0, 260.0, 260.0]


@pytest.mark.parametrize("function", SCORES)
@pytest.mark.parametrize("before", [False, True])
def test_exactly_the_routers_without_a_gradient_are_refused(function: str, before: bool) -> None:
    """Compare with autograd for any number of experts and of chosen experts."""
    for count in (1, 2, 5):
        for topk in range(1, count + 1):
            values = {"num_experts": count, "moe_router_topk": topk, "vocab_size": 64}
            values |= {"moe_router_score_function": function, "moe_router_pre_softmax": before}
            draw = torch.Generator().manual_seed(1)
            scores = torch.randn(7, count, generator=draw, dtype=torch.float64).requires_grad_()
            weights = SCORES[function].weigh[before](scores, choose(scores.detach(), topk))
            (gradient,) = torch.autograd.grad(
                (weights * torch.randn(7, topk, generator=draw)).sum(), scores
            )
            learns = (
                gradient.abs().max() > 1e-6
            )  # otherwise only rounding remains: of a share, or of the 1e-20 added to a sum
            assert (check(with_values(RunConfig(), values), 1) == []) == learns, (count, topk)


SIZES = {**MOE, "num_layers": 1, "moe_layer_freq": "1"}


def sent_by_a_step(
    rank: int, world_size: int, recompute: str, tile: int
) -> tuple[int, int, int, int]:
    """Return the bytes sent over ep, their number by the formulas, and the rows sent and received.

    The last rank has no tokens.
    """
    options = {"recompute_granularity": recompute, "mlp_chunk_tokens": tile}
    config = config_of({**SIZES, **options}, {"dp": world_size, "ep": world_size})
    here = grid(dp=world_size, ep=world_size)
    model, routes, run = ParallelModel(config, here), list[Route](), Block.forward
    batch = step_batches(4, 2)[-1 if rank == world_size - 1 else 0]

    def forward(self: Block, x: torch.Tensor, inputs: BlockInputs) -> torch.Tensor:
        out = run(self, x, inputs)
        routes.append(inputs.routes.by_layer[0])  # type: ignore[union-attr]  # there are experts
        return out

    def moved() -> int:
        """The group is also that of dp, whose messages are counted separately."""
        return here.ep.traffic["all_to_all"] - here.dp.traffic["all_to_all"]

    before = moved()
    with mock.patch.object(Block, "forward", forward):
        model.gradients([batch], 1, 10.0)
    (route,) = routes
    there = sum(count for other, count in enumerate(route.sent) if other != rank)
    here_from = sum(count for other, count in enumerate(route.received) if other != rank)
    width = 8 * 32  # one row of float64
    by_formula = (
        8 * 8 // world_size * (world_size - 1)
        + 2 * width * (there + here_from)
        + 8 * (there + here_from)
    )
    by_formula += (width + 8) * there * (recompute == "full")
    assert len(route.chosen) == batch.real_tokens and sum(route.sent) == route.chosen.numel(), (
        "padding is routed"
    )
    return moved() - before, by_formula, sum(route.sent), sum(route.groups.counts)


@pytest.mark.parametrize(("recompute", "tile"), [("none", 0), ("full", 7)])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_of_the_exchange_are_those_of_the_formulas_and_padding_sends_none(
    ranks: int, recompute: str, tile: int
) -> None:
    """Tiles do not communicate, because the rank without tokens has fewer tiles."""
    found = run_ranks(sent_by_a_step, ranks, recompute, tile)
    sent, by_formula, rows, received = zip(*found, strict=True)
    assert sent == by_formula and sum(rows) == sum(received)
    assert rows[-1] == 0 < rows[0]


def gathered_by_a_step(rank: int, world_size: int, tp: int, ep: int) -> tuple[dict[str, int], int]:
    """Return the bytes sent over edp by two microbatches with full sharding, and the size of a
    rank's experts.
    """
    shape = {"tp": tp, "dp": world_size // tp, "ep": ep}
    options = {"data_parallel_sharding_strategy": "optim_grads_params", "sequence_parallel": True}
    here = grid(**shape)
    model = ParallelModel(config_of({**SIZES, "num_layers": 2, **options}, shape), here)
    here.edp.traffic.clear()
    model.gradients(step_batches(2, 1), 1, 10.0)
    return dict(here.edp.traffic), 2 * 8 * (8 // ep) * 3 * 20 * 32 // here.edp.size


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), (1, 2)])
def test_full_sharding_gathers_experts_twice_and_sums_their_gradients_once(
    tp: int, ep: int
) -> None:
    """There are two separate microbatches; a group of one edp rank sends nothing."""
    ranks = 4 if tp == ep == 2 else 2
    for sent, part in run_ranks(gathered_by_a_step, ranks, tp, ep):
        assert sent == ({} if ranks == ep else {"all_gather": 4 * part, "reduce_scatter": 2 * part})


def test_one_kernel_for_all_experts_makes_what_a_loop_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare rows and both gradients when the second of three experts has no rows; torch also has
    this kernel for CPUs.
    """
    draw = torch.Generator().manual_seed(1)
    x, weight, grad = (
        torch.randn(shape, generator=draw) for shape in ((7, 16), (3 * 8, 16), (7, 8))
    )
    groups, found = Groups(torch.tensor([5, 0, 2])), []
    for one in (False, True):
        monkeypatch.setattr(experts, "_one_kernel", lambda *_, one=one: one)
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = experts.matrices_product(*leaves, groups)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=16 * 2**-23 * 16)
    assert not found[1][2][8:16].any()


@pytest.mark.parametrize(
    "targets", ["q,up,experts.gate:2:5,down", "q,mlp.up,experts.gate+up:2:5,down"]
)
def test_pairs_of_experts_learn_as_the_weights_that_they_add_up_to(targets: str) -> None:
    """Compare with a weight W + s B A: the same loss, and by the chain rule dA = s B^T dW and dB =
    s dW A^T.
    """
    pairs = {"lora_rank": 3, "lora_alpha": 6.0, "lora_targets": targets}
    is_shared = "+" in targets
    scales = dict.fromkeys(("experts.gate", "experts.up") if is_shared else ("experts.gate",), 2.5)
    adapted, whole = (
        ParallelModel(config_of({**MOE, **values}, {}), grid()) for values in (pairs, {})
    )
    draw = np.random.default_rng(1)
    tensors = {
        name: draw.normal(0, 0.1, x.shape)
        for name, x in assemble([parameter_pieces(adapted)]).items()
    }
    fill(adapted.chunks[0], {name: torch.tensor(x) for name, x in tensors.items()})
    made, linears = (
        dict(tensors),
        {name.rsplit(".", 2)[0] for name in tensors if is_of_a_pair(name)},
    )
    # gate and up may share one A, under the name of gate
    places = {
        name: name.replace(".up", ".gate") if is_shared and "experts" in name else name
        for name in linears
    }
    low, high = {places[name]: tensors[f"{places[name]}.{A}"] for name in linears}, {}
    for name in linears:
        tensors.pop(f"{name}.{A}", None)
        high[name] = tensors.pop(f"{name}.{B}")
    assert high["layers.1.mlp.experts.7.up"].shape[1] == (2 if is_shared else 3)
    assert high["layers.1.mlp.experts.7.gate"].shape[1] == 2
    assert ("layers.1.mlp.experts.7.up" in low) is not is_shared
    for name in linears:
        made[f"{name}.weight"] = (
            tensors[f"{name}.weight"]
            + scales.get(lora_kind(name), 2.0) * high[name] @ low[places[name]]
        )
    fill(whole.chunks[0], {name: torch.tensor(x) for name, x in made.items()})
    losses = [model.gradients(step_batches(2, 1), 1, 10.0) for model in (adapted, whole)]
    found, expected = (assemble([gradient_pieces(model)]) for model in (adapted, whole))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    by_chain: dict[str, np.ndarray] = {}
    for name in linears:
        of_sum = scales.get(lora_kind(name), 2.0) * expected[f"{name}.weight"]
        by_chain[f"{name}.{B}"] = of_sum @ low[places[name]].T
        down = f"{places[name]}.{A}"
        by_chain[down] = by_chain.get(down, 0) + high[name].T @ of_sum
    assert by_chain.keys() == {name for name in found if is_of_a_pair(name)}
    for name, exact in by_chain.items():
        np.testing.assert_allclose(found[name], exact, rtol=0, atol=1e-11 * np.abs(exact).max())


def test_a_layer_that_is_computed_again_chooses_nothing_anew() -> None:
    """Recomputation keeps the choice even if its input differs slightly."""
    model = ParallelModel(
        config_of({**SIZES, "recompute_granularity": "full", "dtype": "float32"}, {}), grid()
    )
    with (
        mock.patch.object(layer, "choose", wraps=choose) as choices,
        mock.patch.object(layer, "logits") as found,
    ):
        noise = torch.Generator().manual_seed(1)
        found.side_effect = lambda x, weight: (
            torch.rand(len(x), 8, generator=noise) + 0 * logits(x, weight)
        )
        model.gradients(step_batches(2, 1), 1, 10.0)
    assert (len(choices.mock_calls), len(found.mock_calls)) == (2, 4)


CORRECTED = [
    *(
        *TINY,
        "--num-experts",
        "8",
        "--moe-router-topk",
        "3",
        "--moe-router-score-function",
        "sigmoid",
    ),
    *(
        "--moe-router-bias-update-rate",
        "0.05",
        "--moe-aux-loss-coeff",
        "0.3",
        "--lr-decay-iters",
        "4",
    ),
]


def test_a_second_run_in_a_folder_goes_on_as_if_it_were_the_first(tmp_path: Path) -> None:
    """In one process, weights, moments, corrections and token counts are equal bit for bit."""
    flags = [*CORRECTED, "--num-layers", "1", "--global-batch-size", "1", "--train-iters", "3"]
    run(1, [*flags, "--save", str(tmp_path / "whole")])
    for more in (["--train-iters", "2"], ["--auto-resume"]):
        run(1, [*flags, "--save", str(tmp_path / "halved"), *more])
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    for figure in ("loss", "expert_load", "balance_loss"):
        assert losses(halved, figure) == losses(whole, figure)
    assert payload(halved / "step_0000003") == payload(whole / "step_0000003")


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_ranks_that_share_experts(tmp_path: Path) -> None:
    flags = CORRECTED
    run(1, [*flags, "--save", str(tmp_path / "whole")])
    moved = [*flags, "--save", str(tmp_path / "moved")]
    load = ["--load", str(tmp_path / "moved")]
    run(4, [*moved, *grid_flags(tp=2, ep=1), "--train-iters", "1"])
    sharded = "--data-parallel-sharding-strategy"
    run(4, [*moved, *load, *grid_flags(ep=4), "--train-iters", "2", sharded, "optim_grads_params"])
    run(4, [*moved, *load, *grid_flags(pp=2, ep=2), sharded, "optim_grads"])
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)
    assert losses(tmp_path / "moved", "expert_load") == losses(tmp_path / "whole", "expert_load")
    corrections = [
        [
            tensor
            for name, tensor in load_checkpoint(folder, grid().world).whole_tensors()
            if "correction" in name
        ]
        for folder in (tmp_path / "moved", tmp_path / "whole")
    ]
    assert torch.equal(*map(torch.stack, corrections)) and len(corrections[0]) == 4
