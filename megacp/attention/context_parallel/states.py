"""Recurrent states in rows that ranks share: states follow the path of their tokens across ranks.

A segment that is continued on another rank is an exit (see `state_plan.py`). For each exit, its
rank sends the affine map of the state that it received: `A[K, K]` or a column, and `B[K, V]` per
head. All ranks gather all maps, and each rank applies the maps that precede its own tokens. In the
backward pass, gradients of states go in the opposite direction through the transposed maps. Message
sizes therefore do not depend on the length of the row.

The short convolution before such a layer needs the few tokens before each segment. Ranks exchange
these tokens.

Letters in shapes: `t` tokens of this rank, `C` tokens of a chunk. A state is `[K, V]` per head, as
in `attention/ops/recurrence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.state_plan import (
    CrossingPlan,
    chunks_of,
    crossing_plan,
    taps_plan,
)
from megacp.attention.ops.device import is_compiled, to_device, without_autocast
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.once import once
from megacp.attention.ops.recurrence import (
    Indices,
    Level,
    Rule,
    causal_taps,
    scan,
    scan_back,
    turn_gradient,
    turned,
    turned_back,
    unchanged,
)
from megacp.distributed.collectives import Pending, start_all_gather
from megacp.distributed.differentiable import exchange
from megacp.distributed.grid import Axis, single_axis
from megacp.distributed.large_blocks import LARGE


def _rows(numbers: np.ndarray, device: torch.device) -> Indices:
    """Return a slice, which avoids a copy, for contiguous numbers; else indices on the device."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return to_device(numbers, device)


class StatePlan:
    """The chunks of one rank and the states that cross ranks, as indices on a device."""

    def __init__(self, plan: AttentionPlan, device: torch.device) -> None:
        self.crossing = crossing_plan(plan)
        chunks = chunks_of(plan)

        def levels(chosen: np.ndarray) -> list[Level]:
            """Return the levels of the chosen chunks."""
            found = []
            for rows, before in chunks.levels(chosen):
                found.append(Level(_rows(rows, device), _rows(before, device)))
            return found

        self.chunks = chunks.count
        self.size = chunks.size
        self.real = None if len(chunks.real) == len(plan.local) else to_device(chunks.real, device)
        self.place = to_device(chunks.place, device)
        # a state leaves after the last chunk of a segment, and arrives before its first chunk
        own_exits = [chunks.last[number] for number in self.crossing.own_exits]
        own_entries = [chunks.first[number] for number in self.crossing.own_entries]
        self.levels = levels(np.ones(chunks.count, bool))
        self.to_exits = levels(chunks.leading_to(own_exits))
        self.from_entries = levels(chunks.behind(own_entries))
        self.own_exits = _rows(np.array(own_exits, np.int64), device)
        self.own_entries = _rows(np.array(own_entries, np.int64), device)


_states_on = once(StatePlan)


def _into_chunks(x: torch.Tensor, states: StatePlan) -> torch.Tensor:
    """Return `[t, ...]` as `[chunks, C, ...]` in the accumulation dtype, padded with 0."""
    out = x.new_zeros(states.chunks * states.size, *x.shape[1:], dtype=accumulation_dtype(x.dtype))
    real = x if states.real is None else x.index_select(0, states.real)
    out.index_copy_(0, states.place, real.to(out.dtype))
    return out.unflatten(0, (states.chunks, states.size))


def _out_of_chunks(x: torch.Tensor, states: StatePlan, like: torch.Tensor) -> torch.Tensor:
    """Return `[chunks, C, ...]` as `[t, ...]` in the dtype of `like[t]`, with 0 for padding."""
    rows = x.flatten(0, 1).index_select(0, states.place).to(like.dtype)
    if states.real is None:
        return rows
    return rows.new_zeros(len(like), *rows.shape[1:]).index_copy_(0, states.real, rows)


def _start_gather(own: torch.Tensor, most: int, axis: Axis) -> Pending:
    """Start an all-gather of `own[n, ...]`, padded to `[most, ...]`, as `[ranks * most, ...]`."""
    filled = own.new_zeros(most, *own.shape[1:])
    filled[: len(own)] = own
    return start_all_gather(filled, axis)


def arrived_states(
    crossing: CrossingPlan, maps: Sequence[torch.Tensor], of_turn: int
) -> list[torch.Tensor]:
    """Return the state `[heads, K, V]` at each of this rank's entries.

    `maps` are A and B of every exit side by side, `[heads, K, of_turn + V]`, with `most_exits` maps
    per rank.
    """
    after = dict[int, torch.Tensor]()  # state after each exit
    for number in crossing.arriving:
        rank, own, entry = crossing.exits[number]
        one = maps[rank * crossing.most_exits + own]
        state = one[..., of_turn:]
        if entry >= 0:  # the state began on another rank: apply A to the state that arrived
            came = after[crossing.entries[entry].other]
            state = turned(one[..., :of_turn], came) + state
        after[number] = state
    return [after[crossing.entries[number].other] for number in crossing.own(crossing.entries)]


def _owed_gradients(
    crossing: CrossingPlan, found: torch.Tensor, turns: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradient `[heads, K, V]` of the state after each of this rank's exits.

    `found[ranks, most_entries, heads, K, V]` is the gradient of the state at each entry, from
    tokens of the entry's rank only. `turns[ranks, most_exits, heads, K, columns]` is A of every
    exit.
    """
    after = {n: torch.zeros_like(found[0, 0]) for n in range(len(crossing.exits))}
    for number in crossing.owing:
        rank, place, exit_ = crossing.entries[number]
        after[exit_] += found[rank, place]
        # add the gradients of the exits at which this state leaves the entry's rank again
        for n, one in enumerate(crossing.exits):
            if one.other == number:
                after[exit_] += turned_back(turns[rank, one.number], after[n])
    return [after[number] for number in crossing.own(crossing.exits)]


class _Recurrence(torch.autograd.Function):
    """Apply a rule to a row; saves the inputs and the state before each chunk.

    The backward pass recomputes the maps of the rule.
    """

    @staticmethod
    def forward(
        ctx: Any, rule: Rule, states: StatePlan, axis: Axis, *inputs: torch.Tensor
    ) -> torch.Tensor:
        work = rule(*(_into_chunks(x, states) for x in inputs))
        turn, add = next(work)  # A [chunks, heads, K, K] or a column, B [.., K, V]
        state = torch.zeros_like(add)  # before each chunk
        width = turn.shape[-1]
        turns = turn.new_empty(0)
        crossing = states.crossing
        if crossing.most_exits:
            # the map to an exit is the scan of a wider state: the first columns start from the
            # identity where states arrive from other ranks, and become A
            nothing = add.new_zeros(*add.shape[:-1], width)
            joint = torch.cat([nothing, state], -1)
            joint[states.own_entries, ..., :width] = unchanged(turn, add.shape[-2])
            wide = torch.cat([nothing, add], -1)  # chunks add nothing to the first columns
            ends = states.own_exits
            scan((turn, wide), states.to_exits, joint)
            # `joint` is the state before the last chunk of an exit; send the state after it
            leaving = turned(turn[ends], joint[ends]) + wide[ends]
            coming = _start_gather(leaving, crossing.most_exits, axis)
        read, out = next(work)  # while the maps are in flight
        if crossing.most_exits:
            gathered = coming.wait()  # [ranks * most_exits, heads, K, columns + V]
            turns = gathered.unflatten(0, (axis.size, -1))[..., :width].contiguous()
            if came := arrived_states(crossing, gathered.unbind(), width):
                state[states.own_entries] = torch.stack(came)
        scan((turn, add), states.levels, state)
        out = out + read @ state  # [chunks, heads, C, V]
        ctx.rule = rule
        ctx.states = states
        ctx.axis = axis
        ctx.save_for_backward(state, turns, *inputs)
        return _out_of_chunks(out.transpose(1, 2), states, inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        state, turns, *inputs = ctx.saved_tensors
        states = ctx.states
        axis = ctx.axis
        crossing = states.crossing
        with torch.enable_grad(), without_autocast(state.device):
            leaves = [_into_chunks(x, states).requires_grad_() for x in inputs]
            (turn, add), (read, out) = ctx.rule(*leaves)
        dout = _into_chunks(grads[0], states).transpose(1, 2)  # [chunks, heads, C, V]
        with torch.no_grad():
            reads = read.transpose(-1, -2) @ dout  # R^T dout, to the state before each chunk
            after = torch.zeros_like(state)  # the gradient of the state after each chunk
            if crossing.most_entries:
                # gradients of the states at this rank's entries, from this rank's tokens only
                local = scan_back(turn, reads, states.from_entries, torch.zeros_like(state))
                ends = states.own_entries
                own = turned_back(turn[ends], local[ends]) + reads[ends]
                gathered = _start_gather(own, crossing.most_entries, axis).wait()
                gathered = gathered.unflatten(0, (axis.size, -1))
                if owed := _owed_gradients(crossing, gathered, turns):
                    after[states.own_exits] = torch.stack(owed)
            scan_back(turn, reads, states.levels, after)
            # gradients of A, B, R and O in S' = A S + B and out = O + R S
            wanted = (
                turn_gradient(turn, after, state),
                after,
                dout @ state.transpose(-1, -2),
                dout,
            )
        found = torch.autograd.grad((turn, add, read, out), leaves, wanted)
        gradients = (_out_of_chunks(d, states, x) for d, x in zip(found, inputs, strict=True))
        return None, None, None, *gradients


def recur(rule: Rule, plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the output of a rule, `[t, heads, V]`, with 0 for padding; differentiable.

    The inputs are `[t, ...]` of this rank's tokens. If paths cross ranks, each rank sends
    one message in the forward pass and one in the backward pass.
    """
    states = _states_on(plan, inputs[0].device)
    large = max(x.numel() * x.element_size() for x in inputs) >= LARGE
    if states.crossing.most_exits or not large or is_compiled(inputs[0]):
        return _Recurrence.apply(rule, states, axis, *inputs)
    # heads are independent: on a CPU, one key head at a time keeps intermediate tensors small
    parts = math.gcd(*(x.shape[1] for x in inputs))
    chunks = zip(*(x.chunk(parts, 1) for x in inputs), strict=True)
    return torch.cat([_Recurrence.apply(rule, states, axis, *part) for part in chunks], 1)


def recur_by_heads(
    move: Callable[..., torch.Tensor], plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor
) -> torch.Tensor:
    """Return `move(plan, axis, *inputs)` for all tokens of this rank's share of the heads.

    `move` is, for example, `recur` with a rule. An all-to-all before and another one after the call
    exchange heads for tokens. The number of heads of every input must be divisible by the number of
    ranks. There is one message per dtype of the inputs, and one for the result.
    """
    n = axis.size
    t = len(inputs[0])
    arrival = plan.arrival(n, inputs[0].device)
    whole: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in inputs):
        places = [place for place, x in enumerate(inputs) if x.dtype == dtype]
        parts = [inputs[place].reshape(t, n, -1) for place in places]  # [t, ranks, columns]
        # [n * t, columns]: all tokens, this rank's heads, first in rank order
        arrived = exchange(torch.cat(parts, 2).transpose(0, 1).flatten(0, 1), axis)
        arrived = arrived.index_select(0, arrival)  # in the order of the grouped plan
        widths = [x.shape[2] for x in parts]
        for place, part in zip(places, arrived.split(widths, 1), strict=True):
            whole[place] = part.reshape(n * t, -1, *inputs[place].shape[2:])
    ordered = (whole[place] for place in range(len(inputs)))
    out = move(plan.grouped(n), single_axis("one"), *ordered)
    departure = plan.departure(n, out.device)
    back = exchange(out.index_select(0, departure), axis)  # [n * t, heads / n, V]
    return back.unflatten(0, (n, t)).transpose(0, 1).flatten(1, 2)


@once
def _taps_on(plan: AttentionPlan, taps: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the indices of `taps_plan` on the device: send, near, rows, places."""
    apart = taps_plan(plan, taps)
    return tuple(to_device(x, device) for x in (apart.send, apart.near, apart.rows, apart.places))


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, plan: AttentionPlan, axis: Axis
) -> torch.Tensor:
    """Return `x[t, c]` convolved along the path with `weight[c, taps]`; differentiable.

    Channels are separate, and the last tap is for the token itself. Ranks exchange the few rows
    before each of their segments.
    """
    taps = weight.shape[1]
    apart = taps_plan(plan, taps)
    send, near, separate, places = _taps_on(plan, taps, x.device)
    # correct for tokens whose previous rows are also the previous tokens of their path
    out = causal_taps(x, weight)
    came = x[:0]
    if apart.travels:
        # ranks that receive no rows also take part in the message, here and in the backward pass
        came = exchange(x.index_select(0, send), axis, apart.out_splits, apart.in_splits)
    elif not len(separate):
        return out
    # the remaining tokens gather their previous tokens; the last row is the zero before a path
    rows = torch.cat([x.index_select(0, near), came, x.new_zeros(1, x.shape[1])])
    past = rows.index_select(0, places).unflatten(0, (-1, taps - 1))
    past = past.flip(1)  # [m, taps - 1, c], oldest first
    window = torch.cat([past, x.index_select(0, separate).unsqueeze(1)], 1)
    return out.index_copy_(0, separate, torch.einsum("mtc,ct->mc", window, weight))
