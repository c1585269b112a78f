"""The index: crafted and broken pickles end in a ValueError, run nothing and take no time or memory."""

from __future__ import annotations

import io
import os
import pickle
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megacp.checkpoint.index import read_index
from megacp.checkpoint.storage import INDEX_FILE, write_payload
from tests.checkpoint.test_storage import WORLD, TensorBox, whole_box

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, int]]:
    """The index of a payload of two tensors, one of them in two boxes, and the sizes of its files."""
    folder = tmp_path_factory.mktemp("payload")
    x = torch.arange(6.0)
    parts = [TensorBox("model.v", (6,), (0,), x[:4]), TensorBox("model.v", (6,), (4,), x[4:])]
    write_payload(folder, [whole_box("model.w", torch.zeros(2, 3).bfloat16()), *parts], WORLD)
    return (folder / INDEX_FILE).read_bytes(), {path.name: path.stat().st_size for path in folder.iterdir()}


def crafted(index: tuple[bytes, dict[str, int]], change: Any) -> bytes:
    """The index after `change(metadata)`, pickled again."""
    metadata = pickle.loads(index[0])
    change(metadata)
    return pickle.dumps(metadata)


def test_the_index_comes_back_whole(index: tuple[bytes, dict[str, int]]) -> None:
    found = read_index(*index)
    assert found == pickle.loads(index[0])
    assert found.state_dict_metadata["model.v"].size == (6,)


def _whole(metadata: Any, size: tuple[int, ...]) -> None:
    entry = metadata.state_dict_metadata["model.w"]
    entry.size = torch.Size(size)
    entry.chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), entry.size)]


CRAFTED = {
    "a trillion elements": (lambda m: _whole(m, (10**6, 10**6)), "model.w has [0-9]* bytes, its place"),
    "more than a memory": (lambda m: _whole(m, (2**62, 2)), "model.w has no dtype, no shape"),
    "a hundred thousand dims": (lambda m: _whole(m, (2**61,) * 100_000), "model.w has no dtype, no shape"),
    "below zero": (lambda m: _whole(m, (-1, 3)), "calls what no megacp"),
    "a box outside": (
        lambda m: setattr(m.state_dict_metadata["model.v"].chunks[1], "offsets", torch.Size([5])),
        "model.v has a box that lies outside",
    ),
    "a hole": (lambda m: m.state_dict_metadata["model.v"].chunks.pop(), "boxes of model.v together have 4 elements"),
    "a place beyond the file": (
        lambda m: [setattr(info, "offset", 10**15) for info in m.storage_data.values()],
        "its place in __0_0.distcp is",
    ),
    "a place of no length": (
        lambda m: [setattr(info, "length", 1) for info in m.storage_data.values()],
        "its place in __0_0.distcp is 1 bytes",
    ),
    "another file": (
        lambda m: [setattr(info, "relative_path", "../x") for info in m.storage_data.values()],
        r"files that the manifest does not list: '../x'",
    ),
    "a box in no file": (lambda m: m.storage_data.clear(), "a box of model.w is in no file"),
    "no tables": (lambda m: setattr(m, "storage_data", None), "no table of tensors or of boxes"),
    "bytes": (lambda m: m.state_dict_metadata.update({"model.b": "x"}), "model.b is no tensor"),
    "a name over two lines": (
        lambda m: m.state_dict_metadata.update({"a\nb": m.state_dict_metadata["model.w"]}),
        "without a name",
    ),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_index_is_refused_before_anything_is_allocated(kind: str, index: Any) -> None:
    """Would catch an index that is believed because its hash is right: its author wrote the hash too."""
    change, reason = CRAFTED[kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=reason):
        read_index(crafted(index, change), index[1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


class Evil:
    """What a pickle may call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _twice(depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = (value, value)
    return value


def _pickled(value: Any) -> bytes:
    """`pickle.dumps` without its own limit of depth."""
    stream = io.BytesIO()
    pickle._Pickler(stream, 4).dump(value)  # type: ignore[attr-defined]
    return stream.getvalue()


def _deep_key(depth: int) -> bytes:
    return b"\x80\x04})" + b"\x85" * depth + b"Ns."


ENCODING = "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"
BOMBS = {
    "a memo of 32 GB": b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "a key whose hash takes for ever": b"\x80\x04}" + _pickled(_twice(60))[2:-1] + b"Ns.",
    "a key that ends the process": _deep_key(1_000_000),
    "an enumeration of it": b"\x80\x04c" + ENCODING.encode() + b"\n" + _pickled(_twice(60))[2:-1] + b"\x85R.",
    "a set of it": b"\x80\x04\x8f(" + _pickled(_twice(60))[2:-1] + b"\x90.",
    "a state of it": b"\x80\x04ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81"
    + _pickled(_twice(60))[2:-1]
    + b"b.",
    "the class itself changed": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x01xNs\x86b.",
    "a hundred gigabytes of text": b"\x80\x04\x8d" + struct.pack("<Q", 10**11) + b"x.",
    "a frame of them": b"\x80\x04\x95" + struct.pack("<Q", 10**11) + b"N.",
    "os.system": pickle.dumps(Evil(os.system, "touch ran")),
    "eval": pickle.dumps(Evil(eval, "open('ran', 'w')")),
    "bytes of zeros": pickle.dumps(Evil(bytearray, 10**12)),
    "a getattr of a class": b"cbuiltins\ngetattr\n(ctorch\nSize\nX\x0e\0\0\0__subclasses__tR.",
    "a getattr of an enumeration's class": f"cbuiltins\ngetattr\n(c{ENCODING}\nX\x09\0\0\0__class__tR.".encode(),
    "a member of an enumeration": f"cbuiltins\ngetattr\n(c{ENCODING}\nX\x15\0\0\0TORCH_PRESERVE_FORMATtR.".encode(),
    "nothing": b"",
    "no end": b"\x80\x04N",
    "a number": b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_pickle_that_is_no_index_runs_nothing_and_costs_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch `pickle.Unpickler`, also one with a list of classes: four of these hang or kill it."""
    monkeypatch.chdir(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="^it "):
        read_index(BOMBS[kind], {})
    assert list(tmp_path.iterdir()) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_broken_and_mixed_up_bytes_are_an_index_or_a_value_error(index: Any, data: st.DataObject) -> None:
    """Would catch an exception of the unpickler that nobody expects: KeyError, AttributeError, RecursionError."""
    content = bytearray(index[0])
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(start, min(len(content), start + 8)))
        other = data.draw(st.integers(0, len(content) - 1))
        piece = data.draw(st.one_of(st.binary(max_size=6), st.just(bytes(content[other : other + 12]))))
        content[start:stop] = piece
    try:
        found = read_index(bytes(content), index[1])
    except ValueError:
        return
    assert sum(torch.Size(e.size).numel() for e in found.state_dict_metadata.values()) < 10**6
