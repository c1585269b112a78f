"""A plan for a run that is about to start, on this machine or from a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megacp.engine.checks import check
from megacp.engine.config.cli import parse
from megacp.engine.config.run import RunConfig, flag, with_values
from megacp.engine.config.yaml_file import from_yaml, values_of_file
from megacp.engine.models.costs import run_parameters
from megacp.plan import command
from megacp.plan.hardware import hardware, hardware_here
from megacp.plan.search import fields_chosen, fullest
from megacp.storage.wording import human_count
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.start.layout import LAYOUT_FIELDS
from tests.training.checkpoint.test_commit import WORLD
from tests.training.runs import TINY, grid_flags, run
from tests.training.test_start import REST, change, copied

DEVICE = "megacp.training.start.launch.device_at_hand"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a TINY run after two steps on one rank."""
    folder = tmp_path_factory.mktemp("base") / "out"
    run(1, [*TINY, "--lr-decay-iters", "4", "--train-iters", "2", "--save", str(folder)])
    return folder


def planned(folder: Path, flags: list[str], ranks: int, gpu: str = "here") -> RunConfig:
    """Return the config of a run with these flags and the plan's file; its checks must pass."""
    best = str(folder / "best.yaml")
    assert (
        command.main(
            ["--gpu", gpu, "--world-size", str(ranks), *flags, "--output", best, "--overwrite"]
        )
        == 0
    )
    config = parse([*flags, "--config", best])
    assert check(with_values(config, {"dry_run": True, "vocab_size": 61}), ranks) == []
    return config


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, in one line: a sentence may be broken anywhere."""
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_for_this_machine_keeps_given_flags_and_the_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY[: TINY.index("--dtype")], *grid_flags(tp=2), "--recompute-granularity", "full"]
    config = planned(tmp_path, flags, 4)
    said = printed(capsys)
    assert (
        "CPU: times from the published rates of h100, as hardware.yaml has no entry for CPU; they hold for bfloat16, not float32"
        in said
    )
    assert config.grid_shape(4).tp == 2 and config.training.recompute_granularity == "full"
    assert config.training.dtype == "float32" and "dtype" not in values_of_file(
        str(tmp_path / "best.yaml")
    )
    assert planned(tmp_path, flags, 4, "h100").training.dtype == "bfloat16", (
        "a plan for another machine"
    )


def test_every_flag_of_a_run_is_a_flag_of_a_plan(tmp_path: Path, base: Path) -> None:
    given = [
        "--save",
        str(base),
        "--auto-resume",
        "--train-epochs",
        "2",
        "--save-interval",
        "3",
        "--log-file",
        "x",
    ]
    assert planned(tmp_path, [*TINY, *given, "--load-hf", "none"], 1).checkpoint.auto_resume, (
        "no folder is read again"
    )


def test_a_dry_run_without_a_gpu_is_planned_for_the_default_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--gpu", "here", "--world-size", "2", "--dry-run", *TINY]) == 0
    assert "on 2 GPUs with 79." in printed(capsys)


def test_a_resumed_run_keeps_its_layout_unless_its_ranks_cannot_use_it(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_checkpoint(base, WORLD).config_yaml.replace(
        "micro_batch_size: 1", "micro_batch_size: 2"
    )
    change(copied(base, tmp_path), config=stored)
    flags = [*REST, "--load", str(tmp_path), "--recompute-granularity", "none"]
    kept = planned(tmp_path, flags, 1)
    assert kept.training.micro_batch_size == 2
    assert f"The parallel layout of {tmp_path}/step_0000002, which was saved by 1 rank" in printed(
        capsys
    )
    assert planned(tmp_path, [*flags, "--finetune"], 1).training.micro_batch_size != 2
    assert planned(tmp_path, [*flags, "--micro-batch-size", "4"], 1).training.micro_batch_size == 4
    capsys.readouterr()
    assert planned(tmp_path, flags, 2).grid_shape(2).dp == 2
    assert "step_0000002 was saved by 1 rank, but this run has 2" in printed(capsys)
    # the stored microbatch of two rows does not divide a batch of three
    three = [*flags, "--global-batch-size", "3"]
    assert planned(tmp_path, three, 1).training.micro_batch_size == 1
    assert "contradicts the flags: --global-batch-size 3" in printed(capsys)
    # if one row fills more than half of the device, two rows do not fit
    model = with_values(from_yaml(stored), {"micro_batch_size": 1})
    most = fullest(model, 1).total * 1.2 / 2**30
    monkeypatch.setattr(DEVICE, lambda world: ("CPU", most))
    assert planned(tmp_path, flags, 1).training.micro_batch_size == 1
    assert f"step_0000002 does not fit into {most:.4g} GiB" in printed(capsys)


@pytest.mark.parametrize("gpu", ["h100", "here"])
def test_a_plan_of_a_checkpoint_has_its_model_and_its_dtype(
    base: Path, tmp_path: Path, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = from_yaml(load_checkpoint(base, WORLD).config_yaml)
    flags = ["--load", str(base), "--global-batch-size", "2"]
    assert planned(tmp_path, flags, 2, gpu).training.dtype == RunConfig().training.dtype, (
        "no flag contradicts it"
    )
    assert printed(capsys).startswith(f"{human_count(run_parameters(stored))} parameters on 2 GPUs")


@pytest.mark.parametrize(
    ("ranks", "flags", "gib", "status", "told"),
    [
        (
            3,
            ["--num-layers", "2"],
            80.0,
            2,
            [
                "no parallel layout of 3 ranks",
                "one of 2 ranks does",
                "--global-batch-size 4",
                "dp 3",
            ],
        ),
        (
            2,
            ["--tensor-model-parallel-size", "0"],
            80.0,
            2,
            ["--tensor-model-parallel-size", "got 0"],
        ),
        (
            2,
            ["--recompute-granularity", "full"],
            6e-4,
            1,
            ["None fits", "of 0.0006 GiB", "GPUs with --global-batch-size"],
        ),
    ],
)
def test_ranks_without_a_layout_are_refused_with_what_would_change_it(
    ranks: int,
    flags: list[str],
    gib: float,
    status: int,
    told: list[str],
    tmp_path: Path,
    monkeypatch: Any,
    capfd: Any,
) -> None:
    monkeypatch.setattr(DEVICE, lambda world: ("NVIDIA H200", gib))
    written = tmp_path / "best.yaml"
    asked = ["--gpu", "here", "--world-size", str(ranks), *TINY, *flags, "--output", str(written)]
    assert command.main(asked) == status and not written.exists()
    said = "".join(capfd.readouterr())
    assert [word for word in told if word not in said] == [], said


@pytest.mark.parametrize(
    ("name", "row"),
    [("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA H200", "h200"), ("NVIDIA GH200 480GB", "h100")],
)
def test_a_device_is_found_by_its_name_and_has_its_own_memory(name: str, row: str) -> None:
    here = hardware_here(name, 39.5, "infiniband")
    usual = dataclasses.replace(hardware(row, "infiniband"), memory=39.5, source=here.source)
    assert here == usual and ("hardware.yaml has no entry" in here.source) == ("GH200" in name)


def test_a_run_knows_the_flags_of_a_layout_that_a_plan_chooses() -> None:
    chosen = {flag(name) for name in fields_chosen(RunConfig())}
    assert chosen == {*map(flag, LAYOUT_FIELDS), "--dtype"}


def test_a_plan_for_data_that_is_not_there_names_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--world-size", "2", "--data-path"]
    missing = str(tmp_path / "none")
    assert command.main([*asked, missing]) == 2
    assert f"error: --data-path {missing}: there is no such folder" in capsys.readouterr().err
    assert command.main([*asked, "x", missing]) == 2
    assert capsys.readouterr().err.startswith("error: --data-path ")
