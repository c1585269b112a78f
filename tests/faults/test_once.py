"""`make test-once` in small: a run that dies ends like an undisturbed run, and errors of resuming are
detected.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megacp.engine.config.cli import parse
from megacp.training.start.script import flags_of
from tests.faults.once import KINDS, MODELS, TRAINING, Life, counted, drawn_grid, rows_that_count
from tests.faults.processes import ROOT
from tests.faults.witness import BASE, PREPARED, SEQ_LENGTH, STRIKES, Plan, name_of, packs_of


def lives_of(folder: Path, *deaths: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run the lives of the model with Mamba-2, in a process changed by `first`."""
    arguments = ["--model", "Mamba", "--keep", str(folder), "--forked-for", "99", *deaths]
    program = (
        f"import sys\n{first}\nfrom tests.faults.once import main\nsys.exit(main({arguments!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=850.0
    )


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_run_that_dies_on_changing_grids_loses_no_sample(
    tmp_path: Path, moments: random.Random
) -> None:
    seed = str(moments.randrange(1000))
    done = lives_of(tmp_path / "out", "--deaths", "4", "--seed", seed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "samples, 0 lost, 0 twice;" in done.stdout


SKIPS_A_PACK = """
from megacp.training.data.loader import PackedLoader
begin = PackedLoader.__init__
def resumed(self, source, options, rank, consumed, *rest):
    begin(self, source, options, rank, consumed + (consumed > 0), *rest)
    self.consumed_samples = consumed
PackedLoader.__init__ = resumed
"""
LOSES_A_MOMENT = """
from megacp.training.loop import trainer
load = trainer.load
def resumed(model, *rest):
    found = load(model, *rest)
    for part in model.optimizer.state_slices()["exp_avg"]:
        part.values.zero_()
    return found
trainer.load = resumed
"""


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("broken", "told"),
    [(SKIPS_A_PACK, r"samples lost"), (LOSES_A_MOMENT, "weights differ by")],
    ids=["skips a pack", "loses a moment"],
)
def test_a_resumed_run_that_is_not_the_same_is_seen(tmp_path: Path, broken: str, told: str) -> None:
    done = lives_of(tmp_path / "out", "--deaths", "3", first=broken)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED  Mamba-2" in done.stdout and told in done.stdout


def life_of(folder: Path, world: int, *trained: tuple[int, int, list[int]]) -> Life:
    """Return a life that has trained (step, number of the row, packs), one entry per rank and step."""
    life = Life(folder, world, Plan(str(folder)), [])
    size = len({index for _, index, _ in trained})
    lines = [
        {
            "event": "trained",
            "time": float(i),
            "step": step,
            "index": index,
            "size": size,
            "packs": packs,
        }
        for i, (step, index, packs) in enumerate(trained)
    ]
    life.records = {"rank_0": lines}
    return life


def test_the_last_life_that_trained_a_step_counts(tmp_path: Path) -> None:
    first = life_of(tmp_path, 2, (1, 0, [4]), (1, 1, [2]), (2, 0, [7]), (2, 1, [5]), (3, 0, [1]))
    assert counted([first]) == {1: [2, 4], 2: [5, 7]}  # one rank did not end step 3
    second = life_of(tmp_path, 1, (2, 0, [5, 7]), (3, 0, [1, 6]))
    assert counted([first, second]) == {1: [2, 4], 2: [5, 7], 3: [1, 6]}


def test_ranks_of_one_row_that_read_other_packs_are_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="step 1: ranks of one row read other packs"):
        counted([life_of(tmp_path, 2, (1, 0, [4]), (1, 0, [5]))])


def test_later_steps_of_the_log_do_not_count_after_a_resumption(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": step} for step in (1, 2, 3)
    ]
    rows += [
        {"kind": "run", "step": 1},
        {"kind": "train", "step": 2, "loss": 20},
        {"kind": "note", "step": 2},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {step: row["loss"] for step, row in rows_that_count(tmp_path).items()} == {1: 1, 2: 20}


def test_packs_are_told_by_their_tokens() -> None:
    tokens = np.zeros(3 * SEQ_LENGTH, np.int64)
    for place, pack in enumerate((0, 1234)):
        digits = name_of(pack)
        assert all(BASE <= digit < 2 * BASE for digit in digits)
        tokens[place * SEQ_LENGTH : place * SEQ_LENGTH + len(digits)] = digits
    # the third part is padding that replaces a pack
    leave = np.repeat([SEQ_LENGTH, 2 * SEQ_LENGTH, 0], SEQ_LENGTH)
    batch = type(
        "Batch", (), {"tokens": tokens, "leave": leave, "__len__": lambda self: len(tokens)}
    )()
    row: Any = SimpleNamespace(batch=batch)
    assert packs_of(row) == [0, 1234]


def test_every_kind_of_death_is_one_that_the_witness_or_the_harness_brings_about() -> None:
    assert set(KINDS) - set(STRIKES) - set(PREPARED) == {"a pack is damaged", "a second run comes"}


AXES = (
    "tensor_model_parallel",
    "pipeline_model_parallel",
    "context_parallel",
    "expert_model_parallel",
)


@pytest.mark.slow
def test_drawn_grids_are_many_and_of_all_axes() -> None:
    # train_epochs would need data
    training = {name: value for name, value in TRAINING.items() if name != "train_epochs"}
    base = parse(flags_of({**MODELS["Mamba-2"], **training, "save": "none"}))
    moments = random.Random(1)
    drawn = [drawn_grid(moments, base) for _ in range(60)]
    sizes = [{name: grid[f"{name}_size"] for name in AXES} for _, grid in drawn]
    assert len({str(sorted(one.items())) for one in sizes}) > 15
    assert all(max(one[name] for one in sizes) > 1 for name in AXES)
    assert sum(world == 8 for world, _ in drawn) > 20
