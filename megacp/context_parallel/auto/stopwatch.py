"""Measured seconds of core attention, to stand beside the predicted ones.

Key property: a wrapper around the transport that exists only where somebody asked for the comparison; outside of the
steps that are looked at it passes calls on. Rejected: timers inside every transport, which all runs would pay for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megacp.context_parallel.auto.predict import Seconds
from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.transport import Tensors, Transport
from megacp.distributed.clock import clock_of
from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis
from megacp.ops.kernel import QKV

Result = TypeVar("Result")


class Stopwatch:
    """Adds up the passes of a rank's transports while it is `running`, by the clock of the device."""

    def __init__(self, device: torch.device) -> None:
        self.running = False
        self._device = device
        self._clock = clock_of(device)
        self._passes: dict[str, list[tuple[Any, Any]]] = {"forward": [], "backward": []}

    def time(self, name: str, call: Callable[[], Result]) -> Result:
        """The result of `call`, its seconds added to `forward` or `backward`."""
        if not self.running:
            return call()
        begin = self._clock.mark()
        result = call()
        self._passes[name].append((begin, self._clock.mark()))
        return result

    def slowest(self, world: Axis) -> Seconds:
        """Of one layer and row: the mean of each pass on the rank where it is longest. Collective."""
        means = [
            sum(self._clock.seconds(*span) for span in found) / max(1, len(found)) for found in self._passes.values()
        ]
        worst = all_reduce(torch.tensor(means, dtype=torch.float64, device=self._device), world, "max")
        return Seconds(*worst.tolist())


class TimedTransport:
    """A transport whose passes a stopwatch takes."""

    def __init__(self, transport: Transport, watch: Stopwatch) -> None:
        self.name = transport.name
        self._transport, self._watch = transport, watch

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        return self._watch.time("forward", lambda: self._transport.forward(qkv, plan, scale))

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        return self._watch.time("backward", lambda: self._transport.backward(kept, dout, plan, scale))
