"""Launch files, scripts for clusters and recipes: their structure, and a dry run of their
commands.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megacp.dry_run.memory import stage_memory
from megacp.engine.config.cli import parse
from megacp.engine.config.run import flatten
from megacp.engine.config.yaml_file import values_of_file
from megacp.engine.models.costs import run_parameters, stage_layers
from megacp.huggingface.convert.families import of_values
from megacp.prepare import command as preprocess
from megacp.train import dry_run, main
from megacp.training.data.reader import PackedDataset
from tests.prepare.packs.builds import write_records
from tests.test_packaging import COMMANDS
from tests.training.data.datasets import random_packs, write_dataset

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


ARGUMENTS = 'printf "%s\\n" "$@"'


def launched(
    script: Sequence[str],
    settings: dict[str, str],
    folder: Path,
    program: str,
    told: str = ARGUMENTS,
) -> list[str]:
    """Return the arguments that a script passes to `program`, one per line.

    A substitute for `program` in `folder` prints them, or runs the shell line `told` instead.
    """
    folder.mkdir(exist_ok=True)
    (folder / program).write_text(f"#!/bin/sh\n{told}\n")
    (folder / program).chmod(0o755)
    environment = {**os.environ, **settings, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        script, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "script", ["pretrain_vlm.sh", "long_context.sh", "slurm/pretrain_vlm.sbatch"]
)
@pytest.mark.parametrize(
    ("tp", "strategy", "expected"),
    [("4", "optim", "1"), ("1", "optim", ""), ("4", "optim_grads_params", "")],
)
def test_one_hardware_queue_is_asked_for_where_it_helps(
    script: str,
    tp: str,
    strategy: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a single queue, the gathers of full sharding would delay all products."""
    settings = {"TP": tp, "SHARD": strategy, "SLURM_SUBMIT_DIR": str(EXAMPLES.parent)}
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    told = 'echo "queues=$CUDA_DEVICE_MAX_CONNECTIONS"'
    command = ["bash", str(EXAMPLES / script), "--dry-run"]
    assert launched(command, settings, tmp_path, "python", told) == [f"queues={expected}"]


def dataset(folder: Path) -> str:
    """Write packs of the length in examples/small.yaml. Return their folder."""
    length = int(values_of_file(str(EXAMPLES / "small.yaml"))["seq_length"])
    write_dataset(folder, [random_packs(np.random.default_rng(0), 3)], seq_length=length)
    return str(folder)


def require_run(arguments: list[str], nodes: int, head: str, gpus: int) -> None:
    """Require that torchrun's flags join all machines, and that the run passes its checks."""
    split = arguments.index("-m")
    ours, theirs = arguments[split + 2 :], arguments[:split]
    assert arguments[split + 1] == "megacp.train"
    found = dict(zip(theirs[::2], theirs[1::2], strict=True))
    assert found["--nnodes"] == str(nodes) and found["--nproc-per-node"] == str(gpus)
    assert found["--rdzv-endpoint"] == f"{head}:29500" and found["--rdzv-backend"] == "c10d"
    assert "--auto-resume" in ours  # a restart resumes the run
    assert main([*ours, "--dry-run", "--world-size", str(nodes * gpus)]) == 0


def test_the_skypilot_task_starts_a_run_on_all_its_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    task = read("skypilot/pretrain.yaml")
    assert set(task) <= {
        "name",
        "resources",
        "num_nodes",
        "workdir",
        "file_mounts",
        "envs",
        "setup",
        "run",
    }
    name, gpus = task["resources"]["accelerators"].split(":")
    assert (
        name
        and task["num_nodes"] >= 2
        and task["workdir"] == "."
        and "pip install" in task["setup"]
    )
    settings = {key: str(value) for key, value in task["envs"].items()}
    assert re.match(r"s3://", settings["DATA"]) and re.match(r"s3://", settings["SAVE"])
    settings |= {"DATA": dataset(tmp_path / "data"), "SAVE": str(tmp_path / "out")}
    settings |= {
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        "SKYPILOT_NODE_RANK": "3",
    }
    settings["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4"
    arguments = launched(["bash", "-c", task["run"]], settings, tmp_path / "bin", "torchrun")
    require_run(arguments, 4, "10.0.0.1", int(gpus))


def test_the_jobset_starts_a_run_in_all_its_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    jobset = read("kubernetes/jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod, (container,) = spec["template"]["spec"], spec["template"]["spec"]["containers"]
    settings = {row["name"]: row["value"] for row in container["env"]}
    # Kubernetes refuses numbers in the environment.
    assert all(isinstance(value, str) for value in settings.values())
    nodes, gpus = int(settings["NNODES"]), int(settings["NPROC"])
    assert job["replicas"] == 1 and spec["parallelism"] == spec["completions"] == nodes
    # JobSet restarts all pods together.
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    name = jobset["metadata"]["name"]
    assert settings["HEAD"] == f"{name}-{job['name']}-0-0.{name}"
    assert container["ports"] == [{"containerPort": 29500}]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    places = {"--data-path": dataset(tmp_path / "data"), "--save": str(tmp_path / "out")}
    pairs = [text.partition("=") for text in container["args"]]
    assert set(places) <= {flag for flag, *_ in pairs}
    flags = [f"{flag}{equals}{places.get(flag, value)}" for flag, equals, value in pairs]
    arguments = launched([*container["command"], *flags], settings, tmp_path / "bin", "torchrun")
    require_run(arguments, nodes, settings["HEAD"], gpus)


def test_the_image_copies_what_there_is_and_installs_what_training_may_need() -> None:
    """The image omits only the extra that NVIDIA's image already contains."""
    text = (EXAMPLES / "docker/Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    assert copied and all(
        (EXAMPLES.parent / name).exists() for names in copied for name in names.split()
    )
    assert re.search(r"\nFROM \S+:[\d.]+-py3\n", text) and re.search(r"\nUSER [1-9]", text)
    assert {*re.findall(r"/opt/megacp\[(.+)\]", text)[0].split(",")} == COMMANDS["train"][1] - {
        "gpu"
    }


@pytest.mark.slow
def test_the_cells_of_a_notebook_build_train_on_two_ranks_and_get_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["finetune", str(tmp_path)])
    answers = runpy.run_path(str(EXAMPLES / "finetune.py"))["ANSWERS"]
    said = capsys.readouterr().out
    assert "cp 2" in said and said.endswith(
        "".join(f"{asked} {answer}\n" for asked, answer in answers.items())
    )


def built(script: Sequence[str], settings: dict[str, str], folder: Path) -> None:
    """Run the command of preprocess_data.py that a script starts."""
    program, *flags = launched(script, settings, folder / "bin", "python")
    assert program == "tools/preprocess_data.py"
    assert preprocess.main(flags) == 0


def test_the_arrays_build_in_parts_and_finish(tmp_path: Path) -> None:
    write_records(tmp_path / "part.jsonl", 80)
    common = [
        "--input",
        str(tmp_path / "part.jsonl"),
        "--tokenizer",
        "byte",
        "--seq-length",
        "128",
        "--workers",
        "1",
    ]
    common += ["--unit-bytes", "1000"]
    slurm = [
        "bash",
        "examples/slurm/preprocess.sbatch",
        *common,
        "--output",
        str(tmp_path / "slurm"),
    ]
    for index in ("1", "0"):
        array = {"SLURM_ARRAY_TASK_ID": index, "SLURM_ARRAY_TASK_COUNT": "2"}
        built(slurm, {"SLURM_SUBMIT_DIR": str(EXAMPLES.parent), **array}, tmp_path)
    built(slurm, {"SLURM_SUBMIT_DIR": str(EXAMPLES.parent)}, tmp_path)
    assert len(PackedDataset(tmp_path / "slurm")) > 1

    job = read("kubernetes/preprocess.yaml")
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == (
        "batch/v1",
        "Job",
        "Indexed",
    )
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *shell, line = container["command"]
    given = launched([*shell, line], {"JOB_COMPLETION_INDEX": "7"}, tmp_path / "bin", "python")
    assert given[given.index("--units") + 1] == f"7/{job['spec']['completions']}"
    assert job["spec"]["parallelism"] <= job["spec"]["completions"]
    words = shlex.split(line.replace("$JOB_COMPLETION_INDEX", "7"))
    assert words[:4] == ["exec", "python", "tools/preprocess_data.py", "build"]
    assert (
        preprocess.main(["build", *common, "--output", str(tmp_path / "pods"), "--units", "7/16"])
        == 0
    )


SCRIPTS = (
    "pretrain_vlm.sh",
    "long_context.sh",
    "slurm/pretrain_vlm.sbatch",
    "slurm/long_context.sbatch",
)
ROW = re.compile(
    r"^# +(\d+) GPUs  ((?:[A-Z]+=[\w.]+ +)+)([\d.]+) GiB$(?:\n# +(weights .*) GiB$)?", re.MULTILINE
)


def estimates(script: str) -> list[tuple[str, ...]]:
    """Return (GPUs, environment variables, GiB, terms or an empty text) of each row."""
    return ROW.findall((EXAMPLES / script).read_text(encoding="utf-8"))


def settings_of(row: tuple[str, ...]) -> dict[str, str]:
    return dict(word.split("=") for word in row[1].split())


def dry_run_flags(script: str, row: tuple[str, ...], folder: Path) -> list[str]:
    """Return the flags that a dry run of the script passes to `python -m megacp.train`.

    A substitute for `python` prints them.
    """
    command = ["bash", f"examples/{script}", "--dry-run", "--world-size", row[0]]
    printed = launched(command, settings_of(row), folder, "python")
    program, *flags = printed[printed.index("-m") + 1 :]
    assert program == "megacp.train"
    return flags


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_tells_the_memory_of_several_sizes(script: str) -> None:
    rows = estimates(script)
    assert rows and all(float(row[2]) < 141 for row in rows)


@pytest.mark.parametrize(
    "script, row", [(script, row) for script in SCRIPTS for row in estimates(script)]
)
def test_the_memory_in_a_script_is_what_its_dry_run_estimates(
    script: str,
    row: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    assert main(dry_run_flags(script, row, tmp_path)) == 0
    _, head, *stages = (
        capsys.readouterr().out.split("Memory of one rank")[1].split("\n\n")[0].splitlines()
    )
    names = re.split(" {2,}", head.strip())
    cells = [dict(zip(names, re.split(" {2,}", stage.strip()), strict=True)) for stage in stages]
    assert all(stage["total"].endswith(" GiB") for stage in cells)
    fullest = max(cells, key=lambda stage: float(stage["total"].split()[0]))
    assert fullest["total"] == f"{row[2]} GiB"
    for name, value in (term.rsplit(" ", 1) for term in row[3].split(", ") if term):
        assert fullest[name] == f"{value} GiB", name


PARAMETERS = {
    "llama3_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "molmo2_4b": 4_851_000_000,
    "molmo2_8b": 8_660_000_000,
    "qwen3_5_9b": 9_410_000_000,
    "gemma3_1b": 999_885_952,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_5_35b_a3b": 35_100_000_000,
}
"""Published counts of parameters, or sums of the published parts, which agree within 1 %."""
RECIPES = {
    (path.parent.name, path.stem): path for path in sorted(EXAMPLES.glob("recipes/*/*gpu*.yaml"))
}


def gpus_of(grid: str) -> int:
    """Return the number of GPUs in the name of a recipe."""
    return int(re.findall(r"(\d+)gpu", grid)[0])


@pytest.mark.parametrize(("model", "grid"), RECIPES)
def test_a_recipe_runs_and_fits_the_gpus_it_names(model: str, grid: str) -> None:
    path, gpus = RECIPES[model, grid], gpus_of(grid)
    files = ["--config", str(path.with_name("model.yaml")), "--config", str(path)]
    config = parse([*files, "--dry-run", "--world-size", str(gpus)])
    assert f"Dry run: {gpus} ranks" in dry_run(config)
    head, *commands = path.read_text().splitlines()[:3]
    gib, planned = re.findall(r"([\d.]+) GiB", head)
    needed = max(
        stage_memory(config, stage, chunks, gpus).total
        for stage, chunks in enumerate(stage_layers(config, gpus))
    )
    assert needed <= 0.9 * float(gib) * 2**30 and f"{needed / 2**30:.1f}" == planned, head
    build, start = (shlex.split(line.removeprefix("#")) for line in commands)
    made = preprocess.preprocess_parser().parse_args(build[2:])
    own = parse(start[start.index("--config") :])
    assert start[start.index("--config") + 1] == f"examples/recipes/{model}/{grid}.yaml"
    assert (made.tokenizer, made.output) == (own.checkpoint.load_hf, own.data.data_path)
    assert made.seq_length == config.data.seq_length
    told = {"NODES=8": 64, "--nproc": 8}
    assert (
        build[1] == "tools/preprocess_data.py" and max(told.get(word, 1) for word in start) == gpus
    )
    assert (
        own.checkpoint.save
        and own.training.train_epochs
        and 0 < (own.training.lr_warmup_fraction or 0) <= 0.1
    )


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_recipe_has_the_size_of_its_model_and_its_export_has_its_name(model: str) -> None:
    config = parse(["--config", str(EXAMPLES / "recipes" / model / "model.yaml")])
    assert run_parameters(config) == pytest.approx(PARAMETERS[model], rel=0.01)
    architecture = of_values(flatten(config))
    assert model.startswith(
        architecture.name.removesuffix("_text").removesuffix("_moe").rstrip("2")
    )
    assert architecture.config(flatten(config))


def test_a_finetuning_under_slurm_is_checked_before_it_asks_for_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    script, folder = "examples/slurm/finetune.sbatch", tmp_path / "bin"
    flags = [
        "--config",
        "examples/small.yaml",
        "--data-path",
        dataset(tmp_path / "d"),
        "--save",
        str(tmp_path / "out"),
    ]
    launched(["true"], {}, folder, "python")
    told = launched(["bash", script, *flags], {}, folder, "sbatch")
    checked, asked = told[: told.index("--nodes")], told[told.index("--nodes") :]
    assert asked == ["--nodes", "1", "--gpus-per-node", "8", script, *flags]
    assert checked[:2] == ["-m", "megacp.train"] and main(checked[2:]) == 0
    launched(["true"], {}, folder, "python", "exit 2")
    with pytest.raises(AssertionError):  # no GPUs are requested
        launched(["bash", script, *flags], {}, folder, "sbatch")
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_SUBMIT_DIR": ".",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "n1",
    }
    launched(["true"], {}, folder, "scontrol", "echo n1")
    program, *started = launched(["bash", script, *flags], job, folder, "srun")
    assert program == "torchrun"
    require_run(started, 1, "n1", 8)


def test_the_tiny_config_takes_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(EXAMPLES / "tiny.yaml"), "--train-iters", "2"]) == 0
    assert "step 2/2" in capsys.readouterr().out
