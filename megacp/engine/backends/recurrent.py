"""Transports of recurrent states for all layers of a run, and the choice of their kernel."""

from __future__ import annotations

from megacp.attention.context_parallel.fused_states import (
    FUSED,
    fused_mover,
    linear_attention_problem,
)
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.state_transport import StateTransport
from megacp.attention.ops.recurrence import Rule
from megacp.distributed.grid import Axis
from megacp.distributed.heap import keep_in_heap
from megacp.engine.backends.notes import Notes
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.attention import transport_of
from megacp.engine.tensor_parallel.parameters import LinearOptions

STATE_TEMPORARIES = 32 << 20
"""Maximum size in bytes of temporaries that stay in a CPU's heap; glibc accepts no larger value."""


class RecurrentStates:
    """Transports of all recurrent layers between the ranks that share a row."""

    def __init__(self, config: RunConfig, row_axis: Axis, options: LinearOptions) -> None:
        keys = config.model.linear_num_key_heads // options.tp.size
        ranks = row_axis.size
        self._axis = row_axis
        self._device = options.device
        self._dtype = options.dtype
        # exchange heads instead of states if the key heads can be divided evenly among the ranks
        self._by_heads = transport_of(config).whole_row and ranks > 1 and keys % ranks == 0
        self._taps = config.model.linear_conv_kernel_dim
        self._transports: list[StateTransport] = []

    def transport(self, rule: Rule, notes: Notes) -> StateTransport:
        """Return a transport for a layer with this rule, and log which kernel it uses."""
        kind = self._device.type
        # the operating system would zero large temporaries from mmap at every allocation
        if kind == "cpu":
            keep_in_heap(STATE_TEMPORARIES)
        # None if flash-linear-attention has no kernel for this case or is not installed
        fused = fused_mover(rule, kind, self._dtype)
        if fused:
            notes.tell("states: kernels of flash-linear-attention")
        elif (rule, kind, self._dtype) in FUSED:
            notes.tell(f"states: plain torch, because {linear_attention_problem()}")
        found = StateTransport(rule, self._axis, self._by_heads, self._taps, self._device, fused)
        self._transports.append(found)
        return found

    def prepare(self, plan: AttentionPlan) -> None:
        """Precompute the host data that recurrent layers need for a plan."""
        # all layers need the same data, so one of them is enough
        for states in self._transports[:1]:
            states.prepare(plan)
