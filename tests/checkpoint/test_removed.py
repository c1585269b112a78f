"""Checkpoints that a running job removes while another reads, and files that another machine sees late."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megacp.core.checkpoint import commit as module
from megacp.core.checkpoint.commit import RemovedError, again_when_removed, load_checkpoint
from megacp.core.checkpoint.directory import LATEST_FILE
from megacp.core.distributed.grid import Axis
from tests.checkpoint.test_commit import WORLD, save, value
from tests.ranks import grid, run_ranks

pytestmark = pytest.mark.timeout(120)


def test_what_is_removed_while_it_is_verified_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch `no checkpoint is whole` beside a checkpoint that is: the list was made before it was."""
    save(tmp_path, 1)
    real = module._verify

    def verify(folder: Path, world: Axis) -> Any:
        if folder.name == "step_0000001":
            save(tmp_path, 2, keep_last=1)  # the running job
        return real(folder, world)

    monkeypatch.setattr(module, "_verify", verify)
    loaded = load_checkpoint(tmp_path, WORLD)
    assert (loaded.step, loaded.passed_over, loaded.rejected) == (2, (), ())


def test_what_is_removed_while_the_directory_is_listed_does_not_leave_it_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch `there is no committed checkpoint` in a directory that always has one."""
    save(tmp_path, 1)
    real = Path.iterdir

    def iterdir(folder: Path) -> Any:
        found = list(real(folder))
        if folder / "step_0000001" in found and folder == tmp_path:
            monkeypatch.setattr(Path, "iterdir", real)
            save(tmp_path, 2, keep_last=1)  # the running job
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert load_checkpoint(tmp_path, WORLD).step == 2


def test_a_step_that_was_asked_for_and_is_removed_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 1)
    save(tmp_path, 2)
    real = module._verify

    def verify(folder: Path, world: Axis) -> Any:
        shutil.rmtree(folder)
        return real(folder, world)

    monkeypatch.setattr(module, "_verify", verify)
    with pytest.raises(RemovedError, match=r"step_0000001 was removed while it was read, .*: name the directory above"):
        load_checkpoint(folder, WORLD)


@pytest.mark.parametrize("whole", [False, True])
def test_a_reader_in_the_middle_takes_the_newest_there_is(tmp_path: Path, whole: bool) -> None:
    """Would catch a FileNotFoundError of a tensor, and half of one checkpoint beside half of another."""
    save(tmp_path, 1)
    seen: list[int] = []

    def use() -> float:
        loaded = load_checkpoint(tmp_path, WORLD)
        seen.append(loaded.step)
        if loaded.step < 3:
            save(tmp_path, loaded.step + 1, keep_last=1)
        if whole:
            (found,) = (tensor for _, tensor in loaded.whole_tensors())
            return found[0, 0].item()
        return value(loaded)

    assert again_when_removed(tmp_path, use) == 3
    assert seen == [1, 2, 3]


def test_a_named_step_is_not_exchanged_for_another(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)

    def use() -> float:
        loaded = load_checkpoint(folder, WORLD)
        save(tmp_path, 2, keep_last=1)
        return value(loaded)

    with pytest.raises(RemovedError):
        again_when_removed(folder, use)


def _removed_for_all(rank: int, world_size: int, root: str) -> tuple[float, list[int]]:
    world = grid(dp=world_size).world
    save(Path(root), 1, world)
    seen: list[int] = []

    def use() -> float:
        loaded = load_checkpoint(root, world)
        seen.append(loaded.step)
        if loaded.step == 1:
            save(Path(root), 2, world, keep_last=1)
        return value(loaded)

    module._SECONDS = 0.2
    try:
        return again_when_removed(root, use), seen
    finally:
        module._SECONDS = 10.0


def test_all_ranks_change_to_the_next_checkpoint_together(tmp_path: Path) -> None:
    """Would catch ranks of which one has read its part before the files went, and does not begin again."""
    assert run_ranks(_removed_for_all, 2, str(tmp_path)) == [(2.0, [1, 2])] * 2


def _seen_late(rank: int, world_size: int, root: str) -> tuple[float, float]:
    """Rank 1 does not see the files of a checkpoint for a while, as on NFS."""
    world = grid(dp=world_size).world
    save(Path(root), 1, world)
    real, hidden = os.open, time.monotonic() + 1.0

    def late(path: Any, *rest: Any, **more: Any) -> int:
        if rank == 1 and str(path).endswith(".safetensors") and time.monotonic() < hidden:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *rest, **more)

    os.open = late
    try:
        return value(load_checkpoint(root, world)), 1.0
    finally:
        os.open = real


@pytest.mark.slow
def test_files_that_one_rank_sees_late_are_waited_for(tmp_path: Path) -> None:
    """Would catch a checkpoint that counts as damaged because one machine's list of names is a second old."""
    assert run_ranks(_seen_late, 2, str(tmp_path)) == [(1.0, 1.0)] * 2


def test_files_that_nobody_sees_are_not_waited_for(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "rank_00000.safetensors").unlink()
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"rank_00000\.safetensors cannot be read: No such file"):
        load_checkpoint(tmp_path, WORLD)
    assert time.monotonic() - begun < 5


def _lost_answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every rename is done and answers that there is no such file, as NFS does when an answer was lost."""
    real, renamed = os.replace, []

    def replace(source: Any, target: Any) -> None:
        real(source, target)
        renamed.append(Path(target).name)
        raise FileNotFoundError(2, "No such file or directory", str(source))

    monkeypatch.setattr(os, "replace", replace)
    return renamed


def test_renames_whose_answers_are_lost_commit_point_and_prune_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a run that ends at a checkpoint which is whole, and old ones that are never removed."""
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        renamed = _lost_answers(patch)
        save(tmp_path, 2, keep_last=1)
    assert {"step_0000002", LATEST_FILE} < set(renamed) and any("step_0000001.tmp-" in name for name in renamed)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST_FILE, "step_0000002"]
    assert value(load_checkpoint(tmp_path, WORLD)) == 2


def test_a_folder_that_is_seen_late_is_written_to_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a rank that fails because the folder which rank 0 made is not in its list of names yet."""
    real, hidden = os.open, time.monotonic() + 0.5

    def late(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".safetensors") and time.monotonic() < hidden:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", late)
    save(tmp_path, 1)
    assert value(load_checkpoint(tmp_path, WORLD)) == 1


def test_an_old_checkpoint_that_goes_while_it_is_removed_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch a warning about files which are gone, as they should be."""
    save(tmp_path, 1)
    real = shutil.rmtree

    def half(path: Path, *rest: Any, **more: Any) -> None:
        if path.is_dir() and (path / "config.yaml").exists():
            (path / "config.yaml").unlink()
            raise FileNotFoundError(2, "No such file or directory", str(path / "config.yaml"))
        real(path, *rest, **more)

    monkeypatch.setattr(shutil, "rmtree", half)
    save(tmp_path, 2, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST_FILE, "step_0000002"]
    assert caplog.text == ""


@pytest.mark.slow
def test_a_reader_beside_a_job_that_saves_and_prunes_without_end_always_finds_one(tmp_path: Path) -> None:
    """The race itself, many times over: each read is of one whole checkpoint."""
    save(tmp_path, 1)
    over = threading.Event()

    def job() -> None:
        step = 2
        while not over.is_set():
            save(tmp_path, step, keep_last=1)
            step += 1

    thread = threading.Thread(target=job)
    thread.start()
    found = []

    def use() -> tuple[int, float]:
        loaded = load_checkpoint(tmp_path, WORLD)
        return loaded.step, value(loaded)

    try:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            found.append(again_when_removed(tmp_path, use))
    finally:
        over.set()
        thread.join()
    assert len(found) > 10 and all(step == read for step, read in found)
    assert found == sorted(found)
