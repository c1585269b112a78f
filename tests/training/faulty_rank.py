"""`megacp.train` with a fault in one rank: `torchrun ... -m tests.training.faulty_rank FAULT RANK
STEP FLAGS...`.

The fault happens in the real program, at a known place, only once: after a restart by torchrun it
does not happen again. Killing the process from outside after some seconds would hit another place
each time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacp.engine.step.step import ParallelModel
from megacp.train import program
from megacp.training.checkpoint import commit
from megacp.training.checkpoint.storage import rank_file


def _die(number: int) -> None:
    os.kill(os.getpid(), number)


def _in_step(happen: Callable[[], None]) -> Callable[[int], None]:
    def arm(step: int) -> None:
        real = ParallelModel._total

        def total(self: ParallelModel, losses: Any) -> float:
            """Run the fault after forward and backward of a step, before its end."""
            self.__dict__["steps_begun"] = self.__dict__.get("steps_begun", 0) + 1
            if self.__dict__["steps_begun"] == step:
                happen()
            return real(self, losses)

        ParallelModel._total = total  # type: ignore[method-assign]

    return arm


def _kill_in_writing(step: int) -> None:
    real = commit.write_boxes

    def write(folder: Path, *rest: Any) -> Any:
        written = real(folder, *rest)
        if folder.name.startswith(f"step_{step:07d}"):
            path = folder / rank_file(rest[0])
            os.truncate(path, path.stat().st_size // 2)
            _die(signal.SIGKILL)
        return written

    commit.write_boxes = write


def _slow_in_writing(step: int) -> None:
    real = commit.write_boxes

    def write(folder: Path, *rest: Any) -> Any:
        time.sleep(25)
        return real(folder, *rest)

    commit.write_boxes = write


def _kill_in_reading(step: int) -> None:
    """Kill the rank after a checkpoint has been chosen, before it reads its part."""

    def read(self: commit.LoadedCheckpoint, boxes: Any) -> None:
        _die(signal.SIGKILL)

    commit.LoadedCheckpoint.read = read  # type: ignore[method-assign]


def _kill_before_rename(step: int) -> None:
    real = commit.place_folder

    def place(folder: Path, target: Path) -> None:
        if folder.name.startswith(f"step_{step:07d}.tmp-"):
            _die(signal.SIGKILL)
        real(folder, target)

    commit.place_folder = place


def _kill_before_latest(step: int) -> None:
    real = commit.point_and_prune

    def prune(final: Path, keep_last: int) -> list[str]:
        if final.name.startswith(f"step_{step:07d}"):
            _die(signal.SIGKILL)
        return real(final, keep_last)

    commit.point_and_prune = prune


def _hang() -> None:
    time.sleep(600)


def _raise() -> None:
    raise ValueError("something of this rank alone is wrong")


FAULTS: dict[str, Callable[[int], None]] = {
    "none": lambda step: None,
    "kill in step": _in_step(lambda: _die(signal.SIGKILL)),
    "stop in step": _in_step(lambda: _die(signal.SIGSTOP)),
    "raise in step": _in_step(_raise),
    "hang in step": _in_step(_hang),
    "kill in writing": _kill_in_writing,
    "kill in reading": _kill_in_reading,
    "slow in writing": _slow_in_writing,
    "kill before rename": _kill_before_rename,
    "kill before latest": _kill_before_latest,
}

if __name__ == "__main__":
    fault, rank, step, *flags = sys.argv[1:]
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        FAULTS[fault](int(step))
    sys.argv[1:] = flags
    program()
