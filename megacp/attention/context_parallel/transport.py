"""The transport interface of context parallelism, and the shared loop that brings keys to queries.

A transport is an object with one differentiable call, `attend`, over the tokens of its rank. In the
ring, the all-gather, the K/V exchange and on a single rank, queries stay on their rank and K/V are
sent to them. These transports share one forward and one backward pass, and differ only in
`kv_blocks`, which yields keys in their order of arrival. `a2a.py` exchanges heads instead and then
attends with one of these transports.
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
"""Keys and values `[m, groups, d]`, and the tiles between this rank's queries and these keys."""
KVBlocks = Generator[KVBlock, torch.Tensor | None, torch.Tensor | None]
"""Generator of all `KVBlock`s. In the backward pass, the caller sends it the gradient
`dkv[m, 2, groups, d]` of each block, and the generator returns the gradient of this rank's keys and
values, `[t, 2, groups, d]`. In the forward pass, both are None.
"""


class Transport(Protocol):
    """Attention over the tokens of a cp axis; all tensors are sharded as the plan describes."""

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
        """Attend with `q[t, heads, d]`, `k, v[t, groups, d]`; differentiable.

        Return `out[t, heads, d]` in q's dtype. `sinks[heads]` are described at `merge_sinks`; they
        get only the gradient from this rank's queries. `call` runs the attention function.
        """
        ...

    def prepare(self, plan: AttentionPlan, heads: Heads) -> None:
        """Build, on the host, all tables that layers need for a plan; runs in loader threads."""
        ...


class KeysToQueries(ABC):
    """Base of the transports in which queries stay on their rank and K/V blocks come to them.

    The forward pass saves `q, k, v, out, lse` of this rank's tokens. Keys of other ranks are sent
    again in the backward pass.
    """

    def __init__(self, axis: Axis, kernel: Kernel) -> None:
        self.axis = axis
        self.kernel = kernel

    @abstractmethod
    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        """Yield all keys that this rank's queries need, given its own `k, v[t, groups, d]`.

        Called once in each pass.
        """

    @abstractmethod
    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """Return the tiles between this rank's queries and the keys of each block."""

    def prepare(self, plan: AttentionPlan, heads: Heads) -> None:
        """Prepare the kernel for every block of the plan."""
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
        """Attend to the blocks of keys as they arrive; see `Transport.attend`."""
        # kernels and messages assume a dense last dim and would read past the end of a transposed
        # view
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return call(functools.partial(_AttendBlocks.apply, sinks, self, plan, scale), q, k, v)


class _AttendBlocks(torch.autograd.Function):
    """Attention over the blocks of a transport, with a hand-written backward pass."""

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
        # a transport starts its next message before it yields, so it overlaps with the kernel
        for keys, values, table in transport.kv_blocks(k, v, plan):
            transport.kernel.attend(partial, (q, keys, values), table, scale)
        if sinks is not None:
            merge_sinks(partial.out, partial.lse, sinks)
        out = partial.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse, sinks)
        ctx.transport = transport
        ctx.plan = plan
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(
                "backward with create_graph=True: attention across ranks cannot be differentiated "
                "twice"
            )
        q, k, v, out, lse, sinks = ctx.saved_tensors
        # every kernel call starts from the merged (out, lse) of all blocks, so the sum over blocks
        # is exact
        saved = Saved(q, out, lse, douts[0].contiguous())
        wide = accumulation_dtype(q.dtype)
        dq = zeros(q.shape, q, wide)
        dkv = None  # the first send() starts the generator and must pass None
        blocks = ctx.transport.kv_blocks(k, v, ctx.plan)
        with without_autocast(q.device):  # the caller may run the backward pass under autocast
            while True:
                try:
                    keys, values, table = blocks.send(dkv)
                except StopIteration as end:
                    dk, dv = end.value.unbind(1)  # [t, 2, groups, d] -> [t, groups, d] twice
                    dsinks = None if sinks is None else sinks_gradient(saved, sinks)
                    return dsinks, None, None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
                # dk and dv are halves of one tensor, because a transport sends them as one message
                dkv = zeros((len(keys), 2, *keys.shape[1:]), keys, wide)
                dk, dv = dkv.unbind(1)
                ctx.transport.kernel.attend_backward(
                    saved, (keys, values), table, ctx.scale, (dq, dk, dv)
                )


class LocalAttention(KeysToQueries):
    """Attention on one rank that has the whole row, without messages and with one tile table."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """Return the table of the whole row."""
        return [plan.table_of_row]

    def kv_blocks(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> KVBlocks:
        """Yield the whole row as one block."""
        return (yield k, v, plan.table_of_row)


class WholeAttention(LocalAttention):
    """Attention on one rank with a kernel that autograd differentiates."""

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
        """Attend with the whole kernel; see `Transport.attend`."""
        # sinks are merged by log-sum-exp, which only the blockwise path provides
        if sinks is not None:
            return super().attend(q, k, v, plan, scale, sinks, call)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return self.kernel.whole(q, k, v, plan.table_of_row, scale, call)


def of_one_rank(kernel: Kernel) -> Transport:
    """Return the attention of a rank that has the whole row."""
    return WholeAttention(kernel) if isinstance(kernel, WholeKernel) else LocalAttention(kernel)


class DenseAttention:
    """Reference attention for one process, with a dense bool mask and autograd.

    Raise ValueError if the axis has more than one rank.
    """

    def __init__(self, axis: Axis, cap: float = 0.0) -> None:
        if axis.size != 1:
            raise ValueError(
                f"attention kernel dense supports only one process, but the axis has {axis.size} "
                "ranks; choose another kernel"
            )
        self.cap = cap

    def prepare(self, plan: AttentionPlan, heads: Heads) -> None:
        """Do nothing: this kernel needs no tables."""

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
        """Attend with the dense mask of the local tokens; see `Transport.attend`."""
        mine = plan.metadata.take(plan.local)
        mask = to_device(allowed(mine, mine, plan.reach), q.device)
        return dense_attention(q, k, v, mask, scale, sinks, self.cap)
