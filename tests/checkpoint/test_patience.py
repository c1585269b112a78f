"""A rank whose disk is slow or elsewhere: waited for longer than a collective may take, then named."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest

from megacp.core.checkpoint import commit
from megacp.core.checkpoint.commit import SaveError, load_checkpoint
from megacp.core.checkpoint.directory import committed
from megacp.core.distributed.grid import GridShape, build_grid, single_axis
from tests.checkpoint.test_pending import begin, boxes
from tests.ranks import run_ranks

GROUP_SECONDS = 1.0


def _slow(rank: int, world_size: int, root: str, seconds: float, patience: float, background: bool, late: int) -> str:
    """Save where rank `late` needs `seconds` for its file; the error, if any."""
    timeout = datetime.timedelta(seconds=GROUP_SECONDS)
    waiting = datetime.timedelta(seconds=patience)
    world = build_grid(GridShape(dp=world_size), rank, timeout=timeout, patience=waiting).world
    real = commit.write_boxes

    def write(folder: Path, *rest: Any) -> Any:
        time.sleep(seconds * (rank == late))
        return real(folder, *rest)

    commit.write_boxes = write
    try:
        begin(Path(root), 3, boxes(world), world, background).commit()
    except SaveError as error:
        return str(error)
    finally:
        commit.write_boxes = real
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(("background", "late"), [(False, 0), (False, 1), (True, 1)])
def test_a_save_may_take_longer_than_a_collective(tmp_path: Path, background: bool, late: int) -> None:
    """Would catch a slow disk that ends the run after --distributed-timeout-minutes."""
    assert run_ranks(_slow, 2, str(tmp_path), 2 * GROUP_SECONDS, 60.0, background, late) == ["", ""]
    assert load_checkpoint(tmp_path, single_axis("world")).step == 3


@pytest.mark.slow
def test_a_rank_beyond_the_limit_of_saving_is_named(tmp_path: Path) -> None:
    first, late = run_ranks(_slow, 2, str(tmp_path), 2.0, 0.5, False, 1)
    assert "within 0.5 s (6 x --distributed-timeout-minutes" in first and "Rank 1" in first
    assert "--distributed-timeout-minutes" in late
    assert committed(tmp_path) == []
