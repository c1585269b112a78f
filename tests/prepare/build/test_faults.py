"""Full disks, paths that cannot be read, workers that die: one message each, and no waiting for the dead."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.build.faults import StorageFault, storage_faults
from megacp.prepare.build.workers import WorkerFailed, run_tasks
from tests.prepare.build.builds import files, run, write_records
from tests.tools.in_process import preprocessed as tool

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"


def on_full_disk(largest_file: int, *args: Any) -> subprocess.CompletedProcess[str]:
    """The tool in a process that may write files of `largest_file` bytes at most, as on a disk that is full then."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    command = [sys.executable, str(TOOL), *map(os.fspath, map(str, args))]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=limit,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def build_args(path: Path, output: Path, *more: Any) -> list[Any]:
    return ["build", "--input", path, "--output", output, "--tokenizer", "byte", "--seq-length", 512, *more]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("largest", [100, 1500, 9000])
def test_a_disk_that_is_full_at_any_write_is_one_message_with_path_and_bytes(
    tmp_path: Path, workers: int, largest: int
) -> None:
    """Journal, tables, tokens: would catch the worker's traceback that some sizes gave."""
    corpus = tmp_path / "a.jsonl"
    write_records(corpus, 300)
    full = on_full_disk(largest, *build_args(corpus, tmp_path / "d", "--unit-bytes", 12000, "--workers", workers))
    assert full.returncode == 2 and full.stderr.count("\n") == 1, full.stderr
    assert full.stderr.startswith(f"error: --output {tmp_path}/d: File too large"), full.stderr
    assert "bytes are free there" in full.stderr and "run the same command again" in full.stderr
    if workers == 1:  # another worker is ended where it is; the next run takes its place
        assert not list(tmp_path.glob("d/.shard_*"))
    again = build_args(corpus, tmp_path / "d", "--unit-bytes", 12000, "--workers", 1)
    assert tool(*again).returncode == 0
    whole = build_args(corpus, tmp_path / "whole", "--unit-bytes", 12000, "--workers", 1)
    assert tool(*whole).returncode == 0 and files(tmp_path / "d") == files(tmp_path / "whole")


def test_an_error_without_a_number_or_a_name_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(StorageFault, match=f"--output {tmp_path}: 7 requested and 0 written, .* bytes are free there"):
        with storage_faults(tmp_path):
            raise OSError("7 requested and 0 written")
    with (
        pytest.raises(StorageFault, match="Input/output error, while the input was read or --output"),
        storage_faults(tmp_path),
    ):
        raise OSError(5, os.strerror(5))
    with pytest.raises(StorageFault, match="^/else/where: Permission denied$"), storage_faults(tmp_path):
        raise PermissionError(13, os.strerror(13), "/else/where")


def test_each_kind_of_wrong_input_is_named_as_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    inputs = [tmp_path / name for name in ("folder", "pipe", "none.jsonl")]
    with pytest.raises(ValueError) as error:
        run(inputs, tmp_path / "d")
    for part in ("folder is a directory; give the files in it", "pipe is a named pipe", "no such file: "):
        assert f"--input: {tmp_path}/{part}" in str(error.value) or part in str(error.value)
    assert "no such file: " + str(tmp_path / "none.jsonl") in str(error.value)
    assert str(error.value).count("no such file") == 1


@pytest.mark.parametrize("flag", ["--input", "--output", "--tokenizer", "--image-root", "stats"])
def test_a_path_that_is_no_utf_8_is_one_message(tmp_path: Path, flag: str) -> None:
    corpus = tmp_path / "a.jsonl"
    write_records(corpus, 3)
    odd = os.fsdecode(b"caf\xe9")
    args = ["stats", odd] if flag == "stats" else [*build_args(corpus, tmp_path / "d"), flag, odd]
    refused = tool(*args)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "caf\\udce9' is no path in UTF-8" in refused.stderr and "rename it" in refused.stderr


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
