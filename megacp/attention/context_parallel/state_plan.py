"""The path segments of a row on each rank, and the recurrent states that cross ranks.

All results are integers on the host. The tokens of a rank are divided into segments: stretches of
neighbouring tokens on a path that no branch leaves before their end. A segment continues the
previous segment of its path, on any rank, or begins a document with a state of zeros. A branch
begins with the state at the end of its parent.

Successive segments on the same rank need no message. An exit is a segment that is continued on
another rank. An entry is a segment that continues a segment of another rank.

Example: a question of four tokens with two answers, zigzag on two ranks:

    tokens     0 1   2 3   4 5   6 7
    rank        0     1     1     0
    segment     0     1     2     3
    before     -1     0     1     1     continued segment; both answers continue the question
    exit        0     1                 rank 1 continues segment 0, rank 0 continues segment 1
    entry             0           1     segment 1 continues exit 0, segment 3 continues exit 1
    came       -1     0     0     1     entry whose state the rank uses for the segment

The map of exit 1 begins with the state of entry 0. Rank 0 therefore needs the maps of exits 0 and 1
for entry 1 (`arriving`), and rank 1 needs the map of exit 0 for entry 0. In the backward pass, rank
0 needs the gradients of entries 1 and 0 for exit 0 (`owing`), and rank 1 needs the gradient of
entry 1 for exit 1. Segment 2 continues a segment of its own rank, without a message.

Letters in shapes: `T` tokens of the row, `t` tokens of this rank. -1 stands for no token, segment,
chunk or entry.
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
    """Return, for each token of a row, the previous token on its path, int64 `[T]`.

    The result is -1 for the first token of a tree and for padding.
    """
    before = np.full(len(row), -1)
    real = np.flatnonzero(row.leave > 0)
    before[real[1:]] = real[:-1]  # correct inside nodes; the first tokens of nodes follow below
    leave = row.leave[real]
    # nodes from the root to the current one: end of the subtree, and last token
    path: list[tuple[int, int]] = []
    starts = np.flatnonzero(np.diff(leave, prepend=-1))  # all tokens of a node have equal `leave`
    for start, stop in itertools.pairwise([*starts, len(real)]):
        while path and path[-1][0] <= real[start]:
            path.pop()
        before[real[start]] = path[-1][1] if path else -1
        path.append((int(leave[start]), int(real[stop - 1])))
    return before


class PathSegment(NamedTuple):
    """Consecutive tokens of a path that are on the same rank."""

    tokens: np.ndarray
    rank: int
    before: int
    """Number of the earlier segment that this one continues; -1 at the beginning of a tree."""


def segments_of(plan: AttentionPlan) -> list[PathSegment]:
    """Return the segments of all ranks, sorted by their first tokens."""
    before = predecessors(plan.metadata)
    node_starts = np.flatnonzero(np.diff(plan.metadata.leave, prepend=-1))
    # whether a node ends at the token; the extra element absorbs predecessor -1
    ends_here = np.zeros(len(before) + 1, bool)
    ends_here[before[node_starts]] = True
    found = []
    for rank, tokens in enumerate(plan.indices):
        tokens = np.sort(tokens[plan.metadata.leave[tokens] > 0])
        # also cut where a node ends: a branch on another rank may continue from there, and the
        # state there is then an exit
        cuts = (before[tokens[1:]] != tokens[:-1]) | ends_here[tokens[:-1]]
        for part in np.split(tokens, np.flatnonzero(cuts) + 1):
            if len(part):
                found.append((part, rank))
    found.sort(key=lambda segment: segment[0][0])
    by_last_token = {int(tokens[-1]): number for number, (tokens, _) in enumerate(found)}
    segments = []
    for tokens, rank in found:
        continued = by_last_token.get(int(before[tokens[0]]), -1)
        segments.append(PathSegment(tokens, rank, continued))
    return segments


class Crossing(NamedTuple):
    """An exit (a segment continued on another rank) or an entry (a segment that continues a segment
    of another rank).
    """

    rank: int
    number: int
    """Index among the exits, or entries, of its rank."""
    other: int
    """For an exit, the entry whose state reaches it, or -1 if the state began on its rank. For an
    entry, the exit that it continues. Both are numbered across all ranks in the order of the row.
    """


def crossings(
    segments: list[PathSegment], cp: int
) -> tuple[dict[int, Crossing], dict[int, Crossing], list[int]]:
    """Return exits and entries by segment number, and the entry of each segment.

    A segment's entry is the one whose state is needed to compute the segment; -1 if there is none.
    """
    left = {s.before for s in segments if s.before >= 0 and segments[s.before].rank != s.rank}
    exit_number = {number: place for place, number in enumerate(sorted(left))}
    exits = dict[int, Crossing]()
    entries = dict[int, Crossing]()
    came = list[int]()
    exits_of_rank = [0] * cp
    entries_of_rank = [0] * cp
    for number, (_, rank, before) in enumerate(segments):  # a continued segment comes earlier
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
    """The exits and entries of a row, from the perspective of one rank."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.rank = plan.cp_rank
        self.segments = segments_of(plan)
        exits, entries, _ = crossings(self.segments, plan.cp)
        self.own_exits = [number for number, one in exits.items() if one.rank == self.rank]
        self.own_entries = [number for number, one in entries.items() if one.rank == self.rank]
        """Segments of this rank that begin with a state from another rank."""
        self.exits = list(exits.values())
        self.entries = list(entries.values())
        # largest number of exits of a rank; all ranks send this number of maps
        self.most_exits = 1 + max((one.number for one in self.exits), default=-1)
        self.most_entries = 1 + max((one.number for one in self.entries), default=-1)

    def own(self, ends: list[Crossing]) -> list[int]:
        """Return the indices of this rank's exits or entries in the list of all ranks."""
        return [number for number, one in enumerate(ends) if one.rank == self.rank]

    @functools.cached_property
    def arriving(self) -> list[int]:
        """Exits that this rank's entries depend on, in ascending order."""
        found = set[int]()
        for number in self.own(self.entries):
            # from an entry to its exit, then to the entry whose state reached that exit, and so on
            # to the rank where the state began
            while number >= 0 and (exit_ := self.entries[number].other) not in found:
                found.add(exit_)
                number = self.exits[exit_].other
        return sorted(found)

    @functools.cached_property
    def owing(self) -> list[int]:
        """Entries whose gradients this rank's exits need, in descending order."""
        ends = set(self.own(self.exits))
        found = list[int]()
        for number, entry in enumerate(self.entries):
            if entry.other in ends:
                found.append(number)
                # follow the state to the exits that it reaches
                ends |= {n for n, one in enumerate(self.exits) if one.other == number}
        return found[::-1]


class Chunks:
    """The chunks of this rank's segments, sorted by level.

    The chunks of a level can be computed together and have consecutive numbers. Within a level,
    chunks with longer chains of dependent chunks come first. The chunks that continue them then
    have the same order in the next level.

    In the example above with chunks of two tokens, rank 1 has chunk 0 at level 0 and its
    continuation, chunk 1, at level 1.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        own = {n: s for n, s in enumerate(crossing_plan(plan).segments) if s.rank == plan.cp_rank}
        self.size = CHUNK
        """Tokens per chunk; the last chunk of a segment is padded."""
        # chunks are first numbered segment by segment
        counts = np.array([-(-len(s.tokens) // CHUNK) for s in own.values()], np.int64)
        stops = np.cumsum(counts)
        first = dict(zip(own, stops - counts, strict=True))  # first chunk of each segment
        last = dict(zip(own, stops - 1, strict=True))
        self.count = int(counts.sum())

        # [count]: a chunk continues the chunk before it; the first chunk of a segment continues the
        # last chunk of the previous segment
        before = np.arange(-1, self.count - 1)
        before[stops - counts] = [last.get(s.before, -1) for s in own.values()]

        # [count]: number of chunks on this rank that come before this one on its path, and largest
        # number that come after it
        level = np.zeros(self.count, np.int64)
        height = np.zeros(self.count, np.int64)
        for chunk in np.flatnonzero(before >= 0):
            level[chunk] = level[before[chunk]] + 1
        for chunk in np.flatnonzero(before >= 0)[::-1]:
            height[before[chunk]] = max(height[before[chunk]], height[chunk] + 1)

        order = np.lexsort((-height, level))
        new = np.argsort(order)  # final number of each chunk
        self.level = level[order]
        self.before = np.where(before >= 0, new[before], -1)[order]
        self.first = {n: int(new[chunk]) for n, chunk in first.items()}
        self.last = {n: int(new[chunk]) for n, chunk in last.items()}

        # place of each token in the padded chunks
        place = [np.zeros(0, np.int64)]
        for n, segment in own.items():
            number = np.arange(len(segment.tokens))
            place.append(new[first[n] + number // CHUNK] * CHUNK + number % CHUNK)
        tokens = np.concatenate([np.zeros(0, np.int64), *(s.tokens for s in own.values())])
        # row of each token among this rank's tokens
        sorter = np.argsort(plan.local)
        local = sorter[np.searchsorted(plan.local, tokens, sorter=sorter)]
        self.real = np.sort(local)
        """Rows of this rank's tokens that are not padding."""
        self.place = np.concatenate(place)[np.argsort(local)]
        """Place of each of these tokens, `chunk * size + token`."""

    def levels(self, chosen: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the chosen chunks by level, starting at level 1.

        `chosen` is bool `[count]`. Each level is a pair: its chunks, and the chunks that they
        continue.
        """
        found = []
        for depth in range(1, 1 + self.level.max(initial=0)):
            rows = np.flatnonzero((self.level == depth) & chosen)
            if len(rows):
                found.append((rows, self.before[rows]))
        return found

    def behind(self, chunks: list[int]) -> np.ndarray:
        """Return bool `[count]`: these chunks and all chunks that depend on them."""
        found = np.zeros(self.count, bool)
        found[chunks] = True
        for chunk in np.flatnonzero(self.before >= 0):  # in ascending level order
            found[chunk] |= found[self.before[chunk]]
        return found

    def leading_to(self, chunks: list[int]) -> np.ndarray:
        """Return bool `[count]`: these chunks and all chunks that they depend on."""
        found = np.zeros(self.count, bool)
        found[chunks] = True
        for chunk in np.flatnonzero(self.before >= 0)[::-1]:
            found[self.before[chunk]] |= found[chunk]
        return found


class TapsPlan:
    """The inputs of the short convolution for tokens whose previous rows are not their previous
    tokens.

    * `rows` are these tokens; they are computed separately.
    * `send` are the rows that this rank sends.
    * `near` are the rows of this rank that these tokens need.
    * `places` index the concatenation of `near`, the received rows and a row of zeros, `taps - 1`
      places per token, nearest token first.

    In the example above with four taps, rank 0 computes rows 2 and 3 (tokens 6 and 7) separately.
    It needs `near` rows 1 and 2 (tokens 1 and 6), and receives tokens 2 and 3. Token 6 has places
    3 2 0, which are tokens 3, 2 and 1.
    """

    def __init__(self, plan: AttentionPlan, taps: int) -> None:
        before = np.append(predecessors(plan.metadata), -1)  # [T + 1], -1 precedes itself
        steps = [np.arange(len(plan.metadata))]
        for _ in range(taps - 1):
            steps.append(before[steps[-1]])
        past = np.stack(steps[1:], 1)  # [T, taps - 1], -1 before the beginning of a path
        # [T + 1]: the rank of each token, and its row on that rank
        owner = np.empty(len(before), np.int64)
        row = np.empty(len(before), np.int64)
        for rank, tokens in enumerate(plan.indices):
            owner[tokens] = rank
            row[tokens] = np.arange(len(tokens))
        owner[-1] = plan.cp_rank

        # tokens that each rank needs from other ranks, ascending; all ranks compute all messages
        needed = []
        for rank, tokens in enumerate(plan.indices):
            wanted = np.unique(past[tokens])
            needed.append(wanted[(wanted >= 0) & (owner[wanted] != rank)])
        self.travels = any(map(len, needed))
        mine = needed[plan.cp_rank]
        sent = [row[tokens[owner[tokens] == plan.cp_rank]] for tokens in needed]
        came = [mine[owner[mine] == rank] for rank in range(plan.cp)]
        self.out_splits = list(map(len, sent))
        self.in_splits = list(map(len, came))
        self.send = np.concatenate(sent)

        own = past[plan.local]  # [t, taps - 1]
        # the plain convolution reads the previous rows: find tokens for which these are wrong
        rows_before = np.arange(len(own))[:, None] - np.arange(1, taps)
        tokens_before = np.where(rows_before >= 0, plan.local[np.maximum(rows_before, 0)], -1)
        self.rows = np.flatnonzero(~(tokens_before == own).all(1))
        wanted = own[self.rows]  # [rows, taps - 1]
        near = np.unique(wanted[owner[wanted] == plan.cp_rank])
        near = near[near >= 0]
        self.near = row[near]

        # [T + 1]: index of each token in the concatenation of near and received rows; the last
        # element, for -1, is the row of zeros
        count = len(near) + sum(self.in_splits)
        places = np.full(len(before), count)
        places[np.concatenate([near, *came])] = np.arange(count)
        self.places = places[wanted].reshape(-1)


# computed once for all layers and devices
crossing_plan = once(CrossingPlan)
chunks_of = once(Chunks)
taps_plan = once(TapsPlan)
