"""Standard output and standard error. The reader of either may close it during a run.

Messages may contain text from untrusted folders or files, so all text is escaped here. A line that
cannot be printed does not end the run: the first failure is reported elsewhere, and printing is
tried again with the next line.
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
    """Standard output that may fail.

    `lost` is called with the reason if a line cannot be printed, and not again until printing has
    worked.
    """

    def __init__(self, lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._broken = False

    def say(self, text: str) -> None:
        """Print a line immediately, escaped for a terminal."""
        try:
            print(for_terminal(text), flush=True)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if not self._broken:
                self._broken = True
                reason = getattr(error, "strerror", None) or str(error)
                self._lost(reason)
        else:
            self._broken = False

    def close(self) -> None:
        """Discard text that could not be printed.

        Otherwise, Python would try to print it again at exit, and exit with status 120.
        """
        if self._broken:
            to_nowhere(1, sys.stdout)


def warn(text: str) -> None:
    """Print a message on standard error, escaped for a terminal; ignore a closed stream."""
    try:
        print(for_terminal(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        to_nowhere(2, sys.stderr)


def say(text: str) -> None:
    """Print a whole result on standard output, with control characters escaped."""
    print(escaped(text), flush=True)


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """End the process silently if the reader of its output closes the pipe (`| head`).

    SIGPIPE then kills the process, so use this only in commands that just print.
    """
    # only the main thread may set signal handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        # flush here, because a closed pipe becomes an error again when the block ends
        if sys.stdout is not None:
            sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)


def to_nowhere(number: int, stream: object) -> None:
    """Redirect descriptor `number` to /dev/null, and flush the buffer of `stream` into it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # the stream may have been replaced, for example by a test
        if stream.fileno() != number:  # type: ignore[attr-defined]
            return
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
        stream.flush()  # type: ignore[attr-defined]
