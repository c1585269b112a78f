"""Ctrl-C before a command can save anything: it prints one word and exits with status 130.

This module is imported before torch, which takes seconds, so it only has fast imports.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

# Exit status of a command that Ctrl-C ended before there was anything to save.
INTERRUPTED = 128 + signal.SIGINT


def leave_at_ctrl_c() -> None:
    """Let Ctrl-C end this process at once, unless its starter made it ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)  # an exception could be swallowed by whatever is being imported


def handles(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal that would otherwise end it.

    Return True on systems without /proc.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return True
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    # SigCgt is a mask in hexadecimal digits: bit n - 1 is set if signal n has a handler.
    return bool(int(caught, 16) >> (number - 1) & 1)
