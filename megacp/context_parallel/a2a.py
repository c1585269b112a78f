"""Heads for sequence (DeepSpeed-Ulysses, Jacobs et al., 2023): an all-to-all gives each rank some heads of all tokens.

Key property: any attention on few heads of many tokens can be inside: the whole row on one rank (`a2a`), or another
transport over the outer axis of a hierarchy (`a2a+p2p`). q, k and v travel in one message a pair. A K/V head goes to
every rank that has a query head of its group, and to no other. Backward sends gradients only, because the head-sharded
tensors are kept. Rejected: expanding K/V to all query heads, and padding heads to a multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.sizes import AttentionSizes, HeadRun, HeadShare, head_shares
from megacp.context_parallel.transport import Tensors, Transport
from megacp.distributed.collectives import start_exchange
from megacp.distributed.grid import Axis
from megacp.ops.kernel import QKV, accumulation_dtype


class HeadsForSequence:
    """Transports `a2a` and `a2a+p2p`: `axis` are neighbouring cp ranks, `inner` attends over the tokens of them all."""

    def __init__(self, name: str, axis: Axis, inner: Transport) -> None:
        self.name = name
        self.axis = axis
        self.inner = inner

    def prepare(self, plan: AttentionPlan, sizes: AttentionSizes) -> None:
        """See `Transport.prepare`."""
        for share in sizes.shares(self.axis.size, self.axis.rank):
            self.inner.prepare(plan.grouped(self.axis.size), share)

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`; the tensors kept hold this rank's heads of all tokens of the group."""
        q, k, v = qkv
        shares = head_shares(q.shape[1], k.shape[1], self.axis.size)
        gathered = self._to_heads([(q, "heads"), (k, "groups"), (v, "groups")], plan, shares)
        whole, runs = plan.grouped(self.axis.size), shares[self.axis.rank].runs
        outs: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for run in zip(*(x.split(counts, 1) for x, counts in zip(gathered, _widths(runs), strict=True)), strict=True):
            out, saved = self.inner.forward(run, whole, scale)
            outs.append(out)
            kept += saved
        back = self._to_tokens([torch.cat(outs, 1)], plan, shares)
        out = torch.cat([heads[0] for heads in back], 1)  # [t, share of heads, d] of each rank -> [t, heads, d]
        return out, (*kept, k.new_empty(0, *k.shape[1:]))  # the last one says how many groups there are

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        groups = kept[-1].shape[1]
        shares = head_shares(dout.shape[1], groups, self.axis.size)
        (mine,) = self._to_heads([(dout, "heads")], plan, shares)
        whole, runs = plan.grouped(self.axis.size), shares[self.axis.rank].runs
        saved = zip(*[iter(kept[:-1])] * (len(kept[:-1]) // len(runs)), strict=True)  # equally many tensors of each run
        grads = [
            self.inner.backward(tensors, part, whole, scale)
            for tensors, part in zip(saved, mine.split([run.heads for run in runs], 1), strict=True)
        ]
        dq, dk, dv = (torch.cat(parts, 1) for parts in zip(*grads, strict=True))
        # a K/V head on several ranks has partial gradients, which are summed in the accumulation dtype
        copies = sum(_width(share, "groups") for share in shares)
        wide = accumulation_dtype(dout.dtype) if copies > groups else dout.dtype
        parts = self._to_tokens([dq.to(dout.dtype), dk.to(wide), dv.to(wide)], plan, shares)
        total = parts[0][1].new_zeros(2, len(dout), groups, dk.shape[2], dtype=accumulation_dtype(dout.dtype))
        for share, (_, part_k, part_v) in zip(shares, parts, strict=True):
            total[0, :, share.groups] += part_k
            total[1, :, share.groups] += part_v
        return torch.cat([part[0] for part in parts], 1), total[0], total[1]

    def _to_heads(
        self, tensors: Sequence[tuple[torch.Tensor, str]], plan: AttentionPlan, shares: Sequence[HeadShare]
    ) -> list[torch.Tensor]:
        """Tensors `[t, heads or groups, d]` of this rank's tokens -> its share of them, `[size * t, share, d]`."""
        # [rank][tensor]: this rank's tokens with that rank's heads, [t, share, d]
        outgoing = [[x[:, getattr(share, kind)] for x, kind in tensors] for share in shares]
        mine = [_width(shares[self.axis.rank], kind) for _, kind in tensors]
        shapes = [((len(x), width, x.shape[2]), x.dtype) for (x, _), width in zip(tensors, mine, strict=True)]
        arrived = start_exchange(outgoing, [shapes] * self.axis.size, self.axis).wait()
        order = plan.arrival(self.axis.size, tensors[0][0].device)
        return [torch.cat(parts)[order] for parts in zip(*arrived, strict=True)]

    def _to_tokens(
        self, tensors: Sequence[torch.Tensor], plan: AttentionPlan, shares: Sequence[HeadShare]
    ) -> list[list[torch.Tensor]]:
        """The way back: the first tensor over query heads, others over groups -> for each rank `[t, its share, d]`."""
        order = plan.departure(self.axis.size, tensors[0].device)
        blocks = [x[order].chunk(self.axis.size) for x in tensors]  # [size * t, ...] -> size times [t, ...]
        outgoing = list(zip(*blocks, strict=True))
        kinds = ["heads", *["groups"] * (len(tensors) - 1)]
        shapes = [
            [
                ((len(blocks[0][0]), _width(share, kind), x.shape[2]), x.dtype)
                for x, kind in zip(tensors, kinds, strict=True)
            ]
            for share in shares
        ]
        return start_exchange(outgoing, shapes, self.axis).wait()


def _width(share: HeadShare, kind: str) -> int:
    part: slice = getattr(share, kind)
    return part.stop - part.start


def _widths(runs: Sequence[HeadRun]) -> tuple[list[int], list[int], list[int]]:
    """Heads of q, k and v in each run."""
    heads, groups = ([run.heads for run in runs], [run.groups for run in runs])
    return heads, groups, groups
