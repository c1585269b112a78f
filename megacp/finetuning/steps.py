"""Run the commands of a fine-tuning, and show their output."""

from __future__ import annotations

import collections
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megacp.storage.wording import for_terminal

# A line of a training step, as `step_line` in megacp.training.monitor.log writes it.
STEP = re.compile(r"step +(\d+)/(\d+) .*?loss (\S+) .*left (\S+)$")
# Number of step lines to print if the output is not a terminal.
_PRINTED_STEPS = 10
# Last lines of a command's output in which its error message is looked for.
_LINES_OF_AN_ERROR = 50


@dataclass(frozen=True)
class Command:
    """One of the three commands that `finetune` runs."""

    program: str
    """Name of the installed program, such as megacp-train."""
    module: str
    """Python module of the program."""
    words: tuple[str, ...]

    def shown(self, columns: int) -> str:
        """Return the command for a shell, wrapped at `columns`, with one flag per group."""
        lines = []
        line = self.program
        for group in _grouped(self.words):
            # Two characters are kept free for the backslash at the end of the line.
            if len(line) + 1 + len(group) > columns - 2:
                lines.append(line)
                line = f"    {group}"
            else:
                line = f"{line} {group}"
        return " \\\n".join([*lines, line])


def _grouped(words: Sequence[str]) -> list[str]:
    """Return each flag together with its values, quoted for a shell."""
    groups: list[str] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append(shlex.quote(word))
        else:
            groups[-1] += f" {shlex.quote(word)}"
    return groups


class Failure(Exception):
    """A command failed; the message is its error, and `status` its exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def run_command(command: Command) -> int:
    """Run a command, print its output, and return its exit status.

    Lines of training steps become a progress bar in a terminal, and every tenth part of the run a
    line elsewhere. Ctrl-C also reaches the command, which stops in an orderly way, and is then
    raised here.
    """
    words = [sys.executable, "-m", command.module, *command.words]
    last = collections.deque[str](maxlen=_LINES_OF_AN_ERROR)
    bar = ProgressBar()
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    interrupted = False
    with subprocess.Popen(
        words, stdout=pipe, stderr=joined, text=True, errors="replace"
    ) as process:
        # Ctrl-C ends the first pass; the second one prints the remaining output of the command.
        for _ in range(2):
            try:
                for line in process.stdout or ():
                    last.append(line)
                    bar.line(line.rstrip("\n"))
            except KeyboardInterrupt:
                interrupted = True
    bar.close()
    # The command has stopped by itself, since Ctrl-C reaches every process of the terminal.
    if interrupted:
        raise KeyboardInterrupt
    status = process.returncode
    if status not in (0, _STOPPED):
        message = "".join(last).rpartition("error: ")[2].strip()
        raise Failure(status, message)
    return status


# Exit status of a training run that stopped early and saved.
_STOPPED = 3


class ProgressBar:
    """Prints the lines of a command, and its training steps as a bar in a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open = False
        """Whether the cursor is at the end of a bar."""

    def line(self, text: str) -> None:
        """Print one line of output."""
        found = STEP.match(text)
        if found is None:
            self.close()
            print(for_terminal(text), flush=True)
            return
        step = int(found[1])
        total = int(found[2])
        # In a terminal, each bar replaces the last one.
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            print(
                f"\r\x1b[K{progress_bar(step, total, found[3], found[4], columns)}",
                end="",
                flush=True,
            )
            self._open = True
        elif step in (1, total) or step * _PRINTED_STEPS // total > (step - 1) * 10 // total:
            print(for_terminal(text), flush=True)

    def close(self) -> None:
        """End the line of a bar."""
        if self._open:
            print(flush=True)
        self._open = False


def progress_bar(step: int, total: int, loss: str, left: str, columns: int) -> str:
    """Return a progress bar that is shorter than `columns`."""
    text = f" {step}/{total}  loss {loss}  {left} left"
    # "training [" and "]" and a margin take twelve columns.
    width = max(10, min(40, columns - len(text) - 12))
    filled = width * step // total
    return f"training [{'#' * filled}{'-' * (width - filled)}]{text}"
