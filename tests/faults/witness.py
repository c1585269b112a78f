"""A process of a run in `tests.faults.once`: the real `megacp.train`, with a witness and at most one
fault.

The program itself does not change. The witness records when a life reaches its parts, and the packs
of each step. It reads them from the tokens. A loader that skips a pack would also report wrong
numbers, so the loader's numbers are not used.

A life is a launcher (`--nproc`) and its ranks. Each of these processes finds its plan in the
environment.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from megacp import train
from megacp.engine.step.rows import PlannedRow
from megacp.engine.step.step import ParallelModel
from megacp.training.checkpoint import commit
from megacp.training.loop import trainer
from megacp.training.start import launch
from tests.training import faulty_rank

PLAN = "MEGACP_TESTS_PLAN"
"""Environment variable with the path of the plan."""
SEQ_LENGTH = 32
DIGITS, BASE = 3, 32
"""The first tokens of a pack are its number: digits of this base, each as the token BASE + digit."""


@dataclass(frozen=True)
class Plan:
    """The plan of a life."""

    folder: str
    """Folder of its witnesses, with a file per process."""
    forked: bool = True
    """Whether ranks are forked with everything imported, or started like `--nproc` does."""
    fault: str = ""
    rank: int = 0
    """The rank with the fault, or the rank whose progress determines when it strikes."""
    moment: str = "step"
    """What this rank begins when the fault strikes: one of `RECOVERY`, step, or save."""
    step: int = 0
    """The step that a moment within training belongs to."""
    delay: float = 0.0
    """Seconds between the moment and the fault."""

    def write(self) -> str:
        """Write the plan to its folder; return the path."""
        path = Path(self.folder) / "plan.json"
        path.write_text(json.dumps(asdict(self)))
        return str(path)


RECOVERY = ("start", "join", "read", "resume")
"""Parts that a rank of a restarted life begins before its first step: the program, the process group,
the checkpoint, and the training loop."""


def name_of(number: int) -> list[int]:
    """Return the tokens at the start of a pack."""
    digits = []
    for _ in range(DIGITS):
        number, digit = divmod(number, BASE)
        digits.append(BASE + digit)
    return digits


def packs_of(row: PlannedRow) -> list[int]:
    """Return the packs in a row, by their tokens, without padding that replaces a pack."""
    batch = row.batch
    found = []
    for begin in range(0, len(batch), SEQ_LENGTH):
        if batch.leave[begin] == 0:
            continue
        digits = batch.tokens[begin : begin + DIGITS] - BASE
        found.append(int(np.dot(digits, [BASE**place for place in range(DIGITS)])))
    return found


class Witness:
    """Records the events of this process, one JSON line each, and lets the fault strike."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan = plan
        self._file = os.open(f"{plan.folder}/{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._is_struck = name == f"rank_{plan.rank}"

    def note(self, event: str, **more: Any) -> None:
        """Write a line immediately: the process may be killed after it."""
        line = {"event": event, "time": time.time(), **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def begins(self, moment: str, step: int = 0) -> None:
        """Record that this process begins a part of its life, at which the fault may strike."""
        self.note(moment, step=step)
        if not self._is_struck or (moment, step) != (self.plan.moment, self.plan.step):
            return
        if self.plan.delay > 0.0:
            threading.Timer(self.plan.delay, self.strike).start()
        else:
            self.strike()

    def strike(self) -> None:
        """Let the fault happen if it strikes at a moment. Other faults begin at the start."""
        if self.plan.fault in STRIKES:
            self.note("strikes")
            STRIKES[self.plan.fault]()


def _raise() -> NoReturn:
    raise RuntimeError("a mistake of this rank alone")


STRIKES: dict[str, Callable[[], None]] = {
    "a rank is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "a rank freezes": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "a rank hangs": lambda: time.sleep(3600.0),
    "a rank raises": _raise,
    "a rank is told to stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "the launcher is told to stop": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "the terminal hangs up": lambda: os.killpg(os.getpgrp(), signal.SIGHUP),
    "Ctrl-C": lambda: os.killpg(os.getpgrp(), signal.SIGINT),
    "the launcher is killed": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "the machine is lost": lambda: os.killpg(os.getpgrp(), signal.SIGKILL),
}
"""Faults that strike at a moment."""


def _fill_disk(witness: Witness) -> None:
    """Let the disk of this rank be full when it writes its part of the checkpoint."""
    real = commit.write_boxes

    def write(folder: Path, *rest: Any) -> Any:
        if folder.name.startswith(f"step_{witness.plan.step:07d}"):
            (folder / "half of a file").write_bytes(b"0" * 100)
            witness.note("strikes")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(folder, *rest)

    commit.write_boxes = write


def _kill(place: str) -> Callable[[Witness], None]:
    """Kill this rank at a place of `faulty_rank`."""

    def prepare(witness: Witness) -> None:
        def die(number: int) -> None:
            witness.note("strikes")
            os.kill(os.getpid(), number)

        faulty_rank._die = die
        faulty_rank.FAULTS[place](witness.plan.step)

    return prepare


def _other_flag(witness: Witness) -> None:
    """Start this rank with another learning rate than the other ranks."""
    witness.note("strikes")
    sys.argv += ["--lr", "0.02"]


PREPARED: dict[str, Callable[[Witness], None]] = {
    "the disk is full": _fill_disk,
    "a rank is killed in writing": _kill("kill in writing"),
    "rank 0 is killed before the rename": _kill("kill before rename"),
    "rank 0 is killed before `latest`": _kill("kill before latest"),
    "a rank has another flag": _other_flag,
}
"""Faults that begin at the start of a rank."""


def witnessed(witness: Witness) -> None:
    """Record the parts of a life when they begin."""
    join, load, run = launch.join, trainer.load, trainer.Trainer.run
    real_train, write = ParallelModel.train, commit.write_boxes

    def noted_join(*arguments: Any) -> Any:
        witness.begins("join")
        return join(*arguments)

    def noted_load(*arguments: Any) -> Any:
        witness.begins("read")
        return load(*arguments)

    def noted_run(self: trainer.Trainer) -> int:
        witness.begins("resume")
        return run(self)

    def noted_train(self: ParallelModel, rows: Sequence[Any], step: int, *rest: Any) -> Any:
        witness.begins("step", step)
        result = real_train(self, rows, step, *rest)
        packs = [pack for row in rows for pack in packs_of(row)]
        place = self.rows.data_rank
        witness.note("trained", step=step, packs=packs, index=place.index, size=place.size)
        return result

    def noted_write(folder: Path, *rest: Any) -> Any:
        witness.begins("save", int(folder.name[5:12]))
        return write(folder, *rest)

    launch.join, trainer.load, trainer.Trainer.run = noted_join, noted_load, noted_run  # type: ignore[method-assign]
    ParallelModel.train, commit.write_boxes = noted_train, noted_write  # type: ignore[method-assign]


class Forked:
    """A rank started by `--nproc`, as a fork of its launcher, which has imported everything."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        before: Callable[[], object] | None = None,
    ) -> None:
        """`before`: the `preexec_fn` of `subprocess`."""
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            # `subprocess` does the same; the launcher's store does not belong to this process
            os.closerange(3, 4096)
            os.environ.clear()
            os.environ.update(environment)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                # a new program has no handlers, and ignored signals stay ignored
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            if before is not None:
                before()
            sys.argv = ["megacp.train", *arguments]
            main()

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def _start_of_ranks(witness: Witness) -> Callable[..., Any]:
    """Return a replacement for the launcher's `subprocess.Popen` that adds witnesses to ranks."""
    real = subprocess.Popen

    def start(command: Sequence[str], env: Mapping[str, str], **others: Any) -> Any:
        assert list(command[:3]) == [sys.executable, "-m", "megacp.train"]
        witness.note("spawns")
        if witness.plan.forked:
            return Forked(command[3:], env, others.get("preexec_fn"))
        return real([sys.executable, "-m", "tests.faults.witness", *command[3:]], env=env, **others)

    return start


def main() -> NoReturn:
    """Run a launcher or a rank, by the environment and `sys.argv`, and exit with its status."""
    # OpenMP threads would spin while other ranks compute, and a fork does not inherit threads
    torch.set_num_threads(1)
    plan = Plan(**json.loads(Path(os.environ[PLAN]).read_text()))
    rank = os.environ.get("RANK")
    if rank is None and "--nproc" in sys.argv:
        subprocess.Popen = _start_of_ranks(Witness(plan, "launcher"))  # type: ignore[assignment, misc]
        train.program()
    witness = Witness(plan, f"rank_{rank or 0}")
    witnessed(witness)
    if plan.fault in PREPARED and plan.rank == int(rank or 0):
        PREPARED[plan.fault](witness)
    witness.begins("start")
    train.program()


if __name__ == "__main__":
    main()
