"""The transport of recurrent states across the ranks of a row; layers choose it once, like an
attention transport.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacp.attention.context_parallel.fused_states import fused_mover, segment_levels
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.state_plan import chunks_of, taps_plan
from megacp.attention.context_parallel.states import recur, recur_by_heads, short_convolution
from megacp.attention.ops.recurrence import Rule
from megacp.distributed.grid import Axis


def move_states(rule: Rule, plan: AttentionPlan, axis: Axis, *inputs: torch.Tensor) -> torch.Tensor:
    """Return `recur(rule, plan, axis, *inputs)`.

    The fused kernel of the rule computes it, if one exists for the device and dtype of the first
    input.
    """
    fused = fused_mover(rule, inputs[0].device.type, inputs[0].dtype)
    return fused(plan, axis, *inputs) if fused else recur(rule, plan, axis, *inputs)


@dataclass(frozen=True)
class StateTransport:
    """Transport of one rule's states across the ranks of a row, with the rule's convolution."""

    rule: Rule
    axis: Axis
    by_heads: bool
    """Whether all-to-alls give each rank all tokens of some heads, instead of all heads of its own
    tokens.
    """
    taps: int
    """Length of the convolution, in tokens."""
    device: torch.device = torch.device("cpu")
    fused: Callable[..., torch.Tensor] | None = None
    """`fused_mover` of the rule, if there is a kernel."""

    def prepare(self, plan: AttentionPlan) -> None:
        """Build, on the host, the data that layers need for a plan; runs in loader threads."""
        taps_plan(plan, self.taps)
        whole = plan.grouped(self.axis.size) if self.by_heads else plan
        if self.fused:  # outputs, then maps to exits
            segment_levels(whole, self.device, False)
            segment_levels(whole, self.device, True)
        else:
            chunks_of(whole)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Return the `short_convolution` of this rank's channels."""
        return short_convolution(x, weight, plan, self.axis)

    def move(self, plan: AttentionPlan, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the rule, `[t, heads/tp, V]`, with 0 for padding.

        The inputs are `[t, ...]` of this rank's tokens.
        """
        move = self.fused or functools.partial(recur, self.rule)
        if self.by_heads:
            return recur_by_heads(move, plan, self.axis, *inputs)
        return move(plan, self.axis, *inputs)
