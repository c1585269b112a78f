"""tools/preprocess_data.py on the command line: exit codes, one-line errors, no import of torch,
kills.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.prepare.packs.builds import files
from tests.tools.in_process import preprocessed as tool

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"


def command(*args: object) -> list[str]:
    return [sys.executable, str(TOOL), *map(str, args)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def build_args(path: Path, output: Path, *more: object) -> list[object]:
    return [
        "build",
        "--input",
        path,
        "--output",
        output,
        "--tokenizer",
        "byte",
        "--seq-length",
        512,
        *more,
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"document {i} " * (i % 20 + 1)}) + "\n" for i in range(300))
    )
    return path


def assert_one_line_error(result: subprocess.CompletedProcess[str], code: int = 2) -> None:
    assert result.returncode == code and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], None])
def test_neither_help_nor_a_tiny_build_imports_torch(
    corpus: Path, tmp_path: Path, arguments: list[str] | None
) -> None:
    argv = arguments or [str(a) for a in build_args(corpus, tmp_path / "d", "--workers", 1)]
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['preprocess_data.py', *{argv!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_build_ends_with_one_summary_and_a_second_run_says_complete(
    corpus: Path, tmp_path: Path
) -> None:
    first = tool(*build_args(corpus, tmp_path / "d", "--workers", 2, "--unit-bytes", 5000))
    assert first.returncode == 0, first.stderr
    assert (
        first.stdout.count("\n") == 1
        and "300 documents" in first.stdout
        and "tokenizer byte" in first.stdout
    )
    second = tool(*build_args(corpus, tmp_path / "d", "--unit-bytes", 5000))
    assert (
        second.returncode == 0
        and "already complete" in second.stdout
        and "note" not in second.stderr
    )


def test_inspect_stats_and_verify(corpus: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert tool(*build_args(corpus, tmp_path / name, "--workers", 1)).returncode == 0
    shown = tool("inspect", tmp_path / "a", "--pack", 0, 1)
    assert shown.returncode == 0 and shown.stdout.count("pack ") == 2
    assert "'\xabdocument 139 document 139" in shown.stdout and "weights all 1" in shown.stdout
    stats = json.loads(tool("stats", tmp_path / "a", "--json").stdout)
    assert stats["documents"] == 300 and 0.9 < stats["packing_efficiency"] <= 1.0
    assert sum(stats["length_histogram"].values()) == 300
    assert "efficiency" in tool("stats", tmp_path / "a").stdout
    assert tool("verify", tmp_path / "a", tmp_path / "b").returncode == 0
    assert_one_line_error(tool("inspect", tmp_path / "a", "--pack", 10**6))
    assert "--jsn, did you mean --json?" in tool("stats", tmp_path / "a", "--jsn").stderr


@pytest.mark.slow
def test_errors_are_one_line_and_exit_with_2(corpus: Path, tmp_path: Path) -> None:
    assert_one_line_error(tool())
    assert_one_line_error(tool("build", "--input", corpus))
    assert_one_line_error(tool(*build_args(tmp_path / "none.jsonl", tmp_path / "d")))
    assert_one_line_error(tool(*build_args(corpus, tmp_path / "d"), "--tokenizer", "gpt-5"))
    assert_one_line_error(tool(*build_args(corpus, tmp_path / "d"), "--cp-degrees", "1,x"))
    assert_one_line_error(tool("stats", tmp_path))
    for wrong in (("--unit-bytes", -5), ("--on-error", "skip", "--max-errors", -3)):
        failed = tool(*build_args(corpus, tmp_path / "d"), *wrong)
        assert_one_line_error(failed)
        assert f"{wrong[-2]} is {wrong[-1]}, but must be at least" in failed.stderr
    other = corpus.parent / ".." / corpus.parent.name / corpus.name
    again = tool(*build_args(corpus, tmp_path / "d"), "--input", corpus, other)
    assert_one_line_error(again)
    assert "--input: given more than once" in again.stderr
    assert not (tmp_path / "d").exists()
    with open(corpus, "a") as stream:
        stream.write("{broken\n")
    bad = tool(*build_args(corpus, tmp_path / "d", "--workers", 2, "--unit-bytes", 5000))
    assert_one_line_error(bad)
    assert re.search(r"corpus\.jsonl:301: invalid JSON", bad.stderr)


def big_corpus(path: Path) -> Path:
    text = "some words that take a while " * 40
    path.write_text("".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i in range(5_000)))
    return path


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "stat").read_text().rsplit(") ", 1)[1].split()[
                1
            ] == str(pid):
                if "spawn_main" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def started(args: list[object], output: Path) -> subprocess.Popen[str]:
    """Start a build, and wait until it has finished one shard."""
    before = len(list(output.glob(".build/[0-9]*.json")))
    process = subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    end = time.monotonic() + 30
    while len(list(output.glob(".build/[0-9]*.json"))) <= before:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)
    return process


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds worker processes in /proc")
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_build_that_is_killed_or_loses_a_worker_ends_and_can_be_continued(tmp_path: Path) -> None:
    corpus = big_corpus(tmp_path / "corpus.jsonl")
    size = [
        "--oversize",
        "split",
        "--unit-bytes",
        300_000,
        "--seq-length",
        64,
        "--tokenizer-engine",
        "reference",
    ]
    output = tmp_path / "d"
    args = build_args(corpus, output, "--workers", 2, *size)

    process = started(args, output)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2 and "while working on unit" in stderr
    assert "corpus.jsonl (bytes" in stderr and stderr.count("\n") == 1

    process = started(args, output)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and "run the same command again to continue" in stderr, (
        stdout,
        stderr,
    )

    process = started(args, output)
    process.kill()
    process.communicate(timeout=30)
    time.sleep(0.3)  # its workers notice this and exit

    assert not (output / "manifest.json").exists()
    last = tool(*args)
    assert last.returncode == 0 and "shards were already built" in last.stdout, last.stderr
    assert tool(*build_args(corpus, tmp_path / "whole", "--workers", 1, *size)).returncode == 0
    assert files(output) == files(tmp_path / "whole")
