"""The benchmark tool: runs every layout it names and writes figures that can be read again."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "benchmark.py"))["main"]


@pytest.mark.slow
def test_a_quick_benchmark_gives_ratios_memory_and_bytes_equal_to_the_formulas(tmp_path: Path) -> None:
    """Would catch a layout that no longer runs, a ratio over the wrong base, and traffic that grew."""
    path = tmp_path / "bench.json"
    assert main(["--quick", "--only", "short", "--json", str(path)]) == 0
    rows = {row["layout"]: row for row in json.loads(path.read_text())["short"]}
    assert list(rows) == ["one process, 1 thread", "one process, 2 threads", "dp 2", "tp 2", "pp 2", "cp 2"]
    assert rows["one process, 1 thread"]["over_one_thread"] == rows["one process, 2 threads"]["over_two_threads"] == 1.0
    for row in rows.values():
        assert len(row["peak_memory"]) == row["ranks"] and min(row["peak_memory"]) > 0
        assert row["loss"] == pytest.approx(rows["one process, 1 thread"]["loss"], rel=1e-4)
        sent = [pair for axes in row["bytes_sent_and_formula"] for pair in axes.values()]
        assert all(measured == formula for measured, formula in sent)
        assert bool(sent) == (row["ranks"] > 1)
