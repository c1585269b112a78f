"""Numbers that go wrong and stay wrong: the run ends with a reason, and the last good weights remain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megacp.distributed.grid import single_axis
from megacp.engine.config.cli import parse
from megacp.engine.step.step import ParallelModel
from megacp.train import main, prepare_run
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.checkpoint.directory import committed
from megacp.training.loop.sources import open_sources
from megacp.training.loop.state import RunState
from megacp.training.start.status import FAILED
from tests.faults.sick_run import train_sick
from tests.ranks import grid, run_ranks
from tests.training.runs import TINY, losses, save

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
WORLD = single_axis("world")
LONG = [*TINY, "--train-iters", "40", "--lr-decay-iters", "40"]


def notes(folder: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["text"]) for row in rows if row["kind"] == "note"]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in committed(folder))


def finite(folder: Path) -> bool:
    return all(
        bool(tensor.isfinite().all())
        for _, tensor in load_checkpoint(folder, WORLD).whole_tensors()
    )


def test_a_loss_that_stays_nan_ends_the_run_and_costs_no_checkpoint(tmp_path: Path) -> None:
    """A checkpoint that is being written is kept too."""
    flags = [
        *LONG,
        "--save",
        str(tmp_path),
        "--save-interval",
        "2",
        "--keep-last",
        "2",
        "--async-save",
    ]
    assert run_ranks(train_sick, 2, flags, "nan loss", 1, range(6, 99)) == [FAILED, FAILED]
    assert max(losses(tmp_path)) == 15
    assert steps(tmp_path) == [
        2,
        4,
        6,
    ]  # step 6 has the update of step 5; step 8 would have the same weights
    assert finite(tmp_path / "step_0000006")
    step, text = notes(tmp_path)[-1]
    assert step == 15 and text.startswith("no update in 10 steps in a row, 6 to 15")
    assert (
        f"Nothing was saved afterwards; the newest checkpoint is {tmp_path / 'step_0000006'}"
        in text
    )


def test_weights_that_became_nan_are_not_saved_and_delete_nothing(tmp_path: Path) -> None:
    flags = [*LONG, "--save", str(tmp_path), "--save-interval", "5", "--keep-last", "2"]
    assert run_ranks(train_sick, 2, flags, "nan weight", 1, [12]) == [FAILED, FAILED]
    assert steps(tmp_path) == [5, 10] and finite(tmp_path / "step_0000010")
    step, text = notes(tmp_path)[-1]
    assert step == 15 and text.startswith("the weights after step 15 are not finite: model.")
    assert "on rank 1. Nothing was saved afterwards" in text and text.endswith("step_0000010")


def test_a_run_without_any_update_is_not_finished(tmp_path: Path) -> None:
    flags = [*TINY, "--save", str(tmp_path)]
    assert run_ranks(train_sick, 1, flags, "nan loss", 0, range(1, 99)) == [FAILED]
    assert steps(tmp_path) == []
    assert "none of the 4 steps made an update" in notes(tmp_path)[-1][1]
    assert notes(tmp_path)[-1][1].endswith("there is no checkpoint of this run")


def test_a_run_resumed_between_skipped_steps_is_the_undisturbed_one(tmp_path: Path) -> None:
    flags = [*LONG, "--train-iters", "20"]
    bad = [4, 5, *range(9, 19)]
    whole, halved = (
        [*flags, "--save", str(tmp_path / "whole")],
        [*flags, "--save", str(tmp_path / "halved")],
    )
    assert run_ranks(train_sick, 2, whole, "nan loss", 0, bad) == [FAILED] * 2
    assert run_ranks(train_sick, 2, [*halved, "--train-iters", "10"], "nan loss", 0, bad) == [0] * 2
    assert steps(tmp_path / "halved") == [10]
    again = [*halved, "--load", str(tmp_path / "halved")]
    assert run_ranks(train_sick, 2, again, "nan loss", 0, bad) == [FAILED] * 2
    first, second = (
        {step: value for step, value in losses(tmp_path / n).items() if step not in bad}
        for n in ("whole", "halved")
    )
    assert first == second and max(losses(tmp_path / "halved")) == 18
    assert (
        notes(tmp_path / "whole")[-1][1].split(";")[0]
        == notes(tmp_path / "halved")[-1][1].split(";")[0]
    )


def _save_nan(folder: str) -> None:
    config, _ = prepare_run(parse([*TINY, "--save", folder]), 1)
    model = ParallelModel(config, grid())
    model.parameters.buckets[0].parameters[3] = torch.inf
    _, sources = open_sources(config)
    save(model, RunState(2, 8, sources.fingerprint, config.training.seed), config)


def test_a_checkpoint_of_nan_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save_nan(str(tmp_path))
    for more in ([], ["--finetune"]):
        assert main([*TINY, "--load", str(tmp_path), *more]) == 2
        error = capsys.readouterr().err
        assert f"{tmp_path / 'step_0000002'} contains values that are not finite: model." in error
        assert "on rank 0" in error and "an earlier checkpoint" in error


def test_a_run_in_bfloat16_looks_at_its_masters_too(tmp_path: Path) -> None:
    flags = [text if text != "float64" else "bfloat16" for text in LONG]
    flags = [*flags, "--save", str(tmp_path), "--save-interval", "2", "--train-iters", "8"]
    assert run_ranks(train_sick, 2, flags, "nan weight", 0, [3]) == [FAILED, FAILED]
    assert steps(tmp_path) == [2]
