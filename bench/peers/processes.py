"""Runs the ranks of another trainer as processes in its interpreter, with one input line per
training step.

If a rank dies, raises an error or hangs, the peer ends with one `PeerFailure` that contains the
rank's output. No process outlives the peer. The command `env` sets the environment of a rank, so
our code neither reads nor changes its own environment.
"""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Seconds

_ONE_THREAD = (
    "OMP_NUM_THREADS=1",
    "MKL_NUM_THREADS=1",
    "CUDA_VISIBLE_DEVICES=",
    "TOKENIZERS_PARALLELISM=false",
)
_SHOWN = 12
"""Number of lines from the end of the error stream that a failure contains."""


class PeerFailure(RuntimeError):
    """Raised if a peer's rank dies, fails or hangs; contains the rank and its output."""


@dataclass(frozen=True)
class PeerStep(Seconds):
    """One training step of a peer on one rank, measured between two barriers."""

    tokens: int
    """Number of tokens in the whole step."""
    loss: float | None
    """Loss of the step; None on a rank that does not have it, such as the first stage of a
    pipeline.
    """
    memory: int
    """Peak memory of the process minus its memory before the model was built, in bytes."""


class PeerRanks:
    """The processes of one script in one gloo group; `step` trains one step on all of them."""

    def __init__(
        self, command: Sequence[str], ranks: int, work: Mapping[str, Any], folder: Path
    ) -> None:
        """Start the processes.

        `command` is the interpreter and the script, `work` is the script's input, and `folder` is a
        new folder for its files.
        """
        folder.mkdir(parents=True)
        described = folder / "work.json"
        described.write_text(json.dumps({**work, "world_size": ranks}), encoding="utf-8")
        self._errors = [folder / f"stderr_{rank}" for rank in range(ranks)]
        self._processes = []
        for rank, errors in enumerate(self._errors):
            flags = [
                "--work",
                str(described),
                "--rank",
                str(rank),
                "--store",
                str(folder / "store"),
            ]
            with errors.open("w") as stream:
                process = subprocess.Popen(
                    ["env", *_ONE_THREAD, *command, *flags],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    text=True,
                )
            self._processes.append(process)

    def ready(self, timeout: float = 300.0) -> None:
        """Wait until every rank has built its model. Raise PeerFailure if one fails."""
        self._answers(timeout)

    def step(self, number: int, timeout: float = 600.0) -> list[PeerStep]:
        """Train step `number`, counted from 0, and return the results in rank order.

        Raise PeerFailure if a rank fails.
        """
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"step": number}) + "\n")
                process.stdin.flush()
            except OSError as error:
                raise self._failure(rank, "had ended") from error
        return [PeerStep(**answer) for answer in self._answers(timeout)]

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        deadline, found = time.monotonic() + timeout, dict[int, dict[str, Any]]()
        while len(found) < len(self._processes):
            waiting = {
                p.stdout: rank
                for rank, p in enumerate(self._processes)
                if p.stdout and rank not in found
            }
            ready, _, _ = select.select(
                list(waiting), [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise self._failure(min(waiting.values()), f"did not answer within {timeout:g} s")
            for stream in ready:
                line = stream.readline()
                answer = json.loads(line) if line else {"error": "the process ended"}
                if "error" in answer:
                    raise self._failure(waiting[stream], answer["error"].strip())
                found[waiting[stream]] = answer
        return [found[rank] for rank in range(len(self._processes))]

    def _failure(self, rank: int, what: str) -> PeerFailure:
        self.close()
        printed = (
            self._errors[rank].read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN:]
        )
        return PeerFailure("\n".join([f"rank {rank}: {what}", *printed]))

    def close(self) -> None:
        """Kill all processes. A second call is harmless."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def __enter__(self) -> PeerRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
