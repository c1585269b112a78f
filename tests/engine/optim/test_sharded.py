"""The sharded optimizer compared with `torch.optim.AdamW`; the golden gradients compare it on every
grid.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacp.distributed.grid import ProcessGrid, single_axis
from megacp.engine.backends.native import AdamWEngine
from megacp.engine.config.training import STATE_KINDS, STEPPED_BY, TrainingConfig
from megacp.engine.data_parallel.buckets import FlatBuckets
from megacp.engine.data_parallel.parameter import ParameterSpec, TensorSlice, attach
from megacp.engine.data_parallel.shards import ParameterShard, ParameterSlice
from megacp.engine.layers.table import DATA
from megacp.engine.optim.lr_schedule import learning_rate
from megacp.engine.optim.rules import UPDATE_RULES, AdamW, Group
from megacp.engine.optim.sharded import ShardedOptimizer, clip_scale, global_norm, sum_of_squares
from tests.ranks import grid, run_ranks
from tests.reference.sharded_toy import Toy, group_of, local_of, values

SETTINGS = TrainingConfig(
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, weight_decay=0.1, clip_grad=10.0
)
STEPS, LR = 3, 0.01


def build(
    place: ProcessGrid, dtype: torch.dtype, bucket_elements: int = 200
) -> tuple[Toy, FlatBuckets, ShardedOptimizer]:
    model = Toy(place.tp.size, place.tp.rank, place.pp.size, place.pp.rank, dtype)
    axes = {"tp": place.tp, "embedding": place.embedding}
    buckets = FlatBuckets([model], {DATA: place.over("dp", "cp")}, axes, bucket_elements)
    return model, buckets, ShardedOptimizer(buckets, SETTINGS, place.world, place.device)


def train(place: ProcessGrid, dtype: torch.dtype) -> tuple[Toy, ShardedOptimizer, list[float]]:
    model, buckets, optimizer = build(place, dtype)
    norms = []
    for step in range(STEPS):
        buckets.start_backward(0, last=True)
        model.loss(values((step, buckets.axes[DATA].rank), dtype)).backward()
        buckets.finish()
        norms.append(optimizer.step(LR))
    return model, optimizer, norms


def difference(parts: list[ParameterSlice], whole: dict[str, torch.Tensor], model: Toy) -> float:
    """Return the largest difference of flat slices from the global tensors."""
    parameters = {id(p.megacp_spec): p for p in model.parameters()}  # type: ignore[attr-defined]
    worst = 0.0
    for part in parts:
        expected = local_of(parameters[id(part.spec)], whole).flatten()[
            part.start : part.start + part.values.numel()
        ]
        worst = max(worst, (part.values.double() - expected.double()).abs().max().item())
    return worst


def test_a_slice_learns_at_its_own_rate_and_decays_by_it() -> None:
    slices = [torch.full((4,), 2.0, dtype=torch.float64) for _ in range(2)]
    for x in slices:
        x.grad = torch.ones_like(x)
    AdamW([group_of(slices[0], 0.1), group_of(slices[1], 0.1, 0.25)], SETTINGS).update(LR, 1.0)
    torch.testing.assert_close(2.0 - slices[1], 0.25 * (2.0 - slices[0]), rtol=1e-12, atol=0)
    assert (
        abs(2.0 - slices[0][0].item() - LR * (1 + 0.1 * 2.0)) < 1e-9
    )  # the first step of AdamW has size 1


def other_engine(
    groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=betas, eps=eps)


@pytest.mark.parametrize(
    ("dtype", "engine", "passes"),
    [
        (torch.float32, None, False),
        (torch.float64, None, True),
        (torch.float32, other_engine, True),
    ],
    ids=["in the kernel", "float64", "another engine"],
)
def test_gradients_are_clipped_inside_the_update_where_the_kernel_can(
    dtype: torch.dtype, engine: AdamWEngine | None, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, gradient = torch.randn(2, 99, generator=torch.Generator().manual_seed(0), dtype=dtype)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([parameter], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    mine = start.clone()
    rule = AdamW([group_of(mine, 0.1)], SETTINGS, engine)
    scaled = []
    monkeypatch.setattr(
        torch.Tensor, "mul_", lambda x, factor: scaled.append(factor) or x.copy_(x * factor)
    )
    for scale in (0.3, 1.0, 0.7):
        mine.grad = gradient.clone()
        rule.update(LR, scale)
        parameter.grad = gradient * scale
        reference.step()
        # three updates of some ten roundings each, for values of order 1
        torch.testing.assert_close(
            mine, parameter.detach(), rtol=0, atol=30 * torch.finfo(dtype).eps
        )
    assert bool({0.3, 0.7} & set(scaled)) == passes


def test_an_optimizer_is_given_no_empty_slice() -> None:
    given: list[list[int]] = []

    def engine(
        groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
    ) -> torch.optim.Optimizer:
        given.append([len(s) for group in groups for s in group["params"]])
        return other_engine(groups, betas, eps)

    for sizes in ([3, 0, 0, 2], []):
        specs = [ParameterSpec((), weight_decay=n != 2, lr_multiplier=n / 3) for n in sizes]
        slices = [torch.ones(n) for n in sizes]
        shards = [
            ParameterShard(x, x.dtype, spec, lambda x: [])
            for x, spec in zip(slices, specs, strict=True)
        ]
        parameters: Any = SimpleNamespace(
            shards=shards, grad_shard=list(map(torch.ones, sizes)).__getitem__, publish=list
        )
        ShardedOptimizer(
            parameters, SETTINGS, single_axis("world"), torch.device("cpu"), engine
        ).update(LR, 0.0)
        torch.testing.assert_close(
            [1.0 - s[0].item() for s in slices if len(s)], [LR * 1.1, LR * 2 / 3][: len(sizes)]
        )
    assert given == [[3, 2]]


def fall(group: Group, lr: float) -> None:
    """A second rule, which subtracts its rate from everything and counts its calls."""
    for x, state in zip(group.slices, group.state, strict=True):
        x.sub_(lr)
        state["fallen"].add_(1)


def test_a_rule_steps_what_is_treated_by_it_and_keeps_its_own_kinds_of_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STEPPED_BY, "vector", "falling")
    monkeypatch.setitem(STATE_KINDS, "falling", ("fallen",))

    def falling(groups: Any, *unused: Any) -> Any:
        return SimpleNamespace(update=lambda lr, scale: fall(groups[0], lr))

    monkeypatch.setitem(UPDATE_RULES, "falling", falling)
    pieces = [(TensorSlice(name, (2, 2), (0, 0), (2, 2)),) for name in ("m", "v", "t")]
    specs = [
        ParameterSpec(p, treated=t)
        for p, t in zip(pieces, ("matrix", "vector", "table"), strict=True)
    ]
    model = torch.nn.ParameterList(
        [attach(torch.nn.Parameter(torch.ones(2, 2)), spec) for spec in specs]
    )
    world = single_axis("world")
    buckets = FlatBuckets([model], {DATA: world}, {}, 1000)
    optimizer = ShardedOptimizer(buckets, SETTINGS, world, torch.device("cpu"))
    sum(p.sum() for p in model).backward()
    buckets.finish()
    optimizer.step(LR)
    torch.testing.assert_close(
        [p[0, 0].item() for p in model], [1 - LR * 1.1, 1 - LR, 1 - LR * 1.1]
    )
    held = {
        kind: [part.spec.pieces[0].name for part in parts]
        for kind, parts in optimizer.state_slices().items()
    }
    assert held == {"exp_avg": ["t", "m"], "exp_avg_sq": ["t", "m"], "fallen": ["v"]}
    assert optimizer.state_slices()["fallen"][0].values.tolist() == [1.0] * 4
    optimizer.clear()
    assert not any(
        part.values.any() for parts in optimizer.state_slices().values() for part in parts
    )


def _half_gradient(master: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    leaf = master.bfloat16().requires_grad_()
    (leaf * c + 0.5 * leaf * leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.float()


def _half_precision(rank: int, world_size: int) -> tuple[float, bool, bool]:
    place = grid(dp=world_size)
    model, optimizer, _ = train(place, torch.bfloat16)
    master = {name: v.float() for name, v in values("start", torch.bfloat16).items()}
    parameters = {name: torch.nn.Parameter(v) for name, v in master.items()}
    groups = [
        {
            "params": [p for n, p in parameters.items() if not n.endswith(("bias", "norm.weight"))],
            "weight_decay": 0.1,
        },
        {
            "params": [p for n, p in parameters.items() if n.endswith(("bias", "norm.weight"))],
            "weight_decay": 0.0,
        },
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = sum(
                _half_gradient(parameter.detach(), values((step, r), torch.bfloat16)[name])
                for r in (0, 1)
            )
        torch.nn.utils.clip_grad_norm_(parameters.values(), SETTINGS.clip_grad)
        adamw.step()
    state = optimizer.state_slices()
    worst = difference(state["master"], dict(parameters), model)
    rounded = {name: p.detach().bfloat16() for name, p in parameters.items()}
    close = difference(optimizer.parameters.parameters_held(), rounded, model) <= 2**-7 * 4
    mine = [p.values for p in optimizer.parameters.parameter_slices()]
    follows = all(
        torch.equal(m.values.bfloat16(), p) for m, p in zip(state["master"], mine, strict=True)
    )
    return worst, close, follows


def test_a_bfloat16_model_trains_through_float32_master_slices() -> None:
    """Tolerance: float32 sums in a different order; gradients are rounded to bfloat16 in both runs."""
    for worst, close, follows in run_ranks(_half_precision, 2):
        assert worst < 1e-6
        assert close and follows


def _skips(rank: int, world_size: int, shape: dict[str, int]) -> list[object]:
    model, buckets, optimizer = build(grid(**shape), torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    coefficients = values((0, rank), torch.float32)
    if rank == world_size - 1:
        coefficients["layers.1.norm.weight"][2] = math.nan
    model.loss(coefficients).backward()
    buckets.finish()
    norm = optimizer.step(LR)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    untouched = all(
        not part.values.any() for parts in optimizer.state_slices().values() for part in parts
    )
    model.loss(values((1, rank), torch.float32)).backward()
    buckets.finish()
    return [math.isnan(norm), same, untouched, math.isnan(optimizer.step(LR)), optimizer.updates]


@pytest.mark.parametrize("shape", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(shape: dict[str, int]) -> None:
    assert run_ranks(_skips, 2, shape) == [[True, True, True, False, 1]] * 2


def test_a_float32_model_is_updated_in_place_without_a_second_copy() -> None:
    model, buckets, optimizer = build(grid(), torch.float32)
    assert "master" not in optimizer.state_slices()
    pointers = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert pointers == {b.parameters.untyped_storage().data_ptr() for b in buckets.buckets}
    assert {s.untyped_storage().data_ptr() for s in optimizer.slices} == pointers


def test_masters_follow_parameters_that_were_written_from_outside() -> None:
    weight = attach(
        torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        ParameterSpec((TensorSlice("w", (3,), (0,), (3,)),)),
    )
    model = torch.nn.ParameterList([weight])
    world = single_axis("world")
    buckets = FlatBuckets([model], {DATA: world}, {}, 100)
    optimizer = ShardedOptimizer(buckets, SETTINGS, world, torch.device("cpu"))
    weight.data.fill_(2.0)
    optimizer.reset_masters()
    (weight * 0).sum().backward()
    buckets.finish()
    optimizer.step(0.0)
    assert weight.tolist() == [2.0] * 3


def _norm(rank: int, world_size: int, values: list[list[tuple[list[float], bool]]]) -> float:
    shards = [(torch.tensor(x), counted) for x, counted in values[rank]]
    return global_norm(shards, grid(tp=world_size).world)


def test_the_norm_counts_a_copy_once_and_sees_a_bad_value_in_any() -> None:
    both = ([4.0], True), ([4.0], False)
    assert run_ranks(_norm, 2, [[([3.0], True), both[0]], [([0.0], True), both[1]]]) == [5.0, 5.0]
    for bad in (math.inf, math.nan):
        norms = run_ranks(_norm, 2, [[([3.0], True)], [([1.0], True), ([bad], False)]])
        assert not any(math.isfinite(norm) for norm in norms)
    assert [clip_scale(norm, 1.0) for norm in (0.5, 4.0)] == pytest.approx([1.0, 0.25], rel=1e-6)
    assert clip_scale(4.0, 0.0) == 1.0


def test_partial_sums_are_added_in_float64() -> None:
    assert sum_of_squares(torch.full((300_000,), 1e17)).item() == pytest.approx(3e39, rel=1e-5)
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    bound = (
        4 * 4096**0.5 * 2.0**-24
    )  # sums of 4,096 terms in float32 (Higham and Mary, 2019, theorem 2.8)
    assert sum_of_squares(x).item() == pytest.approx(x.double().square().sum().item(), rel=bound)
    found = [sum_of_squares(torch.full((n,), 3.0)).item() for n in (0, 1, 4096, 5000)]
    assert found == pytest.approx([0, 9, 36_864, 45_000], rel=bound), (
        "the end of a slice is no whole row"
    )
    assert not math.isfinite(sum_of_squares(torch.full((4096,), 1e30)).item()), (
        "skipped, as a non-finite one is"
    )


def rate(update: int, style: Any, **changes: Any) -> float:
    fields: dict[str, Any] = {
        "lr_warmup_iters": 10,
        "lr_decay_iters": 109,
        "lr_wsd_decay_iters": 19,
        **changes,
    }
    return learning_rate(
        update, TrainingConfig(lr=1e-3, min_lr=1e-4, lr_decay_style=style, **fields)
    )


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "WSD"])
def test_warm_up_is_linear_and_the_decay_ends_exactly_at_min_lr_behind_its_last_update(
    style: str,
) -> None:
    assert [rate(update, style) for update in (1, 5, 10)] == pytest.approx([1e-4, 5e-4, 1e-3])
    assert rate(10, style) == 1e-3 >= rate(11, style)
    last = 1e-3 if style == "constant" else 1e-4
    assert rate(109, style) > last or style == "constant"
    assert [rate(update, style) for update in (110, 111, 10_000)] == [last] * 3
    for u in (1, 60, 109, 110):
        assert rate(u, style, lr_decay_iters=None, train_iters=109) == rate(u, style)
        assert rate(u, style, lr_warmup_iters=0, lr_warmup_fraction=0.09) == rate(u, style), (
            "9.81 of 109, rounded up"
        )
    assert rate(1, style, lr_warmup_iters=0, lr_decay_iters=1, lr_wsd_decay_iters=1) == 1e-3


def test_each_style_falls_as_its_formula_says() -> None:
    """Update 60 is halfway through the 100 updates after the warm-up; the formula gives a quarter
    there.
    """
    assert [rate(60, style) for style in ("linear", "cosine", "constant")] == pytest.approx(
        [5.5e-4, 5.5e-4, 1e-3]
    )
    assert rate(35, "cosine") == pytest.approx(1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rate(2, "linear", lr_warmup_iters=0, lr_decay_iters=10) == pytest.approx(
        1e-4 + 9e-4 * 0.9
    )
    assert {rate(update, "WSD") for update in range(10, 91)} == {1e-3}
    assert all(
        a > b for a, b in itertools.pairwise(rate(update, "WSD") for update in range(90, 111))
    )
    assert rate(100, "WSD") == pytest.approx(1e-4 + 9e-4 * (2 * 0.5**0.5 - 1))
