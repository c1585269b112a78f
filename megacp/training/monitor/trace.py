"""Trace of some steps on one rank, as Chrome JSON from torch's profiler (for Perfetto).

The profiler exists only during these steps. Failure to write a trace does not end the run.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from megacp.engine.timers import Timers
from megacp.storage.files import rename


class Trace:
    """One rank's trace of `steps`, written to `folder`, with the phases of `timers`.

    `mine` is whether this rank writes a trace.
    """

    def __init__(self, folder: Path, steps: range, rank: int, mine: bool, timers: Timers) -> None:
        self.folder = folder
        self.running = False
        """Whether the traced steps have begun but not ended; equal on all ranks."""
        self._steps = steps
        self._rank = rank
        self._mine = mine
        self._timers = timers
        self._profiler: Any = None
        self._first = 0

    def before(self, step: int) -> None:
        """Start the trace if `step` is the first traced step in this process."""
        if self.running or step not in self._steps:
            return
        self.running = True
        self._first = step
        if not self._mine:
            return
        # imported here because most runs do not need the profiler
        from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        self._profiler = profile(activities=wanted & set(supported_activities()))
        self._profiler.start()
        self._timers.annotate = record_function  # shows the phases in the trace

    def is_over(self, step: int) -> bool:
        """Return whether the traced steps end with this step."""
        return self.running and step == self._steps[-1]

    def finish(self, step: int) -> str:
        """Write the trace up to `step`; return an error message, empty on success."""
        self.running = False
        if self._profiler is None:
            return ""
        profiler = self._profiler
        self._profiler = None
        self._timers.annotate = None
        name = f"steps_{self._first}_{step}_rank_{self._rank}"
        # Use a new name, because torch would follow a link, or overwrite an earlier run's trace.
        written = self.folder / f".{name}.{secrets.token_hex(6)}.json"
        try:
            profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(os.fspath(written))
            if not written.is_file():  # torch does not raise; it only prints the reason
                raise OSError(f"{self.folder / name}.json was not written")
            rename(written, _free_path(self.folder, name))
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            return f"rank {self._rank}: {reason}"
        return ""


def _free_path(folder: Path, name: str) -> Path:
    """Return the first free path of NAME.json, NAME.2.json, NAME.3.json, ..."""
    path = folder / f"{name}.json"
    number = 1
    while os.path.lexists(path):  # a broken link also occupies the name
        number += 1
        path = folder / f"{name}.{number}.json"
    return path
