"""How long a run still takes: the median time from step to step, times the steps that are left.

Key property: only steps of this process count, so the estimate is right after a resume. A save or a validation between
two steps moves the median little.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

_WINDOW = 64
"""Steps of the median."""


class Pace:
    """The running median of the seconds between calls of `left`; the first one counts from here."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._spans: deque[float] = deque(maxlen=_WINDOW)

    def left(self, steps: int) -> float:
        """Note that a step has ended; seconds that `steps` more take."""
        now = time.monotonic()
        self._spans.append(now - self._last)
        self._last = now
        return statistics.median(self._spans) * steps
