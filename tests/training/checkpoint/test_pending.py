"""Background saves, a disk that fills up during a write, and a crafted checkpoint."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.distributed.grid import Axis, HostGroup, WorldAxis, build_grid, single_axis
from megacp.distributed.shape import GridShape
from megacp.engine.data_parallel.boxes import TensorBox
from megacp.storage.files import sha256_of
from megacp.training.checkpoint import commit, outcome
from megacp.training.checkpoint.commit import (
    Contents,
    PendingCheckpoint,
    SaveError,
    load_checkpoint,
)
from megacp.training.checkpoint.directory import MANIFEST_FILE, checksum_of, committed
from megacp.training.checkpoint.storage import INDEX_FILE
from tests.ranks import grid, run_ranks
from tests.training.checkpoint.saves import save_checkpoint

WORLD = single_axis("world")


def boxes(world: Axis = WORLD, rows: int = 4) -> list[TensorBox]:
    """Return this rank's rows of two global tensors, with `rows` x 64 elements per rank."""
    place = (world.rank * rows, 0)
    shape = (world.size * rows, 64)
    values = torch.arange(rows * 64.0).view(rows, 64) + 1000 * world.rank
    return [
        TensorBox(name, shape, place, values + i)
        for i, name in enumerate(("model.w", "optimizer.exp_avg.w"))
    ]


def begin(
    root: Path, step: int, mine: list[TensorBox], world: Axis = WORLD, background: bool = True
):
    return PendingCheckpoint(
        root, mine, Contents(step, {"at": step}, "a: 1\n"), world, background=background
    )


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path)[1] for path in folder.iterdir()}


def _both_ways(rank: int, world_size: int, root: str) -> bool:
    world = grid(dp=world_size).world
    found = [
        hashes(begin(Path(root, "at once"), 7, boxes(world), world, background=False).commit())
    ]
    gate, real = threading.Event(), commit.write_boxes

    def late(folder: Path, *rest: Any) -> Any:
        assert gate.wait(20)
        return real(folder, *rest)

    commit.write_boxes = late
    try:
        mine = boxes(world)
        pending = begin(Path(root, "background"), 7, mine, world)
        for box in mine:  # training continues
            box.tensor.fill_(-1.0)
        gate.set()
        found.append(hashes(pending.commit()))
    finally:
        commit.write_boxes = real
    return found[0] == found[1] and set(found[0]) == {
        *(f"rank_{r:05d}.safetensors" for r in range(world_size)),
        *(INDEX_FILE, MANIFEST_FILE, "config.yaml"),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_in_the_background_writes_the_same_bytes(tmp_path: Path, world_size: int) -> None:
    results = (
        run_ranks(_both_ways, world_size, str(tmp_path))
        if world_size > 1
        else [_both_ways(0, 1, str(tmp_path))]
    )
    assert results == [True] * world_size


def test_the_caller_goes_on_while_the_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), commit.write_boxes

    def slow(folder: Path, *rest: Any) -> Any:
        assert gate.wait(20)
        return real(folder, *rest)

    monkeypatch.setattr(commit, "write_boxes", slow)
    pending = begin(tmp_path, 3, boxes())
    assert pending.writing and not pending.failed
    threading.Timer(0.2, gate.set).start()
    assert pending.commit() == tmp_path / "step_0000003"
    assert not pending.writing and gate.is_set()
    assert load_checkpoint(tmp_path, WORLD).step == 3


def _one_cannot_write(
    rank: int, world_size: int, root: str, broken: int
) -> tuple[bool, str, list[str]]:
    world = grid(dp=world_size).world
    real = commit.write_boxes

    def write(folder: Path, *rest: Any) -> Any:
        if rank == broken:
            raise OSError(28, "No space left on device")
        return real(folder, *rest)

    commit.write_boxes = write
    try:
        pending = begin(Path(root), 2, boxes(world), world)
        while pending.writing:
            pass
        failed = pending.failed
        with pytest.raises(SaveError) as error:
            pending.commit()
    finally:
        commit.write_boxes = real
    return failed, str(error.value), sorted(p.name for p in Path(root).iterdir())


def test_an_error_in_the_background_is_raised_on_all_ranks_by_the_commit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, boxes(), extra={}, config_yaml="", world=WORLD)
    results = run_ranks(_one_cannot_write, 2, str(tmp_path), 1)
    assert [failed for failed, _, _ in results] == [False, True]
    assert results[0][1] == results[1][1]
    assert "step 2" in results[0][1] and "rank 1: No space left on device (ENOSPC)" in results[0][1]
    assert results[0][2] == ["latest", "step_0000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a real file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("there is no mount program")
    if done.returncode:
        pytest.skip(f"no small file system can be mounted: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_earlier_checkpoint_whole(
    small_disk: Path, background: bool
) -> None:
    save_checkpoint(small_disk, 1, boxes(), extra={}, config_yaml="", world=WORLD)
    before = hashes(small_disk / "step_0000001")
    big = boxes(rows=3 * 4096)  # 2 x 3 MiB
    with pytest.raises(SaveError, match=r"rank 0: No space left on device \(ENOSPC\)"):
        begin(small_disk, 2, big, background=background).commit()
    assert sorted(path.name for path in small_disk.iterdir()) == ["latest", "step_0000001"]
    assert hashes(small_disk / "step_0000001") == before
    assert load_checkpoint(small_disk, WORLD).step == 1
    save_checkpoint(small_disk, 2, boxes(), extra={}, config_yaml="", world=WORLD)


@pytest.mark.parametrize("below", ["file", "read-only"])
def test_a_directory_that_cannot_be_written_is_one_error(tmp_path: Path, below: str) -> None:
    """Return folders that even root cannot write to: below a file, and on a read-only mount if
    possible.
    """
    place = tmp_path / "place"
    if below == "file":
        place.write_text("")
    else:
        place.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)], capture_output=True
        ).returncode:
            pytest.skip("nothing can be mounted read-only")
    try:
        with pytest.raises(
            SaveError, match=r"step 1 in .*Not a directory|step 1 in .*Read-only file system"
        ):
            begin(place / "out", 1, boxes())
    finally:
        if below == "read-only":
            subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", [INDEX_FILE, "rank_00000.safetensors"])
def test_a_pickle_with_a_matching_hash_runs_nothing(tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(tmp_path, 1, boxes(), extra={}, config_yaml="", world=WORLD)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    content = pickle.dumps(Evil()).ljust((folder / name).stat().st_size, b"\0")
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.pop("checksum")
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | {"checksum": checksum_of(manifest)}))
    loaded = load_checkpoint(tmp_path, WORLD)  # all hashes are correct
    told = f"{name} (is damaged: it is not a checkpoint index|does not contain the tensors)"
    with pytest.raises(ValueError, match=f"rank 0: .*{told}"):
        loaded.read(boxes())
    with pytest.raises(ValueError, match=told):
        list(loaded.whole_tensors())
    assert not (tmp_path / "ran").exists()


GROUP_SECONDS = 1.0


def _slow(
    rank: int,
    world_size: int,
    root: str,
    seconds: float,
    file_timeout: float,
    background: bool,
    late: int,
) -> str:
    """Save while rank `late` needs `seconds` for its file; return the error, if any."""
    timeout = datetime.timedelta(seconds=GROUP_SECONDS)
    waiting = datetime.timedelta(seconds=file_timeout)
    world = build_grid(GridShape(dp=world_size), rank, timeout=timeout, file_timeout=waiting).world
    real = commit.write_boxes

    def write(folder: Path, *rest: Any) -> Any:
        time.sleep(seconds * (rank == late))
        return real(folder, *rest)

    commit.write_boxes = write
    try:
        begin(Path(root), 3, boxes(world), world, background).commit()
    except SaveError as error:
        return str(error)
    finally:
        commit.write_boxes = real
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(("background", "late"), [(False, 0), (False, 1), (True, 1)])
def test_a_save_may_take_longer_than_a_collective(
    tmp_path: Path, background: bool, late: int
) -> None:
    assert run_ranks(_slow, 2, str(tmp_path), 2 * GROUP_SECONDS, 60.0, background, late) == ["", ""]
    assert load_checkpoint(tmp_path, single_axis("world")).step == 3


@pytest.mark.slow
def test_a_rank_beyond_the_limit_of_saving_is_named(tmp_path: Path) -> None:
    first, late = run_ranks(_slow, 2, str(tmp_path), 2.0, 0.5, False, 1)
    assert "within 0.5 s (6 x --distributed-timeout-minutes" in first and "Rank 1" in first
    assert "--distributed-timeout-minutes" in late
    assert committed(tmp_path) == []


def test_a_rank_that_died_beside_a_save_is_no_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(host: HostGroup) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(outcome, "await_all", broken)
    world = WorldAxis("world", 1, 0, (0,), host=HostGroup(object(), 60.0))
    with pytest.raises(SaveError, match="a rank was lost: .*Connection closed by peer"):
        outcome.on_all_ranks(world, lambda: None, SaveError)
