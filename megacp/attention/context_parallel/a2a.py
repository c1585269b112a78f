"""Heads for sequence (DeepSpeed-Ulysses, Jacobs et al., 2023): an all-to-all gives each rank some
heads of all tokens.

The inner attention can be any transport for a few heads of many tokens: the whole row on one rank
(`a2a`), or a ring over the outer axis of a hierarchy (`a2a+p2p`). One message contains q, k and
v, and a second one contains the output. In the backward pass, autograd runs both messages in
reverse.

The number of heads must be divisible by the number of ranks. The number of K/V heads need not be,
because K/V heads are copied as required. The rank that owns a token sums the gradients of its
copies.

Example: eight heads in two groups on four ranks. Two copies of each group make four K/V heads.
Each rank gets two heads of q and the copy of their group. Ranks 0 and 1 get heads of group 0.

Letters in shapes: `n` ranks, `t` tokens per rank, `d` dim of a head, `c` heads of q, k and v on
one rank.
"""

from __future__ import annotations

import math

import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import Transport
from megacp.attention.ops.kernel import Caller, Heads, at_once
from megacp.distributed.differentiable import exchange
from megacp.distributed.grid import Axis


class HeadsForSequence:
    """Transports `a2a` and `a2a+p2p`.

    `axis` contains the neighbouring cp ranks that exchange heads, and `inner` attends over the
    tokens of all of them.
    """

    def __init__(self, axis: Axis, inner: Transport) -> None:
        self.axis = axis
        self.inner = inner

    def prepare(self, plan: AttentionPlan, heads: Heads) -> None:
        """Prepare the inner transport for its plan and its share of the heads."""
        ranks = self.axis.size
        groups = heads.groups * key_copies(heads.heads, heads.groups, ranks)
        share = Heads(heads.heads // ranks, groups // ranks, heads.dim)
        self.inner.prepare(plan.grouped(ranks), share)

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
        """Exchange heads, attend with the inner transport, and exchange back."""
        n = self.axis.size
        t, heads, d = q.shape
        groups = k.shape[1]
        copies = key_copies(heads, groups, n)
        # copy i of a group serves the i-th part of the group's queries; the backward pass of
        # expand() sums the gradients of the copies in fp32
        k, v = (x.unsqueeze(2).expand(t, groups, copies, d).flatten(1, 2) for x in (k, v))
        # [t, n * c, d] -> [n, t, c, d]: for each destination its heads of q, k and v
        outgoing = torch.cat([x.unflatten(1, (n, -1)).transpose(0, 1) for x in (q, k, v)], 2)
        arrived = exchange(outgoing.flatten(0, 1), self.axis)  # [n * t, c, d], this rank's heads
        # from rank order to the order of the grouped plan
        whole = arrived.index_select(0, plan.arrival(n, q.device))
        kv_heads = groups * copies // n
        q, k, v = whole.split([heads // n, kv_heads, kv_heads], 1)
        own = None if sinks is None else sinks.chunk(n)[self.axis.rank]  # sinks of these heads
        out = self.inner.attend(q, k, v, plan.grouped(n), scale, own, call)  # [n * t, heads / n, d]
        # back to rank order; each rank then gets its own tokens from all ranks
        departure = plan.departure(n, q.device)
        back = exchange(out.index_select(0, departure), self.axis)  # [n * t, heads / n, d]
        # [n, t, heads / n, d] -> [t, heads, d]
        return back.unflatten(0, (n, t)).transpose(0, 1).flatten(1, 2)


def key_copies(heads: int, groups: int, ranks: int) -> int:
    """Return the number of copies of each K/V head that makes their total divisible by `ranks`.

    Raise ValueError if `heads` is not divisible by `ranks`.
    """
    if heads % ranks:
        raise ValueError(
            f"a2a cannot split {heads} heads among {ranks} ranks, because {heads} is not divisible "
            f"by {ranks}: use another number of ranks, a2a+p2p with a first size that divides "
            f"{heads}, p2p or kv_exchange"
        )
    return math.lcm(groups, ranks) // groups
