"""Which stretches of a row a state runs through on each rank, and what crosses ranks: integers on
the host.

A rank's tokens are segments, stretches of neighbours on a path that no branch leaves but at their
end. A segment goes on from the one before it on the path, here or elsewhere, or begins a document
with a state of zeros; a branch begins with the state at the end of its parent. Segments that follow
one another on a rank need no message. What leaves a rank is an exit: a segment that another rank
goes on from. What comes to one is an entry.

A question of four tokens and two answers to it, zigzag over two ranks:

    tokens     0 1   2 3   4 5   6 7 rank        0     1     1     0 segment     0     1     2     3
    before     -1     0     1     1     the segment that it goes on from: both answers from the
    question's end exit        0     1                 rank 1 goes on from segment 0, rank 0 from
    segment 1 entry             0           1     segment 1 goes on from exit 0, segment 3 from exit
    1 came       -1     0     0     1     the entry with whose state a segment is computed on its
    rank

The map of exit 1 begins with what entry 0 brought. So rank 0 needs for entry 1 the maps of exits 0
and 1 (`arriving`), rank 1 for entry 0 that of exit 0. In backward rank 0 needs for exit 0 the
gradients of entries 1 and 0 (`owing`), and rank 1 for exit 1 that of entry 1. Segment 2 goes on
from its neighbour, without a message.

Letters: `T` tokens of the row, `t` of this rank; -1 is no token, segment, chunk or entry.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.chunk import CHUNK
from megacp.attention.ops.mask import Metadata
from megacp.attention.ops.once import once


def predecessors(row: Metadata) -> np.ndarray:
    """int64 `[T]`: the token before each token of a whole row on its path; -1 for the first of a
    tree and padding.
    """
    before = np.full(len(row), -1)
    real = np.flatnonzero(row.leave > 0)
    before[real[1:]] = real[:-1]  # true inside nodes; their first tokens are set below
    leave = row.leave[real]
    path = list[
        tuple[int, int]
    ]()  # nodes from the root to where we are: where their subtrees end, and their last tokens
    starts = np.flatnonzero(np.diff(leave, prepend=-1))  # of nodes: all tokens of one have the same
    for start, stop in itertools.pairwise([*starts, len(real)]):
        while path and path[-1][0] <= real[start]:
            path.pop()
        before[real[start]] = path[-1][1] if path else -1
        path.append((int(leave[start]), int(real[stop - 1])))
    return before


class PathSegment(NamedTuple):
    """Tokens of the row that follow one another on a path and on a rank."""

    tokens: np.ndarray
    rank: int
    before: int
    """Number of the segment whose end it goes on from, an earlier one; -1: it begins a tree."""


def segments_of(plan: AttentionPlan) -> list[PathSegment]:
    """The segments of all ranks, by their first tokens."""
    before = predecessors(plan.metadata)
    node_starts = np.flatnonzero(np.diff(plan.metadata.leave, prepend=-1))
    ends_here = np.zeros(len(before) + 1, bool)
    ends_here[before[node_starts]] = True  # tokens where a node ends; -1 is nobody's
    found = []
    for rank, tokens in enumerate(plan.indices):
        tokens = np.sort(tokens[plan.metadata.leave[tokens] > 0])
        # a branch leaves where a node ends: one side of it may be elsewhere, and then the state
        # there is an exit
        cuts = (before[tokens[1:]] != tokens[:-1]) | ends_here[tokens[:-1]]
        found += [(part, rank) for part in np.split(tokens, np.flatnonzero(cuts) + 1) if len(part)]
    found.sort(key=lambda one: one[0][0])
    of_last = {int(tokens[-1]): number for number, (tokens, _) in enumerate(found)}
    return [
        PathSegment(tokens, rank, of_last.get(int(before[tokens[0]]), -1)) for tokens, rank in found
    ]


class Crossing(NamedTuple):
    """A segment that another rank goes on from (an exit), or one that goes on from another rank (an
    entry).
    """

    rank: int
    number: int
    """Index among the exits, or entries, of its rank."""
    other: int
    """The entry with whose state its rank came to an exit, -1 where the state began on the rank; of
    an entry the exit that it goes on from. Both count over all ranks, in the order of the row."""


def crossings(
    segments: list[PathSegment], cp: int
) -> tuple[dict[int, Crossing], dict[int, Crossing], list[int]]:
    """Exits and entries by segment, and for each segment the entry with whose state it is computed
    on its rank (-1).
    """
    left = {s.before for s in segments if s.before >= 0 and segments[s.before].rank != s.rank}
    exit_number = {number: place for place, number in enumerate(sorted(left))}
    exits = dict[int, Crossing]()
    entries = dict[int, Crossing]()
    came = list[int]()
    exits_of_rank = [0] * cp
    entries_of_rank = [0] * cp
    for number, (_, rank, before) in enumerate(segments):  # what a segment goes on from is earlier
        if before >= 0 and segments[before].rank != rank:
            came.append(len(entries))
            entries[number] = Crossing(rank, entries_of_rank[rank], exit_number[before])
            entries_of_rank[rank] += 1
        else:
            came.append(came[before] if before >= 0 else -1)
        if number in left:
            exits[number] = Crossing(rank, exits_of_rank[rank], came[number])
            exits_of_rank[rank] += 1
    return exits, entries, came


class CrossingPlan:
    """What crosses ranks, as one of them sees it."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.rank = plan.cp_rank
        self.segments = segments_of(plan)
        exits, entries, _ = crossings(self.segments, plan.cp)
        self.own_exits = [number for number, one in exits.items() if one.rank == self.rank]
        self.own_entries = [number for number, one in entries.items() if one.rank == self.rank]
        """Segments of this rank that begin with a state from elsewhere."""
        self.exits = list(exits.values())
        self.entries = list(entries.values())
        self.most_exits = 1 + max(
            (one.number for one in self.exits), default=-1
        )  # of a rank; all send so many
        self.most_entries = 1 + max((one.number for one in self.entries), default=-1)

    def own(self, ends: list[Crossing]) -> list[int]:
        """This rank's of all exits or entries."""
        return [number for number, one in enumerate(ends) if one.rank == self.rank]

    @functools.cached_property
    def arriving(self) -> list[int]:
        """Exits on whose states those of this rank's entries depend, from the first."""
        found = set[int]()
        for number in self.own(self.entries):
            # from an entry to its exit, to the entry that led there, and so on to where the state
            # began
            while number >= 0 and (exit_ := self.entries[number].other) not in found:
                found.add(exit_)
                number = self.exits[exit_].other
        return sorted(found)

    @functools.cached_property
    def owing(self) -> list[int]:
        """Entries on whose gradients those of this rank's exits depend, from the last."""
        ends = set(self.own(self.exits))
        found = list[int]()
        for number, entry in enumerate(self.entries):
            if entry.other in ends:
                found.append(number)
                ends |= {
                    n for n, one in enumerate(self.exits) if one.other == number
                }  # where its state goes on to
        return found[::-1]


class Chunks:
    """The chunks of this rank's segments. Chunks of a level, which can be computed together, stand
    together, those with most chunks behind them first: then so do the chunks before those of the
    next level.

    In the example, with chunks of two tokens, rank 1 has chunk 0 (level 0) and behind it chunk 1
    (level 1).
    """

    def __init__(self, plan: AttentionPlan) -> None:
        own = {n: s for n, s in enumerate(crossing_plan(plan).segments) if s.rank == plan.cp_rank}
        self.size = CHUNK
        """Tokens of a chunk; the last of a segment is filled up."""
        counts = np.array(
            [-(-len(s.tokens) // CHUNK) for s in own.values()], np.int64
        )  # chunks of each segment
        stops = np.cumsum(counts)
        first = dict(
            zip(own, stops - counts, strict=True)
        )  # by segment, as chunks are numbered at first: one by one
        last = dict(zip(own, stops - 1, strict=True))
        self.count = int(counts.sum())

        # [count]: a chunk goes on from its neighbour, and a segment's first from the last one of
        # the segment before it
        before = np.arange(-1, self.count - 1)
        before[stops - counts] = [last.get(s.before, -1) for s in own.values()]

        # [count]: chunks here that must be done before, and most chunks in a line that wait for
        # this one
        level = np.zeros(self.count, np.int64)
        height = np.zeros(self.count, np.int64)
        for chunk in np.flatnonzero(before >= 0):
            level[chunk] = level[before[chunk]] + 1
        for chunk in np.flatnonzero(before >= 0)[::-1]:
            height[before[chunk]] = max(height[before[chunk]], height[chunk] + 1)

        order = np.lexsort((-height, level))
        new = np.argsort(order)  # the number that each chunk has from here on
        self.level = level[order]
        self.before = np.where(before >= 0, new[before], -1)[order]
        self.first = {n: int(new[chunk]) for n, chunk in first.items()}
        self.last = {n: int(new[chunk]) for n, chunk in last.items()}

        numbers = {
            n: np.arange(len(s.tokens)) for n, s in own.items()
        }  # of tokens in their segments
        place = [
            new[first[n] + number // CHUNK] * CHUNK + number % CHUNK
            for n, number in numbers.items()
        ]
        tokens = np.concatenate([np.zeros(0, np.int64), *(s.tokens for s in own.values())])
        sorter = np.argsort(plan.local)
        local = sorter[
            np.searchsorted(plan.local, tokens, sorter=sorter)
        ]  # which of this rank's tokens each one is
        self.real = np.sort(local)
        """This rank's tokens that are no padding."""
        self.place = np.concatenate([np.zeros(0, np.int64), *place])[np.argsort(local)]
        """Where each of them stands, `chunk * size + token`."""

    def levels(self, chosen: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Some chunks, bool `[count]`, by levels from 1 on: the chunks of a level, and the one
        before each of them.
        """
        depths = (
            np.flatnonzero((self.level == d) & chosen)
            for d in range(1, 1 + self.level.max(initial=0))
        )
        return [(rows, self.before[rows]) for rows in depths if len(rows)]

    def behind(self, chunks: list[int]) -> np.ndarray:
        """Bool `[count]`: these and all that go on from them."""
        found = np.zeros(self.count, bool)
        found[chunks] = True
        for chunk in np.flatnonzero(self.before >= 0):  # levels in order
            found[chunk] |= found[self.before[chunk]]
        return found

    def leading_to(self, chunks: list[int]) -> np.ndarray:
        """Bool `[count]`: these and all on whose states theirs depend."""
        found = np.zeros(self.count, bool)
        found[chunks] = True
        for chunk in np.flatnonzero(self.before >= 0)[::-1]:
            found[self.before[chunk]] |= found[chunk]
        return found


class TapsPlan:
    """Where the `taps - 1` tokens before each of this rank's tokens are, for those whose are not
    the rows before.

    Rows to `send`; `near`, those of this rank that are gathered; `rows`, to be computed apart; and
    `places`, what they gather of `near`, of what came and a row of zeros. In the example above,
    with four taps, rank 0 computes rows 2 and 3 (tokens 6 and 7) apart. It gathers `near`, rows 1
    and 2 (tokens 1 and 6), beside what came, tokens 2 and 3. Token 6 takes places 3 2 0, the
    nearest first: tokens 3, 2, 1.
    """

    def __init__(self, plan: AttentionPlan, taps: int) -> None:
        before = np.append(predecessors(plan.metadata), -1)  # [T + 1]: nobody, -1, is behind nobody
        steps = [np.arange(len(plan.metadata))]
        for _ in range(taps - 1):
            steps.append(before[steps[-1]])
        past = np.stack(steps[1:], 1)  # [T, taps - 1], -1 where a path begins
        owner = np.empty(len(before), np.int64)  # the rank that holds a token, and its row there
        row = np.empty(len(before), np.int64)
        for rank, tokens in enumerate(plan.indices):
            owner[tokens] = rank
            row[tokens] = np.arange(len(tokens))
        owner[-1] = plan.cp_rank

        # tokens of others that each rank needs, ascending: every rank knows the messages of all
        needed = [np.unique(past[tokens]) for tokens in plan.indices]
        needed = [
            tokens[(tokens >= 0) & (owner[tokens] != rank)] for rank, tokens in enumerate(needed)
        ]
        self.travels = any(map(len, needed))
        sent = [row[tokens[owner[tokens] == plan.cp_rank]] for tokens in needed]
        came = [
            needed[plan.cp_rank][owner[needed[plan.cp_rank]] == rank] for rank in range(plan.cp)
        ]
        self.out_splits = list(map(len, sent))
        self.in_splits = list(map(len, came))
        self.send = np.concatenate(sent)

        own = past[plan.local]  # [t, taps - 1]
        rows_before = np.arange(len(own))[:, None] - np.arange(
            1, taps
        )  # what the plain convolution takes
        plain = np.where(rows_before >= 0, plan.local[np.maximum(rows_before, 0)], -1) == own
        self.rows = np.flatnonzero(~plain.all(1))
        wanted = own[self.rows]  # [rows, taps - 1]
        near = np.unique(wanted[owner[wanted] == plan.cp_rank])
        near = near[near >= 0]
        self.near = row[near]

        # [T + 1]: where a token stands once near and came are side by side; nobody stands last, in
        # the row of zeros
        places = np.full(len(before), len(near) + sum(self.in_splits))
        places[np.concatenate([near, *came])] = np.arange(len(near) + sum(self.in_splits))
        self.places = places[wanted].reshape(-1)


crossing_plan = once(CrossingPlan)
chunks_of = once(Chunks)
taps_plan = once(TapsPlan)
"""These are made once for all layers and devices."""
