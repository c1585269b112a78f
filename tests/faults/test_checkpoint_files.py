"""Whole programs before a directory of checkpoints that is not what it must be: each ends at once with one message."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megacp.train import main
from tests.training.runs import TINY, losses

SECONDS = 60


TRAIN = ["-m", "megacp.train"]
GENERATE = [str(Path(__file__).resolve().parents[2] / "tools" / "generate.py")]


def program(name: Sequence[str], *flags: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; one that hangs, or fills the memory, fails the test."""
    limit = f"ulimit -v {8 << 20}; exec"
    command = [os.fsencode(str(text)) for text in (sys.executable, *name, *flags)]
    words: Sequence[bytes] = [b"bash", b"-c", f'{limit} "$@"'.encode(), b"bash", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, errors="replace")


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> bool:
    """Whether a program ended with status 2 and one message that holds all parts, without a traceback."""
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
    assert r"\udcff' on the command line is no text in UTF-8" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_a_program_says_of_a_name_that_is_no_utf_8_what_is_wrong(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    assert refused(program(TRAIN, *TINY, "--save", odd), r"\udcff' on the command line is no text in UTF-8")
    assert not os.path.exists(odd)


@pytest.mark.faults
def test_readers_beside_a_run_that_keeps_one_checkpoint_find_it_whole_or_say_that_it_was_removed(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    flags = [*TINY, "--vocab-size", "257", "--train-iters", "1000000", "--lr-decay-style", "constant"]
    flags += ["--save", str(out), "--save-interval", "1", "--keep-last", "1"]
    job = subprocess.Popen([sys.executable, "-m", "megacp.train", *flags], stdout=subprocess.DEVNULL)
    ask = (GENERATE, "--tokenizer", "byte", "--prompt", "a", "--max-new-tokens", "2", "--checkpoint")
    tune = (TRAIN, *TINY[-2:], "--seq-length", "64", "--global-batch-size", "4", "--train-iters", "1", "--finetune")
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
