"""The index: crafted and broken text ends in a ValueError and takes no time or memory."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacp.core.checkpoint.index import GlobalTensor, Index, StoredBox, read_index
from megacp.core.checkpoint.storage import INDEX_FILE
from tests.checkpoint.test_storage import TensorBox, whole_box, write_payload

pytestmark = pytest.mark.timeout(60)

FILE = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, int]]:
    """The index of a payload of two tensors, one of them in two boxes, and the sizes of its files."""
    folder = tmp_path_factory.mktemp("payload")
    x = torch.arange(6.0)
    parts = [TensorBox("model.v", (6,), (0,), x[:4]), TensorBox("model.v", (6,), (4,), x[4:])]
    write_payload(folder, [whole_box("model.w", torch.zeros(2, 3).bfloat16()), *parts])
    return (folder / INDEX_FILE).read_bytes(), {path.name: path.stat().st_size for path in folder.iterdir()}


def crafted(index: tuple[bytes, dict[str, int]], change: Any) -> bytes:
    """The index after `change(content)`."""
    content = json.loads(index[0])
    change(content)
    return json.dumps(content).encode()


def test_the_index_comes_back_whole(index: tuple[bytes, dict[str, int]]) -> None:
    found = read_index(*index)
    assert found.to_json() == index[0]
    assert found.tensors == {"model.w": ((2, 3), torch.bfloat16), "model.v": ((6,), torch.float32)}
    assert found.files == {FILE: [("model.v", (0,), (4,)), ("model.v", (4,), (2,)), ("model.w", (0, 0), (2, 3))]}


def _whole(content: Any, shape: list[int]) -> None:
    content["tensors"]["model.w"]["shape"] = shape
    content["files"][FILE][2] = ["model.w", [0] * len(shape), shape]


def _box(content: Any, *value: Any) -> None:
    content["files"][FILE][1] = list(value)


CRAFTED = {
    "a trillion elements": (lambda c: _whole(c, [10**6, 10**6]), f"the boxes in {FILE} have [0-9]* bytes, the file"),
    "more than a memory": (lambda c: _whole(c, [2**62, 2]), "model.w has no dtype or no shape"),
    "a hundred thousand dims": (lambda c: _whole(c, [2**61] * 100_000), "model.w has no dtype or no shape"),
    "below zero": (lambda c: _whole(c, [-1, 3]), "model.w has no dtype or no shape"),
    "half an element": (lambda c: _whole(c, [0.5, 3]), "model.w has no dtype or no shape"),
    "no shape": (lambda c: c["tensors"]["model.w"].pop("shape"), "model.w has no dtype or no shape"),
    "another dtype": (lambda c: c["tensors"]["model.w"].update(dtype="C64"), "model.w has no dtype or no shape"),
    "a dtype in a list": (lambda c: c["tensors"]["model.w"].update(dtype=["F32"]), "`tensors.model.w.dtype` is a"),
    "wider elements than the file has": (
        lambda c: c["tensors"]["model.v"].update(shape=[10**4], dtype="F64") or _box(c, "model.v", [4], [10**4 - 4]),
        f"the boxes in {FILE} have [0-9]* bytes, the file",
    ),
    "a box outside": (lambda c: _box(c, "model.v", [5], [2]), f"model.v has a box in {FILE} that lies outside"),
    "a box below zero": (lambda c: _box(c, "model.v", [-1], [2]), "model.v has a box without offsets or extents"),
    "a box of other dims": (lambda c: _box(c, "model.v", [4, 0], [2, 1]), "model.v has a box without offsets"),
    "a box of no tensor": (lambda c: _box(c, "model.u", [4], [2]), f"it has a box of no tensor in {FILE}"),
    "a box that is none": (lambda c: _box(c, "model.v"), f"it has a box of no tensor in {FILE}"),
    "a hole": (lambda c: c["files"][FILE].pop(1), "boxes of model.v together have 4 elements"),
    "an overlap": (
        lambda c: c["files"][FILE].append(["model.v", [0], [0]]) or _box(c, "model.v", [3], [2]),
        "two boxes of model.v overlap",
    ),
    "another file": (
        lambda c: c["files"].update({"../x": c["files"].pop(FILE)}),
        r"files that the manifest does not list: '../x'",
    ),
    "a tensor in no file": (lambda c: c["files"].clear(), "boxes of model.w together have 0 elements"),
    "boxes in an object": (lambda c: c["files"].update({FILE: {}}), f"its boxes of {FILE} are no list"),
    "no tables": (lambda c: c.update(files=None), "`files` is None, it must be an object"),
    "text for a tensor": (lambda c: c["tensors"].update({"model.b": "x"}), "`tensors.model.b` is 'x'"),
    "a name over two lines": (lambda c: c["tensors"].update({"a\nb": c["tensors"]["model.w"]}), "without a name"),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_index_is_refused_before_anything_is_allocated(kind: str, index: Any) -> None:
    """Would catch an index that is believed because its hash is right: its author wrote the hash too."""
    change, reason = CRAFTED[kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=reason):
        read_index(crafted(index, change), index[1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("shape", [(20_000,), (1, 20_000), (2, 20_000), (3, 1, 20_000)])
@pytest.mark.slow
def test_twenty_thousand_boxes_of_one_tensor_are_checked_within_a_second(shape: tuple[int, ...]) -> None:
    """Would catch a comparison of each box with each, and a tensor without rows that no checkpoint may hold."""
    *lead, columns = shape
    boxes = [StoredBox("w", (*(0 for _ in lead), column), (*lead, 1)) for column in range(columns)]
    index = Index({"w": GlobalTensor(shape, torch.float32)}, {FILE: boxes})
    begin = time.process_time()
    index.check()
    assert time.process_time() - begin < 1.0
    boxes[-1] = boxes[0]
    with pytest.raises(ValueError, match="two boxes of w overlap"):
        index.check()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_boxes_are_a_tiling_when_each_element_is_counted_once(data: st.DataObject) -> None:
    """The reference counts elements. Boxes are cuts of the tensor, of which one may be moved."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = [StoredBox("w", (0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 5))):
        name, at, extents = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(0, extents[dim]))
        for begin, length in ((0, cut), (cut, extents[dim] - cut)):
            sides = at[dim] + begin, length
            boxes.append(
                StoredBox(
                    name,
                    *((*side[:dim], new, *side[dim + 1 :]) for side, new in zip((at, extents), sides, strict=True)),
                )
            )
    moved = data.draw(st.integers(0, len(boxes) - 1))
    limits = [size - extent for size, extent in zip(shape, boxes[moved].extents, strict=True)]
    if data.draw(st.booleans()):
        boxes[moved] = boxes[moved]._replace(offsets=tuple(data.draw(st.integers(0, limit)) for limit in limits))
    held = torch.zeros(shape, dtype=torch.int64)
    for _, at, extents in boxes:
        held[tuple(slice(a, a + n) for a, n in zip(at, extents, strict=True))] += 1
    index = Index({"w": GlobalTensor(shape, torch.float32)}, {FILE: boxes})
    with contextlib.nullcontext() if (held == 1).all() else pytest.raises(ValueError, match="two boxes of w overlap"):
        index.check()


def test_boxes_cut_along_very_many_dims_are_too_many_to_compare() -> None:
    """Would catch 2^16 corners of each box in an index that somebody else has written."""
    shape = (2,) * 16
    boxes = [StoredBox("w", tuple(map(int, f"{i:016b}")), (1,) * 16) for i in range(2**16)]
    with pytest.raises(ValueError, match="has 65536 boxes cut along 16 dims, too many to compare"):
        Index({"w": GlobalTensor(shape, torch.float32)}, {FILE: boxes}).check()


BROKEN = {
    "nothing": b"",
    "no text": b"\x80\x04N.",
    "no end": b'{"tensors": {',
    "a number": b"1",
    "a number of a million digits": b"1" * 1_000_000,
    "a million lists": b"[" * 1_000_000,
    "NaN": b'{"tensors": NaN}',
    "no tensors": b'{"files": {}}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_text_that_is_no_index_costs_nothing(kind: str) -> None:
    """Would catch a RecursionError, and a number that takes for ever to read."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="^it is no index|^`tensors` is missing"):
        read_index(BROKEN[kind], {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.slow
@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_broken_and_mixed_up_bytes_are_an_index_or_a_value_error(index: Any, data: st.DataObject) -> None:
    """Would catch an exception that nobody expects: KeyError, AttributeError, UnicodeDecodeError, RecursionError."""
    content = bytearray(index[0])
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(start, min(len(content), start + 8)))
        other = data.draw(st.integers(0, len(content) - 1))
        piece = data.draw(st.one_of(st.binary(max_size=6), st.just(bytes(content[other : other + 12]))))
        content[start:stop] = piece
    try:
        found: Index = read_index(bytes(content), index[1])
    except ValueError:
        return
    assert sum(math.prod(tensor.shape) for tensor in found.tensors.values()) < 10**6
