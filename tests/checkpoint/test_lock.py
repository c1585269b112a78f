"""One run per directory, against real other processes, and what a crashed run leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megacp.core.checkpoint.directory import remove_leftovers, traces_of_checkpoints
from megacp.core.checkpoint.lock import LOCK_FILE, DirectoryLock

_HOLD = """
import sys, time
from megacp.core.checkpoint.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until its standard input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(directory)], text=True, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=10)


@pytest.mark.parametrize("how", ["in order", "kill -9"])
def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path, how: str) -> None:
    """Would catch two jobs in one directory, and a lock that somebody must delete after a crash."""
    owner = holder(tmp_path / "new")
    try:
        with pytest.raises(ValueError) as refused:
            DirectoryLock(tmp_path / "new")
        for part in (f"--save {tmp_path / 'new'}", f"host {socket.gethostname()}", f"process {owner.pid}"):
            assert part in str(refused.value)
    finally:
        if how == "kill -9":
            os.kill(owner.pid, signal.SIGKILL)
        end(owner)
    lock = DirectoryLock(tmp_path / "new")
    assert lock.problem is None
    assert (tmp_path / "new" / LOCK_FILE).read_text() == f"host {socket.gethostname()}, process {os.getpid()}\n"
    lock.release()
    lock.release()
    end(holder(tmp_path / "new"))


def test_a_child_of_a_killed_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Would catch `flock`, whose lock a forked worker inherits."""
    code = _HOLD.replace("print(", "import os\nif os.fork() == 0: time.sleep(20); os._exit(0)\nprint(")
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None and owner.stdout is not None and owner.stdout.readline() == b"held\n"
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

    monkeypatch.setattr("megacp.core.storage.files.fcntl.lockf", unsupported)
    lock = DirectoryLock(tmp_path)
    assert lock.problem is not None and "Function not implemented" in lock.problem and "second run" in lock.problem
    lock.release()


def test_only_what_crashed_saves_left_is_removed(tmp_path: Path) -> None:
    """Would catch a user's file, a checkpoint or the log that goes with the leftovers."""
    kept = ["step_0000001", "step_0000002.2", "notes.tmp-12345678", "step_0000003.tmp-mine", "log.jsonl", "latest"]
    gone = ["latest.tmp-0123abcd", "step_0000003.tmp-0123abcd", "step_0000001.2.tmp-0123abcd"]
    for name in (*kept, *gone):
        if name.startswith("step"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "rank_00000.safetensors").write_bytes(b"1")
        else:
            (tmp_path / name).write_text("")
    assert remove_leftovers(tmp_path) == [f"removed {tmp_path / name}, left by a crash" for name in sorted(gone)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    assert remove_leftovers(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("name", "counts"),
    [("step_0000001", True), ("step_0000001.2", True), ("latest", True), ("step_0000001.tmp-0123abcd", False)],
)
def test_anything_that_was_ever_committed_is_a_trace(tmp_path: Path, name: str, counts: bool) -> None:
    """Would catch a damaged checkpoint that counts as none, after which a run starts at step 0."""
    (tmp_path / name).write_text("") if name == "latest" else (tmp_path / name).mkdir()
    (tmp_path / "log.jsonl").write_text("{}")
    assert bool(traces_of_checkpoints(tmp_path)) == counts
    assert traces_of_checkpoints(tmp_path / "nowhere") == []
