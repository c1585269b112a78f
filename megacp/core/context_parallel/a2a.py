"""Heads for sequence (DeepSpeed-Ulysses, Jacobs et al., 2023): an all-to-all gives each rank some heads of all tokens.

Key property: any attention on few heads of many tokens can be inside: the whole row on one rank (`a2a`), or a ring over
the outer axis of a hierarchy (`a2a+p2p`). A K/V head goes to every rank that has a query head of its group, and to no
other. All that goes to a rank is one message, a row of elements for each token. It is written once where it is sent,
and once where it has arrived. Backward sends gradients only, because the head-sharded tensors are kept. The output is
not one of them: kernels use its dot product with its gradient alone, one number a head, which travels with the
gradient. Where autograd differentiates the kernel, that keeps its output and no dot products travel. Rejected:
expanding K/V to all query heads, and padding heads to a multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megacp.core.context_parallel.local import LocalAttention
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.sizes import AttentionSizes, HeadRun, HeadShare, head_shares
from megacp.core.context_parallel.transport import KeysToQueries, Tensors
from megacp.core.distributed.collectives import start_all_to_all
from megacp.core.distributed.grid import Axis, single_axis
from megacp.core.large_blocks import empty
from megacp.core.ops.compiled import fused
from megacp.core.ops.kernel import QKV, WholeKernel, accumulation_dtype


class HeadsForSequence:
    """Transports `a2a` and `a2a+p2p`: `axis` are neighbouring cp ranks, `inner` attends over the tokens of them all."""

    def __init__(self, name: str, axis: Axis, inner: KeysToQueries) -> None:
        self.name = name
        self.axis = axis
        self.inner = inner

    def prepare(self, plan: AttentionPlan, sizes: AttentionSizes) -> None:
        """See `Transport.prepare`."""
        for share in sizes.shares(self.axis.size, self.axis.rank):
            self.inner.prepare(plan.grouped(self.axis.size), share)

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`. Keeps q, k, v and lse of each run of this rank's heads, for all tokens of the group.
        Keeps the output of its own tokens and an empty tensor `[0, groups, d]` besides.
        """
        q, k, v = qkv
        shares = head_shares(q.shape[1], k.shape[1], self.axis.size)
        runs, whole = shares[self.axis.rank].runs, plan.grouped(self.axis.size)
        mine = self._to_heads([(q, "heads"), (k, "groups"), (v, "groups")], plan, shares)
        parts = zip(*(x.split(counts, 1) for x, counts in zip(mine, _counts(runs), strict=True)), strict=True)
        outs: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for part in parts:
            out, (*saved, _, lse) = self.inner.forward(part, whole, scale)
            outs.append(out)
            kept += [*saved, lse]
        out = self._output_to_tokens(outs, plan, shares)
        return out, (*kept, out, k.new_empty(0, *k.shape[1:]))

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        *saved, out, empty = kept
        groups = empty.shape[1]
        shares = head_shares(dout.shape[1], groups, self.axis.size)
        runs, whole = shares[self.axis.rank].runs, plan.grouped(self.axis.size)
        mine, dots = self._to_heads([(dout, "heads"), (dot_products(out, dout), "heads")], plan, shares)
        heads, *_ = _counts(runs)
        found = [
            self.inner.backward((q, k, v, stand_in(part, dot), lse), part, whole, scale)
            for (q, k, v, lse), part, dot in zip(
                zip(*[iter(saved)] * 4, strict=True), mine.split(heads, 1), dots.split(heads, 1), strict=True
            )
        ]
        # a K/V head on several ranks has partial gradients, which are summed in the accumulation dtype
        copied = sum(_width(share.groups) for share in shares) > groups
        dqs, dks, dvs = zip(*found, strict=True)
        dtype = accumulation_dtype(dout.dtype) if copied else dout.dtype
        leaving = [dq.to(dout.dtype) for dq in dqs] + [x.to(dtype) for x in (*dks, *dvs)]
        return self._gradients_to_tokens(leaving, plan, shares, groups)

    def _output_to_tokens(
        self, outs: Sequence[torch.Tensor], plan: AttentionPlan, shares: Sequence[HeadShare]
    ) -> torch.Tensor:
        """`[size * t, heads, d]` of each run of this rank's heads -> `[t, all heads, d]`."""
        width = outs[0].shape[2]
        arrived = self._to_tokens(outs, plan, [[_width(share.heads) * width] for share in shares])
        return torch.cat([heads for (heads,) in arrived], 1).unflatten(1, (-1, width))

    def _gradients_to_tokens(
        self, leaving: Sequence[torch.Tensor], plan: AttentionPlan, shares: Sequence[HeadShare], groups: int
    ) -> QKV:
        """Gradients `[size * t, share, d]` of this rank's queries, then keys, then values, those of queries in the
        narrower dtype -> `dq[t, heads, d]`, `dk, dv[t, groups, d]` in the accumulation dtype.
        """
        width, narrow, dtype = leaving[0].shape[2], leaving[0].dtype, leaving[-1].dtype
        keys = width * dtype.itemsize // narrow.itemsize  # columns of a K/V head
        counts = [[_width(share.heads) * width, *[_width(share.groups) * keys] * 2] for share in shares]
        dqs, dks, dvs = zip(*self._to_tokens(leaving, plan, counts), strict=True)
        dq = torch.cat(dqs, 1).unflatten(1, (-1, width))  # [t, share of heads * d] of each rank -> [t, heads, d]
        wide = accumulation_dtype(narrow)
        dk, dv = (_sum(x, shares, dtype, dq.new_empty(len(dq), groups, width, dtype=wide)) for x in (dks, dvs))
        return dq, dk, dv

    def _to_heads(
        self, tensors: Sequence[tuple[torch.Tensor, str]], plan: AttentionPlan, shares: Sequence[HeadShare]
    ) -> list[torch.Tensor]:
        """Tensors `[t, heads or groups, ...]` of this rank's tokens -> its share of them, `[size * t, share, ...]`."""
        first, size = tensors[0][0], self.axis.size
        dtype = min((x.dtype for x, _ in tensors), key=lambda dtype: dtype.itemsize)
        # [rank][tensor]: this rank's tokens with that rank's heads, [t, columns]
        outgoing = [[_columns(x[:, getattr(share, kind)], dtype) for x, kind in tensors] for share in shares]
        sizes = [sum(x.numel() for x in columns) for columns in outgoing]
        message = empty((sum(sizes),), first, dtype)
        for columns, block in zip(outgoing, message.split(sizes), strict=True):
            torch.cat(columns, 1, out=block.view(len(first), -1))
        arrived = start_all_to_all(message, self.axis, sizes, [sizes[self.axis.rank]] * size).take()
        counts = [x.shape[1] for x in outgoing[self.axis.rank]]
        order, rows = plan.arrival(size, first.device), arrived.view(size * len(first), -1).split(counts, 1)
        return [
            mine.index_select(0, order).view(x.dtype).unflatten(1, (-1, *x.shape[2:]))
            for mine, (x, _) in zip(rows, tensors, strict=True)
        ]

    def _to_tokens(
        self, tensors: Sequence[torch.Tensor], plan: AttentionPlan, counts: Sequence[Sequence[int]]
    ) -> list[tuple[torch.Tensor, ...]]:
        """The way back of `[size * t, share, d]`, the first in the narrowest dtype: that dtype's columns `[t, count]`
        as they arrive, for each rank and each of its `counts`.
        """
        size, dtype = self.axis.size, tensors[0].dtype
        rows = [_columns(x, dtype) for x in tensors]
        message = empty((len(rows[0]), sum(x.shape[1] for x in rows)), rows[0])
        order = plan.departure(size, message.device)
        for x, columns in zip(rows, message.split([x.shape[1] for x in rows], 1), strict=True):
            torch.index_select(x, 0, order, out=columns)
        tokens = len(message) // size
        sizes = [tokens * sum(count) for count in counts]
        arrived = start_all_to_all(message.view(-1), self.axis, [message.numel() // size] * size, sizes).take()
        return [x.view(tokens, -1).split(list(count), 1) for x, count in zip(arrived.split(sizes), counts, strict=True)]


class WholeHeadsForSequence(HeadsForSequence):
    """Transport `a2a` with a kernel that autograd differentiates: no attention is computed again.

    Its output stays on both sides of the swap: the kernel's backward reads it here, the next layer's there.
    """

    def __init__(self, axis: Axis, kernel: WholeKernel) -> None:
        super().__init__("a2a", axis, LocalAttention(single_axis("cp_outer"), kernel))
        self.kernel = kernel

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        """Differentiable attention: `q[t, heads, d]`, `k, v[t, groups, d]` -> `out[t, heads, d]`."""
        shares = head_shares(q.shape[1], k.shape[1], self.axis.size)
        table = plan.grouped(self.axis.size).table_of_row
        mine = _ToHeads.apply(self, plan, shares, q, k, v)
        counts = _counts(shares[self.axis.rank].runs)
        queries, keys, values = (x.split(of_runs, 1) for x, of_runs in zip(mine, counts, strict=True))
        parts = zip(queries, keys, values, strict=True)
        outs = [self.kernel.whole(*of_run, table, scale) for of_run in parts]
        return _ToTokens.apply(self, plan, shares, *outs)


class _ToHeads(torch.autograd.Function):
    """`q, k, v` of this rank's tokens -> of its heads."""

    @staticmethod
    def forward(
        ctx: Any, transport: HeadsForSequence, plan: AttentionPlan, shares: Sequence[HeadShare], *qkv: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.transport, ctx.plan, ctx.shares, ctx.groups = transport, plan, shares, qkv[1].shape[1]
        return tuple(transport._to_heads(list(zip(qkv, ("heads", "groups", "groups"), strict=True)), plan, shares))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = ctx.transport._gradients_to_tokens(grads, ctx.plan, ctx.shares, ctx.groups)
        return None, None, None, *(x.to(grad.dtype) for x, grad in zip(found, grads, strict=True))


class _ToTokens(torch.autograd.Function):
    """The outputs of this rank's heads -> of its tokens."""

    @staticmethod
    def forward(
        ctx: Any, transport: HeadsForSequence, plan: AttentionPlan, shares: Sequence[HeadShare], *outs: torch.Tensor
    ) -> torch.Tensor:
        ctx.transport, ctx.plan, ctx.shares, ctx.heads = transport, plan, shares, [out.shape[1] for out in outs]
        return transport._output_to_tokens(outs, plan, shares)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mine,) = ctx.transport._to_heads([(grads[0].contiguous(), "heads")], ctx.plan, ctx.shares)
        return None, None, None, *mine.split(ctx.heads, 1)


@fused
def dot_products(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """Over the width of a head: `[t, heads, d]` twice -> `[t, heads]` in the accumulation dtype."""
    wide = accumulation_dtype(out.dtype)
    return (out.to(wide) * dout.to(wide)).sum(-1)


@fused
def stand_in(dout: torch.Tensor, dots: torch.Tensor) -> torch.Tensor:
    """What has these dot products `[n, heads]` with `dout[n, heads, d]`, to within one rounding, and is 0 elsewhere.

    The one element stands where dout is largest, so it is no larger than d times the largest of the true output.
    """
    place = dout.abs().argmax(-1, keepdim=True)  # [n, heads, 1]
    largest = dout.gather(-1, place).to(dots.dtype)
    value = dots.unsqueeze(-1) / largest.masked_fill(largest == 0, 1.0)
    return torch.zeros_like(dout).scatter_(-1, place, value.to(dout.dtype))


def _width(part: slice) -> int:
    return part.stop - part.start


def _counts(runs: Sequence[HeadRun]) -> tuple[list[int], list[int], list[int]]:
    """Heads of q, k and v in each run."""
    heads, groups = zip(*runs, strict=True)
    return list(heads), list(groups), list(groups)


def _columns(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[t, n, ...]` as `[t, columns]` of a dtype that is no wider; a view."""
    return x.flatten(1).view(dtype)


def _sum(
    parts: Sequence[torch.Tensor], shares: Sequence[HeadShare], dtype: torch.dtype, total: torch.Tensor
) -> torch.Tensor:
    """Fill `total[t, groups, d]` with the sum of what each rank has of its groups, as columns that hold `dtype`."""
    done = 0  # groups that a rank before has written
    for part, share in zip(parts, shares, strict=True):
        if part.dtype != dtype:
            part = part.contiguous()  # a wide element may lie across two in place
        found = part.view(dtype).unflatten(1, (-1, total.shape[2]))
        new = max(done, share.groups.start)
        total[:, share.groups.start : new].add_(found[:, : new - share.groups.start])
        total[:, new : share.groups.stop] = found[:, new - share.groups.start :]
        done = share.groups.stop
    return total
