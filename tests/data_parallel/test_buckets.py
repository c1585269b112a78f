"""Gradient buckets: sums equal to one process, launched while the backward pass runs, in one order on all ranks."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megacp.core.data_parallel import buckets as module
from megacp.core.data_parallel import shards
from megacp.core.data_parallel.buckets import FlatBuckets
from megacp.core.distributed.collectives import start_all_gather
from megacp.core.distributed.grid import single_axis
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice, attach
from tests.ranks import grid, run_ranks

WIDTH, DEPTH = 8, 4


class Stack(nn.Module):
    """`DEPTH` square layers; the first layer's weight is used a second time at the end (a tied head)."""

    def __init__(self, recompute: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.recompute = recompute
        generator = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList()
        for layer in range(DEPTH):
            value = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
            piece = TensorSlice(f"layers.{layer}.weight", (WIDTH, WIDTH), (0, 0), (WIDTH, WIDTH))
            self.weights.append(attach(nn.Parameter(value.to(dtype)), ParameterSpec((piece,))))

    def forward(self, x: torch.Tensor, unused: int | None = None) -> torch.Tensor:
        for layer, weight in enumerate(self.weights):
            if layer != unused:
                x = (
                    checkpoint(self._layer, x, weight, use_reentrant=False)
                    if self.recompute
                    else self._layer(x, weight)
                )
        return (x @ self.weights[0]).square().sum()

    @staticmethod
    def _layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)


def inputs(rank: int, microbatch: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def unused_layer(rank: int, microbatch: int) -> int | None:
    """Ranks leave out different layers, in some microbatches."""
    return 1 + (rank + microbatch) % 3 if microbatch % 2 else None


def gathered(flat: FlatBuckets) -> list[torch.Tensor]:
    """The summed gradients of all parameters in bucket order, put together from the slices of all ranks."""
    found = []
    for i, bucket in enumerate(flat.buckets):
        whole = start_all_gather(flat.grad_shard(i), flat.axis).wait()
        for slot in bucket.plan.slots:
            found.append(whole[slot.start : slot.start + slot.parameter.numel()].clone())
    return found


def _sums(
    rank: int, world_size: int, shape: dict[str, int], recompute: bool, bucket_elements: int, each: bool = False
) -> float:
    axis = grid(**shape).over("dp", "cp")
    model = Stack(recompute)
    flat = FlatBuckets([model], axis, {}, bucket_elements, each_microbatch=each)
    worst = 0.0
    for step in range(2):
        for microbatch in range(3):
            flat.start_backward(0, last=microbatch == 2)
            model(inputs(rank, 3 * step + microbatch), unused_layer(rank, 3 * step + microbatch)).backward()
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
def test_bucket_sums_equal_one_process_on_all_data(shape: dict[str, int], bucket_elements: int, each: bool) -> None:
    """Tolerance: float64 sums in another order."""
    size = shape.get("dp", 1) * shape.get("cp", 1)
    assert max(run_ranks(_sums, size, shape, False, bucket_elements, each)) < 1e-12


@pytest.mark.parametrize("each", [False, True])
def test_recomputed_layers_give_the_same_sums(each: bool) -> None:
    assert max(run_ranks(_sums, 2, {"dp": 2}, True, 150, each)) < 1e-12


def _events(monkeypatch: pytest.MonkeyPatch, flat: FlatBuckets, model: Stack) -> list[str]:
    events: list[str] = []
    real = module.start_reduce_scatter

    def recorded(x: torch.Tensor, axis: object) -> object:
        index = [bucket.gradients.data_ptr() for bucket in flat.buckets].index(x.data_ptr())
        events.append(f"reduce {index}")
        return real(x, axis)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "start_reduce_scatter", recorded)
    for layer, weight in enumerate(model.weights):
        weight.register_hook(lambda gradient, layer=layer: events.append(f"gradient {layer}"))
    return events


def test_buckets_are_reduced_while_the_backward_pass_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    flat = FlatBuckets([model], single_axis("dp_cp"), {}, WIDTH * WIDTH)
    events = _events(monkeypatch, flat, model)
    model(inputs(0, 0)).backward()
    assert [e for e in events if e.startswith("reduce")] == []
    events.clear()
    flat.start_backward(0, last=True)
    model(inputs(0, 1)).backward()
    assert events == [e for i in range(DEPTH) for e in (f"gradient {DEPTH - 1 - i}", f"reduce {i}")]
    flat.finish()
    assert len(events) == 2 * DEPTH


def test_a_bucket_without_gradients_holds_back_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    flat = FlatBuckets([model], single_axis("dp_cp"), {}, WIDTH * WIDTH)
    events = _events(monkeypatch, flat, model)
    flat.start_backward(0, last=True)
    model(inputs(0, 0), unused=2).backward()
    assert [e for e in events if e.startswith("reduce")] == ["reduce 0"]
    flat.finish()
    assert [e for e in events if e.startswith("reduce")] == [f"reduce {i}" for i in range(DEPTH)]


def test_reductions_of_a_microbatch_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    real = module.start_reduce_scatter
    monkeypatch.setattr(module, "start_reduce_scatter", lambda x, axis: launched.append(len(x)) or real(x, axis))
    model = Stack()
    flat = FlatBuckets([model], single_axis("dp_cp"), {}, WIDTH * WIDTH, each_microbatch=True)
    for microbatch in (1, 2):
        flat.start_backward(0, last=microbatch == 2)
        model(inputs(0, microbatch), unused=3).backward()
        flat.end_backward(0)
        assert len(launched) == DEPTH * microbatch


def test_chunks_are_reduced_after_their_own_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [Stack(), Stack()]
    flat = FlatBuckets(chunks, single_axis("dp_cp"), {}, 10_000)
    assert [bucket.plan.chunk for bucket in flat.buckets] == [1, 0]
    events = _events(monkeypatch, flat, chunks[0])
    chunks[0](inputs(0, 0)).backward()
    flat.start_backward(1, last=True)
    chunks[1](inputs(0, 0)).backward()
    assert [e for e in events if e.startswith("reduce")] == ["reduce 0"]
    flat.start_backward(0, last=True)
    chunks[0](inputs(0, 1)).backward()
    assert events[-1] == "reduce 1"


def test_a_gradient_after_the_reduction_is_an_error_and_not_lost() -> None:
    model = Stack()
    flat = FlatBuckets([model], single_axis("dp_cp"), {}, WIDTH * WIDTH)
    flat.start_backward(0, last=True)
    model(inputs(0, 0)).backward()
    with pytest.raises(AssertionError, match="start_backward"):
        model(inputs(0, 1)).backward()


def test_bfloat16_gradients_are_accumulated_in_float32() -> None:
    weight = attach(
        nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), ParameterSpec((TensorSlice("w", (4,), (0,), (4,)),))
    )
    flat = FlatBuckets([nn.ParameterList([weight])], single_axis("dp_cp"), {}, 100)
    for scale in (1.0, 1 / 512, 1 / 512):
        (weight * scale).sum().backward()
    flat.finish()
    assert flat.grad_shard(0).dtype == torch.float32
    assert flat.grad_shard(0)[:4].tolist() == [1 + 1 / 256] * 4
    assert weight.grad is None


def _partial(rank: int, world_size: int) -> tuple[list[float], int]:
    place = grid(tp=2, dp=2)
    pieces = [TensorSlice(name, (3,), (0,), (3,)) for name in ("cut", "norm", "bias")]
    specs = [
        ParameterSpec((pieces[0],)),
        *(ParameterSpec((p,), weight_decay=False, partial_over=("tp",)) for p in pieces[1:]),
    ]
    model = nn.ParameterList([attach(nn.Parameter(torch.zeros(3)), spec) for spec in specs])
    flat = FlatBuckets([model], place.over("dp", "cp"), {"tp": place.tp, "embedding": place.embedding}, 1)
    calls = []
    real = shards.all_reduce
    shards.all_reduce = lambda x, axis: calls.append(axis.name) or real(x, axis)  # type: ignore[assignment, func-returns-value]
    try:
        (sum((i + 1) * p for i, p in enumerate(model)) * 10.0**rank).sum().backward()
        flat.finish()
    finally:
        shards.all_reduce = real
    return [whole[0].item() for whole in gathered(flat)], len(calls)


def test_partial_gradients_are_summed_over_tp_in_one_call_and_others_are_not() -> None:
    results = run_ranks(_partial, 4)
    for rank, (sums, calls) in enumerate(results):
        own = 101.0 if rank % 2 == 0 else 1010.0  # tp is fastest: ranks 0 and 2 share a tp rank
        assert sums == [3333.0, 2222.0, own]  # buckets in backward order: bias, norm, cut
        assert calls == 1


def _gather(rank: int, world_size: int) -> list[list[float]]:
    model = Stack(dtype=torch.float32)
    flat = FlatBuckets([model], grid(dp=world_size).over("dp", "cp"), {}, 150)
    for bucket in flat.buckets:
        bucket.parameter_shard.fill_(rank)
    flat.publish()
    return [bucket.parameters.tolist() for bucket in flat.buckets]


def test_gathered_parameters_are_every_ranks_slice_in_order() -> None:
    results = run_ranks(_gather, 4)
    assert all(found == results[0] for found in results)
    for flat in results[0]:
        quarter = len(flat) // 4
        assert flat == [float(rank) for rank in range(4) for _ in range(quarter)]


def test_parameters_keep_their_values_and_share_the_flat_buffer() -> None:
    model, twin = Stack(), Stack()
    flat = FlatBuckets([model], single_axis("dp_cp"), {}, 150)
    for moved, kept in zip(model.weights, twin.weights, strict=True):
        assert torch.equal(moved, kept)
    flat.buckets[0].parameters.zero_()
    assert not model.weights[-1].any()


def test_buckets_and_their_memory_go_with_their_last_user() -> None:
    model = Stack()
    buckets = FlatBuckets([model], single_axis("dp"), {}, 100)
    model(torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    gone = [weakref.ref(buckets.buckets[0]), *(weakref.ref(parameter) for parameter in model.parameters())]
    del model, buckets
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
