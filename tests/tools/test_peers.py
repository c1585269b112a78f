"""Comparison with other trainers: the protocol of their processes, the table of their abilities,
and the measurement.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.peers.comparison import Opponents, other_losses, over_best, peers_part, speed_table
from bench.peers.grids import GRIDS, PEERS, Peer
from bench.peers.processes import PeerFailure, PeerRanks
from megacp.training.monitor.log import LogTargets, RunLog
from megacp.verify.plot import main, read_curves, running_mean

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parents[1] / "tools"
to_hugging_face = runpy.run_path(str(TOOLS / "benchmark.py"))["to_hugging_face"]


@pytest.fixture
def work(tmp_path: Path) -> dict[str, Any]:
    """Write the input of a fake peer: weights, and the tokens of two steps."""
    import numpy as np

    (tmp_path / "model.safetensors").touch()
    np.savez(tmp_path / "tokens.npz", tokens=np.zeros((2, 4, 8)))
    return {"weights": str(tmp_path), "tokens": str(tmp_path / "tokens.npz"), "options": {}}


def fake(work: dict[str, Any], folder: Path, ranks: int, **options: str) -> PeerRanks:
    return PeerRanks(
        [sys.executable, str(HERE / "fake_peer.py")], ranks, {**work, "options": options}, folder
    )


def test_ranks_of_a_peer_train_step_by_step(work: dict[str, Any], tmp_path: Path) -> None:
    with fake(work, tmp_path / "a", 2) as ranks:
        ranks.ready()
        for number in range(2):
            steps = ranks.step(number)
            assert [step.wall for step in steps] == [1.0, 2.0]
            assert [step.loss for step in steps] == [None, 5.0 - number]
            assert steps[0].tokens == 32


FAILURES = {
    "build": "rank 0: ModuleNotFound",
    "step": "(?s)rank 1: .*the last words of a rank",
    "hang": "did not answer",
}


@pytest.mark.slow
@pytest.mark.parametrize("fails", FAILURES)
def test_a_peer_that_fails_says_what_it_printed(
    fails: str, work: dict[str, Any], tmp_path: Path
) -> None:
    with fake(work, tmp_path / "a", 1 if fails == "build" else 2, fails=fails) as ranks:
        with pytest.raises(PeerFailure, match=FAILURES[fails]):
            ranks.ready()
            ranks.step(0, timeout=1.0 if fails == "hang" else 60.0)
            ranks.step(1)


def test_every_cell_of_the_table_names_a_grid_and_a_script_that_exist() -> None:
    for peer in PEERS.values():
        assert (TOOLS / "peers" / peer.script).is_file()
        assert peer.cells and set(peer.cells) <= set(GRIDS)
    for grid in GRIDS.values():
        axes = grid.axes()
        assert axes["dp"] * axes["tp"] * axes["pp"] * axes["cp"] == grid.ranks


def test_peers_take_one_sequence_at_a_time_as_ours() -> None:
    work = runpy.run_path(str(TOOLS / "peers" / "stepping.py"))["Work"]
    axes = {"dp": 1, "tp": 1, "pp": 1, "cp": 4}
    rank = work(2, 4, axes, {}, {}, Path(), sequences=4, length=8, before=0)
    tokens = torch.arange(32).view(4, 8)
    parts = rank.microbatches(tokens, tokens + 1)
    assert [ids.shape for ids, _ in parts] == [(1, 8)] * 4
    assert torch.equal(torch.cat([labels for _, labels in parts]), tokens + 1)


def row(speed: float, losses: list[float]) -> dict[str, Any]:
    return {"tokens_per_second": speed, "peak_memory": [1], "cpu_seconds": 1.0, "losses": losses}


def test_ratios_are_over_the_fastest_peer_and_other_losses_are_told() -> None:
    found = {
        "a": row(10.0, [4.0, 3.0]),
        "b": row(40.0, [4.00004, 3.1]),
        "megacp": row(60.0, [4.00001, 3.0]),
    }
    assert over_best(found) == (1.5, "b")
    assert over_best({"megacp": found["megacp"]}) is None
    assert other_losses(found, 4) == ["last loss of b 3.1000, ours 3.0000"]
    shown = speed_table({"dp 2": found, "one process": {"megacp": found["megacp"]}})
    assert [line.split()[-2:] for line in shown.splitlines() if line.startswith("  over")] == [
        ["1.50", "-"]
    ]


@pytest.mark.slow
def test_a_comparison_takes_turns_and_goes_on_without_the_peer_that_failed() -> None:
    peers = {
        "fake": Peer("fake_peer.py", ("numpy",), {"dp 2": {}}),
        "breaks": Peer("fake_peer.py", ("numpy",), {"dp 2": {"fails": "step"}}),
        "nowhere": Peer("fake_peer.py", ("no_such_package",), {"dp 2": {}}),
    }
    opponents = Opponents(sys.executable, HERE, peers)
    part = peers_part(True, 1, opponents, to_hugging_face, ["dp 2"])
    rows = part.figures["peers"]["dp 2"]
    assert list(rows) == ["megacp", "fake"]
    assert rows["fake"]["tokens_per_second"] == 4 * 256 / 2.0
    assert rows["fake"]["losses"] == [5.0, 4.0] and len(rows["megacp"]["losses"]) == 2
    (goal,) = part.goals
    assert goal.value == pytest.approx(rows["megacp"]["tokens_per_second"] / 512)
    assert "nowhere is absent, not installed: no_such_package" in part.table
    assert "breaks failed, rank 1: the process ended" in part.table
    json.dumps(part.figures)


def write(path: Path) -> None:
    log = RunLog(LogTargets(jsonl=path), total_steps=2)
    log.note(1, "all ranks skipped the update")
    log.figures("attention", 1, "attention", {"measured": 1.0})
    log.validation(1, 2.5)
    log.close()
    with path.open("a") as file:
        file.write(
            '{"kind": "train", "step": 1, "loss": 3.0}\n{"kind": "train", "step": 2, "loss": "nan"}\n'
        )


def test_a_running_mean_is_of_the_last_twenty_losses() -> None:
    losses = [float("nan"), *map(float, range(1, 41))]
    assert running_mean(losses)[20:] == [sum(losses[end - 20 : end]) / 20 for end in range(21, 42)]
    assert running_mean([3.0, 1.0]) == [3.0, 2.0]


def test_a_log_that_does_not_exist_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    assert main(["--log", str(path), "--output", str(tmp_path / "loss.png")]) == 2
    told = capsys.readouterr().err
    assert f"--log {path}: no such file; a run with --save FOLDER writes FOLDER/log.jsonl" in told
    assert "Errno" not in told
    assert main(["--log", str(tmp_path), "--output", str(tmp_path / "loss.png")]) == 2
    assert f"--log {tmp_path} is a folder; a run writes log.jsonl" in capsys.readouterr().err


@pytest.mark.slow
def test_a_log_with_notes_has_its_curves(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl")
    curves = read_curves(tmp_path / "log.jsonl")
    assert (
        list(curves["train"]) == [1, 2]
        and curves["train"][1] == 3.0
        and curves["valid"] == {1: 2.5}
    )
    assert (
        main(
            [
                "--log",
                str(tmp_path / "log.jsonl"),
                "--output",
                str(tmp_path / "loss.png"),
                "--mark",
                "2",
            ]
        )
        == 0
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "log.jsonl:1"),
        ("3", "log.jsonl:1"),
        ("{}", "log.jsonl:1"),
        ("", "no training step"),
        (None, "log.jsonl"),
    ],
)
def test_another_file_is_named(
    text: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    assert main(["--log", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "loss.png")]) == 2
    assert named in capsys.readouterr().err
