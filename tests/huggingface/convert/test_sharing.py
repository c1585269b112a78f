"""Conversions on several ranks: the bytes of one process in both directions, or one message and no
output.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest

from megacp.distributed.grid import single_axis
from megacp.huggingface.convert.export import Request, convert
from tests.huggingface.convert.models import save
from tests.ranks import grid, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors", reason="safetensors is not installed (extra: hf)")
# Bytes of a weight file: the tiny model has four files in float32.
LIMIT = 80_000


def hashes(folder: Path) -> dict[str, str]:
    below = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in below
    }


def converted(rank: int, world_size: int, requests: list[Request]) -> str:
    words = io.StringIO()
    with contextlib.redirect_stdout(words):
        for request in requests:
            convert(request, grid(dp=world_size).world)
    return words.getvalue()


def both_ways(
    given: Path, start: Path, again: Path, limit: int = LIMIT, **more: Any
) -> list[Request]:
    there = Request("hf", "megacp", given, start, max_shard_mib=limit / 2**20, **more)
    return [there, Request("megacp", "hf", start, again, max_shard_mib=limit / 2**20, **more)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_leave_the_bytes_of_one_process(ranks: int, tmp_path: Path) -> None:
    save("qwen3", tmp_path / "given")
    for request in both_ways(tmp_path / "given", tmp_path / "start", tmp_path / "again"):
        convert(request, single_axis("world"))
    want = {name: hashes(tmp_path / name) for name in ("start", "again")}
    weights = (
        [name for name in want["start"] if "rank_" in name],
        [name for name in want["again"] if "model-" in name],
    )
    assert [len(names) for names in weights] == [4, 4]
    requests = both_ways(tmp_path / "given", tmp_path / "start 2", tmp_path / "again 2")
    run_ranks(converted, ranks, requests)
    assert hashes(tmp_path / "start 2") == want["start"]
    assert hashes(tmp_path / "again 2") == want["again"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again",
        "again 2",
        "given",
        "start",
        "start 2",
    ]


def refused(rank: int, world_size: int, request: Request, full: bool) -> str:
    """Return the error message of a rank; if `full`, the last rank cannot write."""
    with pytest.MonkeyPatch.context() as patch:
        if full and rank == world_size - 1:

            def no_space(*_: Any) -> None:
                raise OSError(28, "No space left on device", "weights")

            patch.setattr("megacp.huggingface.convert.hf_files.storage.write_values", no_space)
        with pytest.raises(ValueError) as error:
            convert(request, grid(dp=world_size).world)
    return str(error.value)


def test_an_error_of_one_rank_ends_all_with_its_words(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "given")
    there, _ = both_ways(tmp_path / "given", tmp_path / "start", tmp_path / "x")
    over = Request("hf", "hf", tmp_path / "given", tmp_path / "x", max_shard_mib=LIMIT / 2**20)
    for request in (there, over):
        said = run_ranks(refused, 2, request, True)
        assert said == ["rank 1: No space left on device (ENOSPC) weights"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
