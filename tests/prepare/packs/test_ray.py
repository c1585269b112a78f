"""Builds on Ray equal builds with the local pool, and report problems in one clear message."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare import command as preprocess
from megacp.prepare.packs.ray_workers import run_on_ray, versions_here
from megacp.prepare.packs.run import build
from megacp.prepare.packs.workers import WorkerFailed
from tests.prepare.packs.builds import files, run, settings, visible, write_records


class Lost(Exception):
    """Error of the fake Ray for a worker that died."""


@dataclasses.dataclass(eq=False)
class Answer:
    """A submitted task."""

    function: Any
    arguments: tuple[Any, ...]


class FakeRay(types.SimpleNamespace):
    """Ray calls of a build, in this process. A task runs when its result is requested."""

    def __init__(self, lose: dict[int, int] | None = None, nodes: int = 2) -> None:
        lost = {name: type(name, (Lost,), {}) for name in ("WorkerCrashedError", "NodeDiedError")}
        lost |= {name: type(name, (Lost,), {}) for name in ("OutOfMemoryError", "ObjectLostError")}
        self.exceptions = types.SimpleNamespace(RayError=Lost, **lost)
        self.lose, self.submitted, self.ended = dict(lose or {}), 0, False
        self.count, self.most, self.flying = nodes, 0, 0

    def init(self, **options: Any) -> None:
        self.options = options

    def shutdown(self) -> None:
        self.ended = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0 * self.count}

    def remote(self, function: Any) -> Any:
        def submit(*arguments: Any) -> Any:
            self.flying += 1
            self.most = max(self.most, self.flying)
            return Answer(function, arguments)

        return types.SimpleNamespace(options=lambda **options: types.SimpleNamespace(remote=submit))

    def wait(
        self, answers: list[Any], num_returns: int = 1, timeout: float = 0
    ) -> tuple[list[Any], list[Any]]:
        return answers[-num_returns:], answers[
            :-num_returns
        ]  # in reverse, because the build may not rely on an order

    def get(self, answer: Any, timeout: float | None = None) -> Any:
        self.flying -= 1
        number = answer.arguments[-1] if isinstance(answer.arguments[-1], int) else -1
        if self.lose.get(number, 0):
            self.lose[number] -= 1
            raise self.exceptions.WorkerCrashedError("the worker died\nunexpectedly")
        return answer.function(*answer.arguments)

    def cancel(self, answer: Any, force: bool) -> None:
        self.flying -= 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Replace Ray by the fake, and clear the caches that workers keep."""
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    versions_here.cache_clear()
    yield ray


def _start(settings_: str) -> Any:
    def handle(task: int) -> int:
        if task == 3 and settings_ == "refuses":
            raise ValueError("a.jsonl:4: not a record")
        if task == 3 and settings_ == "raises":
            raise KeyError("surprise")
        return task * task

    return handle


def squares(settings_: str = "fine", count: int = 9, **more: Any) -> list[int]:
    return sorted(run_on_ray(_start, settings_, list(range(count)), 2, **more))


def test_lost_workers_are_replaced_and_no_more_than_two_tasks_a_cpu_are_under_way(
    fake: FakeRay,
) -> None:
    fake.lose = {2: 3, 5: 1}
    assert squares(count=30, address="auto") == [n * n for n in range(30)]
    assert fake.most <= 8 and fake.options["address"] == "auto" and fake.ended


def test_a_task_whose_workers_are_lost_again_and_again_ends_the_build(fake: FakeRay) -> None:
    fake.lose = {2: 99}
    with pytest.raises(
        WorkerFailed, match="^4 workers were lost while working on 2: the worker died$"
    ):
        squares()
    assert fake.ended and fake.flying == 0


def test_errors_are_not_tried_again(fake: FakeRay) -> None:
    with pytest.raises(ValueError, match="^a.jsonl:4: not a record$"):
        squares("refuses")
    with pytest.raises(
        WorkerFailed, match="(?s)a worker failed while working on 3:.*KeyError: 'surprise'"
    ):
        squares("raises")
    assert fake.ended and fake.flying == 0


def test_a_worker_that_is_not_like_this_process_does_nothing(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fake.get

    def get(answer: Any, timeout: float | None = None) -> Any:
        packed, folder, stated, task = answer.arguments
        answer.arguments = packed, folder, {**stated, "the version of numpy": "9.9"}, task
        return own(answer)

    monkeypatch.setattr(fake, "get", get)
    with pytest.raises(
        ValueError, match=r"differs from this process: the version of numpy is .* there, 9\.9 here"
    ):
        squares()


def test_without_ray_a_build_runs_as_ever_and_the_flag_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write_records(tmp_path / "a.jsonl", 20)
    flags = [
        "build",
        "--input",
        str(tmp_path / "a.jsonl"),
        "--tokenizer",
        "byte",
        "--seq-length",
        "128",
    ]
    assert preprocess.main([*flags, "--output", str(tmp_path / "d"), "--workers", "1"]) == 0
    capsys.readouterr()
    assert preprocess.main([*flags, "--output", str(tmp_path / "e"), "--executor", "ray"]) == 2
    told = capsys.readouterr().err
    assert "--executor ray needs the package ray (" in told and "): pip install -e '.[ray]'" in told
    assert preprocess.main([*flags, "--output", str(tmp_path / "e"), "--ray-address", "auto"]) == 2
    assert "--ray-address auto needs --executor ray" in capsys.readouterr().err


def test_a_ray_that_cannot_start_is_told_in_one_line(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: Any) -> None:
        raise RuntimeError("Version mismatch:\n    the cluster has Ray 2.1\n")

    monkeypatch.setattr(fake, "init", init)
    with pytest.raises(
        ValueError,
        match="^--executor ray: cannot connect to Ray at --ray-address h:1: Version mismatch: the",
    ):
        squares(address="h:1")
    with pytest.raises(
        ValueError, match="^--executor ray: Ray cannot start here: Version mismatch"
    ):
        squares()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_node_of_the_real_ray_makes_the_bytes_of_the_local_pool(tmp_path: Path) -> None:
    """A bad record ends the build with its line, and the SIGTERM handler is restored."""
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    write_records(tmp_path / "a.jsonl", 150)
    run([tmp_path / "a.jsonl"], tmp_path / "one", seed=3)
    run([tmp_path / "a.jsonl"], tmp_path / "two", seed=3, workers=2)
    before, stream = signal.getsignal(signal.SIGTERM), io.StringIO()
    chosen = settings([tmp_path / "a.jsonl"], tmp_path / "ray", seed=3, workers=2, executor="ray")
    summary = build(chosen, stream)
    assert visible(tmp_path / "ray") == visible(tmp_path / "one") == visible(tmp_path / "two")
    assert len(summary.results) > 3
    assert signal.getsignal(signal.SIGTERM) is before
    assert not any(name.endswith(".partial") for name in os.listdir(tmp_path / "ray"))
    assert files(tmp_path / "ray").keys() == files(tmp_path / "one").keys()
