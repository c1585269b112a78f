"""Named wall timers of a step.

Key property: a timer adds up until it is taken, and what makes the clock honest on an accelerator (waiting for its
queue) is a function given from outside. Rejected: calling the device's synchronise here, which would cost every CPU run
an import and every GPU run a stall it did not ask for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Timers:
    """Seconds by name; `synchronise` runs before every reading of the clock."""

    def __init__(
        self, synchronise: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronise = synchronise
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the body to `name`, also when the body raises."""
        begin = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - begin

    def seconds(self, name: str) -> float:
        """Time added to `name` since the last `take`; 0 when it did not run."""
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """All timers, and start again from zero."""
        taken, self._seconds = self._seconds, {}
        return taken

    def _now(self) -> float:
        self._synchronise()
        return self._clock()
