"""Simulates a training step of one rank without a GPU, and records its memory and communication.

The model, plan, schedule and optimizer are real. Tensors are FakeTensors on the device `cuda` and
have no values. Process groups send nothing (torch's "fake" backend). Operators reject tensors on
different devices, autograd runs the backward pass in the device's thread, and Dynamo traces every
function that would be compiled on a GPU. Only the compiled kernels are faked.

Memory is the size of all storages on the device in bytes, grouped by the phase that allocated them.
For a compiled function, only its results count. Fragmentation, communicators and buffers inside
kernels are not included.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo.trace_rules
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megacp.distributed.fake_world import Call, differences, fake_world, recorded
from megacp.distributed.grid import build_grid
from megacp.distributed.shape import AXES, GridShape
from megacp.dry_run.memory import STATE, stage_memory
from megacp.engine.backends.select import backend_problems
from megacp.engine.checks import require
from megacp.engine.config.cli import parse
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.vision import POOLED_PATCHES
from megacp.engine.data_parallel.fully_shard import shard_of
from megacp.engine.expert_parallel.route import Route
from megacp.engine.layers.moe import planned_load
from megacp.engine.models import build, offload
from megacp.engine.models.costs import planned_images, stage_layers
from megacp.engine.rows.batch import PackedBatch, VisionInputs
from megacp.engine.rows.choose import resolve_auto
from megacp.engine.rows.image_shards import REPLICATE, compute_image_shard_boundaries
from megacp.engine.step.step import ParallelModel
from megacp.training.data.mock import MASKS, MockRules, mock_batch
from megacp.training.loop.sources import open_sources


class Watch(TorchDispatchMode):
    """Records device memory by category, and collective calls, in all autograd threads."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, because Dynamo should compile while this mode is active."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because `chain` reports the results of compiled functions."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Reset all counts. Freeing a storage from before the reset does not change the counts."""
        self.category, self.chains = "other", 0
        self.held: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.calls: list[Call] = []
        self._known: dict[int, tuple[str, int]] = {}  # storage -> category, bytes
        self._most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if (call := recorded(function, args, kwargs or {})) is not None:
            self.calls.append(call)
        # Tensors that Dynamo creates during tracing occupy no memory in a real step.
        if not self.chains and TracingContext.try_get() is None:
            for x in tree_iter(result):
                if isinstance(x, torch.Tensor):
                    self.see(x)
        return result

    def see(self, x: torch.Tensor, category: str = "") -> None:
        """Count a tensor's storage once; if `category` is given, move the storage there."""
        if x.device.type != "cuda":
            return
        # The storage of a DTensor itself would have the size of the full tensor.
        storage = shard_of(x).untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = self.category, 0
            # Without a category, `_count` removes the storage from all counts.
            weakref.finalize(storage, self._count, key, "", 0)
        self._count(key, category or self._known[key][0], storage.nbytes())

    def _count(self, key: int, category: str, size: int) -> None:
        if key not in self._known:
            return
        # Remove the old size, then add the new size under the new category.
        before, old = self._known.pop(key)
        self.held[before] -= old
        if category:
            self._known[key] = category, size
            self.held[category] += size
        total = sum(self.held.values())
        if total > self._most:
            self._most = total
            self.peak = dict(self.held)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count allocations within this context under the phase `name`.

        Tensors that the forward pass allocates are activations.
        """
        before = self.category
        self.category = {"forward": "activations", "shard": "rows"}.get(name, name)
        try:
            yield
        finally:
            self.category = before

    def chain(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """Return `graph` as a function. Its results are counted, but its other tensors are not.

        This method is the backend of `torch.compile`.
        """

        def call(*args: Any) -> Any:
            self.chains += 1
            try:
                results = graph(*args)
            finally:
                self.chains -= 1
            # Only the outermost compiled function counts its results.
            if self.chains:
                return results
            for x in tree_iter(results):
                if isinstance(x, torch.Tensor):
                    self.see(x)
            return results

        return call


class _NoStream:
    """A stream, event or device context that does nothing."""

    def __init__(self, *args: Any, **named: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *error: object) -> None: ...


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Call the attention operator that torch would choose on a GPU for crops without a mask.

    A CPU build of torch would choose a different operator.
    """
    if q.dtype == torch.bfloat16:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, None, True, scale=scale)[0]


@contextlib.contextmanager
def _device(watch: Watch, rank: int) -> Iterator[None]:
    """Make torch.cuda behave like a Hopper GPU with fake kernels.

    Every value that the host reads from the device is 1.
    """
    item, tolist = torch.Tensor.item, torch.Tensor.tolist
    resize, compile = torch.UntypedStorage.resize_, torch.compile

    # Full sharding frees and restores storages with resize_, which bypasses the dispatcher.
    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        if storage._cdata in watch._known:
            watch._count(storage._cdata, watch._known[storage._cdata][0], size)
        return result

    def graphs(score: Callable, example: tuple, buffers: tuple) -> tuple[Callable, Callable]:
        # FlexAttention creates a scalar on the device while its backward pass is traced.
        with detect_fake_mode(example) or contextlib.nullcontext():
            return create_fw_bw_graph(score, example, buffers)

    nothing = lambda *args, **named: None  # noqa: E731
    hopper = mock.Mock(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    # Replacements, by owner, for every function that would need a real device.
    patches: dict[str, dict[str, Any]] = {
        "torch.cuda": {
            "is_available": lambda: True,
            "device_count": lambda: 8,
            "current_device": lambda: rank % 8,
            **dict.fromkeys(
                ("set_device", "synchronize", "get_rng_state", "set_rng_state", "_lazy_init"),
                nothing,
            ),
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: hopper,
            **dict.fromkeys(("Stream", "Event", "device", "stream", "current_stream"), _NoStream),
        },
        # Fake tensors have no values. During tracing, Dynamo needs the original `item`.
        "torch.Tensor": {
            "item": lambda x: (
                1.0 if isinstance(x, FakeTensor) and TracingContext.try_get() is None else item(x)
            ),
            "tolist": lambda x: [1.0] * len(x) if isinstance(x, FakeTensor) else tolist(x),
            "pin_memory": lambda x, *device: x,
            "record_stream": nothing,
        },
        "torch._higher_order_ops.flex_attention": {"create_fw_bw_graph": graphs},
        "torch.nn.functional": {"scaled_dot_product_attention": _attention},
        "torch": {
            "compile": lambda function, **named: compile(
                function, **{**named, "backend": watch.chain}
            )
        },
        "torch.UntypedStorage": {"resize_": resized},
        "torch._subclasses.fake_tensor.FakeTensorMode": {"avoid_device_init": True},
    }
    # Dynamo builds this table once. It must contain the original functions, not the patches.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    with contextlib.ExitStack() as stack:
        for owner, values in patches.items():
            stack.enter_context(mock.patch.multiple(owner, **values))
        # Fake parameters have no values to initialise.
        stack.enter_context(mock.patch.object(build, "initialise", nothing))
        stack.enter_context(mock.patch.object(offload, "PLAIN", {FakeTensor}))
        yield


@contextlib.contextmanager
def planned_routes(config: RunConfig, busy: int) -> Iterator[None]:
    """Route tokens to experts as the dry run assumes.

    The ep rank `busy` receives the planned load. All other ranks share the remaining rows equally.
    """

    def sent(route: Route) -> list[int]:
        ranks = route.axis.size
        slots = route.chosen.numel()
        most = min(slots, math.ceil(slots * planned_load(config) / ranks))
        # The first `more` of the other ranks receive one row more.
        each, more = divmod(slots - most, max(1, ranks - 1))
        found = [each + 1 if number < more else each for number in range(ranks - 1)]
        return [*found[:busy], most, *found[busy:]]

    def received(route: Route) -> list[int]:
        # All ranks are assumed to send alike: each sends this rank what it would send to itself.
        return [sent(route)[route.axis.rank]] * route.axis.size

    with mock.patch.multiple(Route, sent=property(sent), received=property(received)):
        yield


@dataclass(frozen=True)
class Rank:
    """The memory and communication of one rank in one step."""

    rank: int
    peak: dict[str, int]
    """Bytes at the peak by category: weights, gradients, optimizer, activations, rows, phases."""
    state: dict[str, int]
    """Bytes of weights, gradients and optimizer between steps."""
    calls: list[Call]

    @property
    def total(self) -> int:
        """Total bytes at the peak."""
        return sum(self.peak.values())


def full_row(
    config: RunConfig, packs: int, mask: str, encoder: tuple[int, int] | None
) -> PackedBatch:
    """Return a full-length row of random packs with the planned images.

    `encoder` is this rank's index among the ranks that share the images, and their number. None
    means that the rank is on a later stage and has no images.
    """
    rules = MockRules(config.model.vocab_size, config.data.seq_length, mask)
    batch = mock_batch(range(packs), rules)
    crops, pooled = (packs * count for count in planned_images(config))
    if not config.vision.vision_num_layers:
        return batch
    # Every image has the smallest size, so the planned crops are many small images.
    of_one, _ = config.vision.smallest_image
    # Cumulative ends of the images, in crops and in pooled tokens.
    edges = np.arange(of_one, crops + 1, of_one)
    bounds = edges, edges * pooled // max(crops, 1)
    rank, ranks = encoder or (0, 1)
    mine = compute_image_shard_boundaries(*bounds, ranks)[rank]
    my_crops = 0
    my_pooled = 0
    if encoder is not None:
        my_crops = int(mine["end_image_idx"] - mine["start_image_idx"])
        my_pooled = int(mine["end_pool_idx"] - mine["start_pool_idx"])
    shape = (my_crops, config.vision.crop_patches, config.vision.patch_dim)
    pixels = np.zeros(shape, np.float32)
    windows = np.zeros((my_pooled, POOLED_PATCHES), np.int64)
    strategy = config.parallel.vision_shards
    grids = np.ones((my_pooled, 2), np.int64) if config.vision.family.has_grids else None
    images = VisionInputs(*bounds, np.arange(pooled), None, pixels, windows, strategy, grids=grids)
    return dataclasses.replace(batch, vision=images)


def microbatches_computed(config: RunConfig, world_size: int) -> int:
    """Return the number of microbatches in a fake step.

    More microbatches would only prolong the schedule's steady state without changing the peak.
    """
    stages = config.parallel.pipeline_model_parallel_size
    return min(
        config.num_microbatches(world_size),
        2 * stages * config.parallel.num_virtual_stages_per_pipeline_rank,
    )


def step(
    config: RunConfig, world_size: int, rank: int, mask: str, watch: Watch, busy: int = 0
) -> Rank:
    """Build one rank's model from a validated config and train it for one step on equal rows.

    `busy` is the ep rank that receives the planned load. The first step in a process compiles, and
    its peak is a few percent higher, because Dynamo keeps the traced inputs.
    """
    gc.collect()
    watch.begin()
    with fake_world(rank, world_size):
        grid = build_grid(config.grid_shape(world_size), rank, torch.device("cuda", rank % 8))
        with _device(watch, rank):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, watch:
                model = ParallelModel(config, grid, watch.phase)
                model.is_new = False  # the first step of a new model needs less memory
                state = _state(model, watch)
            # Only the first stage has images. Its ranks share them unless they are replicated.
            encoder: tuple[int, int] | None = None
            if grid.pp.rank == 0:
                encoder = (model.rows.axis.rank, model.rows.axis.size)
                if config.parallel.vision_shards == REPLICATE:
                    encoder = (0, 1)
            row = model.plan(full_row(config, model.rows.packs, mask, encoder))
            with mode, watch, planned_routes(config, busy):
                rows = [row] * microbatches_computed(config, world_size)
                model.train(rows, 1, 1.0, sum(one.batch.real_tokens for one in rows))
        return Rank(rank, watch.peak, state, watch.calls)


def _state(model: ParallelModel, watch: Watch) -> dict[str, int]:
    """Assign the tensors that a rank keeps between steps to the categories in STATE.

    Return the bytes in each category.
    """
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in STATE}
    for chunk in model.chunks:
        kept["weights"] += [shard_of(p) for p in chunk.parameters()]
    kept["weights"] += [s.values for s in model.parameters.shards]
    for parts in model.optimizer.state_slices().values():
        kept["optimizer"] += [part.values for part in parts]
    kept["gradients"] += [bucket.gradients for bucket in getattr(model.parameters, "buckets", ())]
    # Optimizer state or gradients that share a storage with weights count as weights.
    weights = {x.untyped_storage()._cdata for x in kept["weights"]}
    for name, tensors in kept.items():
        for x in tensors:
            if name == "weights" or x.untyped_storage()._cdata not in weights:
                watch.see(x, name)
    return {name: watch.held[name] for name in STATE}


def neighbours(shape: GridShape, rank: int) -> list[int]:
    """Return the next rank along each axis (tp, cp, dp, pp) that has more than one rank."""
    # The ranks along each axis through `rank`, in order. The first rank follows the last.
    axes = [shape.members(rank, (name,)) for name in ("tp", "cp", "dp", "pp")]
    return [one[(one.index(rank) + 1) % len(one)] for one in axes if len(one) > 1]


def _figures(sizes: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if size >= 5 << 20
    )


def main(argv: Sequence[str]) -> int:
    """Run the command line (`--rank`, `--mask` and the flags of a run), and return the exit status.

    The status is 1 if neighbouring ranks make different collective calls. Raise ValueError if a
    flag is invalid.
    """
    parser = argparse.ArgumentParser(prog="check_gpu.py --fake", allow_abbrev=False)
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        help="rank whose step is simulated, together with those of its neighbours (default: 0)",
    )
    parser.add_argument(
        "--mask",
        choices=MASKS,
        default="mixed",
        help="attention mask of the random packs (default: mixed)",
    )
    own, rest = parser.parse_known_args(argv)
    # Random packs have no epochs.
    config = with_values(parse(rest, parser.prog), {"train_epochs": None})
    world_size = config.world_size or config.model_ranks
    require(config, world_size, backend_problems(config, None))
    if config.model.num_experts > 0 and config.training.dtype != "bfloat16":
        raise ValueError(
            f"--fake with --num-experts does not support --dtype {config.training.dtype}; "
            "use --dtype bfloat16"
        )
    # Read the sources' metadata, then resolve `auto` values for a full-length row.
    config, _ = open_sources(config)
    config, chosen = resolve_auto(
        config, lambda: [full_row(config, config.training.micro_batch_size, own.mask, None)]
    )
    shape = config.grid_shape(world_size)
    watch = Watch()
    if not 0 <= own.rank < world_size:
        raise ValueError(
            f"--rank {own.rank} must be from 0 to {world_size - 1} (--world-size {world_size})"
        )
    if chosen:
        print(chosen)
    # The requested rank gets the planned expert load, so its peak is comparable with the dry run.
    busy = shape.experts(own.rank)[0].index(own.rank) if shape.ep else 0
    # The first step compiles, and the inputs that Dynamo keeps add a few percent to its peak.
    # The rank therefore takes a second step, and only that step's peak is printed.
    step(config, world_size, own.rank, own.mask, watch, busy)
    mine = step(config, world_size, own.rank, own.mask, watch, busy)
    others = [
        step(config, world_size, rank, own.mask, watch, busy)
        for rank in neighbours(shape, own.rank)
    ]
    computed = microbatches_computed(config, world_size)
    print(
        f"a step of {computed} of {config.num_microbatches(world_size)} microbatches of "
        f"{config.data.seq_length:,} tokens, mask {own.mask}"
    )
    wrong: list[str] = []
    # Compare peaks with the dry run, and the neighbours' calls with those of the requested rank.
    for one in (mine, *others):
        at = shape.coordinates(one.rank)
        layers = stage_layers(config, world_size)[at["pp"]]
        planned = stage_memory(config, at["pp"], layers, world_size)
        place = ", ".join(f"{name} {at[name]}" for name in reversed(AXES))
        peak = f"peak {one.total / 2**30:.2f} GiB ({_figures(one.peak)})"
        estimate = f"the dry run estimates {planned.total / 2**30:.2f}"
        calls = f"{len(one.calls):,} collective calls"
        print(f"rank {one.rank} ({place}): {peak}; {estimate}; {calls}")
        wrong += differences(own.rank, mine.calls, one.rank, one.calls)
    if wrong:
        print("\n".join(["DIFFERENT:", *wrong]))
    else:
        print(f"THE SAME CALLS on rank {own.rank} and on its neighbours")
    return int(bool(wrong))
