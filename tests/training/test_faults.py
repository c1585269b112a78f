"""Ranks that are killed, stopped or raise, in real processes: everybody ends with a reason, and a resumed run is the
undisturbed one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megacp.core.checkpoint.commit import PendingCheckpoint, load_checkpoint
from megacp.core.checkpoint.directory import committed
from megacp.core.distributed.grid import single_axis
from megacp.core.storage.files import sha256_of
from tests.ranks import RankError, preload, run_ranks
from tests.training.faulty_rank import FAULTS
from tests.training.runs import TINY, losses, run, train_on_rank

ROOT = Path(__file__).resolve().parents[2]
SIX = [*TINY, "--train-iters", "6", "--save-interval", "2"]
ALONE = single_axis("world")


def payload(folder: Path) -> dict[str, str]:
    """Hashes of weights, optimizer state and their index."""
    return {path.name: sha256_of(path)[1] for path in folder.iterdir() if path.name[0] in "._"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(2, [*SIX, "--save", str(folder)])
    return folder


def _finish_saves_before(step: int) -> None:
    """Background saves of earlier steps are waited for: how fast a disk is must not decide which of them is there."""
    real = PendingCheckpoint.writing.fget  # type: ignore[attr-defined]

    def writing(self: PendingCheckpoint) -> bool:
        if self.step < step and self._background:
            self._outcome.exception()
        return real(self)

    PendingCheckpoint.writing = property(writing)  # type: ignore[method-assign, assignment]


def _faulty(rank: int, world_size: int, flags: Sequence[str], fault: str, where: int, step: int) -> int:
    _finish_saves_before(step)
    if rank == where:
        FAULTS[fault](step)
    return train_on_rank(rank, world_size, flags)


@pytest.mark.slow
@pytest.mark.parametrize("saving", [[], ["--async-save"]], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    ("fault", "where", "left"),
    [
        ("kill in step", 1, ["2"]),
        ("kill in writing", 1, ["2"]),
        ("kill before rename", 0, ["2"]),
        ("kill before latest", 0, ["2", "4"]),
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    tmp_path: Path, undisturbed: Path, fault: str, where: int, left: list[str], saving: list[str]
) -> None:
    flags = [*SIX, "--save", str(tmp_path), "--auto-resume", *saving]
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(_faulty, 2, flags, fault, where, 4)
    assert sorted(path.name[-1] for path in committed(tmp_path)) == left
    assert load_checkpoint(tmp_path, ALONE).step == 2
    run(2, flags)
    assert losses(tmp_path) == losses(undisturbed)
    assert payload(tmp_path / "step_0000006") == payload(undisturbed / "step_0000006")
    assert not any(".tmp-" in path.name for path in tmp_path.iterdir())


def torchrun(*arguments: str, restarts: int = 0, timeout: float = 200.0) -> subprocess.CompletedProcess[str]:
    """`faulty_rank` on two ranks of a real torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "--max-restarts", str(restarts), "-m", "tests.training.faulty_rank", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, pytest.param(1, marks=pytest.mark.faults)])
def test_a_run_that_torchrun_restarts_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, undisturbed: Path, where: int
) -> None:
    flags = [*SIX, "--save", str(tmp_path), "--auto-resume"]
    done = torchrun("kill in step", str(where), "4", *flags, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "holds no checkpoint at all, this run starts from step 0, from scratch" in done.stdout
    assert f"resumed from {tmp_path / 'step_0000002'} after step 2" in done.stdout
    assert losses(tmp_path) == losses(undisturbed)
    assert payload(tmp_path / "step_0000006") == payload(undisturbed / "step_0000006")


BUSY = """
import threading, torch
from megacp import train

def busy() -> None:
    while True:
        torch.ones(8) + 1

def stop() -> None:
    for _ in range(4):
        threading.Thread(target=busy, daemon=True).start()

train.launch.stop = stop
train.program()
"""


@pytest.mark.slow
def test_threads_of_libraries_that_still_run_do_not_turn_a_good_end_into_an_abort(tmp_path: Path) -> None:
    """As those of gloo may: one that comes back from C++ while the interpreter ends calls std::terminate."""
    command = [sys.executable, "-c", BUSY, *TINY, "--train-iters", "2", "--save", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200.0)
    assert done.returncode == 0, done.stderr
    assert "finished after step 2" in done.stdout


def _rank(environment: dict[str, str], arguments: Sequence[str], words: Path) -> None:
    """`faulty_rank` as the program of this process, its stderr in a file."""
    os.environ.update(environment)
    os.dup2(os.open(words, os.O_CREAT | os.O_WRONLY), 2)
    sys.argv = ["faulty_rank", *arguments]
    runpy.run_module("tests.training.faulty_rank", run_name="__main__")


@contextlib.contextmanager
def without_torchrun(folder: Path, *arguments: str) -> Iterator[list[Any]]:
    """Processes of two ranks, forked with their modules imported; `folder/words RANK` is what a rank says.

    Their store is in this process, as torchrun's is in its agent. torchrun itself waits 30 s for a stopped rank before
    it kills it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    preload()
    context, processes = multiprocessing.get_context("forkserver"), []
    for rank in ("0", "1"):
        given = ({**shared, "RANK": rank, "LOCAL_RANK": rank}, arguments, folder / f"words {rank}")
        processes.append(context.Process(target=_rank, args=given))
        processes[-1].start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, 1])
def test_a_stopped_rank_ends_the_others_after_the_timeout_and_is_named(tmp_path: Path, where: int) -> None:
    flags = [*SIX, "--save", str(tmp_path / "out"), "--distributed-timeout-minutes", "0.1"]
    with without_torchrun(tmp_path, "stop in step", str(where), "3", *flags) as processes:
        processes[1 - where].join(60)
        assert processes[where].is_alive() and processes[1 - where].exitcode == 1
    message = (tmp_path / f"words {1 - where}").read_text()
    assert f"rank {1 - where} failed in step 3: RuntimeError" in message
    assert f"no word from rank {where} in step 3: stopped, dead, or still computing" in message
    assert load_checkpoint(tmp_path / "out", ALONE).step == 2


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_with_its_reason(tmp_path: Path) -> None:
    with without_torchrun(tmp_path, "raise in step", "1", "3", *SIX, "--save", str(tmp_path / "out")) as processes:
        for rank, process in enumerate(processes):
            process.join(60)
            assert process.exitcode == 1
            said = (tmp_path / f"words {rank}").read_text()
            assert "rank 1 failed in step 3: ValueError: something of this rank alone is wrong" in said
    assert load_checkpoint(tmp_path / "out", ALONE).step == 2


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.faults), 1])
def test_a_run_that_stops_by_the_clock_is_not_restarted(tmp_path: Path, restarts: int) -> None:
    flags = [*TINY, "--train-iters", "100000", "--exit-duration", "0.01", "--save", str(tmp_path), "--auto-resume"]
    done = torchrun("none", "0", "0", *flags, restarts=restarts)
    assert done.stdout.count("stopped after --exit-duration after step") == 1
    assert (done.returncode == 0) == (restarts == 1)
    assert restarts == 1 or "exitcode  : 3" in done.stderr
