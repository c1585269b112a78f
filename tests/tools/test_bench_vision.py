"""The benchmark of images runs, and its JSON holds every figure beside its goal."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from bench.vision import WAYS
from megacp.core.context_parallel.layout import LAYOUTS

main = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "bench_vision.py"))["main"]


def test_loads_and_packs_meet_their_goals_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "figures.json"
    assert main(["--quick", "--only", "loads", "packs", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert {entry["way"] for entry in result["loads"]} == set(WAYS)
    assert {entry["cp"] for entry in result["loads"]} == {2, 4, 8, 16}
    assert len(result["goals"]) == 3 * 4 + 4 and all(goal["met"] for goal in result["goals"])
    assert "16 of 16 goals met" in capsys.readouterr().out
    # what the figure is for: the plain loop starves ranks and is uneven
    greedy = [entry for entry in result["loads"] if entry["way"] == "greedy" and entry["kind"] == "images"]
    assert sum(entry["starved"] for entry in greedy) > 0 and max(entry["over_optimum"] for entry in greedy) > 1.2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bytes_are_counted_for_every_layout_and_equal_what_ranks_send(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert main(["--quick", "--only", "bytes", "preprocessing", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert {(entry["cp"], entry["layout"]) for entry in result["bytes"]} == {
        (cp, name) for cp in (2, 4, 8, 16) for name in LAYOUTS
    }
    assert all(entry["sent"] == entry["counted"] > 0 for entry in result["bytes_on_ranks"])
    assert len(result["bytes_on_ranks"]) == 2 * 2 * len(LAYOUTS) and all(goal["met"] for goal in result["goals"])
    for kind in ("photos", "videos"):
        assert all(value > 0 for values in result[kind]["seconds"].values() for value in values)
