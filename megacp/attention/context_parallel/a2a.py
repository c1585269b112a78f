"""Heads for sequence (DeepSpeed-Ulysses, Jacobs et al., 2023): an all-to-all gives each rank some
heads of all tokens.

Any attention on few heads of many tokens can be inside: the whole row on one rank (`a2a`), or a
ring over the outer axis of a hierarchy (`a2a+p2p`). q, k and v travel in one message, the output in
a second; backward is the same two messages the other way, by autograd. Heads must divide by the
ranks. K/V heads need not: those of a group are copied until they do, and their gradients summed on
the rank that owns the token.

Eight heads of two groups over four ranks: two copies of each group make four K/V heads. A rank gets
two heads of q, and the copy of their group; heads of ranks 0 and 1 are of group 0.

Letters: `n` ranks, `t` tokens of each, `d` the width of a head, `c` what a rank gets: heads of q, k
and v side by side.
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
    """Transports `a2a` and `a2a+p2p`: `axis` are neighbouring cp ranks, `inner` attends over the
    tokens of them all.
    """

    def __init__(self, axis: Axis, inner: Transport) -> None:
        self.axis = axis
        self.inner = inner

    def prepare(self, plan: AttentionPlan, heads: Heads) -> None:
        ranks = self.axis.size
        groups = heads.groups * key_copies(heads.heads, heads.groups, ranks)
        self.inner.prepare(
            plan.grouped(ranks), Heads(heads.heads // ranks, groups // ranks, heads.dim)
        )

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
        n = self.axis.size
        t, heads, d = q.shape
        groups = k.shape[1]
        copies = key_copies(heads, groups, n)
        # copy i of group g serves the i-th part of the group's queries; backward sums copies as
        # sum() does, in fp32
        k, v = (x.unsqueeze(2).expand(t, groups, copies, d).flatten(1, 2) for x in (k, v))
        # [t, n * c, d] -> [n, t, c, d]: what goes to each rank, its heads of q, k and v side by
        # side
        outgoing = torch.cat([x.unflatten(1, (n, -1)).transpose(0, 1) for x in (q, k, v)], 2)
        arrived = exchange(
            outgoing.flatten(0, 1), self.axis
        )  # [n * t, c, d]: all tokens, this rank's heads
        whole = arrived.index_select(
            0, plan.arrival(n, q.device)
        )  # rank by rank -> the order of the grouped plan
        q, k, v = whole.split([heads // n, groups * copies // n, groups * copies // n], 1)
        own = None if sinks is None else sinks.chunk(n)[self.axis.rank]  # of its heads
        out = self.inner.attend(q, k, v, plan.grouped(n), scale, own, call)  # [n * t, heads / n, d]
        # back: the tokens of each rank together, and then each rank's heads side by side
        back = exchange(
            out.index_select(0, plan.departure(n, q.device)), self.axis
        )  # [n * t, heads / n, d]
        return (
            back.unflatten(0, (n, t)).transpose(0, 1).flatten(1, 2)
        )  # [n, t, heads / n, d] -> [t, heads, d]


def key_copies(heads: int, groups: int, ranks: int) -> int:
    """Copies of each K/V head, so that they divide by the ranks; ValueError where heads do not."""
    if heads % ranks:
        raise ValueError(
            f"a2a splits {heads} heads over {ranks} ranks, which do not divide them: use another "
            "number of ranks, "
            f"a2a+p2p with a first size that divides them, p2p or kv_exchange"
        )
    return math.lcm(groups, ranks) // groups
