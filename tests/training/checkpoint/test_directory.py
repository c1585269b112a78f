"""A directory of checkpoints: manifests, messages about damaged files, and the lock of the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacp.storage.files import sha256_of
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.checkpoint.directory import (
    LOCK_FILE,
    MANIFEST_FILE,
    CheckpointManifest,
    DirectoryLock,
    FileRecord,
    damage,
    holds_checkpoints,
    read_manifest,
    remove_leftovers,
    to_json,
)
from tests.training.checkpoint.test_commit import WORLD, save, value


def written(folder: Path) -> CheckpointManifest:
    (folder / "data").write_bytes(b"0123456789")
    manifest = CheckpointManifest(
        7,
        3,
        4,
        {"tp": 2, "dp": 2},
        {"data": FileRecord(*sha256_of(folder / "data"))},
        {"samples": 12, "by": {"1": 2}},
    )
    (folder / MANIFEST_FILE).write_text(to_json(manifest))
    return manifest


def test_a_manifest_comes_back_equal(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    assert read_manifest(tmp_path) == manifest


def test_every_flipped_digit_of_the_manifest_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    text = (tmp_path / MANIFEST_FILE).read_text()
    for place in [i for i, c in enumerate(text) if c.isdigit()]:
        flipped = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        (tmp_path / MANIFEST_FILE).write_text(flipped)
        with pytest.raises(ValueError, match=MANIFEST_FILE):
            read_manifest(tmp_path)


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"step": 1}', "\x00\x01"])
def test_a_broken_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(ValueError, match=f"{MANIFEST_FILE} is damaged"):
        read_manifest(tmp_path)


def test_truncation_deletion_and_a_flipped_bit_are_told_apart(tmp_path: Path) -> None:
    files = written(tmp_path).files
    assert damage(tmp_path, files, ["data"]) == []
    for harm, reason in (
        (b"012345678", "has 9 bytes, expected 10"),
        (b"0123456788", "sha256"),
        (None, "cannot be"),
    ):
        (tmp_path / "data").write_bytes(harm) if harm else (tmp_path / "data").unlink()
        (line,) = damage(tmp_path, files, ["data"])
        assert reason in line and str(tmp_path / "data") in line


WRONG: dict[str, dict[str, Any]] = {
    "a file above": {"files": {"../x": {"size": 1, "sha256": "0" * 64}}},
    "a whole path": {"files": {"/etc/passwd": {"size": 1, "sha256": "0" * 64}}},
    "files in a list": {"files": [1]},
    "a format of the future": {"format": 3},
    "an unknown field": {"more": 1},
}


_HOLD = """
import sys, time
from megacp.training.checkpoint.directory import DirectoryLock
lock = DirectoryLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    """Return another process, which has the lock until its standard input closes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(directory)], text=True, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=10)


@pytest.mark.parametrize("how", ["in order", "kill -9"])
def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path, how: str) -> None:
    owner = holder(tmp_path / "new")
    try:
        with pytest.raises(ValueError) as refused:
            DirectoryLock(tmp_path / "new")
        for part in (
            f"--save {tmp_path / 'new'}",
            f"host {socket.gethostname()}",
            f"process {owner.pid}",
        ):
            assert part in str(refused.value)
    finally:
        if how == "kill -9":
            os.kill(owner.pid, signal.SIGKILL)
        end(owner)
    lock = DirectoryLock(tmp_path / "new")
    assert lock.problem is None
    assert (
        tmp_path / "new" / LOCK_FILE
    ).read_text() == f"host {socket.gethostname()}, process {os.getpid()}"
    lock.release()
    lock.release()
    end(holder(tmp_path / "new"))


def test_a_child_of_a_killed_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = _HOLD.replace(
        "print(", "import os\nif os.fork() == 0: time.sleep(20); os._exit(0)\nprint("
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert (
        owner.stdin is not None
        and owner.stdout is not None
        and owner.stdout.readline() == b"held\n"
    )
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    owner.kill()
    owner.wait(timeout=10)
    try:
        os.kill(int(children[0]), 0)  # it is still there
        DirectoryLock(tmp_path).release()
    finally:
        os.kill(int(children[0]), signal.SIGKILL)
        owner.stdin.close()
        owner.stdout.close()


def test_a_file_system_without_locks_is_told_and_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("megacp.storage.files.fcntl.lockf", unsupported)
    lock = DirectoryLock(tmp_path)
    assert (
        lock.problem is not None
        and "Function not implemented" in lock.problem
        and "another run" in lock.problem
    )
    lock.release()


def test_only_what_crashed_saves_left_is_removed(tmp_path: Path) -> None:
    kept = [
        "step_0000001",
        "step_0000002.2",
        "notes.tmp-12345678",
        "step_0000003.tmp-mine",
        "log.jsonl",
        "latest",
    ]
    gone = [
        ".latest.0123abcd0123.partial",
        "step_0000003.tmp-0123abcd",
        "step_0000001.2.tmp-0123abcd",
    ]
    for name in (*kept, *gone):
        if name.startswith("step"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "rank_00000.safetensors").write_bytes(b"1")
        else:
            (tmp_path / name).write_text("")
    assert remove_leftovers(tmp_path) == [
        f"removed {tmp_path / name}, left by a crash" for name in sorted(gone)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_lock_that_is_a_link_is_refused_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("thesis")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=LOCK_FILE):
        DirectoryLock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "thesis"


def test_a_reader_beside_a_job_that_prunes_reads_or_says_so_in_one_message(tmp_path: Path) -> None:
    save(tmp_path, 1)
    loaded = load_checkpoint(tmp_path, WORLD)
    save(tmp_path, 2, keep_last=1)
    with pytest.raises(ValueError, match="step_0000001 was removed while it was read"):
        value(loaded)
    assert value(load_checkpoint(tmp_path, WORLD)) == 2


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("step_0000001", True),
        ("step_0000001.2", True),
        ("latest", True),
        ("step_0000001.tmp-0123abcd", False),
    ],
)
def test_anything_that_was_ever_committed_is_a_trace(
    tmp_path: Path, name: str, counts: bool
) -> None:
    (tmp_path / name).write_text("") if name == "latest" else (tmp_path / name).mkdir()
    (tmp_path / "log.jsonl").write_text("{}")
    assert holds_checkpoints(tmp_path) == counts
    assert not holds_checkpoints(tmp_path / "nowhere")
