"""Run a command in the process of its test, without the seconds that a subprocess needs to
start.
"""

from __future__ import annotations

import contextlib
import io
import subprocess

from megacp.prepare import command as preprocess


def preprocessed(*args: object) -> subprocess.CompletedProcess[str]:
    """Return the exit status and the output of `megacp-preprocess`."""
    words, out, err = list(map(str, args)), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = preprocess.main(words)
        except SystemExit as end:  # argparse exits on bad flags
            status = int(end.code or 0)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())
