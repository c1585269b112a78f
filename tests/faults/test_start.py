"""Ranks that differ at the start, miss each other or see different directories: one message on each
rank, and no step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.faults.processes import Ended, ends, environment, free_port, launch, run_all
from tests.training.runs import TINY

HOST = socket.gethostname()
QUICK = [*TINY, "--distributed-timeout-minutes", "1"]
IMPATIENT = [*TINY, "--distributed-timeout-minutes", "0.25"]


def refused(ended: Ended) -> str:
    """Return the only message of a rank that was refused."""
    assert ended.status == 2, ended
    assert "Traceback" not in ended.err and "step 1/" not in ended.out
    _, *messages = re.split(r"^error(?: on rank \d+)?: ", ended.err, flags=re.MULTILINE)
    assert len(messages) == 1, ended.err
    return messages[0].strip()


@pytest.mark.slow
def test_a_rank_with_another_learning_rate_is_refused_on_every_rank_with_both_values() -> None:
    messages = {refused(ended) for ended in run_all([QUICK, [*QUICK, "--lr", "0.02"]])}
    assert messages == {
        "the 2 ranks of this run were started differently; start all of them with the same flags, data and software:\n"
        f"  - --lr: 0.02 on rank 1 (host {HOST}); 0.01 on rank 0 (host {HOST})"
    }


SILENT = (
    "--seed 5 --hidden-dropout 0.2 --weight-decay 0.2 --clip-grad 0.5 --rotary-base 20000 --attention-mask causal "
    "--global-batch-size 8 --save elsewhere --dtype float32 --eval-iters 2 --save-interval 3 --lr-warmup-iters 1 "
    "--distributed-timeout-minutes 5"
).split()
"""Flags in which ranks could once differ without an error."""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("other", "odd"),
    [
        (SILENT, 0),
        (SILENT, 1),
        (["--num-attention-heads", "8"], 1),
        (["--num-layers", "2", "--train-iters", "6"], 0),
        (["--tensor-model-parallel-size", "2"], 1),
        (["--pipeline-model-parallel-size", "2"], 0),
        (["--context-parallel-size", "2"], 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_any_other_flag_on_one_rank_is_refused(tmp_path: Path, other: list[str], odd: int) -> None:
    flags = [QUICK, QUICK]
    flags[odd] = [*QUICK, *other]
    first, second = (refused(ended) for ended in run_all(flags, [tmp_path, tmp_path]))
    assert first == second
    assert all(f"  - {flag}: " in first for flag in other if flag.startswith("--"))
    assert f"on rank {odd} (host {HOST})" in first


@pytest.mark.faults
@pytest.mark.parametrize(
    "wrong", [["--data-path", "/nowhere"], ["--lr", "much"], ["--lerning-rate", "1"]]
)
def test_what_only_one_rank_cannot_do_ends_all_of_them_with_its_reason(wrong: list[str]) -> None:
    first, second = (refused(ended) for ended in run_all([QUICK, [*QUICK, *wrong]]))
    assert first == second
    assert f"rank 1 (host {HOST}): " in first and wrong[0].strip("-") in first


@pytest.mark.faults
def test_what_no_rank_can_do_is_told_without_ranks() -> None:
    messages = {refused(ended) for ended in run_all([[*QUICK, "--data-path", "/nowhere"]] * 2)}
    assert messages == {
        "this configuration cannot run:\n  - --data-path /nowhere does not exist: there is no such "
        "folder"
    }


@pytest.mark.faults
def test_a_save_directory_that_is_not_shared_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    (message,) = {refused(ended) for ended in run_all([[*QUICK, "--save", "out"]] * 2, folders)}
    assert message.startswith("rank 1: --save out is not the same directory on all machines")
    assert f"the lock of rank 0 (host {HOST}" in message


@pytest.mark.faults
def test_a_rank_that_never_comes_is_named_by_all_others() -> None:
    flags = [*IMPATIENT, "--global-batch-size", "6"]
    port = free_port()
    for ended in ends([launch(flags, environment(rank, 3, port)) for rank in (0, 1)]):
        message = refused(ended)
        assert (
            "waited 15 s for the 3 ranks of this run to start: no message from rank 2; start every rank"
            in message
        )


@pytest.mark.faults
def test_a_port_that_is_taken_is_one_message() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        flags = [*QUICK, "--distributed-timeout-minutes", "0.1"]
        (ended,) = ends([launch(flags, environment(0, 2, port))])
    assert f"MASTER_PORT={port}" in refused(ended)


@pytest.mark.faults
def test_local_ranks_behind_the_first_are_silent() -> None:
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    for rank, flags in enumerate((QUICK, [*QUICK, "--lr", "0.02"])):
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        processes.append(launch(flags, environment(rank, 2, port, **local)))
    first, second = ends(processes)
    assert "--lr" in refused(first)
    assert (second.status, second.err) == (2, "")


ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("finetune", "train", "preprocess", "convert", "generate", "parity", "plan", "plot")
SIZES = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --seq-length 64"
)


def clean_environment(folder: Path) -> dict[str, str]:
    """Return an environment without anything of a checkout."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    return {**kept, "HOME": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(
        ROOT / "megacp", source / "megacp", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = [
        *PIP,
        "wheel",
        *OFFLINE,
        "--no-build-isolation",
        "--wheel-dir",
        str(folder / "dist"),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True, text=True, timeout=200)
    (made,) = (folder / "dist").glob("megacp-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """Return a virtual environment with the wheel, in which the packages of this one are visible,
    and an empty folder.
    """
    folder = wheel.parents[1]
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")],
        check=True,
        timeout=100,
    )
    own = (
        folder
        / "venv"
        / "lib"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        / "site-packages"
    )
    (own / "shared.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # its own .pth files are not read again
    python = str(folder / "venv" / "bin" / "python")
    install = [
        *PIP,
        "--python",
        python,
        "install",
        *OFFLINE,
        "--quiet",
        "--ignore-installed",
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True, text=True, timeout=100)
    shutil.rmtree(folder / "source")
    (folder / "empty").mkdir()
    return folder


def run(installed: Path, command: str, *flags: str, status: int = 0) -> str:
    """Return the output of a command of the wheel in an empty folder."""
    program = str(installed / "venv" / "bin" / f"megacp-{command}")
    done = subprocess.run(
        [program, *flags],
        cwd=installed / "empty",
        env=clean_environment(installed),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_a_program_for_each_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        programs = dict(
            re.findall(r"^(\S+) = (\S+)$", archive.read(entry_points).decode(), re.MULTILINE)
        )
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "megacp").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert programs.keys() == {"megacp", *(f"megacp-{name}" for name in COMMANDS)}
    assert all(
        f"{target.partition(':')[0].replace('.', '/')}.py" in names for target in programs.values()
    )


@pytest.mark.faults
def test_every_command_of_the_wheel_starts_in_an_empty_folder(installed: Path) -> None:
    python, folder = str(installed / "venv" / "bin" / "python"), installed / "empty"
    code = "import megacp; print(megacp.__file__)"
    found = subprocess.run(
        [python, "-c", code],
        cwd=folder,
        env=clean_environment(installed),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert found.startswith(str(installed / "venv")), found
    for command in COMMANDS:
        text = run(installed, command, "--help")
        assert "usage" in text.lower() and "Traceback" not in text, command
    assert list(folder.iterdir()) == []


@pytest.mark.faults
def test_the_commands_of_the_wheel_make_a_model(installed: Path) -> None:
    """Build, train, generate, convert there and back, plot, and check parity on two ranks. Each error
    is one line.
    """
    folder = installed / "empty"
    (folder / "records.jsonl").write_text(
        "".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(40))
    )
    build = [
        "build",
        "--input",
        "records.jsonl",
        "--output",
        "data",
        "--tokenizer",
        "byte",
        "--seq-length",
        "64",
    ]
    run(installed, "preprocess", *build)
    steps = (
        "--data-path data --global-batch-size 2 --train-iters 2 --save run --log-interval 1".split()
    )
    run(installed, "train", *SIZES.split(), *steps)
    assert "number" in run(
        installed,
        "generate",
        *"--checkpoint run --tokenizer byte --prompt number --max-new-tokens 3".split(),
    )
    there = "--from megacp --to hf --input run --output theirs --tokenizer byte --verify".split()
    assert "verify: all" in run(installed, "convert", *there)
    assert "verify: all" in run(
        installed, "convert", *"--from hf --to megacp --input theirs --output ours --verify".split()
    )
    run(installed, "plot", *"--log run/log.jsonl --output loss.png".split())
    assert (folder / "loss.png").stat().st_size > 1000
    same = run(installed, "parity", *"--nproc 2 --tensor-model-parallel-size 2 --steps 1".split())
    assert "THE SAME" in same
    error = run(installed, "convert", *"--from hf --to hf --input run --output x".split(), status=2)
    assert error.count("\n") == 1 and "--from megacp" in error
