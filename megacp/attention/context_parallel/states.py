"""Layers with a state over a row that ranks share: a state follows the path of its tokens from rank
to rank.

What leaves a rank is, for each segment that another rank goes on from (an exit, see
`state_plan.py`), the affine map from the state that came to the rank (`A[K, K]` or a column, and
`B[K, V]` a head): all ranks gather all maps, and each applies those that precede its own tokens. In
backward the gradients of states come the other way by the transposed maps. So messages have the
same size for any length.

The short convolution before such a layer needs the few tokens before each segment, which their
ranks send.

Letters: `t` tokens of this rank, `C` of a chunk; a state is `[K, V]` a head, as in
`attention/ops/recurrence.py`.
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
    """A slice where they follow one another, whose rows are then no copy."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return to_device(numbers, device)


class StatePlan:
    """What one rank must know to move states over a row: its chunks, and what crosses ranks."""

    def __init__(self, plan: AttentionPlan, device: torch.device) -> None:
        self.crossing = crossing_plan(plan)
        chunks = chunks_of(plan)

        def levels(chosen: np.ndarray) -> list[Level]:
            return [
                Level(_rows(rows, device), _rows(before, device))
                for rows, before in chunks.levels(chosen)
            ]

        self.chunks = chunks.count
        self.size = chunks.size
        self.real = None if len(chunks.real) == len(plan.local) else to_device(chunks.real, device)
        self.place = to_device(chunks.place, device)
        # a segment is left behind its last chunk, and entered before its first
        own_exits = [chunks.last[number] for number in self.crossing.own_exits]
        own_entries = [chunks.first[number] for number in self.crossing.own_entries]
        self.levels = levels(np.ones(chunks.count, bool))
        self.to_exits = levels(chunks.leading_to(own_exits))
        self.from_entries = levels(chunks.behind(own_entries))
        self.own_exits = _rows(np.array(own_exits, np.int64), device)
        self.own_entries = _rows(np.array(own_entries, np.int64), device)


_states_on = once(StatePlan)


def _into_chunks(x: torch.Tensor, states: StatePlan) -> torch.Tensor:
    """`[t, ...] -> [chunks, C, ...]`, in the accumulation dtype."""
    out = x.new_zeros(states.chunks * states.size, *x.shape[1:], dtype=accumulation_dtype(x.dtype))
    out.index_copy_(
        0,
        states.place,
        (x if states.real is None else x.index_select(0, states.real)).to(out.dtype),
    )
    return out.unflatten(0, (states.chunks, states.size))


def _out_of_chunks(x: torch.Tensor, states: StatePlan, like: torch.Tensor) -> torch.Tensor:
    """`[chunks, C, ...] -> [t, ...]` in the dtype of `like[t]`; 0 for padding."""
    rows = x.flatten(0, 1).index_select(0, states.place).to(like.dtype)
    if states.real is None:
        return rows
    return rows.new_zeros(len(like), *rows.shape[1:]).index_copy_(0, states.real, rows)


def _start_gather(own: torch.Tensor, most: int, axis: Axis) -> Pending:
    """`own[n, ...]` of each rank, filled up to `[most, ...]`: comes as `[ranks * most, ...]`."""
    filled = own.new_zeros(most, *own.shape[1:])
    filled[: len(own)] = own
    return start_all_gather(filled, axis)


def arrived_states(
    crossing: CrossingPlan, maps: Sequence[torch.Tensor], of_turn: int
) -> list[torch.Tensor]:
    """The state `[heads, K, V]` at each of this rank's entries, of A and B side by side of every
    exit, `[heads, K, of_turn + V]`: `most_exits` from each rank.
    """
    behind = dict[int, torch.Tensor]()  # by exit, the state there
    for number in crossing.arriving:
        rank, own, entry = crossing.exits[number]
        one = maps[rank * crossing.most_exits + own]
        behind[number] = one[..., of_turn:]
        if entry >= 0:
            behind[number] = (
                turned(one[..., :of_turn], behind[crossing.entries[entry].other]) + behind[number]
            )
    return [behind[crossing.entries[number].other] for number in crossing.own(crossing.entries)]


def _owed_gradients(
    crossing: CrossingPlan, found: torch.Tensor, turns: torch.Tensor
) -> list[torch.Tensor]:
    """The gradient `[heads, K, V]` of the state behind each of this rank's exits.

    Of `found[ranks, most_entries, heads, K, V]`, what the tokens of each entry's rank make of the
    state there, and `turns[ranks, most_exits, heads, K, columns]`, A of every exit.
    """
    behind = {n: torch.zeros_like(found[0, 0]) for n in range(len(crossing.exits))}
    for number in crossing.owing:
        rank, place, exit_ = crossing.entries[number]
        behind[exit_] += found[rank, place]
        for n in (
            n for n, one in enumerate(crossing.exits) if one.other == number
        ):  # where the state leaves again
            behind[exit_] += turned_back(turns[rank, crossing.exits[n].number], behind[n])
    return [behind[number] for number in crossing.own(crossing.exits)]


class _Recurrence(torch.autograd.Function):
    """Saves the inputs and the state before each chunk; what the rule makes of a chunk is made
    again in backward.
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
            # the map to an exit is what becomes of a state of more columns, which are A's where
            # states come from afar
            nothing = add.new_zeros(*add.shape[:-1], width)
            joint = torch.cat([nothing, state], -1)
            joint[states.own_entries, ..., :width] = unchanged(turn, add.shape[-2])
            wide = torch.cat([nothing, add], -1)  # a chunk adds nothing to those columns
            ends = states.own_exits
            scan((turn, wide), states.to_exits, joint)
            # `joint` is before the last chunk of an exit, what leaves is behind it
            coming = _start_gather(
                turned(turn[ends], joint[ends]) + wide[ends], crossing.most_exits, axis
            )
        read, out = next(work)  # while the maps are under way
        if crossing.most_exits:
            gathered = coming.wait()  # [ranks * most_exits, heads, K, columns + V]
            turns = gathered.unflatten(0, (axis.size, -1))[..., :width].contiguous()
            if came := arrived_states(crossing, gathered.unbind(), width):
                state[states.own_entries] = torch.stack(came)
        scan((turn, add), states.levels, state)
        out = out + read @ state  # [chunks, heads, C, V]
        ctx.rule, ctx.states, ctx.axis = rule, states, axis
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
            after = torch.zeros_like(state)  # the gradient of the state behind each chunk
            if crossing.most_entries:
                # as if nothing came from elsewhere: what this rank's tokens alone make of the
                # states at its entries
                alone = scan_back(turn, reads, states.from_entries, torch.zeros_like(state))
                ends = states.own_entries
                own = turned_back(turn[ends], alone[ends]) + reads[ends]
                gathered = (
                    _start_gather(own, crossing.most_entries, axis)
                    .wait()
                    .unflatten(0, (axis.size, -1))
                )
                if owed := _owed_gradients(crossing, gathered, turns):
                    after[states.own_exits] = torch.stack(owed)
            scan_back(turn, reads, states.levels, after)
            # S' = A S + B and out = O + R S: of A, B, R and O in turn
            wanted = (
                turn_gradient(turn, after, state),
                after,
                dout @ state.transpose(-1, -2),
                dout,
            )
        found = torch.autograd.grad((turn, add, read, out), leaves, wanted)
        return (
            None,
            None,
            None,
            *(_out_of_chunks(d, states, x) for d, x in zip(found, inputs, strict=True)),
        )


def recur(rule: Rule, plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor) -> torch.Tensor:
    """What a rule reads, `[t, heads, V]`, for inputs `[t, ...]` of this rank's tokens; 0 for
    padding.

    Differentiable in the inputs. One message in forward and one in backward, where paths cross
    ranks.
    """
    states = _states_on(plan, inputs[0].device)
    large = max(x.numel() * x.element_size() for x in inputs) >= LARGE
    if states.crossing.most_exits or not large or is_compiled(inputs[0]):
        return _Recurrence.apply(rule, states, axis, *inputs)
    # heads know nothing of each other: on a CPU, key head by key head, what the rule makes on its
    # way stays small
    parts = math.gcd(*(x.shape[1] for x in inputs))
    chunks = zip(*(x.chunk(parts, 1) for x in inputs), strict=True)
    return torch.cat([_Recurrence.apply(rule, states, axis, *part) for part in chunks], 1)


def recur_by_heads(
    move: Callable[..., torch.Tensor], plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor
) -> torch.Tensor:
    """`move(plan, axis, *inputs)`, such as `recur` of a rule, by an all-to-all before and after:
    each rank has its part of the heads of all tokens.

    Heads of every input are to divide by the ranks. One message for each dtype, and one for the
    result.
    """
    n = axis.size
    t = len(inputs[0])
    arrival = plan.arrival(n, inputs[0].device)
    whole: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in inputs):
        places = [place for place, x in enumerate(inputs) if x.dtype == dtype]
        parts = [inputs[place].reshape(t, n, -1) for place in places]  # [t, ranks, its columns]
        # [n * t, columns]: all tokens, this rank's heads; rank by rank -> the order of the grouped
        # plan
        arrived = exchange(torch.cat(parts, 2).transpose(0, 1).flatten(0, 1), axis).index_select(
            0, arrival
        )
        for place, part in zip(places, arrived.split([x.shape[2] for x in parts], 1), strict=True):
            whole[place] = part.reshape(n * t, -1, *inputs[place].shape[2:])
    out = move(plan.grouped(n), single_axis("one"), *(whole[place] for place in range(len(inputs))))
    back = exchange(
        out.index_select(0, plan.departure(n, out.device)), axis
    )  # [n * t, heads / n, V]
    return back.unflatten(0, (n, t)).transpose(0, 1).flatten(1, 2)


@once
def _taps_on(plan: AttentionPlan, taps: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    apart = taps_plan(plan, taps)
    return tuple(to_device(x, device) for x in (apart.send, apart.near, apart.rows, apart.places))


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, plan: AttentionPlan, axis: Axis
) -> torch.Tensor:
    """`x[t, c]` with each channel convolved along the path by `weight[c, taps]`, the last tap for
    the token itself.

    Differentiable in both. Ranks exchange the few rows before each of their segments.
    """
    taps = weight.shape[1]
    apart = taps_plan(plan, taps)
    send, near, alone, places = _taps_on(plan, taps, x.device)
    out = causal_taps(x, weight)  # true of tokens whose rows before are those before on the path
    came = x[:0]
    if (
        apart.travels
    ):  # a rank that gets no rows has part in the message all the same, also in backward
        came = exchange(x.index_select(0, send), axis, apart.out_splits, apart.in_splits)
    elif not len(alone):
        return out
    rows = torch.cat([x.index_select(0, near), came, x.new_zeros(1, x.shape[1])])
    past = (
        rows.index_select(0, places).unflatten(0, (-1, taps - 1)).flip(1)
    )  # [m, taps - 1, c], oldest first
    window = torch.cat([past, x.index_select(0, alone).unsqueeze(1)], 1)
    return out.index_copy_(0, alone, torch.einsum("mtc,ct->mc", window, weight))
