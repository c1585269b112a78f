"""Time and memory of attention under context parallelism beside the plain programs that it replaces, on real ranks.

The transports are those of training. One opponent is one process with a dense mask in `scaled_dot_product_attention`.
The other is a ring that computes every block its order lets it see, as Picotron's does. Tables and masks are made
before the clock starts on both sides, since a model makes them once for all layers.
"""

from __future__ import annotations

import functools
import gc

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.layouts import GROUPS, HEADS, WIDTH
from bench.report import Seconds, timed
from megacp.core.config.run import RunConfig
from megacp.core.context_parallel.attention import core_attention, select_transport
from megacp.core.context_parallel.layout import select_layout
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.shard import mask_metadata, shard_batch
from megacp.core.data.batch import PackedBatch
from megacp.core.distributed.collectives import barrier
from megacp.core.distributed.grid import Axis, GridShape, build_grid
from megacp.core.distributed.p2p import start_shift
from megacp.core.large_blocks import BLOCKS
from megacp.core.models.build import grid_shape
from megacp.core.ops import calls
from megacp.core.ops.mask import allowed
from megacp.core.training.step import ParallelModel

SCALE = WIDTH**-0.5


@functools.cache
def _cp_axis(rank: int, world_size: int) -> Axis:
    return build_grid(GridShape(cp=world_size), rank).cp


def _tensors(tokens: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, fp32, the same values on every run."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, WIDTH, generator=g) for heads in (HEADS, GROUPS, GROUPS, HEADS)]


class _Attention:
    """One rank's attention on its share of a row."""

    def __init__(self, axis: Axis, batch: PackedBatch, transport: str, layout: str) -> None:
        self.plan = shard_batch(batch, axis, select_layout(layout)).plan
        self.transport = select_transport(transport, "auto", axis, torch.device("cpu"))
        *self.inputs, self.dout = _tensors(len(self.plan.local))

    def forward(self) -> Tensor:
        leaves = [x.clone().requires_grad_() for x in self.inputs]
        return core_attention(*leaves, transport=self.transport, plan=self.plan, scale=SCALE)

    def step(self) -> None:
        self.forward().backward(self.dout)


def attention_work(rank: int, world_size: int, batch: PackedBatch, transport: str, layout: str) -> Seconds:
    """One attention forward and backward of one rank on its share of the row."""
    axis = _cp_axis(rank, world_size)
    attention = _Attention(axis, batch, transport, layout)
    attention.step()  # makes tables and index tensors, as the first layer of a model does
    barrier(axis)
    return timed(attention.step)[1]


def attention_per_tile(rank: int, world_size: int, batch: PackedBatch, transport: str, layout: str) -> Seconds:
    """`attention_work` with no block under a mask."""
    cost, calls.CALL = calls.CALL, 0
    try:
        return attention_work(rank, world_size, batch, transport, layout)
    finally:
        calls.CALL = cost


def kept_bytes(rank: int, world_size: int, batch: PackedBatch, transport: str, layout: str) -> int:
    """Bytes that one attention of this rank holds between forward and backward: whole storages, each counted once."""
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        held = _Attention(_cp_axis(rank, world_size), batch, transport, layout).forward()
    assert held.requires_grad
    return sum(kept.values())


def activation_peak(rank: int, world_size: int, config: RunConfig, batch: PackedBatch) -> int:
    """Most bytes that forward and backward of a model allocate at one time, above weights, gradients and optimizer.

    Every allocation of the process counts, those inside kernels too: torch's profiler hears of them.
    """
    model = ParallelModel(config, build_grid(grid_shape(config, world_size), rank))
    model.gradients([batch], 1, 1.0)  # the first step makes tables and index tensors, and warms up
    model.parameters.zero()
    gc.collect()  # cycles of earlier calls would be freed inside and lower the peak
    cpu = torch.profiler.ProfilerActivity.CPU
    with BLOCKS.paused(), torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=False) as profile:
        model.gradients([batch], 1, 1.0)
    events = profile.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    return int(np.cumsum(changes).max())


def dense_work(rank: int, world_size: int, batch: PackedBatch) -> Seconds:
    """One process, `scaled_dot_product_attention` with the whole mask: fp32, which the CPU kernel takes as it is."""
    meta = mask_metadata(batch)
    hidden = torch.from_numpy(~allowed(meta, meta))
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    q, k, v, dout = (x.transpose(0, 1).unsqueeze(0) for x in _tensors(len(batch)))  # [T, heads, d] -> [1, heads, T, d]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return timed(lambda: scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).backward(dout))[1]


def ring_of_dense_blocks(rank: int, world_size: int, batch: PackedBatch) -> Seconds:
    """One attention forward and backward of one rank by `DenseRing`."""
    axis = _cp_axis(rank, world_size)
    plan = shard_batch(batch, axis, select_layout("contiguous")).plan
    ring, inputs = DenseRing(axis, plan), _tensors(len(plan.local))
    barrier(axis)
    return timed(lambda: ring.step(*inputs))[1]


class DenseRing:
    """Ring attention as Picotron describes it: contiguous parts, whole blocks, matrix products and a softmax in fp32.

    Each rank computes the blocks of all earlier ranks, whatever they hold, and its own; K/V heads are expanded before
    they travel. A block with a hidden pair has a mask added to its scores: the diagonal one of a causal row, and in
    other rows nearly all. Blocks of later ranks are left out unless an image sees into them, so the result is exact.
    """

    def __init__(self, axis: Axis, plan: AttentionPlan) -> None:
        self.axis = axis
        self.visited: list[int | None] = []
        """The source of the keys of each step; None where they are left out."""
        self.masks: dict[int, Tensor] = {}
        queries = plan.metadata.take(plan.local)
        for step in range(axis.size):
            source = (axis.rank - step) % axis.size
            seen = torch.from_numpy(allowed(queries, plan.metadata.take(plan.indices[source])))
            visited = source <= axis.rank or bool(seen.any())
            self.visited.append(source if visited else None)
            if visited and not seen.all():
                self.masks[source] = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)

    def step(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`q, dout[t, heads, d]`, `k, v[t, groups, d]` -> out, dq, dk, dv of the same shapes."""
        groups, repeat = k.shape[1], q.shape[1] // k.shape[1]
        q, dout = (x.transpose(0, 1).contiguous() for x in (q, dout))  # [t, heads, d] -> [heads, t, d]
        kv = torch.stack([x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (k, v)])  # [2, heads, t, d]
        out, lse = self._forward(q, kv)
        dq, dkv = self._backward(q, kv, out, lse, dout)
        dkv = dkv.unflatten(1, (groups, repeat)).sum(2)  # [2, heads, t, d] -> [2, groups, t, d]
        return out.transpose(0, 1), dq.transpose(0, 1), dkv[0].transpose(0, 1), dkv[1].transpose(0, 1)

    def _scores(self, q: Tensor, k: Tensor, source: int) -> Tensor:
        scores = (q * SCALE) @ k.transpose(1, 2)
        return scores.add_(self.masks[source]) if source in self.masks else scores

    def _forward(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.zeros_like(q), torch.full((*q.shape[:2], 1), -torch.inf)
        for step, source in enumerate(self.visited):
            shift = start_shift(kv, self.axis) if step < self.axis.size - 1 else None
            if source is not None:
                scores = self._scores(q, kv[0], source)
                part = torch.logsumexp(scores, -1, keepdim=True)
                weights = scores.sub_(_finite(part)).exp_()
                total = torch.logaddexp(lse, part)
                out = out * torch.exp(lse - _finite(total)) + weights @ kv[1] * torch.exp(part - _finite(total))
                lse = total
            kv = shift.wait() if shift else kv
        return out, lse

    def _backward(self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """dK/dV travel with their K/V and come home with the last step."""
        lse, delta = _finite(lse), (out * dout).sum(-1, keepdim=True)
        dq, gradient = torch.zeros_like(q), None
        for step, source in enumerate(self.visited):
            shift = start_shift(kv, self.axis) if step < self.axis.size - 1 else None
            dkv = torch.zeros_like(kv)
            if source is not None:
                weights = self._scores(q, kv[0], source).sub_(lse).exp_()
                torch.matmul(weights.transpose(1, 2), dout, out=dkv[1])
                dscores = (dout @ kv[1].transpose(1, 2)).sub_(delta).mul_(weights).mul_(SCALE)
                dq += dscores @ kv[0]
                torch.matmul(dscores.transpose(1, 2), q, out=dkv[0])
            if gradient is not None:
                dkv += gradient.wait()
            gradient = start_shift(dkv, self.axis)
            kv = shift.wait() if shift else kv
        assert gradient is not None
        return dq, gradient.wait()


def _finite(lse: Tensor) -> Tensor:
    """0 where nothing was seen, so that no difference is NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
