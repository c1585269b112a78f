"""Worker processes: all tasks done, and no waiting for the dead."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from megacp.prepare.build.workers import WorkerFailed, run_tasks


def _start(settings: str) -> Any:
    def handle(task: int) -> int:
        if task == 2 and settings == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == 2 and settings == "exits":
            os._exit(0)
        if task == 2 and settings == "raises":
            raise KeyError("surprise")
        return task * task

    return handle


def _where(task: int) -> str:
    return f"at task {task}"


def test_tasks_are_all_done_by_several_workers() -> None:
    assert sorted(run_tasks(_start, "fine", list(range(7)), 3, _where)) == [n * n for n in range(7)]


def _start_asking(settings: str) -> Any:
    return lambda task: settings in sys.modules


def test_workers_do_not_import_torch() -> None:
    assert list(run_tasks(_start_asking, "torch", [1, 2], 2, _where)) == [False, False]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", "a worker was killed or ended .*at task 2"),
        ("exits", "a worker was killed or ended .*at task 2"),
        ("raises", "(?s)failed at task 2.*KeyError: 'surprise'"),
    ],
)
def test_a_worker_that_dies_ends_the_job_with_its_place(how: str, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        list(run_tasks(_start, how, list(range(6)), 2, _where))
