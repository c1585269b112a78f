"""Bytes of CPU memory that a piece of work holds at its highest, as torch's allocator reports them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from megacp.core.large_blocks import BLOCKS


def peak_bytes_of(work: Callable[[], object]) -> int:
    """Most bytes held at once over those held before; what operations make inside and let go counts too."""
    with (
        mock.patch.object(BLOCKS, "active", False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace,
    ):
        kept = work()
    del kept
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
