"""Stopping of a run before its last step, on a signal or after --exit-duration.

A signal only sets a reason on its own rank. Ranks exchange reasons before each step
(`agree_on_step`), so all of them stop at the same step.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

REASONS = {1: "stopped on request", 2: "stopped after --exit-duration"}
"""Reasons to stop, by number. If ranks have different reasons, the highest number counts."""


class StopSignal:
    """Record of SIGTERM, SIGINT (Ctrl-C), SIGUSR1, SIGHUP, or a timeout after `minutes`.

    The run reads it before the next step. A second Ctrl-C ends the run immediately; however, within
    two seconds it counts as the same Ctrl-C, because the terminal and torchrun may both deliver it.
    If the parent process ignores SIGHUP (nohup), the run ignores it too.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.received = False
        self._deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._interrupted: float | None = None
        # schedulers send SIGTERM or SIGUSR1 some time before they kill a job
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._remember) for number in numbers}

    @property
    def reason(self) -> int:
        """Number in REASONS of the reason to stop; 0 to continue."""
        # clocks may differ between ranks, which therefore agree before the next step
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return 2
        return int(self.received)

    def release(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # a handler must not log or communicate: it may interrupt any other code
        self.received = True
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted is not None and now - self._interrupted > 2.0:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or now  # the time of the first Ctrl-C
