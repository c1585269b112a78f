"""The benchmark of sharding strategies: every way runs, and its figures can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import bench_sharding


@pytest.mark.slow
def test_a_quick_run_measures_every_strategy_and_the_peer(tmp_path: Path) -> None:
    """Would catch a strategy that no longer runs, and a peer that trains other tokens."""
    path = tmp_path / "bench.json"
    assert bench_sharding.main(["--quick", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["strategies"]
    assert list(found["seconds"]) == [*bench_sharding.STRATEGIES, bench_sharding.PEER]
    assert found["over_optim"]["optim"] == 1.0
    assert min(found["cpu_seconds"].values()) > 0
