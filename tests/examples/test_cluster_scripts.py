"""The scripts for clusters: each estimate that stands in one is what its own dry run prints."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from megacp.train import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("pretrain_vlm.sh", "long_context.sh", "slurm/pretrain_vlm.sbatch", "slurm/long_context.sbatch")
ROW = re.compile(r"^# +(\d+) GPUs  ((?:[A-Z]+=[\w.]+ +)+)([\d.]+) GiB$(?:\n# +(weights .*) GiB$)?", re.MULTILINE)


def estimates(script: str) -> list[tuple[str, ...]]:
    """(GPUs, settings of the environment, GiB, terms or nothing) of each row."""
    return ROW.findall((ROOT / "examples" / script).read_text(encoding="utf-8"))


def settings_of(row: tuple[str, ...]) -> dict[str, str]:
    return dict(word.split("=") for word in row[1].split())


def launched(script: str, row: tuple[str, ...], folder: Path) -> list[str]:
    """The flags that a dry run of the script gives to `python -m megacp.train`, told by a `python` that prints them."""
    (folder / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (folder / "python").chmod(0o755)
    settings = {**settings_of(row), "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", f"examples/{script}", "--dry-run", "--world-size", row[0]]
    printed = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    program, *flags = printed.stdout.split("-m\n")[1].splitlines()
    assert program == "megacp.train"
    return flags


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_tells_the_memory_of_several_sizes(script: str) -> None:
    rows = estimates(script)
    assert rows and all(float(row[2]) < 141 for row in rows)
    for row in rows:
        settings = settings_of(row)
        assert int(row[0]) % (int(settings["TP"]) * int(settings["CP"])) == 0


@pytest.mark.parametrize("script, row", [(script, row) for script in SCRIPTS for row in estimates(script)])
def test_the_memory_in_a_script_is_what_its_dry_run_estimates(
    script: str, row: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(launched(script, row, tmp_path)) == 0
    _, head, *stages = capsys.readouterr().out.split("Memory of one rank")[1].split("\n\n")[0].splitlines()
    names = re.split(" {2,}", head.strip())
    cells = [dict(zip(names, re.split(" {2,}", stage.strip()), strict=True)) for stage in stages]
    assert all(stage["total"].endswith(" GiB") for stage in cells)
    fullest = max(cells, key=lambda stage: float(stage["total"].split()[0]))
    assert fullest["total"] == f"{row[2]} GiB"
    for name, value in (term.rsplit(" ", 1) for term in row[3].split(", ") if term):
        assert fullest[name] == f"{value} GiB", name
