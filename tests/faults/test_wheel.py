"""The wheel, installed into a folder of its own: every command starts there, and together they make a model.

Run by `make test-faults` for the whole way; the half that takes seconds runs with the other tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("train", "preprocess", "convert", "generate", "parity", "plot")
SIZES = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --seq-length 64"


def environment(folder: Path) -> dict[str, str]:
    """Without anything of a checkout in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "HOME": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what is here, built from a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "megacp", source / "megacp", ignore=shutil.ignore_patterns("__pycache__"))
    build = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(source)]
    subprocess.run(build, check=True, capture_output=True, text=True, timeout=200)
    (made,) = (folder / "dist").glob("megacp-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A virtual environment with the wheel, which sees the packages of this one behind it; an empty folder in it."""
    folder = wheel.parents[1]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=100)
    own = folder / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read again
    python = str(folder / "venv" / "bin" / "python")
    install = [*PIP, "--python", python, "install", *OFFLINE, "--quiet", "--ignore-installed", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True, timeout=100)
    shutil.rmtree(folder / "source")
    (folder / "empty").mkdir()
    return folder


def run(installed: Path, command: str, *flags: str, status: int = 0) -> str:
    """What a command of the wheel prints in an empty folder."""
    program = str(installed / "venv" / "bin" / f"megacp-{command}")
    done = subprocess.run(
        [program, *flags],
        cwd=installed / "empty",
        env=environment(installed),
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
        programs = dict(re.findall(r"^(\S+) = (\S+)$", archive.read(entry_points).decode(), re.MULTILINE))
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "megacp").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert programs.keys() == {f"megacp-{name}" for name in COMMANDS}
    assert all(f"{target.partition(':')[0].replace('.', '/')}.py" in names for target in programs.values())


@pytest.mark.faults
def test_every_command_of_the_wheel_starts_in_an_empty_folder(installed: Path) -> None:
    python, folder = str(installed / "venv" / "bin" / "python"), installed / "empty"
    code = "import megacp; print(megacp.__file__)"
    found = subprocess.run(
        [python, "-c", code], cwd=folder, env=environment(installed), check=True, capture_output=True, text=True
    ).stdout
    assert found.startswith(str(installed / "venv")), found
    for command in COMMANDS:
        text = run(installed, command, "--help")
        assert "usage" in text.lower() and "Traceback" not in text, command
    assert list(folder.iterdir()) == []


@pytest.mark.faults
def test_the_commands_of_the_wheel_make_a_model(installed: Path) -> None:
    """Build, train, generate, convert there and back, plot, parity on two ranks; and what is refused is one line."""
    folder = installed / "empty"
    (folder / "records.jsonl").write_text("".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(40)))
    build = ["build", "--input", "records.jsonl", "--output", "data", "--tokenizer", "byte", "--seq-length", "64"]
    run(installed, "preprocess", *build)
    steps = "--data-path data --global-batch-size 2 --train-iters 2 --save run --log-interval 1".split()
    run(installed, "train", *SIZES.split(), *steps)
    assert "number" in run(
        installed, "generate", *"--checkpoint run --tokenizer byte --prompt number --max-new-tokens 3".split()
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
