"""The gated delta rule with flash-linear-attention's kernel `chunk_gated_delta_rule`.

The kernel processes whole sequences, here the segments of this rank. Segments that continue other
segments of the rank are processed after them, level by level. The map to an exit is the final state
of a kernel call with K additional columns. They have no values, and start from the identity where
states come from other ranks. Autograd therefore differentiates the kernel, the message and the
maps.

In the example of `state_plan.py`, rank 1 processes segment 1 from the state of its entry and then
segment 2 from the end of segment 1: two levels with one sequence each. Its states have places 0
(zeros), 1 (the entry), and 2 and 3 (the two ends). Rank 0 processes segments 0 and 3 in one call,
from places 0 and 1.
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
"""`chunk_gated_delta_rule`: sequences are concatenated in `[1, t, heads, ...]`, states are
`[sequences, heads, K, V]`.
"""


def linear_attention_problem() -> str | None:
    """Return the reason why flash-linear-attention cannot be used here, or None."""
    if find_spec("fla") is None or find_spec("triton") is None:
        return "flash-linear-attention is not installed (pip install -e '.[fla]')"
    release = tuple(int(number) for number in re.findall(r"\d+", version("triton"))[:3])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    # with these releases of Triton, the package raises an error in the first backward pass
    if hopper and (3, 4) <= release < (3, 7, 1):
        return (
            "flash-linear-attention computes wrong gradients on Hopper with Triton "
            f"{version('triton')}: use Triton 3.7.1 or newer"
        )
    return None


def flash_linear_attention() -> Recurrence | None:
    """Return `chunk_gated_delta_rule`, or None if it cannot be used.

    With float32 inputs it multiplies in TF32.
    """
    if linear_attention_problem():
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


_CHUNK = 64
"""Tokens per chunk in flash-linear-attention."""


class SegmentLevel(NamedTuple):
    """Segments for one kernel call; all tensors are int64."""

    rows: torch.Tensor
    bounds: torch.Tensor
    chunks: torch.Tensor
    """`[n, 2]`: the segment of each chunk, and its number within the segment. Otherwise, the
    package would compute them and block the device.
    """
    before: torch.Tensor
    """Places of the initial states; empty if all of them are zeros."""


def chunk_places(lengths: np.ndarray) -> np.ndarray:
    """Return `SegmentLevel.chunks` for segments of these lengths."""
    counts = -(-lengths // _CHUNK)
    segment = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(counts.cumsum() - counts, counts)  # first chunk of the same segment
    return np.stack([segment, np.arange(counts.sum()) - first], 1)


@dataclass(frozen=True)
class SegmentLevels:
    """A rank's segments by level, or only the segments that its exits depend on.

    States are numbered by place: 0 is zeros, then come the entries, then the ends of segments in
    the order of the levels.
    """

    levels: list[SegmentLevel]
    rows: torch.Tensor
    """Rows of all levels."""
    exits: torch.Tensor
    """Places of the states that leave the rank."""
    to_exits: bool
    """Whether these are only the segments that exits depend on."""

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> SegmentLevels:
        """Return a copy with `move` applied to all tensors."""
        levels = [SegmentLevel(*map(move, level)) for level in self.levels]
        return SegmentLevels(levels, move(self.rows), move(self.exits), self.to_exits)

    def run(
        self, kernel: Recurrence, states: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs for the tokens in `rows`, and the states.

        The states include all places that a later level or an exit continues.
        """
        parts = [inputs[2][:0]]  # an empty v, the output of a rank without segments
        device = states.device
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
            # the backward pass runs in a separate thread, which needs scratch memory too
            if out.grad_fn is not None:
                out.grad_fn.register_prehook(lambda grads: lend_scratch(device))
            parts.append(out.squeeze(0))
            # places of ends follow the order of the levels, as in `segment_levels`
            if final is not None:
                states = torch.cat([states, final])
        return torch.cat(parts), states


@once
def segment_levels(plan: AttentionPlan, device: torch.device, to_exits: bool) -> SegmentLevels:
    """Return the levels of a plan in memory from which `device` can copy; runs in loader threads.

    With `to_exits`, include only the segments that this rank's exits depend on.
    """
    crossing = crossing_plan(plan)
    segments = crossing.segments
    row = np.zeros(len(plan.metadata), np.int64)  # [T], local row of each token
    row[plan.local] = np.arange(len(plan.local))
    entry_place = {n: place for place, n in enumerate(crossing.own_entries, 1)}
    if to_exits:
        chosen = set(crossing.own_exits)
    else:
        chosen = {n for n, s in enumerate(segments) if s.rank == plan.cp_rank}
    # add the segments that chosen segments continue; these come earlier, so go backwards
    for n in range(len(segments))[::-1]:
        if n in chosen and n not in entry_place and segments[n].before >= 0:
            chosen.add(segments[n].before)

    depth = dict[int, int]()  # level of each segment: segments of this rank before it on its path
    for n in sorted(chosen):
        depth[n] = 1 + depth.get(segments[n].before, -1)
    end_place = dict[int, int]()  # place of the state at the end of each segment
    levels = list[SegmentLevel]()
    for level in range(1 + max(depth.values(), default=-1)):
        now = [n for n in depth if depth[n] == level]
        # initial state: the entry, the end of the previous segment, or zeros
        before = np.array([entry_place.get(n) or end_place.get(segments[n].before, 0) for n in now])
        if not before.any():
            before = before[:0]
        first_place = 1 + len(entry_place) + len(end_place)
        end_place |= {n: place for place, n in enumerate(now, first_place)}
        lengths = np.array([len(segments[n].tokens) for n in now])
        rows = row[np.concatenate([segments[n].tokens for n in now])]
        arrays = (rows, np.append(0, lengths.cumsum()), chunk_places(lengths), before)
        levels.append(SegmentLevel(*map(torch.from_numpy, arrays)))
    everything = torch.cat([torch.zeros(0, dtype=torch.int64), *(level.rows for level in levels)])
    exits = torch.tensor([end_place[n] for n in crossing.own_exits], dtype=torch.int64)
    return SegmentLevels(levels, everything, exits, to_exits).moved(lambda x: pinned(x, device))


@once
def _levels_on(plan: AttentionPlan, device: torch.device, to_exits: bool) -> SegmentLevels:
    """Return `segment_levels` on the device; the first layer that needs them copies them."""
    return segment_levels(plan, device, to_exits).moved(lambda x: to_device(x, device))


def fused_recur(
    kernel: Recurrence, plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor
) -> torch.Tensor:
    """Return `recur(gated_delta_rule, plan, axis, *inputs)`, computed with a kernel.

    The backward pass sums the gradients of all maps across ranks in one message, which is as large
    as the message of the forward pass.
    """
    crossing = crossing_plan(plan)
    device = inputs[0].device
    every = _levels_on(plan, device, False)
    to_exits = _levels_on(plan, device, True)
    q, k, v, *rates = inputs
    keys = k.shape[2]
    heads, values = v.shape[1:]
    # an empty tensor that depends on all inputs: every rank then takes part in the backward pass of
    # its inputs and of the message, even if its gradient is not needed
    tie = torch.cat([x[:0].reshape(0, heads, values).to(v.dtype) for x in inputs])
    first = v.new_zeros(1, heads, keys, values, dtype=accumulation_dtype(v.dtype))  # place 0
    if crossing.most_exits:
        # the first K columns are A and start from the identity at an entry; the remaining columns
        # are B and start from zeros, as if no state had arrived
        joint = first.new_zeros(1 + len(crossing.own_entries), heads, keys, keys + values)
        joint[1:, ..., :keys] = torch.eye(keys, dtype=joint.dtype, device=device)
        # values of 0 add nothing to A
        _, states = to_exits.run(kernel, joint, q, k, F.pad(v, (keys, 0)), *rates)
        own = states.index_select(0, to_exits.exits)
        # a gather needs equal parts: ranks with fewer exits also send zeros
        more = joint.new_zeros(crossing.most_exits - len(own), *own.shape[1:])
        own_tie = tie.reshape(0, *own.shape[1:]).to(own.dtype)
        maps = gather_from(torch.cat([own, own_tie, more]), axis)
        came = arrived_states(crossing, maps.unbind(), keys)
        first = torch.cat([first, *(state.unsqueeze(0) for state in came)])
        tie = maps[:0].reshape(tie.shape).to(tie.dtype)
    read, _ = every.run(kernel, first, q, k, v, *rates)
    # padding is in no segment and stays 0
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
    """Return `recur(convolved_delta_rule, ...)`, computed with a kernel."""
    return fused_recur(kernel, plan, axis, F.silu(q), F.silu(k), F.silu(v), *rates)


FUSED: dict[tuple[Rule, str, torch.dtype], Callable[..., torch.Tensor]] = {
    (gated_delta_rule, "cuda", torch.bfloat16): fused_recur,
    (convolved_delta_rule, "cuda", torch.bfloat16): fused_convolved,
}
"""Replacements for `recur`, by rule, device type and dtype; the first argument is the kernel."""


def fused_mover(
    rule: Rule, device_type: str, dtype: torch.dtype
) -> Callable[..., torch.Tensor] | None:
    """Return a function `(plan, axis, *inputs)` that computes the rule with a kernel.

    Return None if there is no kernel for the rule, or if its package is not installed.
    """
    function = FUSED.get((rule, device_type, dtype))
    kernel = function and flash_linear_attention()
    return functools.partial(function, kernel) if function and kernel else None
