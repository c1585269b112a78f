"""Bytes that core attention sends over context parallelism: every message of every transport, as arithmetic on sizes.

Key property: one formula per message, used twice. Their sum is the bytes that ranks send, equal to the byte in a test
on real ranks. `auto/predict.py` turns each into seconds. Rejected: volumes up to a factor, which cannot tell replicated
K/V heads or wide gradients from a mistake.

Symbols: t tokens of a row on this rank, n ranks, d width of a head. A tp rank has h query heads and g K/V heads
(groups). An element has s bytes in `--dtype`, w in a gradient (fp32 or wider). K and V have E = 2 t g d elements.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megacp.core.config.run import RunConfig


class HeadRun(NamedTuple):
    """Neighbouring heads of a rank whose groups serve equally many of them there, which is what kernels take."""

    heads: int
    groups: int


@dataclass(frozen=True)
class HeadShare:
    """The query heads `[h0, h1)` of one rank and the K/V heads (groups) `[g0, g1)` that they belong to."""

    heads: slice
    groups: slice
    runs: tuple[HeadRun, ...]
    """All its heads in order: one run unless it has other parts of one group than of the next."""


@functools.cache
def head_shares(heads: int, groups: int, ranks: int) -> tuple[HeadShare, ...]:
    """How heads are dealt: in order, at most ceil(heads / ranks) to a rank, which no deal can beat.

    Of such deals the one with the fewest K/V heads on ranks, then runs, then the most even one. So groups stay whole
    where that leaves no rank with more. Raises ValueError for more ranks than heads.
    """
    if ranks > heads:
        raise ValueError(
            f"--cp-comm-type a2a gives each of {ranks} ranks a head of its own, there are {heads} heads on a tensor "
            f"rank: lower --context-parallel-size, or choose a2a+p2p with a smaller first size, p2p or kv_exchange"
        )
    most = -(-heads // ranks)
    # heads dealt so far -> the cheapest deal of them to the ranks so far: (K/V heads, runs, squares), shares
    best: dict[int, tuple[tuple[int, int, int], tuple[HeadShare, ...]]] = {0: ((0, 0, 0), ())}
    for left in reversed(range(ranks)):  # ranks that still wait: each gets a head, all of them what is left
        found: dict[int, tuple[tuple[int, int, int], tuple[HeadShare, ...]]] = {}
        for low, ((copies, runs, squares), shares) in best.items():
            for high in range(max(low + 1, heads - left * most), min(low + most, heads - left) + 1):
                share = _share(low, high, heads // groups)
                groups_here = share.groups.stop - share.groups.start
                cost = (copies + groups_here, runs + len(share.runs), squares + (high - low) ** 2)
                if high not in found or cost < found[high][0]:
                    found[high] = cost, (*shares, share)
        best = found
    return best[heads][1]


def _share(low: int, high: int, per_group: int) -> HeadShare:
    """The query heads `[low, high)` of groups with `per_group` heads each."""
    groups = range(low // per_group, -(-high // per_group))
    counts = [min(high, (group + 1) * per_group) - max(low, group * per_group) for group in groups]
    equal = [(count, len(list(members))) for count, members in itertools.groupby(counts)]
    runs = tuple(HeadRun(count * members, members) for count, members in equal)
    return HeadShare(slice(low, high), slice(groups.start, groups.stop), runs)


@dataclass(frozen=True)
class AttentionSizes:
    """Core attention of one layer on one rank."""

    tokens: int
    """Tokens of a row that the rank holds."""
    heads: int
    groups: int
    """K/V heads."""
    dim: int
    """Width of a head."""
    element: int
    """Bytes of an element of q, k and v."""
    wide: int
    """Bytes of an element of gradients under way."""

    @property
    def key_values(self) -> int:
        """E: elements of K and V of the rank's tokens."""
        return 2 * self.tokens * self.groups * self.dim

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a query and of a key."""
        return self.heads * self.dim, self.groups * self.dim

    def share(self, ranks: int, rank: int) -> AttentionSizes:
        """Of one rank once heads were dealt over `ranks` ranks: its heads, and the tokens of them all."""
        heads, groups = (sum(counts) for counts in zip(*self._runs(ranks, rank), strict=True))
        return dataclasses.replace(self, tokens=self.tokens * ranks, heads=heads, groups=groups)

    def shares(self, ranks: int, rank: int) -> list[AttentionSizes]:
        """`share` run by run, as the rank attends."""
        return [
            dataclasses.replace(self, tokens=self.tokens * ranks, heads=run.heads, groups=run.groups)
            for run in self._runs(ranks, rank)
        ]

    def _runs(self, ranks: int, rank: int) -> tuple[HeadRun, ...]:
        return head_shares(self.heads, self.groups, ranks)[rank].runs


def attention_sizes(config: RunConfig, tokens: int) -> AttentionSizes:
    """For `tokens` tokens of a row on each rank."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads // tp, model.query_groups // tp
    return AttentionSizes(
        tokens, heads, groups, model.head_dim, config.training.element_bytes, config.training.accumulation_bytes
    )


@dataclass(frozen=True)
class KeyMessages:
    """Bytes of one message with the K/V of one rank's tokens, and of one with their gradients."""

    keys: int
    gradients: int


def key_messages(sizes: AttentionSizes) -> KeyMessages:
    """E s, and E w."""
    return KeyMessages(sizes.key_values * sizes.element, sizes.key_values * sizes.wide)


@dataclass(frozen=True)
class HeadMessages:
    """Bytes that one rank sends in each exchange of heads for sequence, to all others together.

    Where a kernel is differentiated by autograd (FlexAttention under `a2a`), no dot products travel, and dk and dv go
    in the model's dtype.
    """

    to_heads: int
    """q, k, v of its tokens: t d s (heads + 2 groups) of every other rank, replicated K/V heads counted."""
    to_tokens: int
    """The outputs of its heads: (n - 1) t d s for each of them."""
    gradient_to_heads: int
    """dout of its tokens and its dot product with the output: t (d s + w) for each head of every other rank."""
    gradient_to_tokens: int
    """dq in the model's dtype and dk, dv of its heads, these wide where a K/V head is on several ranks."""


def head_messages(sizes: AttentionSizes, ranks: int, rank: int) -> HeadMessages:
    """The four exchanges of one rank among `ranks`."""
    shares = [sizes.share(ranks, number) for number in range(ranks)]
    mine, others = shares[rank], [share for number, share in enumerate(shares) if number != rank]
    row = sizes.tokens * sizes.dim
    heads, groups = (sum(getattr(share, name) for share in others) for name in ("heads", "groups"))
    key_bytes = sizes.wide if mine.groups + groups > sizes.groups else sizes.element
    return HeadMessages(
        to_heads=row * sizes.element * (heads + 2 * groups),
        to_tokens=(ranks - 1) * row * sizes.element * mine.heads,
        gradient_to_heads=(row * sizes.element + sizes.tokens * sizes.wide) * heads,
        gradient_to_tokens=(ranks - 1) * row * (sizes.element * mine.heads + key_bytes * 2 * mine.groups),
    )


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends for one layer and row."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Both passes."""
        return self.forward + self.backward

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.forward + other.forward, self.backward + other.backward)


def ring_bytes(sizes: AttentionSizes, ranks: int) -> Sent:
    """K/V go n - 1 steps round in forward and again in backward, their gradients n - 1 steps from the first visit."""
    message = key_messages(sizes)
    return Sent((ranks - 1) * message.keys, (ranks - 1) * (message.keys + message.gradients))


def all_gather_bytes(sizes: AttentionSizes, ranks: int) -> Sent:
    """K/V are gathered in forward and again in backward, gradients reduce-scattered: n - 1 messages each."""
    message = key_messages(sizes)
    return Sent((ranks - 1) * message.keys, (ranks - 1) * (message.keys + message.gradients))


def exchange_bytes(sizes: AttentionSizes, sent: int, received: int) -> Sent:
    """K/V of the `sent` rows go to who needs them, in backward again; gradients of the `received` rows go back."""
    row = key_messages(dataclasses.replace(sizes, tokens=1))
    return Sent(sent * row.keys, sent * row.keys + received * row.gradients)


def heads_bytes(sizes: AttentionSizes, inner: int, outer: int, rank: int) -> Sent:
    """Heads for sequence over `inner` neighbours, a ring over `outer` groups of them inside; `rank` is the place on cp.

    With `outer` 1 it is a2a: (n - 1) / n (2 h + 2 g) t d s each way where heads and groups divide by n, and in backward
    (n - 1) / n t w h besides.
    """
    place = rank % inner
    exchange = head_messages(sizes, inner, place)
    ring = ring_bytes(sizes.share(inner, place), outer)
    return ring + Sent(exchange.to_heads + exchange.to_tokens, exchange.gradient_to_heads + exchange.gradient_to_tokens)


Exchanged = tuple[int, int]
"""Of kv_exchange: K/V rows that the plan of a row makes one rank send, and receive, in one layer's forward."""


def layer_bytes(config: RunConfig, row: int, rank: int = 0, exchanged: Exchanged | None = None) -> Sent:
    """Bytes that place `rank` of the cp axis sends for one layer and a row of `row` padded tokens.

    Raises ValueError for a transport that is not chosen yet, and for kv_exchange without the plan's counts.
    """
    p = config.parallel
    if p.cp_comm_type not in SENT:
        raise ValueError(f"--cp-comm-type {p.cp_comm_type} has no traffic of its own; choose {', '.join(SENT)}")
    if p.context_parallel_size == 1 and not p.dynamic_context_parallel:
        return Sent(0, 0)
    sizes = attention_sizes(config, row // p.context_parallel_size)
    return SENT[p.cp_comm_type](config, sizes, rank, exchanged)


def _heads_over_hierarchy(config: RunConfig, sizes: AttentionSizes, rank: int, exchanged: Exchanged | None) -> Sent:
    hierarchy = config.parallel.hierarchical_context_parallel_sizes
    assert hierarchy is not None, "checked: a2a+p2p comes with its sizes"
    return heads_bytes(sizes, *hierarchy, rank)


def _needed_rows(config: RunConfig, sizes: AttentionSizes, rank: int, exchanged: Exchanged | None) -> Sent:
    if exchanged is None:
        raise ValueError("what kv_exchange sends depends on the packs: the plan's rows must be given")
    return exchange_bytes(sizes, *exchanged)


SENT: dict[str, Callable[[RunConfig, AttentionSizes, int, Exchanged | None], Sent]] = {
    "p2p": lambda config, sizes, rank, exchanged: ring_bytes(sizes, config.parallel.context_parallel_size),
    "all_gather": lambda config, sizes, rank, exchanged: all_gather_bytes(sizes, config.parallel.context_parallel_size),
    "a2a": lambda config, sizes, rank, exchanged: heads_bytes(sizes, config.parallel.context_parallel_size, 1, rank),
    "a2a+p2p": _heads_over_hierarchy,
    "kv_exchange": _needed_rows,
}
"""Bytes of one layer and row by `--cp-comm-type`."""
