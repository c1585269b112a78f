"""Training from a Python script or a notebook, with flags passed by name."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from megacp.engine.config.run import flag
from megacp.training.start.status import REFUSED, STOPPED

# Number of last output lines to search for an error message.
_LINES_OF_AN_ERROR = 50


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags for values by field name.

    List items follow the flag as separate words, and False gives the negated flag.
    """
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif isinstance(value, (list, tuple)):
            words += [flag(name), *map(str, value)]
        else:
            words.append(f"{flag(name)}={value}")
    return words


def train(values: Mapping[str, Any], nproc: int = 1) -> int:
    """Train from a script or a notebook; return 0, or 3 if the run stopped early after saving.

    `values` are flags by name: `{"data_path": "data/chat", "lr": 1e-5}`. Ranks run in separate
    processes, and this process prints their output. Ctrl-C saves and stops the run. Raise
    ValueError if the flags, files or data are wrong, and RuntimeError if the run fails.
    """
    command = [sys.executable, "-m", "megacp.train"]
    if nproc > 1:
        command += ["--nproc", str(nproc)]
    command += flags_of(values)
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    # Keep the end of the output, where the reason for a failure is printed.
    last = collections.deque[str](maxlen=_LINES_OF_AN_ERROR)
    with subprocess.Popen(command, stdout=pipe, stderr=joined, text=True, errors="replace") as run:
        # Ctrl-C ends the first pass; the second pass prints the run's remaining output.
        for _ in range(2):
            try:
                for line in run.stdout or ():
                    print(line, end="", flush=True)
                    last.append(line)
            except KeyboardInterrupt:
                run.terminate()
    # the reason follows the last "error: "
    said = "".join(last).rpartition("error: ")[2].strip()
    if run.returncode == REFUSED:
        raise ValueError(said)
    if run.returncode not in (0, STOPPED):
        raise RuntimeError(said)
    return run.returncode
