"""Seconds of core attention under each way of context parallelism, predicted from counts and measured constants.

Key property: a prediction is the course of events of the transport's own code, rank by rank: what a rank computes while
a message is under way, whom it then waits for, and what no computation hides. All inputs are numbers, so a decision can
be proven on a machine that nobody has. Rejected: volume over bandwidth plus FLOPs over peak, which is blind to the
three things that decide: balance, overlap and the cost of small tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megacp.config.parallel import ParallelConfig
from megacp.context_parallel.sizes import AttentionSizes, head_messages, key_messages


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
class Work:
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
class Stage:
    """One all-to-all of kv_exchange as one rank sees it, and the work on what arrived."""

    sent: int
    received: int
    work: Work


@dataclass(frozen=True)
class RankWork:
    """Core attention of one row on one rank under one layout, as far as somebody asks for it."""

    tokens: int
    own: Work
    """On the rank's own keys."""
    others: Work | None
    """On the keys of all other ranks at once."""
    rings: Mapping[int, tuple[Work, ...]]
    """By ranks that hold their tokens together (1: a plain ring; all: no ring): the work of each step."""
    stages: Mapping[int, tuple[Stage, ...]]
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
class Seconds:
    """Of core attention of one layer and row on the slowest rank."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


_PASSES = 4
"""Times that each byte of an exchange of heads is copied: sliced and packed, joined and put in order."""


class Predictor:
    """Predicts one row: `ranks[cp]` under one layout, `sizes` of the layer whatever its tokens.

    Below, an array has one element for each rank, and a time is counted from the start of the pass.
    """

    def __init__(self, machine: Machine, sizes: AttentionSizes, ranks: Sequence[RankWork]) -> None:
        self.machine, self.ranks = machine, ranks
        self.sizes = replace(sizes, tokens=ranks[0].tokens)

    def seconds(self, candidate: Candidate) -> Seconds:
        """Of a candidate with the layout that made `ranks`."""
        if candidate.comm_type == "all_gather":
            return self._all_gather()
        if candidate.comm_type == "kv_exchange":
            return self._exchange(candidate.stages)
        joined = candidate.joined(len(self.ranks))
        assert joined is not None, candidate
        return self._ring(list(range(len(self.ranks))), 1) if joined == 1 else self._heads(joined)

    def _beside(self, work: np.ndarray, message: float) -> np.ndarray:
        """What it costs extra that a message is under way during a computation."""
        return (1 - self.machine.overlap) * np.minimum(work, message)

    def _own(self, cost: KernelCost) -> np.ndarray:
        return np.array([rank.own.seconds(cost, self.sizes) for rank in self.ranks])

    def _all_gather(self) -> Seconds:
        machine, n, message = self.machine, len(self.ranks), key_messages(self.sizes)
        gather = machine.links[ALL_GATHER].seconds((n - 1) * message.keys)
        scatter = machine.links[REDUCE_SCATTER].seconds((n - 1) * message.gradients)
        copied = n * message.keys, n * message.keys + 3 * n * message.gradients
        found = []
        for cost, exposed, count in ((machine.forward, 0.0, copied[0]), (machine.backward, scatter, copied[1])):
            own = self._own(cost)
            others = np.array([(rank.others or Work()).seconds(cost, self.sizes) for rank in self.ranks])
            end = np.maximum(own, gather) + self._beside(own, gather) + others
            found.append(float(end.max()) + exposed + machine.copy * count)
        return Seconds(*found)

    def _exchange(self, stages: int) -> Seconds:
        machine = self.machine
        rows = [rank.stages[stages] for rank in self.ranks]
        line = machine.links[link_name(ALL_TO_ALL, len(self.ranks))]
        message = key_messages(replace(self.sizes, tokens=1))
        most = [max(max(stage.sent, stage.received) for stage in column) for column in zip(*rows, strict=True)]
        found = []
        for cost, returns in ((machine.forward, False), (machine.backward, True)):
            keys = [line.seconds(count * message.keys) for count in most]
            gradients = [line.seconds(count * message.gradients) if returns else 0.0 for count in most]
            piece, end, home = self._own(cost), np.zeros(len(rows)), 0.0
            arrival = 0.0
            posted = 0.0
            for number in range(len(most)):
                arrival = max(arrival, posted) + keys[number]
                end = end + piece
                posted = float(end.max())
                end = np.maximum(end, arrival) + self._beside(piece, keys[number])
                piece = np.array([row[number].work.seconds(cost, self.sizes) for row in rows])
                if returns:
                    home = max(home, float((end + piece).max())) + gradients[number]
            copied = sum(most) * (2 * message.keys + 3 * returns * message.gradients)
            found.append(max(float((end + piece).max()), home) + machine.copy * copied)
        return Seconds(*found)

    def _heads(self, inner: int) -> Seconds:
        """Heads for sequence in groups of `inner` neighbours; in them attention over whole rows, or rings."""
        machine, n = self.machine, len(self.ranks)
        line = machine.links[link_name(ALL_TO_ALL, inner)]
        exchanges = [head_messages(self.sizes, inner, place) for place in range(inner)]
        names = (("to_heads", "to_tokens"), ("gradient_to_heads", "gradient_to_tokens"))
        sent = [[max(getattr(exchange, name) for exchange in exchanges) for name in pair] for pair in names]
        rings = [self._ring(list(range(place, n, inner)), inner) for place in range(inner)]
        inside = max(ring.forward for ring in rings), max(ring.backward for ring in rings)
        copies = _PASSES * machine.copy * inner / (inner - 1)  # of what the rank keeps as well
        outside = [sum(line.seconds(count) + copies * count for count in pair) for pair in sent]
        return Seconds(inside[0] + outside[0], inside[1] + outside[1])

    def _ring(self, members: list[int], inner: int) -> Seconds:
        """A ring over `members`, each of which holds its share of the heads of `inner` ranks' tokens."""
        machine = self.machine
        sizes = self.sizes.share(inner, members[0] % inner)
        works = [self.ranks[rank].rings[inner] for rank in members]
        message = key_messages(sizes)
        line = machine.links[link_name(SHIFT, inner)] if len(members) > 1 else Line(0.0, 0.0)
        keys, gradients = line.seconds(message.keys), line.seconds(message.gradients)
        forward, backward = (
            np.array([[work.seconds(cost, sizes) for work in row] for row in works])
            for cost in (machine.forward, machine.backward)
        )
        copied = len(members) * 2 * message.gradients + message.keys if len(members) > 1 else 0
        return Seconds(
            self._round(forward, keys, 0.0) + machine.copy * (message.keys if len(members) > 1 else 0),
            self._round(backward, keys, gradients) + machine.copy * copied,
        )

    def _round(self, work: np.ndarray, keys: float, gradients: float) -> float:
        """One way round of `work[ranks, steps]`: keys travel beside each step, gradients beside the one after."""
        ready = np.zeros(len(work))
        steps = work.shape[1]
        for step in range(steps):
            message = (keys if step < steps - 1 else 0.0) + (gradients if step > 0 else 0.0)
            together = np.maximum(ready, np.maximum(np.roll(ready, 1), np.roll(ready, -1)))
            arrival = together + message if message else ready
            ready = np.maximum(ready + work[:, step], arrival) + self._beside(work[:, step], message)
        if gradients and steps > 1:
            ready = np.maximum(ready, np.roll(ready, 1)) + gradients  # the last ones come home, beside nothing
        return float(ready.max())
