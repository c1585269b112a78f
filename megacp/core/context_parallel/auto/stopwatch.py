"""Measured seconds of core attention, to stand beside the predicted ones.

Key property: a wrapper around a transport, which exists where a run wants the comparison. Outside of the steps that are
measured it passes calls on. Rejected: timers inside every transport, which all runs would pay for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megacp.core.context_parallel.auto.predict import PassSeconds
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.sizes import AttentionSizes
from megacp.core.context_parallel.transport import Attend, Tensors, Transport
from megacp.core.distributed.clock import clock_of
from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.grid import Axis
from megacp.core.ops.kernel import QKV

_Result = TypeVar("_Result")


class Stopwatch:
    """A `Transport` that adds up the passes of another while it is `running`, by the clock of the device."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.name = transport.name
        self.running = False
        self._transport, self._device, self._clock = transport, device, clock_of(device)
        self._passes: tuple[list[Any], list[Any]] = ([], [])  # (begin, end) of every forward, of every backward

    @property
    def attend(self) -> Attend | None:
        """See `Transport`; while it is running the passes are apart, which costs such a transport a second forward."""
        return None if self.running else getattr(self._transport, "attend", None)

    def prepare(self, plan: AttentionPlan, sizes: AttentionSizes) -> None:
        """See `Transport.prepare`."""
        self._transport.prepare(plan, sizes)

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        return self._time(0, lambda: self._transport.forward(qkv, plan, scale))

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        return self._time(1, lambda: self._transport.backward(kept, dout, plan, scale))

    def _time(self, which: int, call: Callable[[], _Result]) -> _Result:
        if not self.running:
            return call()
        begin = self._clock.mark()
        result = call()
        self._passes[which].append((begin, self._clock.mark()))
        return result

    def forget(self) -> None:
        """Start anew, without the passes so far, in which kernels may have been compiled."""
        self._passes = ([], [])

    def slowest(self, world: Axis) -> PassSeconds:
        """Of one layer and row: the mean of each pass on the rank where it is longest. Collective."""
        means = [sum(self._clock.seconds(*span) for span in spans) / max(1, len(spans)) for spans in self._passes]
        worst = all_reduce(torch.tensor(means, dtype=torch.float64, device=self._device), world, "max")
        return PassSeconds(*worst.tolist())
