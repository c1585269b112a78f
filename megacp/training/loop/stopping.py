"""When a run stops before its last step: on a signal, or after --exit-duration.

A signal only sets a reason on its rank. The ranks exchange reasons before each step
(`agree_on_step`), so all of them stop at the same step.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

REASONS = {1: "stopped on request", 2: "stopped after --exit-duration"}
"""Why a run stops, by number; of several reasons the highest counts."""


class StopSignal:
    """Remembers SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP until the next step boundary, and when
    `minutes` are over.

    A second Ctrl-C ends the run at once; within two seconds it counts as the first, since a
    terminal and torchrun may both pass one on. A SIGHUP that the starter of the process has ignored
    (nohup) stays ignored.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.received = False
        self._deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._interrupted: float | None = None
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._remember) for number in numbers}

    @property
    def reason(self) -> int:
        """0 to go on, else a number of REASONS."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return 2
        return int(self.received)

    def release(self) -> None:
        """Restore the handlers of before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted is not None and now - self._interrupted > 2.0:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or now
