"""A rank whose disk is slow or elsewhere: waited for longer than a collective may take, then named."""

from __future__ import annotations

import datetime
import functools
import time
from pathlib import Path

import pytest

from megacp.core.checkpoint import pending
from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.checkpoint.directory import committed
from megacp.core.checkpoint.manifest import FileRecord
from megacp.core.checkpoint.pending import SaveError
from megacp.core.checkpoint.storage import PayloadWriter, rank_file
from megacp.core.distributed.grid import GridShape, build_grid, single_axis
from megacp.core.storage.files import seen
from tests.checkpoint.test_pending import begin, boxes
from tests.ranks import grid, run_ranks

GROUP_SECONDS = 1.0


def _slow(rank: int, world_size: int, root: str, seconds: float, patience: float, background: bool, late: int) -> str:
    """Save where rank `late` needs `seconds` for its file; the error, if any."""
    timeout = datetime.timedelta(seconds=GROUP_SECONDS)
    waiting = datetime.timedelta(seconds=patience)
    world = build_grid(GridShape(dp=world_size), rank, timeout=timeout, patience=waiting).world
    real = PayloadWriter.write

    def write(self: PayloadWriter, folder: Path) -> list[Path]:
        time.sleep(seconds * (rank == late))
        return real(self, folder)

    PayloadWriter.write = write  # type: ignore[method-assign]
    try:
        begin(Path(root), 3, boxes(world), world, background).commit()
    except SaveError as error:
        return str(error)
    finally:
        PayloadWriter.write = real  # type: ignore[method-assign]
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
    assert "within 0.5 s (--checkpoint-timeout-minutes" in first and "Rank 1" in first
    assert "(--checkpoint-timeout-minutes" in late
    assert committed(tmp_path) == []


def _elsewhere(rank: int, world_size: int, root: str, kept: int) -> str:
    """Save where rank 1's file comes to lie in a directory that only rank 1 has, but for `kept` bytes."""
    world = grid(dp=world_size).world
    real = PayloadWriter.write

    def write(self: PayloadWriter, folder: Path) -> dict[str, FileRecord]:
        records = real(self, folder)
        if rank == 1:
            path = folder / rank_file(1)
            content = path.read_bytes()
            path.unlink()
            if kept:
                path.write_bytes(content[:kept])
        return records

    PayloadWriter.write = write  # type: ignore[method-assign]
    pending.seen = functools.partial(seen, seconds=0.2)  # type: ignore[attr-defined]
    try:
        begin(Path(root, "out"), 3, boxes(world), world, False).commit()
    except SaveError as error:
        return str(error)
    finally:
        PayloadWriter.write = real  # type: ignore[method-assign]
        pending.seen = seen  # type: ignore[attr-defined]
    return ""


@pytest.mark.parametrize("kept", [0, 100])
def test_a_file_that_rank_0_does_not_see_is_not_committed(tmp_path: Path, kept: int) -> None:
    """Would catch a committed checkpoint without the file of a rank that saw another directory."""
    first, second = run_ranks(_elsewhere, 2, str(tmp_path), kept)
    assert first == second
    assert ("100 bytes of" if kept else "no") + " rank_00001.safetensors" in first
    assert committed(tmp_path / "out") == []
