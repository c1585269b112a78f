"""What a transport of context parallelism is, and the loop of those that bring keys to queries.

A transport is an object with one differentiable call, `attend`, over the tokens that its rank
holds. Those in which queries stay and K/V travel (ring, all-gather, K/V exchange, and one rank
alone) share a forward and a backward: they differ only in `kv_blocks`, the order in which keys come
by. `a2a.py` moves heads instead and attends with one of these.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Protocol

import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.device import to_device, without_autocast
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.kernel import (
    Caller,
    Heads,
    Kernel,
    Saved,
    WholeKernel,
    at_once,
    empty_partial,
    merge_sinks,
    sinks_gradient,
)
from megacp.attention.ops.mask import TileTable, allowed
from megacp.attention.ops.tile_kernels import dense_attention
from megacp.distributed.grid import Axis
from megacp.distributed.large_blocks import zeros

KVBlock = tuple[torch.Tensor, torch.Tensor, TileTable]
"""Keys and values `[m, groups, d]`, and the tiles between this rank's queries and them."""
KVBlocks = Generator[KVBlock, torch.Tensor | None, torch.Tensor | None]
"""Yields every `KVBlock`. In backward it is sent the gradient `dkv[m, 2, groups, d]` of each block,
and returns the gradient of this rank's keys and values, `[t, 2, groups, d]`. In forward both are
None."""


class Transport(Protocol):
    """Attention over the tokens of a cp axis; tensors are sharded over it by the plan."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sinks: torch.Tensor | None = None,
        call: Caller = at_once,
    ) -> torch.Tensor:
        """Differentiable: `q[t, heads, d]`, `k, v[t, groups, d]` -> `out[t, heads, d]` in q's
        dtype.

        `sinks[heads]`: see `merge_sinks`; of each its gradient from this rank's queries.
        """
        ...

    def prepare(self, plan: AttentionPlan, heads: Heads) -> None:
        """Make on the host what the layers of a plan need; called from the loader's threads."""
        ...


class KeysToQueries(ABC):
    """Queries stay on their rank, blocks of keys and values come to it.

    Forward saves `q, k, v, out, lse` of this rank's tokens; keys of other ranks travel again in
    backward.
    """

    def __init__(self, axis: Axis, kernel: Kernel) -> None:
        self.axis = axis
        self.kernel = kernel

    @abstractmethod
    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        """All keys that this rank's queries see, for its own `k, v[t, groups, d]`; called once in
        each pass.
        """

    @abstractmethod
    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """What this rank's queries see of the keys of each block."""

    def prepare(self, plan: AttentionPlan, heads: Heads) -> None:
        for table in self.tables(plan):
            self.kernel.prepare(table, heads)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sinks: torch.Tensor | None = None,
        call: Caller = at_once,
    ) -> torch.Tensor:
        # kernels and messages take the last dim as dense; a transposed view would be read past its
        # end
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return call(functools.partial(_AttendBlocks.apply, sinks, self, plan, scale), q, k, v)


class _AttendBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sinks: torch.Tensor | None,
        transport: KeysToQueries,
        plan: AttentionPlan,
        scale: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        partial = empty_partial(q)  # out 0 and lse -inf, in fp32 or wider
        # a transport starts its next message before it yields: keys travel while these are attended
        # to
        for keys, values, table in transport.kv_blocks(k, v, plan):
            transport.kernel.attend(partial, (q, keys, values), table, scale)
        if sinks is not None:
            merge_sinks(partial.out, partial.lse, sinks)
        out = partial.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse, sinks)
        ctx.transport, ctx.plan, ctx.scale = transport, plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(
                "backward with create_graph=True: attention over ranks cannot be differentiated twice"
            )
        q, k, v, out, lse, sinks = ctx.saved_tensors
        # a kernel called for one source of keys starts from the merged (out, lse), so the sum over
        # sources is exact
        saved = Saved(q, out, lse, douts[0].contiguous())
        wide = accumulation_dtype(q.dtype)
        dq = zeros(q.shape, q, wide)
        dkv = None  # of no block yet: a generator is started by sending None
        blocks = ctx.transport.kv_blocks(k, v, ctx.plan)
        with without_autocast(q.device):  # also where somebody calls backward under it
            while True:
                try:
                    keys, values, table = blocks.send(dkv)
                except StopIteration as end:
                    dk, dv = end.value.unbind(1)  # [t, 2, groups, d] -> [t, groups, d] twice
                    dsinks = None if sinks is None else sinks_gradient(saved, sinks)
                    return dsinks, None, None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
                # halves of one tensor: a transport sends the gradients of keys and values as one
                # message
                dkv = zeros((len(keys), 2, *keys.shape[1:]), keys, wide)
                dk, dv = dkv.unbind(1)
                ctx.transport.kernel.attend_backward(
                    saved, (keys, values), table, ctx.scale, (dq, dk, dv)
                )


class LocalAttention(KeysToQueries):
    """One rank that holds the whole row: no message, one tile table, the kernels of context
    parallelism.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        return [plan.table_of_row]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        return (yield k, v, plan.table_of_row)


class WholeAttention(LocalAttention):
    """The same with a kernel that autograd differentiates."""

    kernel: WholeKernel

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sinks: torch.Tensor | None = None,
        call: Caller = at_once,
    ) -> torch.Tensor:
        if sinks is not None:  # they are merged by the log-sum-exp
            return super().attend(q, k, v, plan, scale, sinks, call)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return self.kernel.whole(q, k, v, plan.table_of_row, scale, call)


def of_one_rank(kernel: Kernel) -> Transport:
    """Return the attention of a rank that holds the whole row."""
    return WholeAttention(kernel) if isinstance(kernel, WholeKernel) else LocalAttention(kernel)


class DenseAttention:
    """The reference for one process: an explicit bool mask from the rule itself, differentiated by
    autograd.
    """

    def __init__(self, axis: Axis, cap: float = 0.0) -> None:
        if axis.size != 1:
            raise ValueError(
                f"attention kernel dense is for one process, this axis has {axis.size} ranks"
            )
        self.cap = cap

    def prepare(self, plan: AttentionPlan, heads: Heads) -> None:
        """Do nothing: the mask of this kernel is dense."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sinks: torch.Tensor | None = None,
        call: Caller = at_once,
    ) -> torch.Tensor:
        mine = plan.metadata.take(plan.local)
        return dense_attention(
            q, k, v, to_device(allowed(mine, mine, plan.reach), q.device), scale, sinks, self.cap
        )
