"""With LAYOUT=auto, a launch script plans in one process before any rank starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacp.engine.checks import check
from megacp.engine.config.cli import parse
from megacp.engine.config.yaml_file import values_of_file
from tests.examples.test_launch_files import EXAMPLES, require_run
from tests.training.runs import TINY, losses, run

FIRST = ["--lr-decay-iters", "4", "--train-iters", "2"]
"""First half of TINY."""
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_GPUS_ON_NODE": "2",
}
ROOT = EXAMPLES.parent

STAND_IN = """#!/bin/bash
before=
for word in "$@"; do
    [[ $before != --output ]] || printf 'tensor_model_parallel_size: 4\\n' > "$word"
    before=$word
done
echo "queues=$CUDA_DEVICE_MAX_CONNECTIONS" "$@"
"""
"""Substitute for python, torchrun or srun that prints its arguments, and plans tp 4."""


def started(
    script: str, flags: list[str], settings: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end. It finds programs in `folder` first, then in this environment."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "TMPDIR": str(folder), **settings, "PATH": path}
    command = ["bash", str(EXAMPLES / script), *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.slow
def test_a_script_plans_starts_ranks_and_plans_anew_for_other_ranks(tmp_path: Path) -> None:
    save = tmp_path / "out"
    size = [*TINY, "--global-batch-size", "2"]  # four dp ranks cannot share two packs
    flags = [*size, "--save", str(save), "--auto-resume"]
    first = started(
        "pretrain_llm.sh", [*flags, *FIRST], {"LAYOUT": "auto", "NPROC": "4", "PP": "1"}, tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert "on 4 GPUs" in first.stderr and "2/2" in first.stdout
    values = values_of_file(str(save / "best.yaml"))
    assert values and check(parse([*size, "--config", str(save / "best.yaml")]), 4) == []
    again = started("pretrain_llm.sh", flags, {"LAYOUT": "auto", "NPROC": "2", "PP": "1"}, tmp_path)
    assert again.returncode == 0, again.stderr
    # The note is wrapped where the path of the checkpoint ends.
    noted = " ".join(again.stderr.split())
    assert "step_0000002 was saved by 4 ranks, but this run has 2" in noted
    assert "4/4" in again.stdout
    run(1, [*size, "--save", str(tmp_path / "whole")])
    # In float64, only the order of sums differs.
    assert losses(save) == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)


def test_a_slurm_job_plans_once_for_all_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    submitted, save = tmp_path / "submitted", tmp_path / "out"
    submitted.mkdir()
    (submitted / "examples").symlink_to(EXAMPLES)
    program(tmp_path, "scontrol", "#!/bin/sh\necho n1\n")
    program(tmp_path, "srun", '#!/bin/sh\nshift\nprintf "%s\\n" "$@"\n')
    settings = {**SLURM, "SLURM_SUBMIT_DIR": str(submitted), "LAYOUT": "auto"}
    size = [
        *TINY[: TINY.index("--dtype")],
        "--dtype",
        "float32",
    ]  # attention on CPUs does not support bfloat16
    for flags, best in (["--save", str(save)], save / "best.yaml"), ([], submitted / "best_7.yaml"):
        resumes = ["--auto-resume"] if flags else []
        done = started("slurm/pretrain_llm.sbatch", [*size, *flags, *resumes], settings, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "on 4 GPUs" in done.stderr and best.exists()
        assert done.stdout.splitlines()[-2] == "--config" and best.samefile(
            submitted / done.stdout.splitlines()[-1]
        )
    flags = ["--save", str(save), "--auto-resume"]
    done = started("slurm/finetune.sbatch", [*size, *flags[:2]], settings, tmp_path)
    require_run(done.stdout.splitlines(), 2, "n1", 2)


SCRIPTS = [
    *(
        "pretrain_llm.sh",
        "pretrain_vlm.sh",
        "long_context.sh",
        "million_tokens.sh",
        "pretrain_nodes.sh",
    ),
    *(
        "slurm/pretrain_llm.sbatch",
        "slurm/pretrain_vlm.sbatch",
        "slurm/long_context.sbatch",
        "slurm/finetune.sbatch",
    ),
]


def test_every_launch_script_is_here() -> None:
    shells = [*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("slurm/*.sbatch")]
    training = {
        path for path in shells if "-m megacp.train" in path.read_text() and "demo" not in path.name
    }
    assert {EXAMPLES / script for script in SCRIPTS} == training
    for script in SCRIPTS:
        assert (
            "# With LAYOUT=auto, megacp-plan chooses the parallel layout flags"
            in (EXAMPLES / script).read_text()
        )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_plans_with_the_given_flags_and_adds_the_file(script: str, tmp_path: Path) -> None:
    for name in ("python", "torchrun", "srun", "sbatch"):
        program(tmp_path, name, STAND_IN)
    program(tmp_path, "scontrol", "#!/bin/sh\necho n1\n")
    settings = {
        "LAYOUT": "auto",
        "PLAN": "--network ethernet",
        "NNODES": "2",
        "NPROC": "2",
        "HEAD": "n1",
        "CP": "2",
    }
    settings |= {**SLURM, "SLURM_SUBMIT_DIR": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": ""}
    done = started(script, ["--save", str(tmp_path)], settings, tmp_path)
    assert done.returncode == 0, done.stderr
    (plan,) = (line.split() for line in done.stderr.splitlines() if "megacp.plan.command" in line)
    start = done.stdout.splitlines()[-1].split()
    assert plan[1:5] == ["-m", "megacp.plan.command", "--gpu", "here"]
    assert plan[plan.index("--world-size") + 1] == (
        "4" if "nodes" in script or "slurm" in script else "2"
    )
    best = plan[plan.index("--output") + 1]
    assert plan[-5:] == ["--network", "ethernet", "--output", best, "--overwrite"]
    assert start[-2:] == ["--config", best] and "--save" in start and "--save" in plan
    assert best == str(tmp_path / "best.yaml") or "nodes" in script
    planned = {
        "--recompute-granularity",
        "--data-parallel-sharding-strategy",
        "--cp-layout",
        "--activation-offload",
    }
    assert not planned & {*plan} and not planned & {*start}
    takes_cp = script not in ("million_tokens.sh", "slurm/finetune.sbatch")
    assert ("--context-parallel-size" in plan) == ("--context-parallel-size" in start) == takes_cp
    queues = "vlm" in script or "long_context" in script
    assert start[0] == ("queues=1" if queues else "queues="), "tp 4 is the plan's"


def test_a_dry_run_of_a_planned_layout_writes_nothing_to_save(tmp_path: Path) -> None:
    save = tmp_path / "out"
    flags = [*TINY, "--save", str(save), "--dry-run", "--world-size", "8"]
    done = started("pretrain_llm.sh", flags, {"LAYOUT": "auto", "NPROC": "2"}, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "on 8 GPUs with 79." in done.stderr
        and "Dry run: 8 ranks" in done.stdout
        and not save.exists()
    )


@pytest.mark.parametrize(
    ("script", "settings", "told"),
    [
        (
            "long_context.sh",
            {"LAYOUT": "zigzag_document"},
            "LAYOUT is zigzag_document, expected auto; CP_LAYOUT sets",
        ),
        ("pretrain_nodes.sh", {"LAYOUT": "auto", "NNODES": "6:8", "HEAD": "n1"}, "NNODES is 6:8"),
        (
            "pretrain_llm.sh",
            {"LAYOUT": "auto", "NPROC": "3"},
            "no parallel layout of 3 ranks allows these flags; one of 2 ranks does",
        ),
    ],
)
def test_a_layout_that_cannot_be_planned_ends_a_script(
    script: str, settings: dict[str, str], told: str, tmp_path: Path
) -> None:
    done = started(script, [*TINY, "--num-layers", "2"], settings, tmp_path)
    assert done.returncode == 2 and told in done.stderr and done.stdout == ""
