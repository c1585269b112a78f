"""Files that launch runs elsewhere: their structure, and a dry run of the command inside of each."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megacp.core.config.yaml_file import values_of_file
from megacp.core.data.reader import PackedDataset
from megacp.prepare import command as preprocess
from megacp.train import main
from tests.data.datasets import random_packs, write_dataset
from tests.prepare.build.builds import write_records

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def launched(script: Sequence[str], settings: dict[str, str], folder: Path, program: str) -> list[str]:
    """What a script gives to `program`, which stands in `folder` and prints its arguments."""
    folder.mkdir(exist_ok=True)
    (folder / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / program).chmod(0o755)
    environment = {**os.environ, **settings, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(script, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def dataset(folder: Path) -> str:
    """Packs of the length that examples/small.yaml asks for."""
    length = int(values_of_file(str(EXAMPLES / "small.yaml"))["seq_length"])
    write_dataset(folder, [random_packs(np.random.default_rng(0), 3)], seq_length=length)
    return str(folder)


def require_run(arguments: list[str], nodes: int, head: str, gpus: int) -> None:
    """torchrun's flags join all machines, and what follows is a run that passes its checks."""
    split = arguments.index("-m")
    ours, theirs = arguments[split + 2 :], arguments[:split]
    assert arguments[split + 1] == "megacp.train"
    found = dict(zip(theirs[::2], theirs[1::2], strict=True))
    assert found["--nnodes"] == str(nodes) and found["--nproc-per-node"] == str(gpus)
    assert found["--rdzv-endpoint"] == f"{head}:29500" and found["--rdzv-backend"] == "c10d"
    assert "--auto-resume" in ours  # a restart goes on
    assert main([*ours, "--dry-run", "--world-size", str(nodes * gpus)]) == 0


def test_the_skypilot_task_starts_a_run_on_all_its_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    task = read("skypilot/pretrain.yaml")
    assert set(task) <= {"name", "resources", "num_nodes", "workdir", "file_mounts", "envs", "setup", "run"}
    name, gpus = task["resources"]["accelerators"].split(":")
    assert name and task["num_nodes"] >= 2 and task["workdir"] == "." and "pip install" in task["setup"]
    settings = {key: str(value) for key, value in task["envs"].items()}
    assert re.match(r"s3://", settings["DATA"]) and re.match(r"s3://", settings["SAVE"])
    settings |= {"DATA": dataset(tmp_path / "data"), "SAVE": str(tmp_path / "out")}
    settings |= {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NUM_GPUS_PER_NODE": gpus, "SKYPILOT_NODE_RANK": "3"}
    settings["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4"
    arguments = launched(["bash", "-c", task["run"]], settings, tmp_path / "bin", "torchrun")
    require_run(arguments, 4, "10.0.0.1", int(gpus))


def test_the_jobset_starts_a_run_in_all_its_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    jobset = read("kubernetes/jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod, (container,) = spec["template"]["spec"], spec["template"]["spec"]["containers"]
    settings = {row["name"]: row["value"] for row in container["env"]}
    assert all(isinstance(value, str) for value in settings.values())  # Kubernetes refuses numbers there
    nodes, gpus = int(settings["NNODES"]), int(settings["NPROC"])
    assert job["replicas"] == 1 and spec["parallelism"] == spec["completions"] == nodes
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"  # JobSet restarts all pods together
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    name = jobset["metadata"]["name"]
    assert settings["HEAD"] == f"{name}-{job['name']}-0-0.{name}"
    assert container["ports"] == [{"containerPort": 29500}]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    places = {"--data-path": dataset(tmp_path / "data"), "--save": str(tmp_path / "out")}
    pairs = [text.partition("=") for text in container["args"]]
    assert set(places) <= {flag for flag, *_ in pairs}
    flags = [f"{flag}{equals}{places.get(flag, value)}" for flag, equals, value in pairs]
    arguments = launched([*container["command"], *flags], settings, tmp_path / "bin", "torchrun")
    require_run(arguments, nodes, settings["HEAD"], gpus)


def built(script: Sequence[str], settings: dict[str, str], folder: Path) -> None:
    """Run the line of preprocess_data.py that a script starts."""
    program, *flags = launched(script, settings, folder / "bin", "python")
    assert program == "tools/preprocess_data.py"
    assert preprocess.main(flags) == 0


def test_the_arrays_build_in_parts_and_finish(tmp_path: Path) -> None:
    write_records(tmp_path / "part.jsonl", 80)
    common = ["--input", str(tmp_path / "part.jsonl"), "--tokenizer", "byte", "--seq-length", "128", "--workers", "1"]
    common += ["--unit-bytes", "1000"]
    slurm = ["bash", "examples/slurm/preprocess.sbatch", *common, "--output", str(tmp_path / "slurm")]
    for index in ("1", "0"):
        array = {"SLURM_ARRAY_TASK_ID": index, "SLURM_ARRAY_TASK_COUNT": "2"}
        built(slurm, {"SLURM_SUBMIT_DIR": str(EXAMPLES.parent), **array}, tmp_path)
    built(slurm, {"SLURM_SUBMIT_DIR": str(EXAMPLES.parent)}, tmp_path)
    assert len(PackedDataset(tmp_path / "slurm")) > 1

    job = read("kubernetes/preprocess.yaml")
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *shell, line = container["command"]
    given = launched([*shell, line], {"JOB_COMPLETION_INDEX": "7"}, tmp_path / "bin", "python")
    assert given[given.index("--units") + 1] == f"7/{job['spec']['completions']}"
    assert job["spec"]["parallelism"] <= job["spec"]["completions"]
    words = shlex.split(line.replace("$JOB_COMPLETION_INDEX", "7"))
    assert words[:4] == ["exec", "python", "tools/preprocess_data.py", "build"]
    assert preprocess.main(["build", *common, "--output", str(tmp_path / "pods"), "--units", "7/16"]) == 0
