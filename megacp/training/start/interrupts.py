"""What Ctrl-C does to a command before it can save anything: one word and status 130, no traceback.

This module is imported before torch, whose import takes seconds, so it imports nothing that takes
time.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a command that Ctrl-C has ended before there was anything to save."""


def leave_at_ctrl_c() -> None:
    """Let Ctrl-C end this process at once. One that its starter has told to ignore it still
    does.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)  # an exception could be swallowed by whatever is being imported


def handles(process: int, number: int) -> bool:
    """Whether a process has a handler for this signal, which would end it otherwise; True where
    Linux is not asked.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return True
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)
