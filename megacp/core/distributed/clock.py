"""The clock of a device: the host's for a CPU, events in the queue of a GPU.

Key property: reading a GPU's clock only queues an event. Seconds are asked for at the end of a step, which has waited
for the GPU anyway. Rejected: a synchronisation before every reading, which removes the overlap that is measured.
"""

from __future__ import annotations

from typing import Any

import torch

from megacp.core.monitor.timers import Clock, WallClock


class EventClock:
    """See `Clock`: marks are CUDA events in the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """An event that is over when all that was queued before it is."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds of the GPU between two events; waits for the second."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0  # it counts milliseconds


def clock_of(device: torch.device) -> Clock:
    """The clock whose seconds are those of this device's work."""
    return EventClock(device) if device.type == "cuda" else WallClock()
