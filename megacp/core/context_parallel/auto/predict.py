"""Seconds of core attention under each way of context parallelism, predicted from counts and measured constants.

Key property: a prediction replays the transport step by step, rank by rank: compute, wait for the next message,
compute. All inputs are numbers, so a decision can be tested for any machine. Rejected: volume over bandwidth plus FLOPs
over peak, which leaves out balance, overlap and the cost of small tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megacp.core.config.parallel import ParallelConfig
from megacp.core.context_parallel.sizes import AttentionSizes, head_messages, key_messages


@dataclass(frozen=True)
class KernelCost:
    """Seconds of one pass of the attention kernel."""

    pair: float
    """For each computed (query, key) pair, head and element of a head."""
    row: float
    """For each query of each kernel call, head and element: what is read and merged whatever it sees."""
    call: float
    """For each kernel call."""


@dataclass(frozen=True)
class Line:
    """Seconds of a message: `latency + per_byte * bytes`, bytes as one rank sends them."""

    latency: float
    per_byte: float

    def seconds(self, count: float) -> float:
        """Of `count` bytes."""
        return self.latency + self.per_byte * count


@dataclass(frozen=True)
class Machine:
    """What was measured of the device and the links of one cp axis."""

    forward: KernelCost
    backward: KernelCost
    copy: float
    """Seconds for each byte that is put into another order on the device."""
    overlap: float
    """How much of the shorter of a computation and a message beside it costs no time, in [0, 1]."""
    links: Mapping[str, Line]
    """By `link_name`."""


SHIFT, ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = "shift", "all_to_all", "all_gather", "reduce_scatter"


def link_name(kind: str, ranks: int) -> str:
    """An all-to-all of so many neighbours; a shift to the rank so many places on."""
    return f"{kind}/{ranks}"


def inner_sizes(cp: int, heads: int) -> list[int]:
    """Ranks that may swap tokens for heads: divisors of `cp` above 1 with a head for every rank, ascending."""
    return [inner for inner in range(2, min(cp, heads) + 1) if cp % inner == 0]


def link_names(cp: int, heads: int) -> list[str]:
    """Every link that a transport on `cp` ranks may use."""
    parts = [inner for inner in inner_sizes(cp, heads) if inner < cp]
    names = [ALL_GATHER, REDUCE_SCATTER, link_name(SHIFT, 1), link_name(ALL_TO_ALL, cp)]
    return names + [link_name(kind, inner) for inner in parts for kind in (SHIFT, ALL_TO_ALL)]


@dataclass(frozen=True)
class KernelWork:
    """What one kernel pass over one tile table does, for every head alike."""

    pairs: int = 0
    """Computed pairs: the allowed ones and what a causal tile's last blocks compute in vain."""
    rows: int = 0
    """Queries, summed over kernel calls."""
    calls: int = 0

    def seconds(self, cost: KernelCost, sizes: AttentionSizes) -> float:
        """One pass with the heads of `sizes`."""
        return cost.call * self.calls + (cost.row * self.rows + cost.pair * self.pairs) * sizes.heads * sizes.dim


@dataclass(frozen=True)
class StageWork:
    """One all-to-all of kv_exchange as one rank sees it, and the work on what arrived."""

    sent: int
    received: int
    work: KernelWork


@dataclass(frozen=True)
class RankWork:
    """Core attention of one row on one rank under one layout, for the candidates in question."""

    tokens: int
    own: KernelWork
    """On the rank's own keys."""
    others: KernelWork | None
    """On the keys of all other ranks at once."""
    rings: Mapping[int, tuple[KernelWork, ...]]
    """By ranks that hold their tokens together (1: a plain ring; all: no ring): the work of each step, for one run of
    the rank's heads after the other."""
    stages: Mapping[int, tuple[StageWork, ...]]
    """Of kv_exchange, by `--cp-exchange-stages`."""


@dataclass(frozen=True)
class Candidate:
    """One way of context parallelism, as the flags name it."""

    comm_type: str
    layout: str
    hierarchy: tuple[int, int] | None = None
    stages: int = 1

    def joined(self, cp: int) -> int | None:
        """Ranks that hold their tokens together before a ring goes round; None for a transport without one."""
        return self.hierarchy[0] if self.hierarchy else {"p2p": 1, "a2a": cp}.get(self.comm_type)

    def __str__(self) -> str:
        detail = f" {self.hierarchy[0]} x {self.hierarchy[1]}" if self.hierarchy else ""
        detail += f" in {self.stages} stages" if self.stages > 1 else ""
        return f"{self.comm_type}{detail}, {self.layout}"


_LAYOUTS = ("zigzag", "contiguous", "balanced")
"""What `--cp-layout auto` chooses from, the default first."""


def candidates(parallel: ParallelConfig, heads: int) -> list[Candidate]:
    """Every way that `auto` leaves open with `heads` heads on a tensor rank; the first one is the default."""
    p, cp = parallel, parallel.context_parallel_size
    layouts = _LAYOUTS if p.cp_layout == "auto" else (p.cp_layout,)
    ways = [Candidate(p.cp_comm_type, layouts[0], p.hierarchical_context_parallel_sizes, p.cp_exchange_stages)]
    if p.cp_comm_type == "auto":
        ways = [Candidate(name, layouts[0]) for name in ("p2p", "kv_exchange", "all_gather")]
        ways += [Candidate("a2a", layouts[0])] if cp in inner_sizes(cp, heads) else []
        ways += [
            Candidate("a2a+p2p", layouts[0], (inner, cp // inner)) for inner in inner_sizes(cp, heads) if inner < cp
        ]
        ways += [Candidate("kv_exchange", layouts[0], stages=2)] if cp > 2 else []
    return [replace(way, layout=layout) for way in ways for layout in layouts]


WORTHWHILE = 0.97
"""The default stays unless something takes at most this share of its time."""


def choose(predicted: Mapping[Candidate, float]) -> Candidate:
    """The fastest candidate, or the first (the default) unless that is clearly slower; of equals the earlier one."""
    default = next(iter(predicted))
    best = min(predicted, key=lambda candidate: predicted[candidate])
    return best if predicted[best] <= WORTHWHILE * predicted[default] else default


@dataclass(frozen=True)
class PassSeconds:
    """Of core attention of one layer and row on the slowest rank."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


_COPIES = 2
"""Times that each byte of an exchange of heads is copied: into the message, and out of it in order."""


class Predictor:
    """Predicts one row: `ranks[cp]` under one layout, `sizes` of the layer whatever its tokens.

    A pass is replayed step by step: compute, wait for the next message, compute. Arrays have one element for each rank;
    times count from the start of the pass.
    """

    def __init__(self, machine: Machine, sizes: AttentionSizes, ranks: Sequence[RankWork]) -> None:
        self.machine, self.ranks = machine, ranks
        self.sizes = replace(sizes, tokens=ranks[0].tokens)

    def seconds(self, candidate: Candidate) -> PassSeconds:
        """Of a candidate with the layout that made `ranks`."""
        one_pass: Callable[[KernelCost, bool], float]
        if candidate.comm_type == "all_gather":
            one_pass = self._all_gather
        elif candidate.comm_type == "kv_exchange":
            one_pass = functools.partial(self._exchange, candidate.stages)
        else:
            joined = candidate.joined(len(self.ranks))
            assert joined is not None, candidate
            ring = functools.partial(self._ring, range(len(self.ranks)), 1)
            one_pass = ring if joined == 1 else functools.partial(self._heads, joined)
        return PassSeconds(one_pass(self.machine.forward, False), one_pass(self.machine.backward, True))

    def _beside(self, work: np.ndarray, message: float) -> np.ndarray:
        """What it costs extra that a message is under way during a computation."""
        return (1 - self.machine.overlap) * np.minimum(work, message)

    def _computed(self, works: Iterable[KernelWork], cost: KernelCost) -> np.ndarray:
        return np.array([work.seconds(cost, self.sizes) for work in works])

    def _all_gather(self, cost: KernelCost, backward: bool) -> float:
        machine, n, message = self.machine, len(self.ranks), key_messages(self.sizes)
        gather = machine.links[ALL_GATHER].seconds((n - 1) * message.keys)
        own = self._computed((rank.own for rank in self.ranks), cost)
        others = self._computed((rank.others or KernelWork() for rank in self.ranks), cost)
        end = np.maximum(own, gather) + self._beside(own, gather) + others
        copied, scatter = n * message.keys, 0.0
        if backward:
            copied += 3 * n * message.gradients
            scatter = machine.links[REDUCE_SCATTER].seconds((n - 1) * message.gradients)
        return float(end.max()) + scatter + machine.copy * copied

    def _exchange(self, stages: int, cost: KernelCost, backward: bool) -> float:
        rows = [rank.stages[stages] for rank in self.ranks]
        line = self.machine.links[link_name(ALL_TO_ALL, len(rows))]
        message = key_messages(replace(self.sizes, tokens=1))
        most = [max(max(stage.sent, stage.received) for stage in column) for column in zip(*rows, strict=True)]
        work, end = self._computed((rank.own for rank in self.ranks), cost), np.zeros(len(rows))
        arrival = posted = home = 0.0
        for number, count in enumerate(most):
            keys = line.seconds(count * message.keys)
            arrival = max(arrival, posted) + keys
            end = end + work
            posted = float(end.max())  # of the next stage, once the slowest rank has come here
            end = np.maximum(end, arrival) + self._beside(work, keys)
            work = self._computed((row[number].work for row in rows), cost)
            if backward:
                home = max(home, float((end + work).max())) + line.seconds(count * message.gradients)
        copied = sum(most) * (2 * message.keys + 3 * backward * message.gradients)
        return max(float((end + work).max()), home) + self.machine.copy * copied

    def _heads(self, inner: int, cost: KernelCost, backward: bool) -> float:
        """Heads for sequence in groups of `inner` neighbours; in them attention over whole rows, or rings."""
        machine, n = self.machine, len(self.ranks)
        line = machine.links[link_name(ALL_TO_ALL, inner)]
        names = ("gradient_to_heads", "gradient_to_tokens") if backward else ("to_heads", "to_tokens")
        exchanges = [head_messages(self.sizes, inner, place) for place in range(inner)]
        sent = [max(getattr(exchange, name) for exchange in exchanges) for name in names]
        inside = max(self._ring(range(place, n, inner), inner, cost, backward) for place in range(inner))
        copies = _COPIES * machine.copy * inner / (inner - 1)  # of what the rank keeps as well
        return inside + sum(line.seconds(count) + copies * count for count in sent)

    def _ring(self, members: Sequence[int], inner: int, cost: KernelCost, backward: bool) -> float:
        """Rings over `members`, each of which holds its share of the heads of `inner` ranks' tokens: one for each run.

        Keys travel beside each step; gradients, which the second step starts, beside the step after.
        """
        steps, seconds = len(members), 0.0
        for run, sizes in enumerate(self.sizes.shares(inner, members[0] % inner)):
            works = [self.ranks[rank].rings[inner][run * steps : (run + 1) * steps] for rank in members]
            work = np.array([[one.seconds(cost, sizes) for one in works_of_rank] for works_of_rank in works])
            seconds += self._round(work, sizes, inner, backward)
        return seconds

    def _round(self, work: np.ndarray, sizes: AttentionSizes, inner: int, backward: bool) -> float:
        """One pass of a ring whose ranks compute `work[ranks, steps]` seconds, between ranks `inner` places apart."""
        steps = len(work)
        if steps == 1:
            return float(work.sum())
        message, line = key_messages(sizes), self.machine.links[link_name(SHIFT, inner)]
        keys, gradients = line.seconds(message.keys), line.seconds(message.gradients) if backward else 0.0
        ready = np.zeros(steps)
        for step in range(steps):
            sent = (keys if step < steps - 1 else 0.0) + (gradients if step > 1 else 0.0)
            together = np.maximum(ready, np.maximum(np.roll(ready, 1), np.roll(ready, -1)))  # with both neighbours
            arrival = together + sent if sent else ready
            ready = np.maximum(ready + work[:, step], arrival) + self._beside(work[:, step], sent)
        if backward:
            ready = np.maximum(ready, np.roll(ready, 1)) + gradients  # the last ones come home, beside nothing
        copied = message.keys + (2 * steps - 1) * backward * message.gradients  # zeroed each step, added once less
        return float(ready.max()) + self.machine.copy * copied
