"""A trace of some steps of one rank: torch's profiler, written as chrome JSON (chrome://tracing,
Perfetto).

Outside of its steps no profiler exists, and a trace that cannot be written ends nothing.
"""

from __future__ import annotations

import itertools
import os
import secrets
from pathlib import Path
from typing import Any

from megacp.engine.timers import Timers
from megacp.storage.files import rename


class Trace:
    """The trace of this rank over `steps`, with the phases of `timers` as named ranges, below
    `folder`.

    `mine`: whether this rank writes one.
    """

    def __init__(self, folder: Path, steps: range, rank: int, mine: bool, timers: Timers) -> None:
        self.folder = folder
        self.running = False
        """Whether the range has begun and not ended, on this rank and all others."""
        self._steps, self._rank, self._mine, self._timers = steps, rank, mine, timers
        self._profiler: Any = None
        self._first = 0

    def before(self, step: int) -> None:
        """Begin where `step` is the first one of the range that this process makes."""
        if self.running or step not in self._steps:
            return
        self.running, self._first = True, step
        if not self._mine:
            return
        from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        self._profiler = profile(activities=wanted & set(supported_activities()))
        self._profiler.start()
        self._timers.annotate = record_function

    def is_over(self, step: int) -> bool:
        """Whether the range ends with this step."""
        return self.running and step == self._steps[-1]

    def finish(self, step: int) -> str:
        """Write what was traced up to `step`; why that was not possible, or nothing."""
        self.running = False
        if self._profiler is None:
            return ""
        profiler, self._profiler, self._timers.annotate = self._profiler, None, None
        name = f"steps_{self._first}_{step}_rank_{self._rank}"
        # torch would write through a link, and over the trace of an earlier run of these steps
        written = self.folder / f".{name}.{secrets.token_hex(6)}.json"
        try:
            profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(os.fspath(written))
            if not written.is_file():  # torch only prints why
                raise OSError(f"{self.folder / name}.json was not written")
            rename(written, _free_path(self.folder, name))
        except (OSError, RuntimeError) as error:
            return f"rank {self._rank}: {getattr(error, 'strerror', None) or error}"
        return ""


def _free_path(folder: Path, name: str) -> Path:
    """The first of NAME.json, NAME.2.json, NAME.3.json, ... that nothing has, not even a link."""
    names = itertools.chain(
        [f"{name}.json"], (f"{name}.{number}.json" for number in itertools.count(2))
    )
    return next(folder / one for one in names if not os.path.lexists(folder / one))
