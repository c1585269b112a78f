"""Calibration: equal numbers on all ranks, quick, and a file that is only ever a cache."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.core.context_parallel.auto import calibration_file
from megacp.core.context_parallel.auto.calibrate import Setup, measure, slowest
from megacp.core.context_parallel.auto.predict import KernelCost, Line, Machine, link_names
from megacp.core.ops.kernels import select_kernel
from tests.ranks import grid, run_ranks
from tests.reference.machines import machine

CPU = torch.device("cpu")
LINKS = link_names(4, 4)
SOUND = dataclasses.replace(machine(4, 4, pair=1e-10, call=1e-5, per_byte=1e-9, latency=1e-4), copy=0.1, overlap=0.5)


def measured(rank: int, world_size: int, shape: tuple[int, int, int]) -> tuple[Machine, float]:
    """The constants, and the processor time that they took."""
    over = grid(cp=world_size)
    begin = time.process_time()
    found = measure(Setup(select_kernel("auto", CPU), *shape, torch.float32, CPU, over.cp, over.world))
    return found, time.process_time() - begin


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_hold_the_same_constants_after_little_work(world_size: int) -> None:
    """Would catch a rank's own medians in its decision; four ranks on two cores have 6 s of them in 3 s."""
    results = run_ranks(measured, world_size, (4, 2, 16))
    machines, seconds = zip(*results, strict=True)
    assert len(set(map(repr, machines))) == 1
    assert sum(seconds) < 6.0
    found = machines[0]
    assert sorted(found.links) == sorted(link_names(world_size, 4))
    assert min(found.forward.pair, found.backward.pair, found.copy) > 0 and 0 <= found.overlap <= 1
    assert min(line.latency + line.per_byte for line in found.links.values()) > 0


def test_the_slowest_rank_counts_constant_by_constant() -> None:
    fast = Machine(KernelCost(1, 6, 3), KernelCost(4, 5, 6), 7.0, 0.9, {"a": Line(1, 4)})
    slow = Machine(KernelCost(2, 5, 3), KernelCost(4, 5, 7), 6.0, 0.3, {"a": Line(2, 3)})
    assert slowest([fast, slow]) == Machine(KernelCost(2, 6, 3), KernelCost(4, 5, 7), 7.0, 0.3, {"a": Line(2, 4)})


def test_a_file_gives_back_what_was_written_beside_what_it_held(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "calibration.json"
    assert calibration_file.read(path, "one", LINKS) == (None, "")
    assert calibration_file.write(path, "one", SOUND) == ""
    other = dataclasses.replace(SOUND, overlap=0.25)
    assert calibration_file.write(path, "two", other) == ""
    assert calibration_file.read(path, "one", LINKS) == (SOUND, "")
    assert calibration_file.read(path, "two", LINKS) == (other, "")
    assert calibration_file.read(path, "three", LINKS) == (None, "")
    assert [file.name for file in path.parent.iterdir()] == ["calibration.json"]


def with_change(change: Any) -> str:
    content = {"format": calibration_file.FORMAT, "machines": {"key": dataclasses.asdict(SOUND)}}
    change(content["machines"]["key"])
    return json.dumps(content)


DAMAGED = {
    "cut off": with_change(lambda row: None)[:-40],
    "empty": "",
    "another program's": json.dumps({"version": 3, "machines": []}),
    "a list": "[1, 2]",
    "deep": "[" * 100_000,
    "no machines": json.dumps({"format": calibration_file.FORMAT}),
    "a link too few": with_change(lambda row: row["links"].pop("shift/1")),
    "a word": with_change(lambda row: row["forward"].update(pair="fast")),
    "a truth value": with_change(lambda row: row.update(copy=True)),
    "negative": with_change(lambda row: row["backward"].update(call=-1.0)),
    "not a number": with_change(lambda row: row["links"]["shift/1"].update(latency=float("nan"))),
    "for ever": with_change(lambda row: row["links"]["shift/1"].update(per_byte=float("inf"))),
    "free of charge": with_change(lambda row: row["forward"].update(pair=0.0)),
    "more than whole": with_change(lambda row: row.update(overlap=1.5)),
    "a row that is a word": json.dumps({"format": calibration_file.FORMAT, "machines": {"key": "fast"}}),
    "a row of lists": with_change(lambda row: row.update(links=[])),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_foreign_file_is_told_and_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    found, wrong = calibration_file.read(path, "key", LINKS)
    assert found is None and str(path) in wrong and "anew" in wrong
    assert calibration_file.write(path, "key", SOUND) == ""
    assert calibration_file.read(path, "key", LINKS) == (SOUND, "")


def test_bytes_that_are_no_text_are_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(b"\xff\xfe\x00garbage")
    assert "damaged" in calibration_file.read(path, "key", LINKS)[1]


def test_a_place_that_cannot_be_written_costs_a_message(tmp_path: Path) -> None:
    """Would catch a run that ends because a home folder is read-only, and scraps of files left behind."""
    (tmp_path / "file").write_text("")
    assert "cannot be written" in calibration_file.write(tmp_path / "file" / "calibration.json", "key", SOUND)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "folder" in calibration_file.read(folder, "key", LINKS)[1]
    assert "cannot be written" in calibration_file.write(folder, "key", SOUND)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_the_default_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibration_file.default_path() == Path.home() / ".cache/megacp/core/context_parallel.json"

    def nowhere(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert calibration_file.default_path() == Path("context_parallel.json")
