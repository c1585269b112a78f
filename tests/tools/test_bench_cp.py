"""The benchmark of context parallelism runs, and its JSON holds every figure beside its goal."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from bench.context_parallel import BOUND_GOAL
from megacp.core.context_parallel.layout import LAYOUTS

main = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "bench_cp.py"))["main"]


@pytest.mark.slow
def test_layouts_are_counted_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "figures.json"
    assert main(["--quick", "--only", "layouts", "--json", str(path), "--plot", str(tmp_path / "plots")]) == 0
    result = json.loads(path.read_text())
    assert {entry["layout"] for entry in result["layouts"]} == set(LAYOUTS)
    assert {entry["cp"] for entry in result["layouts"]} == {2, 4, 8, 16}
    for kind, count in (
        ("area max / mean", 8),
        ("pairs used / allowed", 8),
        ("pairs computed / allowed", 8),
        ("calls on empty tiles", 2),
    ):
        checked = [goal for goal in result["goals"] if kind in goal["name"]]
        assert len(checked) == count and all(goal["met"] for goal in checked), kind
    ratios = {(entry["pack"], entry["cp"]): entry["over_bound"] for entry in result["layouts"] if entry["over_bound"]}
    assert len(ratios) >= 7 and min(ratios.values()) >= 1.0, "no layout is below the bound"
    for (pack, cp), ratio in ratios.items():
        assert ratio <= BOUND_GOAL or (pack.startswith("mixed") and cp <= 4), (pack, cp, ratio)
    assert "goals met" in capsys.readouterr().out
    pictures = sorted((tmp_path / "plots").glob("*.png"))
    assert [picture.name for picture in pictures] == ["causal_4096_cp8.png", "mixed_4096_cp8.png"]


@pytest.mark.slow
def test_memory_and_time_are_measured_on_ranks(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert main(["--quick", "--only", "memory", "time", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    memory = [goal["value"] for goal in result["goals"] if "peak of activations" in goal["name"]]
    assert len(memory) == 4 and all(0.5 < value < 1.5 for value in memory)
    assert all(one["work"] >= one["slowest_rank"] > 0 for runs in result["time"]["seconds"].values() for one in runs)
    kept = [goal for goal in result["goals"] if "kept for backward" in goal["name"]]
    assert len(kept) == 4 and all(goal["met"] for goal in kept)
