"""Gradient buckets: sums equal the sums of one process, start during backward, and have the same
order on all ranks.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from megacp.distributed.collectives import gather_into, start_all_gather
from megacp.distributed.grid import Axis, single_axis
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.data_parallel import buckets as module
from megacp.engine.data_parallel import shards
from megacp.engine.data_parallel.buckets import ALIGNMENT, FlatBuckets, plan_buckets, slices_of
from megacp.engine.data_parallel.parameter import ParameterSpec, TensorSlice, attach
from megacp.engine.layers.table import DATA
from megacp.engine.models import build
from megacp.engine.step.step import ParallelModel
from megacp.training.data.mock import MockRules, mock_batch
from megacp.verify.cases import MODELS
from tests.distributed.test_collectives import as_on_nccl
from tests.engine.tensor_parallel.test_linear import SIZES
from tests.ranks import grid, run_ranks

WIDTH, DEPTH = 8, 4


def parameter(value: torch.Tensor, name: str = "p", **options: Any) -> nn.Parameter:
    piece = TensorSlice(name, tuple(value.shape), (0,) * value.dim(), tuple(value.shape))
    return attach(nn.Parameter(value), ParameterSpec((piece,), **options))


class Stack(nn.Module):
    """`DEPTH` square layers; the first layer's weight is used again at the end (a tied head)."""

    def __init__(self, recompute: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.recompute = recompute
        generator = torch.Generator().manual_seed(3)
        drawn = [
            torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
            for _ in range(DEPTH)
        ]
        self.weights = nn.ParameterList(
            [parameter(value.to(dtype), f"layers.{i}") for i, value in enumerate(drawn)]
        )

    def forward(self, x: torch.Tensor, unused: int | None = None) -> torch.Tensor:
        for layer, weight in enumerate(self.weights):
            if layer != unused and self.recompute:
                x = checkpoint(self._layer, x, weight, use_reentrant=False)
            elif layer != unused:
                x = self._layer(x, weight)
        return (x @ self.weights[0]).square().sum()

    @staticmethod
    def _layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)


def inputs(rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def unused_layer(rank: int, microbatch: int) -> int | None:
    """Leave out different layers on different ranks and in some microbatches."""
    return 1 + (rank + microbatch) % 3 if microbatch % 2 else None


def gathered(flat: FlatBuckets) -> list[torch.Tensor]:
    """Return the summed gradients of all parameters in bucket order, assembled from the slices of
    all ranks.
    """
    found = []
    for i, bucket in enumerate(flat.buckets):
        whole = start_all_gather(flat.grad_shard(i), flat.buckets[i].axis).wait()
        found += [
            whole[slot.start : slot.start + slot.parameter.numel()].clone()
            for slot in bucket.plan.slots
        ]
    return found


def _sums(
    rank: int,
    world_size: int,
    shape: dict[str, int],
    recompute: bool,
    bucket_elements: int,
    each: bool = False,
    nccl: bool = False,
) -> float:
    with pytest.MonkeyPatch.context() as patch:
        axis = grid(**shape).over("dp", "cp")
        return _worst(as_on_nccl(axis, patch) if nccl else axis, recompute, bucket_elements, each)


def _worst(axis: Axis, recompute: bool, bucket_elements: int, each: bool) -> float:
    rank, world_size = axis.rank, axis.size
    model = Stack(recompute)
    flat = FlatBuckets([model], {DATA: axis}, {}, bucket_elements, each_microbatch=each)
    worst = 0.0
    for step in range(2):
        for microbatch in range(3):
            flat.start_backward(0, last=microbatch == 2)
            model(
                inputs(rank, 3 * step + microbatch), unused_layer(rank, 3 * step + microbatch)
            ).backward()
            flat.end_backward(0)
        flat.finish()
        twin = Stack()
        for other in range(world_size):
            for microbatch in range(3 * step, 3 * step + 3):
                twin(inputs(other, microbatch), unused_layer(other, microbatch)).backward()
        expected = [p.grad.flatten() for p in reversed(list(twin.weights))]  # type: ignore[union-attr]
        pairs = zip(gathered(flat), expected, strict=True)
        worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
        flat.zero()
    return worst


@pytest.mark.parametrize("shape", [{"dp": 2}, {"cp": 2}, {"dp": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("bucket_elements", [1, 150, 10_000])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.slow
def test_bucket_sums_equal_one_process_on_all_data(
    shape: dict[str, int], bucket_elements: int, each: bool
) -> None:
    """Tolerance: float64 sums in a different order."""
    size = shape.get("dp", 1) * shape.get("cp", 1)
    assert max(run_ranks(_sums, size, shape, False, bucket_elements, each)) < 1e-12


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("nccl", [False, True])
def test_recomputed_layers_give_the_same_sums_also_in_place_as_on_nccl(
    each: bool, nccl: bool
) -> None:
    assert max(run_ranks(_sums, 2, {"dp": 2}, True, 150, each, nccl)) < 1e-12


def _events(monkeypatch: pytest.MonkeyPatch, flat: FlatBuckets, model: Stack) -> list[str]:
    events: list[str] = []
    real = module.start_reduce_scatter

    def recorded(x: torch.Tensor, axis: object, in_place: bool) -> object:
        index = [bucket.gradients.data_ptr() for bucket in flat.buckets].index(x.data_ptr())
        events.append(f"reduce {index}")
        return real(x, axis, in_place=in_place)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "start_reduce_scatter", recorded)
    for layer, weight in enumerate(model.weights):
        weight.register_hook(lambda gradient, layer=layer: events.append(f"gradient {layer}"))
    return events


def test_buckets_are_reduced_in_order_while_the_last_backward_still_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Stack()
    flat = FlatBuckets([model], {DATA: single_axis("dp_cp")}, {}, WIDTH * WIDTH)
    events = _events(monkeypatch, flat, model)
    model(inputs(0, 0)).backward()
    assert [e for e in events if e.startswith("reduce")] == []
    events.clear()
    flat.start_backward(0, last=True)
    model(inputs(0, 1)).backward()
    assert events == [e for i in range(DEPTH) for e in (f"gradient {DEPTH - 1 - i}", f"reduce {i}")]
    with pytest.raises(AssertionError, match="start_backward"):  # the next step would lose it
        model(inputs(0, 1)).backward()
    flat.finish()
    flat.zero()
    events.clear()
    flat.start_backward(0, last=True)
    model(inputs(0, 0), unused=2).backward()
    assert [e for e in events if e.startswith("reduce")] == ["reduce 0"], (
        "one without gradients holds back the rest"
    )
    flat.finish()
    assert [e for e in events if e.startswith("reduce")] == [f"reduce {i}" for i in range(DEPTH)]


def test_reductions_of_a_microbatch_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    real = module.start_reduce_scatter
    monkeypatch.setattr(
        module,
        "start_reduce_scatter",
        lambda x, axis, **how: launched.append(len(x)) or real(x, axis),
    )
    model = Stack()
    flat = FlatBuckets(
        [model], {DATA: single_axis("dp_cp")}, {}, WIDTH * WIDTH, each_microbatch=True
    )
    for microbatch in (1, 2):
        flat.start_backward(0, last=microbatch == 2)
        model(inputs(0, microbatch), unused=3).backward()
        flat.end_backward(0)
        assert len(launched) == DEPTH * microbatch


def test_chunks_are_reduced_after_their_own_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [Stack(), Stack()]
    flat = FlatBuckets(chunks, {DATA: single_axis("dp_cp")}, {}, 10_000)
    assert [bucket.plan.chunk for bucket in flat.buckets] == [1, 0]
    events = _events(monkeypatch, flat, chunks[0])
    chunks[0](inputs(0, 0)).backward()
    flat.start_backward(1, last=True)
    chunks[1](inputs(0, 0)).backward()
    assert [e for e in events if e.startswith("reduce")] == ["reduce 0"]
    flat.start_backward(0, last=True)
    chunks[0](inputs(0, 1)).backward()
    assert events[-1] == "reduce 1"


def test_bfloat16_gradients_are_accumulated_in_float32() -> None:
    weight = parameter(torch.ones(4, dtype=torch.bfloat16))
    flat = FlatBuckets([nn.ParameterList([weight])], {DATA: single_axis("dp_cp")}, {}, 100)
    for scale in (1.0, 1 / 512, 1 / 512):
        (weight * scale).sum().backward()
    flat.finish()
    assert flat.grad_shard(0).dtype == torch.float32
    assert flat.grad_shard(0)[:4].tolist() == [1 + 1 / 256] * 4
    assert weight.grad is None


def _partial(rank: int, world_size: int, instances: int) -> tuple[list[float], int]:
    place = grid(tp=2, dp=2)
    options: list[dict[str, Any]] = [{}, *[{"weight_decay": False, "partial_over": ("tp",)}] * 2]
    options.append({"reduced_over": "other"})
    names = ("cut", "norm", "bias", "expert")
    model = nn.ParameterList(
        [parameter(torch.zeros(3), n, **o) for n, o in zip(names, options, strict=True)]
    )
    axes = {DATA: place.over("dp", "cp"), "other": place.tp}
    partial = {"tp": place.tp, "embedding": place.embedding}
    flat = FlatBuckets([model], axes, partial, 1000, instances=instances)
    calls = []
    real = shards.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            shards, "all_reduce", lambda x, axis: calls.append(axis.name) or real(x, axis)
        )
        (sum((i + 1) * p for i, p in enumerate(model)) * 10.0**rank).sum().backward()
        flat.finish()
    return [whole[0].item() for whole in gathered(flat)], len(calls)


@pytest.mark.parametrize("instances", [1, 2])
def test_partial_gradients_are_summed_over_tp_in_one_call_and_others_are_not(
    instances: int,
) -> None:
    results = run_ranks(_partial, 4, instances)
    for rank, (sums, calls) in enumerate(results):
        # tp is the fastest axis: ranks 0 and 2 have the same tp rank
        own = 101.0 if rank % 2 == 0 else 1010.0
        expert = 44.0 if rank < 2 else 4400.0
        assert sums == [
            expert,
            3333.0,
            2222.0,
            own,
        ]  # in backward order; each is reduced over a different axis
        assert calls == (1 if instances == 1 else 3), "and each axis has its own copies"


def _gather(rank: int, world_size: int) -> list[list[float]]:
    flat = FlatBuckets(
        [Stack(dtype=torch.float32)], {DATA: grid(dp=world_size).over("dp", "cp")}, {}, 150
    )
    for bucket in flat.buckets:
        bucket.parameter_shard.fill_(rank)
    flat.publish()
    return [bucket.parameters.tolist() for bucket in flat.buckets]


def test_gathered_parameters_are_every_ranks_slice_in_order() -> None:
    results = run_ranks(_gather, 4)
    assert all(found == results[0] for found in results)
    assert all(
        flat == [float(rank) for rank in range(4) for _ in range(len(flat) // 4)]
        for flat in results[0]
    )


def test_parameters_share_the_flat_buffer_and_its_memory_goes_with_the_last_user() -> None:
    model, twin = Stack(), Stack()
    flat = FlatBuckets([model], {DATA: single_axis("dp")}, {}, 150)
    assert all(
        torch.equal(moved, kept) for moved, kept in zip(model.weights, twin.weights, strict=True)
    )
    model(torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    flat.buckets[0].parameters.zero_()
    assert not model.weights[-1].any()
    gone = [
        weakref.ref(flat.buckets[0]),
        *(weakref.ref(parameter) for parameter in model.parameters()),
    ]
    del model, flat
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


kinds = st.tuples(st.integers(1, 300), st.booleans(), st.sampled_from([(), ("tp",)]), st.booleans())


def of_kind(
    elements: int, decay: bool = True, partial: tuple[str, ...] = (), counted: bool = True
) -> nn.Parameter:
    return parameter(
        torch.zeros(elements), weight_decay=decay, partial_over=partial, counted=counted
    )


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.lists(st.lists(kinds, max_size=8), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 900),
)
def test_every_parameter_has_one_place_among_its_like(
    chunks: list[list[tuple]], size: int, limit: int
) -> None:
    models = [nn.ParameterList([of_kind(*kind) for kind in chunk]) for chunk in chunks]
    order = [p for model in reversed(models) for p in reversed(list(model))]
    plans = plan_buckets(models, {DATA: size}, limit)
    assert sorted(id(s.parameter) for plan in plans for s in plan.slots) == sorted(map(id, order))
    for plan in plans:
        assert plan.elements % (size * ALIGNMENT) == 0
        assert len(plan.slots) == 1 or sum(s.parameter.numel() for s in plan.slots) <= limit
        assert (
            len({(s.spec.partial_over, s.spec.weight_decay, s.spec.counted) for s in plan.slots})
            == 1
        )
        end = 0
        for slot in plan.slots:
            assert slot.start >= end and slot.start % ALIGNMENT == 0
            end = slot.start + slot.parameter.numel()
            assert any(p is slot.parameter for p in models[plan.chunk])
        assert end <= plan.elements
    place = {id(p): i for i, p in enumerate(order)}
    completed = [place[id(plan.slots[-1].parameter)] for plan in plans]
    assert completed == sorted(completed)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 5))
def test_the_slices_of_all_ranks_are_the_parameters(sizes: list[int], ranks: int) -> None:
    plan = plan_buckets([nn.ParameterList([of_kind(n) for n in sizes])], {DATA: ranks}, 10_000)[0]
    shard = plan.elements // ranks
    owners = {id(slot.spec): torch.zeros(slot.parameter.numel()) for slot in plan.slots}
    for rank in range(ranks):
        for part in slices_of(plan, rank * shard, torch.ones(shard)):
            owners[id(part.spec)][part.start : part.start + part.values.numel()] += part.values
    assert all((owned == 1).all() for owned in owners.values())


AHEAD: list[tuple[dict[str, int], dict[str, Any]]] = [
    (
        {"dp": 2},
        {"data_parallel_sharding_strategy": "optim_grads", "recompute_granularity": "full"},
    ),
    ({"dp": 2, "pp": 2}, {"num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4}),
    ({"cp": 2}, {"dtype": "float32", "untie_embeddings_and_output_weights": True}),
    (
        {"dp": 2},
        {**MODELS["tiny_vlm"], "vocab_size": 64, "seq_length": 64},
    ),  # its rows have no image
]
RULES = MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask="mixed")


class Late:
    """A gather that fills its bucket only when it is waited for, like on a slow network."""

    def __init__(self, bucket: torch.Tensor, begun: Any) -> None:
        begun.wait()
        self._bucket, self._values = bucket, bucket.clone()
        bucket.fill_(torch.nan)

    def wait(self) -> None:
        self._bucket.copy_(self._values)


def three_steps(
    rank: int, world: int, shape: dict[str, int], settings: dict[str, Any], ahead: bool
) -> list[Any]:
    """Return the losses, a validation loss, and all parameters after three steps."""
    names = {"pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
    sizes = {names[key]: n for key, n in shape.items() if key in names}
    config = with_values(
        RunConfig(), {**SIZES, **sizes, **settings, "lr": 0.01, "lr_warmup_iters": 0}
    )

    def with_parts(chunks: Any, *arguments: Any, **options: Any) -> FlatBuckets:
        return FlatBuckets(chunks, *arguments, **{**options, "parts": build._parts(chunks)})

    with pytest.MonkeyPatch.context() as patch:
        if ahead:
            patch.setattr(build, "FlatBuckets", with_parts)
            patch.setattr(
                module, "gather_into", lambda out, x, axis: Late(out, gather_into(out, x, axis))
            )
        model = ParallelModel(config, grid(**shape))
        own = 10 * rank * (shape.get("dp", 1) > 1) * (shape.get("pp", 1) == 1)
        rows = [mock_batch([own + i], RULES) for i in range(2)]
        found: list[Any] = [model.train(rows, number, 100.0, 0).loss for number in (1, 2)]
        found.append(model.evaluate(rows, 100.0))
        found.append(model.train(rows, 3, 100.0, 0).loss)
        return [found, [part.values.clone().numpy() for part in model.parameters.parameters_held()]]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "settings"), AHEAD, ids=str)
def test_a_run_that_gathers_parameters_ahead_is_the_same_bit_for_bit(
    shape: dict[str, int], settings: dict[str, Any]
) -> None:
    world = int(np.prod(list(shape.values())))
    waiting, ahead = (
        run_ranks(three_steps, world, shape, settings, late) for late in (False, True)
    )
    for (losses, expected), (found_losses, found) in zip(waiting, ahead, strict=True):
        assert found_losses == losses and np.isfinite(losses).all()
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_part_waits_for_its_own_buckets_alone_and_sums_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    class Gather:
        def __init__(self, bucket: torch.Tensor) -> None:
            self.bucket = [b.parameters.data_ptr() for b in flat.buckets].index(bucket.data_ptr())

        def wait(self) -> None:
            seen.append(f"bucket {self.bucket}")

    parts = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    for number, part in enumerate(parts):
        part.weight = parameter(part.weight.data, f"{number}")
        part.register_forward_hook(lambda *arguments, number=number: seen.append(f"part {number}"))
    whole = nn.Sequential(*parts)
    flat = FlatBuckets([whole], {DATA: Axis("dp_cp", 2, 0, (0, 1))}, {}, 4, parts=[*parts, whole])
    monkeypatch.setattr(module, "gather_into", lambda out, x, axis: Gather(out))
    monkeypatch.setattr(
        module, "start_reduce_scatter", lambda x, axis, **how: module.Pending([], lambda: x)
    )
    flat.publish()
    for _ in range(2):
        parts[1](parts[0](torch.zeros(1, 2)))
    assert seen == ["bucket 2", "part 0", "bucket 1", "part 1", "part 0", "part 1"]
    flat.finish()
    assert seen[-1] == "bucket 0", "that of a part which no microbatch has used"
