"""The gated delta rule by a kernel for whole sequences: flash-linear-attention's
`chunk_gated_delta_rule`.

Its sequences are this rank's segments. Those that branch from others of the rank follow them, level
by level. The map to an exit is the final state of K more columns: of no values, from the identity
where states come from afar. So autograd goes back through kernel, message and maps.

In the example of `state_plan.py`, rank 1 runs segment 1 from the state of its entry, and then
segment 2 from the end of segment 1: two levels of a sequence each. Its states stand at places 0
(zeros), 1 (the entry), 2 and 3 (the two ends). Rank 0 runs segments 0 and 3 in one call, from
places 0 and 1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.state_plan import crossing_plan
from megacp.attention.context_parallel.states import arrived_states
from megacp.attention.ops.device import lend_scratch, pinned, to_device
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.once import once
from megacp.attention.ops.recurrence import Rule, convolved_delta_rule, gated_delta_rule
from megacp.distributed.differentiable import gather_from
from megacp.distributed.grid import Axis

Recurrence = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""`chunk_gated_delta_rule`: sequences side by side in `[1, t, heads, ...]`, states `[sequences,
heads, K, V]`.
"""


def linear_attention_problem() -> str | None:
    """Why flash-linear-attention cannot be taken here; None when it can."""
    if find_spec("fla") is None or find_spec("triton") is None:
        return "flash-linear-attention is not installed (pip install 'megacp[fla]')"
    release = tuple(int(number) for number in re.findall(r"\d+", version("triton"))[:3])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if hopper and (3, 4) <= release < (3, 7, 1):  # it raises in the first backward
        return (
            "flash-linear-attention's gradients are wrong on Hopper by Triton "
            f"{version('triton')}: take 3.7.1"
        )
    return None


def flash_linear_attention() -> Recurrence | None:
    """`chunk_gated_delta_rule`, where the package can be taken. In float32 it multiplies in
    TF32.
    """
    if linear_attention_problem():
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


_CHUNK = 64
"""Tokens of a chunk of the package."""


class SegmentLevel(NamedTuple):
    """Segments of one call; all int64."""

    rows: torch.Tensor
    bounds: torch.Tensor
    chunks: torch.Tensor
    """`[n, 2]`: the segment of each chunk, and its number there. The package would copy them while
    the device waits.
    """
    before: torch.Tensor
    """Places of their first states; none where all are zeros."""


def chunk_places(lengths: np.ndarray) -> np.ndarray:
    """`SegmentLevel.chunks` of segments of these lengths."""
    counts = -(-lengths // _CHUNK)
    first = np.repeat(counts.cumsum() - counts, counts)  # of its segment
    return np.stack([np.repeat(np.arange(len(counts)), counts), np.arange(counts.sum()) - first], 1)


@dataclass(frozen=True)
class SegmentLevels:
    """A rank's segments, or those on whose states its exits depend. Places of states: 0 has zeros,
    then come the entries, then the ends of segments in the order of the levels.
    """

    levels: list[SegmentLevel]
    rows: torch.Tensor
    """Rows of all levels."""
    exits: torch.Tensor
    """Places of the states that leave."""
    to_exits: bool

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> SegmentLevels:
        """These with all tensors moved."""
        levels = [SegmentLevel(*map(move, level)) for level in self.levels]
        return SegmentLevels(levels, move(self.rows), move(self.exits), self.to_exits)

    def run(
        self, kernel: Recurrence, states: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the tokens of `rows` read, and the states of all places that a later level or an
        exit goes on from.
        """
        parts, device = [inputs[2][:0]], states.device  # of v: what a rank without segments reads
        lend_scratch(device)
        for number, (rows, bounds, chunks, before) in enumerate(self.levels, 1):
            out, final = kernel(
                *(x.index_select(0, rows).unsqueeze(0) for x in inputs),
                initial_state=states.index_select(0, before) if len(before) else None,
                output_final_state=self.to_exits or number < len(self.levels),
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=bounds,
                chunk_indices=chunks,
            )
            if out.grad_fn is not None:  # its backward runs in a thread of its own
                out.grad_fn.register_prehook(lambda grads: lend_scratch(device))
            parts.append(out.squeeze(0))
            # the ends of a level stand behind those of the levels before, as `last` counts them
            states = states if final is None else torch.cat([states, final])
        return torch.cat(parts), states


@once
def segment_levels(plan: AttentionPlan, device: torch.device, to_exits: bool) -> SegmentLevels:
    """The levels of a plan in memory that `device` copies from; also called from the loader's
    threads.
    """
    crossing = crossing_plan(plan)
    segments = crossing.segments
    row = np.zeros(len(plan.metadata), np.int64)  # [T]: which row here a token is
    row[plan.local] = np.arange(len(plan.local))
    first = {
        n: place for place, n in enumerate(crossing.own_entries, 1)
    }  # by segment, the place of its entry
    chosen = (
        set(crossing.own_exits)
        if to_exits
        else {n for n, s in enumerate(segments) if s.rank == plan.cp_rank}
    )
    for n in range(len(segments))[::-1]:  # what is gone on from is earlier
        if n in chosen and n not in first and segments[n].before >= 0:
            chosen.add(segments[n].before)

    depth = dict[int, int]()  # by segment, how many here must be run before it
    for n in sorted(chosen):
        depth[n] = 1 + depth.get(segments[n].before, -1)
    last = dict[int, int]()  # by segment, the place of the state at its end
    levels = list[SegmentLevel]()
    for level in range(1 + max(depth.values(), default=-1)):
        now = [n for n in depth if depth[n] == level]
        # the state of its entry, of the end of the segment before it, or zeros
        before = np.array([first.get(n) or last.get(segments[n].before, 0) for n in now])
        last |= {n: place for place, n in enumerate(now, 1 + len(first) + len(last))}
        lengths = np.array([len(segments[n].tokens) for n in now])
        rows, bounds = (
            row[np.concatenate([segments[n].tokens for n in now])],
            np.append(0, lengths.cumsum()),
        )
        arrays = rows, bounds, chunk_places(lengths), before if before.any() else before[:0]
        levels.append(SegmentLevel(*map(torch.from_numpy, arrays)))
    everything = torch.cat([torch.zeros(0, dtype=torch.int64), *(level.rows for level in levels)])
    exits = torch.tensor([last[n] for n in crossing.own_exits], dtype=torch.int64)
    return SegmentLevels(levels, everything, exits, to_exits).moved(lambda x: pinned(x, device))


@once
def _levels_on(plan: AttentionPlan, device: torch.device, to_exits: bool) -> SegmentLevels:
    """The same on the device, with the first layer that asks."""
    return segment_levels(plan, device, to_exits).moved(lambda x: to_device(x, device))


def fused_recur(
    kernel: Recurrence, plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor
) -> torch.Tensor:
    """`recur(gated_delta_rule, plan, axis, *inputs)` by a kernel.

    In backward the gradients of all maps are summed over ranks, a message of the size of the
    forward's.
    """
    crossing = crossing_plan(plan)
    device = inputs[0].device
    every, to_exits = (_levels_on(plan, device, part) for part in (False, True))
    q, k, v, *rates = inputs
    keys = k.shape[2]
    heads, values = v.shape[1:]
    # of no elements: by it every rank has part in the backward of its inputs and of the message,
    # needed or not
    tie = torch.cat([x[:0].reshape(0, heads, values).to(v.dtype) for x in inputs])
    first = v.new_zeros(1, heads, keys, values, dtype=accumulation_dtype(v.dtype))  # place 0
    if crossing.most_exits:
        # the first K columns carry A, from the identity at an entry; the rest B, from zeros as if
        # nothing had come
        joint = first.new_zeros(1 + len(crossing.own_entries), heads, keys, keys + values)
        joint[1:, ..., :keys] = torch.eye(keys, dtype=joint.dtype, device=device)
        _, states = to_exits.run(
            kernel, joint, q, k, F.pad(v, (keys, 0)), *rates
        )  # values of 0 add nothing to A
        own = states.index_select(0, to_exits.exits)
        # ranks with fewer exits than the most send zeros: a gather is of equal parts
        more = joint.new_zeros(crossing.most_exits - len(own), *own.shape[1:])
        maps = gather_from(
            torch.cat([own, tie.reshape(0, *own.shape[1:]).to(own.dtype), more]), axis
        )
        first = torch.cat(
            [
                first,
                *(state.unsqueeze(0) for state in arrived_states(crossing, maps.unbind(), keys)),
            ]
        )
        tie = maps[:0].reshape(tie.shape).to(tie.dtype)
    read, _ = every.run(kernel, first, q, k, v, *rates)
    # padding, which is in no segment, stays 0
    return torch.zeros_like(v).index_copy(0, every.rows, torch.cat([read, tie]))


def fused_convolved(
    kernel: Recurrence,
    plan: AttentionPlan,
    axis: Axis,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rates: Any,
) -> torch.Tensor:
    """`recur(convolved_delta_rule, ...)` by a kernel."""
    return fused_recur(kernel, plan, axis, F.silu(q), F.silu(k), F.silu(v), *rates)


FUSED: dict[tuple[Rule, str, torch.dtype], Callable[..., torch.Tensor]] = {
    (gated_delta_rule, "cuda", torch.bfloat16): fused_recur,
    (convolved_delta_rule, "cuda", torch.bfloat16): fused_convolved,
}
"""`(kernel, plan, axis, *inputs)` in the place of `recur` of a rule, on a type of device, for a
dtype.
"""


def fused_mover(
    rule: Rule, device_type: str, dtype: torch.dtype
) -> Callable[..., torch.Tensor] | None:
    """`(plan, axis, *inputs)` by a kernel; None where no row has one, or its package is not
    installed.
    """
    function = FUSED.get((rule, device_type, dtype))
    kernel = function and flash_linear_attention()
    return functools.partial(function, kernel) if function and kernel else None
