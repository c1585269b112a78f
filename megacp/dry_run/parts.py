"""Measure the memory of one model part by running it on tensors without data.

The part is the real module on a rank of the real grid. Its tensors are on torch's `meta` device,
which has shapes but no data, and its process groups send nothing. The
measurement of a block of any size on any number of ranks therefore takes a few hundredths of a
second on any machine, and no second description of its memory is needed.

A storage counts from its creation by an operator until its last reference is gone. If a chain of
operators becomes one kernel on a GPU, only its results count. Fragmentation and scratch memory of
kernels do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from megacp.attention.context_parallel.balance import ALIKE
from megacp.attention.context_parallel.layout import CONTIGUOUS, LAYOUTS
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.device import CHAINS, STAND_IN
from megacp.attention.ops.mask import Metadata
from megacp.attention.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies
from megacp.distributed.fake_world import fake_world
from megacp.distributed.grid import ProcessGrid, build_grid, single_axis
from megacp.distributed.shape import GridShape
from megacp.dry_run.part_memory import PartMemory
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.config.vision import POOLED_PATCHES
from megacp.engine.expert_parallel.route import PlannedRoute, Routes
from megacp.engine.layers.moe import planned_load
from megacp.engine.layers.stack import vocabulary_table
from megacp.engine.layers.table import tokens_per_rank
from megacp.engine.models.block import Block, BlockInputs
from megacp.engine.models.costs import loss_chunk_tokens
from megacp.engine.models.language import OutputHead
from megacp.engine.models.multimodal import VisionEncoder
from megacp.engine.rows.mix import mix_of
from megacp.engine.rows.vision import PatchGrids
from megacp.engine.tensor_parallel.vocabulary import TableSpec, Target
from megacp.engine.tensor_parallel.weight_gradients import DeferredWeightGradients, WeightGradients

DEVICE = torch.device(STAND_IN)
# The forward pass of a part; the result is still connected to its autograd graph.
Run = Callable[[], torch.Tensor]


class Follow(TorchDispatchMode):
    """A mode that tracks the bytes of all live storages created by operators."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Current number of bytes."""
        self.most = 0
        """Highest value of `alive` since this attribute was last set."""
        self._known: set[int] = set()
        self._inside_a_chain = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self._inside_a_chain:
            self._see(result)
        return result

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude these tensors from the count, including views that operators return."""
        self._known.update(x.untyped_storage()._cdata for x in tensors)

    def run_chain(
        self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Call a function that becomes one kernel on a GPU, and count only its results."""
        if self._inside_a_chain:
            return function(*args, **options)
        self._inside_a_chain = True
        try:
            result = _chain(function, args, options)
        finally:
            self._inside_a_chain = False
        self._see(result)
        return result

    def _see(self, result: Any) -> None:
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.alive += size
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


class _Like(NamedTuple):
    """Description of a tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


# Descriptions of results by function and arguments, so that a chain's operators run only once.
_KNOWN_CHAINS: dict[Any, Any] = {}


def _chain(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the function's results, or tensors like its earlier results for similar arguments.

    The function is called every time if autograd records it, or if it returns its arguments or
    views of them.
    """
    given, spec = tree_flatten((args, options))
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return function(*args, **options)
    key = (function, str(spec), tuple(map(_like, given)))
    if key not in _KNOWN_CHAINS:
        result = function(*args, **options)
        results, made = tree_flatten(result)
        given_storages = {x.untyped_storage()._cdata for x in tensors}
        new = [x for x in results if isinstance(x, torch.Tensor)]
        # a view shares memory with its argument, which a new tensor would not
        if given_storages.isdisjoint(x.untyped_storage()._cdata for x in new):
            _KNOWN_CHAINS[key] = list(map(_like, results)), made
        return result
    results, made = _KNOWN_CHAINS[key]
    return tree_unflatten(list(map(_unlike, results)), made)


def _like(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return _Like(tuple(x.shape), x.stride(), x.dtype)
    return x


def _unlike(x: Any) -> Any:
    if isinstance(x, _Like):
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=DEVICE)
    return x


class _Begin(torch.autograd.Function):
    """Create a tensor that represents another part's output.

    The tensor stays alive only while the backward pass needs it.
    """

    @staticmethod
    def forward(
        ctx: Any, begin: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None


def _made_before(begin: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a non-leaf tensor that requires a gradient and depends on `begin`."""
    made: torch.Tensor = _Begin.apply(begin, shape, dtype)
    return made


def _begin() -> torch.Tensor:
    return torch.zeros((), device=DEVICE, requires_grad=True)


@contextlib.contextmanager
def _grid_of(config: RunConfig, rank: int = 0) -> Iterator[ProcessGrid]:
    """Yield the grid of one stage, with a single replica unless experts need more."""
    p = config.parallel
    ranks = p.tensor_model_parallel_size * p.context_parallel_size
    ep = p.expert_model_parallel_size if config.model.num_experts else 0
    shape = GridShape(
        tp=p.tensor_model_parallel_size,
        cp=p.context_parallel_size,
        # the smallest number of replicas that groups of ep ranks fill completely
        dp=math.lcm(max(1, ep), ranks) // ranks,
        ep=ep,
    )
    # a single rank needs no process groups
    if shape.world_size == 1:
        yield build_grid(shape, 0, DEVICE)
        return
    with fake_world(rank, shape.world_size):
        yield build_grid(shape, rank, DEVICE)


# Plans of rows with more tokens are not cached, because a plan takes about 100 bytes per token.
_REMEMBERED = 2**18


@functools.lru_cache(4)
def _plan(
    model: ModelConfig, packs: int, tokens: int, cp: int, multiple: int, layout: str
) -> AttentionPlan:
    """Return the plan of the cp rank with the last token, which attends to the most keys.

    One causal document fills each pack.
    """
    # each document ends at the end of its pack
    leave = np.repeat(np.arange(1, packs + 1) * tokens, tokens)
    row = Metadata.of_row(leave, np.zeros_like(leave))
    chosen = LAYOUTS[layout] if cp > 1 else CONTIGUOUS
    # pad the row to a length that the layout can divide
    missing = (0, chosen.padded_length(row, cp, multiple) - len(row))
    filled = Metadata.of_row(np.pad(row.leave, missing), np.pad(row.span, missing))
    dealt = chosen.deal(filled, cp, mix_of(model) or ALIKE)
    last = int(np.flatnonzero((dealt == len(row) - 1).any(1))[0])
    return AttentionPlan(dealt, filled, last)


def _plan_of(config: RunConfig) -> AttentionPlan:
    p = config.parallel
    multiple = p.tensor_model_parallel_size if p.sequence_parallel else 1
    packs, tokens = config.training.micro_batch_size, config.data.seq_length
    sizes = (config.model, packs, tokens, p.context_parallel_size, multiple, p.cp_layout)
    if packs * tokens > _REMEMBERED:
        return _plan.__wrapped__(*sizes)
    return _plan(*sizes)


def _backend(config: RunConfig, grid: ProcessGrid) -> NativeBackend:
    sink: WeightGradients | None = None
    # as in a training run: defer weight gradients, add them to sums, or leave them to autograd
    if config.parallel.defers_weight_gradients:
        sink = DeferredWeightGradients()
    elif config.training.gradient_accumulation_fusion and not config.parallel.sharding.parameters:
        sink = WeightGradients()
    return NativeBackend(grid, config, sink)


def _buckets(config: RunConfig, part: nn.Module) -> list[torch.Tensor]:
    """Attach wide gradient sums to the parameters, as gradient buckets do, and return the sums.

    Under full sharding, the list is empty, because gradients are kept until they are complete for
    the whole part.
    """
    if config.parallel.sharding.parameters:
        return []
    dtype = {4: torch.float32, 8: torch.float64}[config.training.accumulation_bytes]
    sums = []
    for parameter in part.parameters():
        if not parameter.requires_grad:
            continue
        total = torch.empty(parameter.shape, dtype=dtype, device=DEVICE)
        sums.append(total)
        parameter.main_grad = total  # type: ignore[attr-defined]  # ours, on a tensor of torch
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # likewise
        parameter.gradient_added = _drop_gradient  # type: ignore[attr-defined]  # likewise
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    return sums


def _drop_gradient(parameter: torch.Tensor) -> None:
    """Free a gradient, as a bucket does after adding it to its sum."""
    parameter.grad = None


def _follow(
    config: RunConfig, part: nn.Module, given: Iterable[torch.Tensor], begin: Callable[[], Run]
) -> PartMemory:
    """Run a part's forward and backward pass twice, and return the memory of the second run.

    `given` are the inputs that exist before the run; `begin` starts a microbatch. The first run
    creates the plan's indices on the device. They take a few bytes per token and do not count,
    because all blocks share them.
    """
    follow = Follow()
    given = list(given)
    # weights, gradient sums and inputs are other terms of a rank's memory
    follow.ignore([*part.parameters(), *_buckets(config, part), *given])
    token = CHAINS.set(follow.run_chain)
    try:
        with follow:
            _measure(follow, begin())
            part.zero_grad()
            return _measure(follow, begin())._replace(given=sum(x.nbytes for x in given))
    finally:
        CHAINS.reset(token)


def _measure(follow: Follow, run: Run) -> PartMemory:
    before = follow.most = follow.alive
    result = run()
    own = result.untyped_storage().nbytes()
    # everything alive after the forward pass, except the result, is saved for the backward pass
    kept = follow.alive - before - own
    forward = follow.most - before
    backward = left = 0
    if result.requires_grad:
        follow.most = follow.alive
        torch.autograd.backward(result, torch.empty_like(result))
        # the result is not included: the next part frees it before this part's backward pass
        backward = follow.most - before - own
    # release the graph and its inputs, so that only leftovers of the backward pass remain
    del result, run
    if backward:
        left = follow.alive - before
    return PartMemory(kept=kept, forward=forward, backward=backward, left=left)


def block(config: RunConfig, layer: int) -> PartMemory:
    """Return the memory of one decoder block."""
    model, p = config.model, config.parallel
    plan = _plan_of(config)
    tokens = plan.local.size
    with _grid_of(config, plan.cp_rank * p.tensor_model_parallel_size) as grid:
        backend = _backend(config, grid)
        part = Block(layer, model, backend, config.training.recompute_mode)
        rows = tokens // grid.tp.size if backend.sequence_parallel else tokens
        frequencies = inverse_frequencies(model.rotary_dim, model.rotary_base, RotaryScaling())
        places = torch.arange(tokens, device=DEVICE)
        angles = cos_sin(places, frequencies.to(DEVICE), backend.dtype)
        names = torch.arange(tokens, device=DEVICE)
        sharers = grid.tp if backend.sequence_parallel else single_axis("one")
        load = PlannedRoute.of_load(planned_load(config))
        start = _begin()

        def begin() -> Run:
            kept: list[Routes] = []
            if backend.deferred is not None:
                backend.deferred.begin()

            def run() -> torch.Tensor:
                routes = None
                if part.is_routed:
                    # a route lives as long as its microbatch, so every layer keeps its tensors
                    routes = Routes.of(plan, sharers, DEVICE, tokens)
                    routes = dataclasses.replace(routes, make=load)
                    kept.append(routes)
                inputs = BlockInputs(plan, (angles, angles), names[:rows], names, 1, routes)
                shape = (rows, model.hidden_size)
                with backend.precision():
                    return part(_made_before(start, shape, backend.dtype), inputs)

            return run

        return _follow(config, part, [*angles, names], begin)


def head(config: RunConfig) -> PartMemory:
    """Return the memory of the final norm, the output head and the loss."""
    model = config.model
    with _grid_of(config) as grid:
        backend = _backend(config, grid)
        norm = backend.norm(NormSpec("final_norm", model.hidden_size, model.norm_epsilon))
        table = backend.vocabulary(TableSpec(vocabulary_table(model, "head", model.vocab_size)))
        part = OutputHead(norm, table, loss_chunk_tokens(config))
        tokens = tokens_per_rank(config)
        rows = tokens // grid.tp.size if backend.sequence_parallel else tokens
        labels = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
        weights = torch.zeros(tokens, device=DEVICE)
        start = _begin()

        def begin() -> Run:
            shape = (rows, model.hidden_size)
            return lambda: part(
                _made_before(start, shape, backend.dtype), Target(labels, weights, 1.0)
            )

        return _follow(config, part, [labels, weights], begin)


def vision(config: RunConfig, crops: int, pooled: int) -> PartMemory:
    """Return the memory of the vision tower and connector for some crops and pooled tokens."""
    v = config.vision
    with _grid_of(config) as grid:
        backend = _backend(config, grid)
        part = VisionEncoder(v, config.model, backend, config.training.recompute_mode)
        grids = None
        if v.family.has_grids:
            # a single image that consists of complete pooling windows
            grids = PatchGrids(np.array([[1, pooled]]))
            crops = pooled * POOLED_PATCHES
        patches = torch.zeros(
            crops, v.crop_patches, v.patch_dim, dtype=backend.dtype, device=DEVICE
        )
        pooling = torch.zeros(pooled, POOLED_PATCHES, dtype=torch.int64, device=DEVICE)
        return _follow(
            config, part, [patches, pooling], lambda: lambda: part(patches, pooling, grids)
        )
