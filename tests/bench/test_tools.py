"""The benchmark tools run, and their JSON holds every figure beside its goal."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def figures(tool: str, path: Path, *flags: str) -> dict[str, Any]:
    assert runpy.run_path(str(TOOLS / tool))["main"](["--quick", *flags, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_quick_benchmark_gives_ratios_memory_and_bytes(tmp_path: Path) -> None:
    rows = {row["layout"]: row for row in figures("benchmark.py", tmp_path / "a.json", "--only", "short")["short"]}
    assert list(rows) == ["one process, 1 thread", "one process, 2 threads", "dp 2", "tp 2", "pp 2", "cp 2"]
    assert rows["one process, 1 thread"]["over_one_thread"] == rows["one process, 2 threads"]["over_two_threads"] == 1.0
    for row in rows.values():
        assert len(row["peak_memory"]) == row["ranks"] and min(row["peak_memory"]) > 0
        assert row["loss"] == pytest.approx(rows["one process, 1 thread"]["loss"], rel=1e-4)
        assert any(row["bytes_sent"]) == (row["ranks"] > 1)


@pytest.mark.slow
def test_the_benchmark_of_context_parallelism_counts_and_times(tmp_path: Path) -> None:
    found = figures("bench_cp.py", tmp_path / "a.json")
    assert len(found["goals"]) == 10 and {entry["cp"] for entry in found["layouts"]} == {2, 4, 8, 16}
    assert all(seconds > 0 for runs in found["time"].values() for seconds in runs)
