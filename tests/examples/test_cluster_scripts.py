"""The scripts for clusters: each estimate that stands in one is what its own dry run prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("pretrain_vlm.sh", "long_context.sh", "slurm/pretrain_vlm.sbatch", "slurm/long_context.sbatch")
ROW = re.compile(r"^# +(\d+) GPUs  TP=(\d+) CP=(\d+) RECOMPUTE=(\w+) +([\d.]+) GiB$", re.MULTILINE)


def estimates(script: str) -> list[tuple[str, ...]]:
    return ROW.findall((ROOT / "examples" / script).read_text(encoding="utf-8"))


def dry_run(script: str, gpus: str, tp: str, cp: str, recompute: str) -> str:
    """GiB of the fullest rank."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"TP": tp, "CP": cp, "RECOMPUTE": recompute, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", f"examples/{script}", "--dry-run", "--world-size", gpus]
    report = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )
    assert report.returncode == 0, report.stderr
    table = report.stdout.split("Memory of one rank")[1].split("\n\n")[0]
    return max((re.findall(r"([\d.]+) GiB$", line.rstrip())[0] for line in table.splitlines()[2:]), key=float)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_tells_the_memory_of_several_sizes(script: str) -> None:
    rows = estimates(script)
    assert rows and all(float(row[-1]) < 141 for row in rows)
    assert all(int(gpus) % (int(tp) * int(cp)) == 0 for gpus, tp, cp, _, _ in rows)


@pytest.mark.slow
@pytest.mark.parametrize("script, row", [(script, row) for script in SCRIPTS for row in estimates(script)])
def test_the_memory_in_a_script_is_what_its_dry_run_estimates(script: str, row: tuple[str, ...]) -> None:
    assert dry_run(script, *row[:4]) == row[4]
