"""Outputs of a run that close or fill up: the run continues, saves, and reports the failed output."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megacp.train import main
from tests.training.runs import TINY, losses

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-m", "megacp.train"]
TORCHRUN = [
    sys.executable,
    *"-m torch.distributed.run --standalone --nproc-per-node 2 -m megacp.train".split(),
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def notes(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["text"] for row in rows if row["kind"] == "note"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [PYTHON, pytest.param(TORCHRUN, marks=pytest.mark.faults)], ids=["one", "torchrun"]
)
def test_a_reader_that_has_read_enough_does_not_end_the_run(
    tmp_path: Path, launcher: list[str]
) -> None:
    """`| head -1`: detects a traceback before the first save, and status 120 at the end of a finished
    run.
    """
    flags = [*TINY, "--save", str(tmp_path), "--save-interval", "2"]
    run = subprocess.Popen(
        [*launcher, *flags],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None and run.stderr is not None
    assert " = pp 1" in run.stdout.readline()
    run.stdout.close()
    error = run.stderr.read()
    run.stderr.close()
    assert run.wait(timeout=120) == 0, error
    assert error.count("standard output cannot be written (Broken pipe): the run continues") == 1
    assert "Traceback" not in error and "Exception ignored" not in error
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == [
        "step_0000002",
        "step_0000004",
    ]
    assert len(notes(tmp_path)) == 1 and notes(tmp_path)[0].startswith(
        "standard output cannot be written"
    )


@pytest.mark.faults
def test_ranks_that_start_without_standard_output_end_well(tmp_path: Path) -> None:
    """`>&-`: detects a good run of two ranks that ends with status 1."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *TORCHRUN, *TINY, "--save", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.faults
@pytest.mark.parametrize("events", [False, True], ids=["jsonl", "jsonl and TensorBoard"])
def test_a_full_disk_under_the_log_file_does_not_end_the_run(tmp_path: Path, events: bool) -> None:
    """The log may grow to 4 MiB and 1,000 bytes; checkpoints are smaller. Detects half a line in the
    file.
    """
    whole = [*TINY, "--lr-decay-iters", "30", "--save", str(tmp_path), "--save-interval", "10"]
    first = subprocess.run(
        [*PYTHON, *whole, "--train-iters", "2"], cwd=ROOT, env=ENVIRONMENT, timeout=120
    )
    assert first.returncode == 0
    note = json.dumps({"kind": "note", "step": 1, "text": "x" * 1000}) + "\n"
    room = (4 << 20) - (tmp_path / "log.jsonl").stat().st_size
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(note * (room // len(note)))
    more = ["--train-iters", "30", "--load", str(tmp_path)]
    more += ["--tensorboard-dir", str(tmp_path / "events")] if events else []
    limit = (tmp_path / "log.jsonl").stat().st_size + 1000
    done = subprocess.run(
        [*PYTHON, *whole, *more],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr
    warning = f"{tmp_path / 'log.jsonl'} cannot be written (File too large): the run continues"
    assert done.stdout.count(warning) == 1 and "Traceback" not in done.stderr
    assert "finished after step 30" in done.stdout and (tmp_path / "step_0000030").is_dir()
    kept = sorted(losses(tmp_path))  # json of every line: none is cut
    assert kept[:3] == [1, 2, 3] and 3 <= len(kept) < 30
    assert (tmp_path / "log.jsonl").stat().st_size <= limit


SECONDS = 60


TRAIN = ["-m", "megacp.train"]
GENERATE = [str(Path(__file__).resolve().parents[2] / "tools" / "generate.py")]


def program(name: Sequence[str], *flags: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the test fails if it hangs or fills the memory."""
    limit = f"ulimit -v {8 << 20}; exec"
    command = [os.fsencode(str(text)) for text in (sys.executable, *name, *flags)]
    words: Sequence[bytes] = [b"bash", b"-c", f'{limit} "$@"'.encode(), b"bash", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, errors="replace")


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> bool:
    """Return whether a program ended with status 2 and one message with all parts, without a
    traceback.
    """
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert all(part in done.stderr for part in parts), done.stderr
    return True


@pytest.mark.parametrize(("name", "status"), [("lock", 2), ("latest", 0)])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, status: int) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    precious.write_text("precious")
    (out / name).symlink_to(precious)
    assert main([*TINY, "--save", str(out)]) == status
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("flag", ["--save", "--load", "--data-path", "--log-file"])
def test_names_that_are_no_utf_8_are_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert main([*TINY, flag, os.fsdecode(os.fsencode(tmp_path) + b"/\xff")]) == 2
    assert r"\udcff' on the command line is not valid UTF-8" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_a_program_says_of_a_name_that_is_no_utf_8_what_is_wrong(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    assert refused(
        program(TRAIN, *TINY, "--save", odd), r"\udcff' on the command line is not valid UTF-8"
    )
    assert not os.path.exists(odd)


@pytest.mark.faults
def test_readers_beside_a_run_that_keeps_one_checkpoint_find_it_whole_or_say_that_it_was_removed(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    flags = [
        *TINY,
        "--vocab-size",
        "257",
        "--train-iters",
        "1000000",
        "--lr-decay-style",
        "constant",
    ]
    flags += ["--save", str(out), "--save-interval", "1", "--keep-last", "1"]
    job = subprocess.Popen(
        [sys.executable, "-m", "megacp.train", *flags], stdout=subprocess.DEVNULL
    )
    ask = (
        GENERATE,
        "--tokenizer",
        "byte",
        "--prompt",
        "a",
        "--max-new-tokens",
        "2",
        "--checkpoint",
    )
    tune = (
        TRAIN,
        *TINY[-2:],
        "--seq-length",
        "64",
        "--global-batch-size",
        "4",
        "--train-iters",
        "1",
        "--finetune",
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not list(out.glob("step_*/manifest.json")):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.1)
        for reader in (program(*ask, out), program(*tune, "--load", out)):
            assert reader.returncode == 0 or refused(reader, "step_"), reader.stderr
        assert job.poll() is None
    finally:
        job.terminate()
        job.wait(timeout=SECONDS)
    assert program(*ask, out).returncode == 0 and len(losses(out)) > 5
