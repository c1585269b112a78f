"""Layers with a state over a row that ranks share: a state follows the path of its tokens from rank to rank.

A rank's tokens are segments, stretches of neighbours on a path that no branch leaves but at their end. A segment goes
on from the one before it on the path, here or elsewhere, or begins a document with a state of zeros; a branch begins
with the state at the end of its parent. Segments that follow one another on a rank need no message. What leaves a rank
is, for each segment that another rank goes on from, the affine map from the state that came to the rank (`A[K, K]`,
`B[K, V]` a head): all ranks gather all maps, and each applies those that precede its own tokens. In backward the
gradients of states come the other way by the transposed maps. So messages have the same size for any length.

The short convolution before such a layer needs the few tokens before each segment, which their ranks send.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.distributed.collectives import Pending, start_all_gather
from megacp.core.distributed.differentiable import exchange
from megacp.core.distributed.grid import Axis, single_axis
from megacp.core.layers.gated_delta import CHUNK
from megacp.core.ops.device import to_device
from megacp.core.ops.kernel import accumulation_dtype
from megacp.core.ops.mask import Metadata
from megacp.core.ops.recurrence import Level, Rows, Rule, causal_taps, scan, scan_back


def predecessors(row: Metadata) -> np.ndarray:
    """int64 `[T]`: the token before each token of a whole row on its path; -1 for the first of a tree and padding."""
    before, real = np.full(len(row), -1), np.flatnonzero(row.leave > 0)
    before[real[1:]] = real[:-1]
    leave, path = row.leave[real], list[tuple[int, int]]()
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
        cuts = (before[tokens[1:]] != tokens[:-1]) | ends_here[tokens[:-1]]
        found += [(part, rank) for part in np.split(tokens, np.flatnonzero(cuts) + 1) if len(part)]
    found.sort(key=lambda one: one[0][0])
    of_last = {int(tokens[-1]): number for number, (tokens, _) in enumerate(found)}
    return [PathSegment(tokens, rank, of_last.get(int(before[tokens[0]]), -1)) for tokens, rank in found]


class Crossing(NamedTuple):
    """A segment that another rank goes on from (an exit), or one that goes on from another rank (an entry)."""

    rank: int
    number: int
    """Among the exits, or entries, of its rank."""
    other: int
    """Of an exit: the entry with whose state its rank came there; -1 where the state began on the rank. Of an entry:
    the exit that it goes on from. Both count over all ranks, by place in the row."""


def crossings(segments: list[PathSegment], cp: int) -> tuple[dict[int, Crossing], dict[int, Crossing], list[int]]:
    """Exits and entries by segment, and for each segment the entry with whose state it is computed on its rank (-1)."""
    left = {s.before for s in segments if s.before >= 0 and segments[s.before].rank != s.rank}
    exits, entries, came = dict[int, Crossing](), dict[int, Crossing](), list[int]()
    exit_number = {number: place for place, number in enumerate(sorted(left))}
    counts = np.zeros((2, cp), np.int64)
    for number, (_, rank, before) in enumerate(segments):
        if before >= 0 and segments[before].rank != rank:
            came.append(len(entries))
            entries[number] = Crossing(rank, int(counts[1, rank]), exit_number[before])
            counts[1, rank] += 1
        else:
            came.append(came[before] if before >= 0 else -1)
        if number in left:
            exits[number] = Crossing(rank, int(counts[0, rank]), came[number])
            counts[0, rank] += 1
    return exits, entries, came


class CrossingPlan:
    """What crosses ranks, as one of them sees it; on the host."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.rank, self.segments = plan.cp_rank, segments_of(plan)
        exits, entries, _ = crossings(self.segments, plan.cp)
        self.own_exits, self.own_entries = (
            [number for number, one in ends.items() if one.rank == self.rank] for ends in (exits, entries)
        )
        """Segments of this rank."""
        self.exits, self.entries = list(exits.values()), list(entries.values())
        self.most_exits, self.most_entries = (
            1 + max((one.number for one in ends), default=-1) for ends in (self.exits, self.entries)
        )
        """Of a rank."""

    def own(self, ends: list[Crossing]) -> list[int]:
        """This rank's of all exits or entries."""
        return [number for number, one in enumerate(ends) if one.rank == self.rank]

    @functools.cached_property
    def arriving(self) -> list[int]:
        """Exits on whose states those of this rank's entries depend, from the first."""
        found = set[int]()
        for number in self.own(self.entries):
            while number >= 0 and (exit_ := self.entries[number].other) not in found:
                found.add(exit_)
                number = self.exits[exit_].other
        return sorted(found)

    @functools.cached_property
    def owing(self) -> list[int]:
        """Entries on whose gradients those of this rank's exits depend, from the last."""
        ends, found = set(self.own(self.exits)), list[int]()
        for number, entry in enumerate(self.entries):
            if entry.other in ends:
                found.append(number)
                ends |= {n for n, one in enumerate(self.exits) if one.other == number}
        return found[::-1]

    def came(self, maps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The state `[heads, K, V]` at each of this rank's entries, of A and B side by side of every exit,
        `[heads, K, K + V]`: `most_exits` from each rank.
        """
        behind = dict[int, torch.Tensor]()
        for number in self.arriving:
            rank, own, entry = self.exits[number]
            one = maps[rank * self.most_exits + own]
            behind[number] = one[..., one.shape[-2] :]
            if entry >= 0:
                behind[number] = one[..., : one.shape[-2]] @ behind[self.entries[entry].other] + behind[number]
        return [behind[self.entries[number].other] for number in self.own(self.entries)]


def _rows(numbers: np.ndarray, device: torch.device) -> Rows:
    """A slice where they follow one another, whose rows are then no copy."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return to_device(numbers, device)


class Chunks:
    """The chunks of this rank's segments, on the host. Chunks of a level, which can be computed together, stand
    together, those with most chunks behind them first: then so do the chunks before those of the next level.
    """

    def __init__(self, plan: AttentionPlan, segments: list[PathSegment]) -> None:
        own = {n: s for n, s in enumerate(segments) if s.rank == plan.cp_rank}
        counts = np.array([-(-len(s.tokens) // CHUNK) for s in own.values()], np.int64)
        stops = np.cumsum(counts)
        first, last = dict(zip(own, stops - counts, strict=True)), dict(zip(own, stops - 1, strict=True))
        self.count = int(counts.sum())
        before = np.arange(-1, self.count - 1)
        before[stops - counts] = [last.get(s.before, -1) for s in own.values()]
        level, height = np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)
        for chunk in np.flatnonzero(before >= 0):
            level[chunk] = level[before[chunk]] + 1
        for chunk in np.flatnonzero(before >= 0)[::-1]:
            height[before[chunk]] = max(height[before[chunk]], height[chunk] + 1)
        order = np.lexsort((-height, level))
        new = np.argsort(order)
        self.level, self.before = level[order], np.where(before >= 0, new[before], -1)[order]
        self.first, self.last = ({n: int(new[chunk]) for n, chunk in of.items()} for of in (first, last))
        place = [new[first[n] + np.arange(len(s.tokens)) // CHUNK] * CHUNK for n, s in own.items()]
        tokens = np.concatenate([np.zeros(0, np.int64), *(s.tokens for s in own.values())])
        in_chunk = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(s.tokens)) % CHUNK for s in own.values())])
        sorter = np.argsort(plan.local)
        local = sorter[np.searchsorted(plan.local, tokens, sorter=sorter)]
        self.real = np.sort(local)
        """This rank's tokens that are no padding."""
        self.place = (np.concatenate([np.zeros(0, np.int64), *place]) + in_chunk)[np.argsort(local)]
        """Where each of them stands, `chunk * CHUNK + token`."""

    def levels(self, chosen: np.ndarray, device: torch.device) -> list[Level]:
        """Levels of some chunks: bool `[count]`."""
        depths = (np.flatnonzero((self.level == d) & chosen) for d in range(1, 1 + self.level.max(initial=0)))
        return [Level(_rows(rows, device), _rows(self.before[rows], device)) for rows in depths if len(rows)]

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


def crossing_plan(plan: AttentionPlan) -> CrossingPlan:
    """Made once for all layers and devices."""
    return plan.part("crossings", lambda: CrossingPlan(plan))


def _chunks(plan: AttentionPlan) -> Chunks:
    return plan.part("chunks", lambda: Chunks(plan, crossing_plan(plan).segments))


class StatePlan:
    """What one rank must know to move states over a row: its chunks, and what crosses ranks."""

    def __init__(self, plan: AttentionPlan, device: torch.device) -> None:
        self.crossing, chunks = crossing_plan(plan), _chunks(plan)
        self.chunks = chunks.count
        self.real = None if len(chunks.real) == len(plan.local) else to_device(chunks.real, device)
        self.place = to_device(chunks.place, device)
        own_exits = [chunks.last[number] for number in self.crossing.own_exits]
        own_entries = [chunks.first[number] for number in self.crossing.own_entries]
        self.levels = chunks.levels(np.ones(chunks.count, bool), device)
        self.to_exits = chunks.levels(chunks.leading_to(own_exits), device)
        self.from_entries = chunks.levels(chunks.behind(own_entries), device)
        self.own_exits, self.own_entries = (_rows(np.array(x, np.int64), device) for x in (own_exits, own_entries))


def _into_chunks(x: torch.Tensor, states: StatePlan) -> torch.Tensor:
    """`[t, ...] -> [chunks, CHUNK, ...]`, in the accumulation dtype."""
    out = x.new_zeros(states.chunks * CHUNK, *x.shape[1:], dtype=accumulation_dtype(x.dtype))
    out.index_copy_(0, states.place, (x if states.real is None else x.index_select(0, states.real)).to(out.dtype))
    return out.unflatten(0, (states.chunks, CHUNK))


def _out_of_chunks(x: torch.Tensor, states: StatePlan, like: torch.Tensor) -> torch.Tensor:
    """`[chunks, CHUNK, ...] -> [t, ...]` in the dtype of `like[t]`; 0 for padding."""
    rows = x.flatten(0, 1).index_select(0, states.place).to(like.dtype)
    if states.real is None:
        return rows
    return rows.new_zeros(len(like), *rows.shape[1:]).index_copy_(0, states.real, rows)


def _start_gather(own: torch.Tensor, most: int, axis: Axis) -> Pending:
    """`own[n, ...]` of each rank, filled up to `[most, ...]`: comes as `[ranks * most, ...]`."""
    filled = own.new_zeros(most, *own.shape[1:])
    filled[: len(own)] = own
    return start_all_gather(filled, axis)


class _Recurrence(torch.autograd.Function):
    """Saves the inputs and the state before each chunk; what the rule makes of a chunk is made again in backward."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, states: StatePlan, axis: Axis, *inputs: torch.Tensor) -> torch.Tensor:
        work = rule(*(_into_chunks(x, states) for x in inputs))
        turn, add = next(work)  # [chunks, heads, K, K], [.., K, V]
        state, width, turns = torch.zeros_like(add), turn.shape[-1], turn.new_empty(0)
        crossing = states.crossing
        if crossing.most_exits:
            # the map to an exit is what becomes of a state of K more columns, the identity where states come from afar
            joint = torch.cat([torch.zeros_like(turn), state], -1)
            joint[states.own_entries, ..., :width] = torch.eye(width, dtype=joint.dtype, device=joint.device)
            wide, ends = torch.cat([torch.zeros_like(turn), add], -1), states.own_exits
            scan((turn, wide), states.to_exits, joint)
            coming = _start_gather(turn[ends] @ joint[ends] + wide[ends], crossing.most_exits, axis)
        read, out = next(work)  # while the maps are under way
        if crossing.most_exits:
            gathered = coming.wait()
            turns = gathered.unflatten(0, (axis.size, -1))[..., :width].contiguous()
            if came := crossing.came(gathered.unbind()):
                state[states.own_entries] = torch.stack(came)
        scan((turn, add), states.levels, state)
        out = out + read @ state  # [chunks, heads, C, V]
        ctx.rule, ctx.states, ctx.axis = rule, states, axis
        ctx.save_for_backward(state, turns, *inputs)
        return _out_of_chunks(out.transpose(1, 2), states, inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, axis, (state, turns, *inputs) = ctx.states, ctx.axis, ctx.saved_tensors
        crossing = states.crossing
        with torch.enable_grad(), torch.autocast(state.device.type, enabled=False):
            leaves = [_into_chunks(x, states).requires_grad_() for x in inputs]
            (turn, add), (read, out) = ctx.rule(*leaves)
        dout = _into_chunks(grads[0], states).transpose(1, 2)  # [chunks, heads, C, V]
        with torch.no_grad():
            reads, after = read.transpose(-1, -2) @ dout, torch.zeros_like(state)
            if crossing.most_entries:
                alone, ends = scan_back(turn, reads, states.from_entries, torch.zeros_like(state)), states.own_entries
                own = turn[ends].transpose(-1, -2) @ alone[ends] + reads[ends]
                gathered = _start_gather(own, crossing.most_entries, axis).wait().unflatten(0, (axis.size, -1))
                behind = {n: torch.zeros_like(gathered[0, 0]) for n in range(len(crossing.exits))}
                for number in crossing.owing:  # the gradient of the state [heads, K, V] behind each exit
                    rank, place, exit_ = crossing.entries[number]
                    behind[exit_] += gathered[rank, place]
                    for n in (n for n, one in enumerate(crossing.exits) if one.other == number):
                        behind[exit_] += turns[rank, crossing.exits[n].number].transpose(-1, -2) @ behind[n]
                if owed := [behind[number] for number in crossing.own(crossing.exits)]:
                    after[states.own_exits] = torch.stack(owed)
            scan_back(turn, reads, states.levels, after)
            wanted = (after @ state.transpose(-1, -2), after, dout @ state.transpose(-1, -2), dout)
        found = torch.autograd.grad((turn, add, read, out), leaves, wanted)
        return None, None, None, *(_out_of_chunks(d, states, x) for d, x in zip(found, inputs, strict=True))


def _taps_plan(plan: AttentionPlan, taps: int) -> TapsPlan:
    return plan.part(f"{taps} taps", lambda: TapsPlan(plan, taps))


def prepare_states(plan: AttentionPlan, taps: int) -> None:
    """Make on the host what the layers of a plan need; called from the loader's threads."""
    _chunks(plan)
    _taps_plan(plan, taps)


def recur(rule: Rule, plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor) -> torch.Tensor:
    """What a rule reads, `[t, heads, V]`, for inputs `[t, ...]` of this rank's tokens; 0 for padding.

    Differentiable in the inputs. One message in forward and one in backward, where paths cross ranks.
    """
    device = inputs[0].device
    return _Recurrence.apply(rule, plan.part(f"states on {device}", lambda: StatePlan(plan, device)), axis, *inputs)


def recur_by_heads(
    move: Callable[..., torch.Tensor], plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor
) -> torch.Tensor:
    """`move(plan, axis, *inputs)`, such as `recur` of a rule, by an all-to-all before and after: each rank has its part
    of the heads of all tokens.

    Heads of every input are to divide by the ranks. One message for each dtype, and one for the result.
    """
    n, t = axis.size, len(inputs[0])
    arrival = plan.arrival(n, inputs[0].device)
    whole: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in inputs):
        places = [place for place, x in enumerate(inputs) if x.dtype == dtype]
        parts = [inputs[place].reshape(t, n, -1) for place in places]  # [t, ranks, its columns]
        arrived = exchange(torch.cat(parts, 2).transpose(0, 1).flatten(0, 1), axis).index_select(0, arrival)
        for place, part in zip(places, arrived.split([x.shape[2] for x in parts], 1), strict=True):
            whole[place] = part.reshape(n * t, -1, *inputs[place].shape[2:])
    out = move(plan.grouped(n), single_axis("one"), *(whole[place] for place in range(len(inputs))))
    back = exchange(out.index_select(0, plan.departure(n, out.device)), axis)  # [n * t, heads / n, V]
    return back.unflatten(0, (n, t)).transpose(0, 1).flatten(1, 2)


class TapsPlan:
    """Where the `taps - 1` tokens before each of this rank's tokens are, for those whose are not the rows before.

    Made on the host: rows to `send`; `near`, those of this rank that are gathered; `rows`, to be computed apart; and
    `places`, what they gather of `near`, of what came and a row of zeros.
    """

    def __init__(self, plan: AttentionPlan, taps: int) -> None:
        before, steps = np.append(predecessors(plan.metadata), -1), [np.arange(len(plan.metadata))]
        for _ in range(taps - 1):
            steps.append(before[steps[-1]])
        past = np.stack(steps[1:], 1)  # [T, taps - 1], -1 where a path begins
        owner, row = np.empty(len(before), np.int64), np.empty(len(before), np.int64)
        for rank, tokens in enumerate(plan.indices):
            owner[tokens], row[tokens] = rank, np.arange(len(tokens))
        owner[-1] = plan.cp_rank
        needed = [np.unique(past[tokens]) for tokens in plan.indices]
        needed = [tokens[(tokens >= 0) & (owner[tokens] != rank)] for rank, tokens in enumerate(needed)]
        self.travels = any(map(len, needed))
        sent = [row[tokens[owner[tokens] == plan.cp_rank]] for tokens in needed]
        came = [needed[plan.cp_rank][owner[needed[plan.cp_rank]] == rank] for rank in range(plan.cp)]
        self.out_splits, self.in_splits = list(map(len, sent)), list(map(len, came))
        own = past[plan.local]  # [t, taps - 1]
        rows_before = np.arange(len(own))[:, None] - np.arange(1, taps)  # what the plain convolution takes
        plain = np.where(rows_before >= 0, plan.local[np.maximum(rows_before, 0)], -1) == own
        others = np.flatnonzero(~plain.all(1))
        near = np.unique(own[others][owner[own[others]] == plan.cp_rank])
        near = near[near >= 0]
        places = np.full(len(before), len(near) + sum(self.in_splits))  # the last row, of zeros
        places[np.concatenate([near, *came])] = np.arange(len(near) + sum(self.in_splits))
        self.send, self.near, self.rows = np.concatenate(sent), row[near], others
        self.places = places[own[others]].reshape(-1)


def short_convolution(x: torch.Tensor, weight: torch.Tensor, plan: AttentionPlan, axis: Axis) -> torch.Tensor:
    """`x[t, c]` with each channel convolved along the path by `weight[c, taps]`, the last tap for the token itself.

    Differentiable in both. Ranks exchange the few rows before each of their segments.
    """
    taps = weight.shape[1]
    apart = _taps_plan(plan, taps)
    send, near, alone, places = (
        plan.on_device(f"{name} of {taps} taps", x.device, functools.partial(getattr, apart, name))
        for name in ("send", "near", "rows", "places")
    )
    out, came = causal_taps(x, weight), x[:0]
    if apart.travels:  # a rank that gets no rows has part in the message all the same, also in backward
        came = exchange(x.index_select(0, send), axis, apart.out_splits, apart.in_splits)
    elif not len(alone):
        return out
    rows = torch.cat([x.index_select(0, near), came, x.new_zeros(1, x.shape[1])])
    past = rows.index_select(0, places).unflatten(0, (-1, taps - 1)).flip(1)  # [m, taps - 1, c], oldest first
    window = torch.cat([past, x.index_select(0, alone).unsqueeze(1)], 1)
    return out.index_copy_(0, alone, torch.einsum("mtc,ct->mc", window, weight))
