"""What one rank of a training run holds, counted by torch's allocator, where messages cost what they cost under NCCL.

Real gloo ranks train. Their collectives take the paths of other backends; buffers that gloo needs are made and let go
where no profiler looks. A collective under way holds its tensors until somebody waits, as NCCL's does.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.data_parallel.buckets import FlatBuckets
from megacp.core.distributed import collectives
from megacp.core.distributed.grid import Axis
from megacp.core.large_blocks import BLOCKS
from megacp.core.models.build import stage_layers
from megacp.core.planner.memory import RankMemory, stage_memory
from megacp.core.training.step import ParallelModel
from tests.ranks import grid

SIZES = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 384,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "seq_length": 256,
    "attention_kernel": "flash",
    "cp_layout": "contiguous",
}
_SUM = dist.all_reduce


class _Message:
    """It holds its tensors until somebody waits."""

    def __init__(self, held: object, finish: Callable[[], None] = lambda: None) -> None:
        self._held, self._finish = held, finish

    def wait(self, timeout: object = None) -> bool:
        self._finish()
        self._held, self._finish = None, lambda: None
        return True


def _unseen(work: Callable[[], object]) -> None:
    """Run it in a thread that no profiler looks at, and let go there of what it has made."""

    def run() -> None:
        with torch.no_grad():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _collective(real: Callable[..., Any]) -> Callable[..., Any]:
    """`real(out, ...)`, on copies: gloo lets go of a tensor when it likes."""

    def call(*tensors: Any, async_op: bool = False, **options: Any) -> _Message:
        def work() -> None:
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in tensors]
            real(*copies, **options)
            tensors[0].copy_(copies[0])

        _unseen(work)
        return _Message(tensors)

    return call


def _reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Any, async_op: bool = False) -> _Message:
    def work() -> None:
        total = x.clone()
        _SUM(total, group=group)
        out.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    _unseen(work)
    return _Message((out, x))


def _single(real: Callable[..., Any], arrives: bool) -> Callable[..., _Message]:
    """A send or a receive through a buffer that numpy has made."""

    def call(x: torch.Tensor, **options: Any) -> _Message:
        buffer = torch.from_numpy(np.empty(x.nbytes, np.uint8)).view(x.dtype).view(x.shape)
        if not arrives:
            buffer.copy_(x)
        work = real(buffer, **options)

        def finish() -> None:
            work.wait()
            if arrives:
                x.copy_(buffer)

        return _Message((x, buffer), finish)

    return call


def _together(operations: list[tuple[Callable[..., _Message], torch.Tensor, int, Any]]) -> list[_Message]:
    (send, sent, target, group), (receive, received, source, _) = operations
    return [send(sent, dst=target, group=group), receive(received, src=source, group=group)]


@contextlib.contextmanager
def _as_under_nccl() -> Iterator[None]:
    def put(axis: Axis, name: str) -> None:
        axis.__dict__["backend"] = name

    with contextlib.ExitStack() as stack:
        for target, name, value in [
            (Axis, "backend", property(lambda axis: "native", put)),
            (collectives, "_all_gather_single", _collective(collectives._all_gather_single)),
            (collectives, "_reduce_scatter_single", _reduce_scatter),
            (dist, "all_reduce", _collective(dist.all_reduce)),
            (dist, "all_to_all_single", _collective(dist.all_to_all_single)),
            (dist, "isend", _single(dist.isend, False)),
            (dist, "irecv", _single(dist.irecv, True)),
            (dist, "P2POp", lambda *operation: operation),
            (dist, "batch_isend_irecv", _together),
        ]:
            stack.enter_context(mock.patch.object(target, name, value))
        yield


@contextlib.contextmanager
def _phase(name: str) -> Iterator[None]:
    """torch's `fully_shard` leaves cycles; what collects them must do so in this thread, where frees are seen."""
    gc.collect()
    yield


def _config(values: Mapping[str, Any]) -> RunConfig:
    return with_values(RunConfig(), {**SIZES, **values})


def _model(config: RunConfig, world: int) -> ParallelModel:
    p = config.parallel
    shape = {"tp": p.tensor_model_parallel_size, "cp": p.context_parallel_size, "pp": p.pipeline_model_parallel_size}
    return ParallelModel(config, grid(**shape, dp=config.data_parallel_size(world)), _phase)


def _rows(model: ParallelModel, world: int, step: int) -> list[Any]:
    config, dp = model.config, model.grid.dp
    rules = MockRules(config.model.vocab_size, config.data.seq_length)
    first = step * config.training.global_batch_size + dp.rank * config.num_microbatches(world)
    return [mock_batch([first + i], rules) for i in range(config.num_microbatches(world))]


def _planned(model: ParallelModel, world: int) -> RankMemory:
    stage = model.grid.pp.rank
    return stage_memory(model.config, stage, stage_layers(model.config, world)[stage], world)


@contextlib.contextmanager
def _only_what_comes() -> Iterator[None]:
    """The collector runs when asked alone, and walks neither modules nor what an earlier call has left.

    What is frozen stays so: it would be walked in every later test of the rank.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_only_what_comes()
def step_peak(rank: int, world: int, values: dict[str, Any]) -> tuple[int, RankMemory]:
    """Most bytes that a rank holds in its second step, of those allocated since before the model was built."""
    with BLOCKS.paused(), _as_under_nccl(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        model = _model(_config(values), world)
        model.train(_rows(model, world, 1), 1, 1000.0)
        rows = _rows(model, world, 2)
        gc.collect()
        start = time.time_ns()
        assert model.train(rows, 2, 1000.0).decision.update
        end = time.time_ns()
    planned = _planned(model, world)
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        if start <= event.start_ns() <= end:
            peak = max(peak, held)
    return peak, planned


@_only_what_comes()
def state_bytes(rank: int, world: int, values: dict[str, Any]) -> tuple[int, RankMemory]:
    """Bytes of the storages of parameters, gradients, moments and master weights, before the optimizer's update."""
    model = _model(_config(values), world)
    model.gradients(_rows(model, world, 1), 1, 1000.0)
    of_chunks = [p.detach() for chunk in model.chunks for p in chunk.parameters()]
    found = [x.to_local() if isinstance(x, DTensor) else x for x in of_chunks]
    found += [part.values for parts in model.optimizer.state_slices().values() for part in parts]
    shards = model.parameters
    whole = isinstance(shards, FlatBuckets) and model.config.parallel.data_parallel_sharding_strategy == "optim"
    found += (
        [b.gradients for b in shards.buckets] if whole else [shards.grad_shard(i) for i in range(len(shards.shards))]
    )
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
    return sum(storages.values()), _planned(model, world)
