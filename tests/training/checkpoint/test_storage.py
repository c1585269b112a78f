"""The payload: boxes to safetensors files and back, and files that are not trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch as safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.engine.data_parallel.boxes import (
    TensorBox,
    boxes_of_slice,
    boxes_to_load,
    boxes_to_save,
    split_range,
)
from megacp.engine.data_parallel.parameter import ParameterSpec, TensorSlice
from megacp.engine.data_parallel.shards import ParameterSlice
from megacp.storage.files import sha256_of
from megacp.training.checkpoint import storage
from megacp.training.checkpoint.directory import FileRecord
from megacp.training.checkpoint.storage import INDEX_FILE, Payload, index_of, write_boxes

FILE = "rank_00000.safetensors"


def write_payload(folder: Path, boxes: Sequence[TensorBox]) -> None:
    """Write the files of one rank that has all boxes."""
    (folder / INDEX_FILE).write_bytes(index_of([write_boxes(folder, 0, boxes)[1]]).to_json())


def whole_box(name: str, tensor: torch.Tensor) -> TensorBox:
    return TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def hashes(folder: Path) -> dict[str, FileRecord]:
    return {path.name: FileRecord(*sha256_of(path)) for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_boxes_cut_in_any_way_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    source = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    source[0, 0], source[1, 1], source[2, 2] = float("nan"), -0.0, float("inf")
    cuts = [((0, 0), (3, 5)), ((3, 0), (1, 2)), ((3, 2), (1, 3)), ((4, 0), (3, 5))]
    boxes = [
        TensorBox("w", (7, 5), (i, j), source[i : i + n, j : j + m]) for (i, j), (n, m) in cuts
    ]
    write_payload(tmp_path, [*boxes, whole_box("s", torch.tensor(3.0))])
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


def test_the_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    w, v, h = (
        torch.arange(6.0).view(2, 3),
        torch.arange(4.0).double(),
        torch.tensor([1.5]).bfloat16(),
    )
    parts = [TensorBox("v", (4,), (0,), v[:1]), TensorBox("v", (4,), (1,), v[1:])]
    write_payload(
        tmp_path, [whole_box("h", h), whole_box("w", w), *parts, whole_box("s", torch.tensor(3))]
    )
    found = safetensors.load_file(tmp_path / FILE)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        **{"w": w.tolist(), "h": [1.5], "s": 3},
        **{"v[0:1]": [0], "v[1:4]": [1, 2, 3]},
    }
    assert [found[name].dtype for name in ("w", "h", "s", "v[0:1]")] == [
        w.dtype,
        h.dtype,
        torch.int64,
        v.dtype,
    ]


def test_only_the_bytes_from_the_first_to_the_last_wanted_element_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.arange(6000.0).view(60, 100)
    write_payload(tmp_path, [whole_box("w", source)])
    payload, read = Payload(tmp_path, hashes(tmp_path)), list[int]()
    real, header, made = storage.as_bytes, storage.header, list[int]()
    monkeypatch.setattr(storage, "header", lambda tensors: made.append(1) or header(tensors))

    def counted(tensor: torch.Tensor) -> memoryview:
        read.append(tensor.nbytes)
        return real(tensor)

    monkeypatch.setattr(storage, "as_bytes", counted)
    for rows, columns, count in (
        (slice(10, 13), slice(0, 100), 300),
        (slice(7, 8), slice(3, 8), 5),
        (slice(0, 2), slice(9, 11), 102),
    ):
        target = torch.zeros_like(source[rows, columns])
        payload.read([TensorBox("w", (60, 100), (rows.start, columns.start), target)])
        assert torch.equal(target, source[rows, columns])
        assert read.pop() == 4 * count and not read
    assert made == [1], "one header for all reads of a file"


def test_the_same_tensors_make_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write_payload(tmp_path / name, [whole_box("w", torch.arange(6.0))])
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


CUTS = {"hole": [(0, 3)], "overlap": [(0, 4), (3, 6)], "twice": [(0, 3), (0, 3)]}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_elements_written_twice_or_not_at_all_are_refused(
    tmp_path: Path, cuts: list[tuple[int, int]]
) -> None:
    x = torch.zeros(6)
    with pytest.raises(ValueError, match="boxes of w "):
        write_payload(tmp_path, [TensorBox("w", (6,), (i,), x[i:j]) for i, j in cuts])


def test_boxes_of_one_tensor_with_other_dtypes_are_refused(tmp_path: Path) -> None:
    boxes = [
        TensorBox("w", (4,), (0,), torch.zeros(2)),
        TensorBox("w", (4,), (2,), torch.zeros(2).int()),
    ]
    with pytest.raises(ValueError, match="two boxes disagree on shape or dtype of the tensor w"):
        write_payload(tmp_path, boxes)


def test_an_index_with_another_hash_is_not_opened(tmp_path: Path) -> None:
    write_payload(tmp_path, [whole_box("w", torch.zeros(2))])
    known = hashes(tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(bytes(known[INDEX_FILE].size))
    with pytest.raises(ValueError, match="sha256"):
        Payload(tmp_path, known)


def test_an_index_may_not_refer_to_files_outside_the_manifest(tmp_path: Path) -> None:
    write_payload(tmp_path, [whole_box("w", torch.zeros(2))])
    with pytest.raises(ValueError, match=r"rank_00000\.safetensors"):
        Payload(tmp_path, {INDEX_FILE: hashes(tmp_path)[INDEX_FILE]})


def test_tensors_that_do_not_fit_are_named_with_both_sides(tmp_path: Path) -> None:
    write_payload(tmp_path, [whole_box("w", torch.zeros(2, 3)), whole_box("v", torch.zeros(2))])
    payload = Payload(tmp_path, hashes(tmp_path))
    wanted = [
        whole_box("w", torch.zeros(3, 2)),
        whole_box("v", torch.zeros(2).bfloat16()),
        whole_box("u", torch.zeros(1)),
    ]
    assert payload.problems(wanted) == [
        "w is torch.float32 (2, 3) in the checkpoint, but torch.float32 (3, 2) in this run",
        "v is torch.float32 (2,) in the checkpoint, but torch.bfloat16 (2,) in this run",
        "u is not in the checkpoint",
    ]


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    low = draw(st.integers(0, math.prod(shape)))
    return shape, low, draw(st.integers(low, math.prod(shape)))


@settings(deadline=None, derandomize=True, max_examples=500)
@given(ranges())
@pytest.mark.slow
def test_boxes_of_a_range_are_its_elements_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, low, high = case
    array = np.arange(math.prod(shape)).reshape(shape)
    boxes = split_range(shape, low, high)
    parts = [
        array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1)
        for box in boxes
    ]
    assert [int(x) for part in parts for x in part] == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_box() -> None:
    assert split_range((1000, 8), 8, 7992) == [((1, 0), (998, 8))]
    assert split_range((1000, 8), 5, 7993) == [
        ((0, 5), (1, 3)),
        ((1, 0), (998, 8)),
        ((999, 0), (1, 1)),
    ]


def test_a_slice_of_a_fused_and_padded_parameter_lands_in_its_pieces() -> None:
    pieces = (
        TensorSlice("q", (4, 3), (2, 0), (2, 3), start=0),
        TensorSlice("k", (2, 6), (1, 3), (1, 3), start=2),
    )
    local = torch.arange(12.0)  # [4, 3]: two rows of q, one of k, one of padding
    part = ParameterSlice(ParameterSpec(pieces), (4, 3), 4, local[4:])
    boxes = boxes_of_slice("model", part)
    assert [(b.name, b.global_shape, b.offsets, b.tensor.tolist()) for b in boxes] == [
        ("model.q", (4, 3), (3, 1), [[4.0, 5.0]]),
        ("model.k", (2, 6), (1, 3), [[6.0, 7.0, 8.0]]),
    ]
    boxes[0].tensor.fill_(-1)
    assert local[4:6].tolist() == [-1.0, -1.0]


def test_copies_are_read_but_not_written() -> None:
    spec = ParameterSpec((TensorSlice("w", (2,), (0,), (2,)),), counted=False)
    part = ParameterSlice(spec, (2,), 0, torch.zeros(2))
    assert boxes_to_save([part], {"exp_avg": [part]}, lambda spec: spec.counted) == []
    assert [b.name for b in boxes_to_load([part], {"exp_avg": [part]})] == [
        "model.w",
        "optimizer.exp_avg.w",
    ]
