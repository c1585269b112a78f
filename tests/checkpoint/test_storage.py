"""The payload: boxes to DCP files and back, and an index that is not trusted."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megacp.checkpoint.manifest import FileRecord, hash_file
from megacp.checkpoint.names import TensorBox
from megacp.checkpoint.storage import INDEX_FILE, Payload, PayloadError, write_payload
from megacp.distributed.grid import single_axis

WORLD = single_axis("world")


def whole_box(name: str, tensor: torch.Tensor) -> TensorBox:
    return TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def hashes(folder: Path) -> dict[str, FileRecord]:
    return {path.name: hash_file(path) for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_boxes_cut_in_any_way_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Would catch swapped offsets, boxes that overlap several stored ones, special values that change."""
    source = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    source[0, 0], source[1, 1], source[2, 2] = float("nan"), -0.0, float("inf")
    cuts = [((0, 0), (3, 5)), ((3, 0), (1, 2)), ((3, 2), (1, 3)), ((4, 0), (3, 5))]
    boxes = [TensorBox("w", (7, 5), (i, j), source[i : i + n, j : j + m]) for (i, j), (n, m) in cuts]
    write_payload(tmp_path, [*boxes, whole_box("s", torch.tensor(3.0))], WORLD)
    payload = Payload(tmp_path, hashes(tmp_path))
    target = torch.zeros(7, 5, dtype=dtype)
    payload.read([TensorBox("w", (7, 5), (2, 1), target[2:6, 1:4])])
    inside = torch.zeros(7, 5, dtype=torch.bool)
    inside[2:6, 1:4] = True
    assert torch.equal(target[inside], source[inside])
    assert not target[~inside].any()
    assert payload.read_whole("w").view(torch.uint8).equal(source.view(torch.uint8))
    assert payload.read_whole("s").item() == 3.0
    assert payload.tensors == {"w": ((7, 5), dtype), "s": ((), torch.float32)}


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to load in a single process")
def test_the_files_are_ordinary_dcp(tmp_path: Path) -> None:
    """Would catch a private format: PyTorch's own loader must read it."""
    write_payload(tmp_path, [whole_box("w", torch.arange(6.0).view(2, 3))], WORLD)
    state = {"w": torch.zeros(2, 3)}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_same_tensors_make_the_same_bytes(tmp_path: Path) -> None:
    """Would catch a path or a random id in the files."""
    for name in "ab":
        (tmp_path / name).mkdir()
        write_payload(tmp_path / name, [whole_box("w", torch.arange(6.0))], WORLD)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


CUTS = {"hole": [(0, 3)], "overlap": [(0, 4), (3, 6)], "overlap and hole": [(0, 3), (2, 5)]}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_elements_written_twice_or_not_at_all_are_refused(tmp_path: Path, cuts: list[tuple[int, int]]) -> None:
    """Would catch a wrong `counted`: a copy that is written, or a parameter that no rank writes."""
    x = torch.zeros(6)
    with pytest.raises(
        PayloadError, match=r"boxes of w together have \d elements, the tensor has 6|two boxes of w overlap"
    ):
        write_payload(tmp_path, [TensorBox("w", (6,), (i,), x[i:j]) for i, j in cuts], WORLD)


def test_a_crafted_index_runs_nothing(tmp_path: Path) -> None:
    """Would catch a plain pickle.load: the index names os.system, and even its hash is right."""
    write_payload(tmp_path, [whole_box("w", torch.zeros(2))], WORLD)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / INDEX_FILE).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="system"):
        Payload(tmp_path, hashes(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_an_index_with_another_hash_is_not_opened(tmp_path: Path) -> None:
    """Would catch an index that is unpickled before it is checked."""
    write_payload(tmp_path, [whole_box("w", torch.zeros(2))], WORLD)
    known = hashes(tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(bytes(known[INDEX_FILE].size))
    with pytest.raises(ValueError, match="sha256"):
        Payload(tmp_path, known)


def test_an_index_may_not_refer_to_files_outside_the_manifest(tmp_path: Path) -> None:
    """Would catch data that no hash protects."""
    write_payload(tmp_path, [whole_box("w", torch.zeros(2))], WORLD)
    with pytest.raises(ValueError, match=r"__0_0\.distcp"):
        Payload(tmp_path, {INDEX_FILE: hashes(tmp_path)[INDEX_FILE]})


def test_tensors_that_do_not_fit_are_named_with_both_sides(tmp_path: Path) -> None:
    """Would catch a silent conversion, broadcast or skip."""
    write_payload(tmp_path, [whole_box("w", torch.zeros(2, 3)), whole_box("v", torch.zeros(2))], WORLD)
    payload = Payload(tmp_path, hashes(tmp_path))
    wanted = [
        whole_box("w", torch.zeros(3, 2)),
        whole_box("v", torch.zeros(2).bfloat16()),
        whole_box("u", torch.zeros(1)),
    ]
    assert payload.problems(wanted) == [
        "w has shape (2, 3) in the checkpoint, (3, 2) here",
        "v is torch.float32 in the checkpoint, torch.bfloat16 here",
        "u is not in the checkpoint",
    ]
