"""Measured seconds of core attention, to stand beside the predicted ones.

Key property: a wrapper around the transport that exists only where somebody asked for the comparison; outside of the
steps that are looked at it passes calls on. Rejected: timers inside every transport, which all runs would pay for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.transport import Tensors, Transport
from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis
from megacp.ops.attention import QKV
from megacp.planner.attention_time import Seconds

Result = TypeVar("Result")


class Stopwatch:
    """Adds up the passes of a rank's transports while it is `running`; an accelerator's queue is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.running = False
        self._device = device
        self._passes: dict[str, list[float]] = {"forward": [], "backward": []}

    def time(self, name: str, call: Callable[[], Result]) -> Result:
        """The result of `call`, its seconds added to `forward` or `backward`."""
        if not self.running:
            return call()
        begin = self._now()
        result = call()
        self._passes[name].append(self._now() - begin)
        return result

    def slowest(self, world: Axis) -> Seconds:
        """Of one layer and row: the mean of each pass on the rank where it is longest. Collective."""
        means = [sum(found) / max(1, len(found)) for found in self._passes.values()]
        worst = all_reduce(torch.tensor(means, dtype=torch.float64, device=self._device), world, "max")
        return Seconds(*worst.tolist())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


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
