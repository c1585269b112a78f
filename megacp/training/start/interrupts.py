"""Handling of Ctrl-C before a run can save: the command prints `interrupted` and exits with 130.

This module is imported before torch, which takes seconds to import, so its own imports are fast.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

# Exit status of a command that Ctrl-C ends before there is anything to save.
INTERRUPTED = 128 + signal.SIGINT


def leave_at_ctrl_c() -> None:
    """Make Ctrl-C end this process immediately, unless its parent process disabled Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)  # the module being imported might catch an exception


def handles(process: int, number: int) -> bool:
    """Return whether a process handles a signal that would otherwise end it.

    Return True on systems without /proc.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return True
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    # SigCgt is a hexadecimal mask: bit n - 1 is set if signal n has a handler.
    return bool(int(caught, 16) >> (number - 1) & 1)
