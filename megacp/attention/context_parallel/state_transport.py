"""How the states of layers move over the ranks of a row: chosen once a layer, as `transport.py` is
for attention.
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
    """`recur`, by the fused kernel of the rule where there is one for the device and dtype of the
    first input.
    """
    fused = fused_mover(rule, inputs[0].device.type, inputs[0].dtype)
    return fused(plan, axis, *inputs) if fused else recur(rule, plan, axis, *inputs)


@dataclass(frozen=True)
class StateTransport:
    """Moves the states of one rule over the ranks of a row, and makes the convolution before
    them.
    """

    rule: Rule
    axis: Axis
    by_heads: bool
    """Whether a rank takes all tokens of some heads, by all-to-alls, instead of all heads of its
    tokens.
    """
    taps: int
    """Tokens of the convolution."""
    device: torch.device = torch.device("cpu")
    fused: Callable[..., torch.Tensor] | None = None
    """`fused_mover` of the rule."""

    def prepare(self, plan: AttentionPlan) -> None:
        """Make on the host what the layers will ask of a plan; called from the loader's threads."""
        taps_plan(plan, self.taps)
        whole = plan.grouped(self.axis.size) if self.by_heads else plan
        for to_exits in (False, True) if self.fused else ():
            segment_levels(whole, self.device, to_exits)
        if not self.fused:
            chunks_of(whole)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """`short_convolution` of the rank's channels."""
        return short_convolution(x, weight, plan, self.axis)

    def move(self, plan: AttentionPlan, *inputs: torch.Tensor) -> torch.Tensor:
        """What the rule reads, `[t, heads/tp, V]`, of inputs `[t, ...]` of this rank's tokens; 0
        for padding.
        """
        move = self.fused or functools.partial(recur, self.rule)
        if self.by_heads:
            return recur_by_heads(move, plan, self.axis, *inputs)
        return move(plan, self.axis, *inputs)
