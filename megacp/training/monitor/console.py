"""Where messages leave the program: standard output and standard error, which may go away under a
run.

Text of a foreign folder or file may be part of any message, so all are escaped here. A line that
cannot be printed ends nothing. The first one of a row is reported on another channel; the next is
tried.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from megacp.storage.wording import escaped, for_terminal


class Console:
    """Prints lines on standard output. `lost` is called with the reason when a line cannot be
    printed, once a row.
    """

    def __init__(self, lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._broken = False

    def say(self, text: str) -> None:
        """Print a line at once, as a terminal may have it."""
        try:
            print(for_terminal(text), flush=True)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if not self._broken:
                self._broken = True
                self._lost(getattr(error, "strerror", None) or str(error))
        else:
            self._broken = False

    def close(self) -> None:
        """Forget what could not be printed: Python would try once more at exit and end with status
        120.
        """
        if self._broken:
            to_nowhere(1, sys.stdout)


def warn(text: str) -> None:
    """Print a message on standard error, as a terminal may have it; where that is not possible,
    nothing happens.
    """
    try:
        print(for_terminal(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        to_nowhere(2, sys.stderr)


def say(text: str) -> None:
    """Print a result on standard output: whole, but with its control characters escaped."""
    print(escaped(text), flush=True)


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Let a reader that closes the pipe (`| head`) end the process in silence, by SIGPIPE: for what
    only prints.
    """
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # only it may set what a signal does
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)


def to_nowhere(number: int, stream: object) -> None:
    """Let the stream of descriptor `number` write to nothing, with what it still holds."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stream.fileno() != number:  # type: ignore[attr-defined]  # somebody has put another stream in its place
            return
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
        stream.flush()  # type: ignore[attr-defined]  # likewise
