"""Files of a dataset that are no files, or hold anything: each ends in a ValueError that names it, at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacp.core.data import tables
from megacp.core.data.manifest import DatasetManifest
from megacp.core.data.reader import OPEN_SHARDS, PackedDataset
from megacp.core.data.verify import verify
from megacp.prepare.build.journal import Journal
from tests.data.datasets import IMAGE_RULES, random_packs, sign, weighted_images, write_dataset, write_older
from tests.prepare.build.builds import run, write_records

FUZZ = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAMES = ["manifest.json", "shard_00000/tokens.bin", "shard_00000/images.idx", "shard_00000/packs.npy"]


@contextmanager
def seconds(limit: int) -> Iterator[None]:
    """Ends what hangs."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"not done after {limit} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def dataset_path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "d", [weighted_images(rng, n) for n in (3, 2)], image_rules=IMAGE_RULES)
    return tmp_path / "d"


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "huge", "dangling"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_what_stands_in_the_place_of_a_file_is_named_and_not_read(dataset_path: Path, name: str, kind: str) -> None:
    """Would catch a reader that waits at a pipe, or reads a device or a sparse terabyte into memory."""
    path = dataset_path / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        (dataset_path.parent / "huge").touch()
        os.truncate(dataset_path.parent / "huge", 1 << 40)
        path.symlink_to(dataset_path.parent / "huge")
    else:
        path.symlink_to(kind)
    with seconds(20):
        with pytest.raises(ValueError, match=name):
            PackedDataset(dataset_path)
        found = verify(dataset_path)
    assert len(found) == 1 and name in found[0]


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "folder"])
def test_a_journal_that_is_no_file_ends_the_build(tmp_path: Path, kind: str) -> None:
    write_records(tmp_path / "a.jsonl", 3)
    run([tmp_path / "a.jsonl"], tmp_path / "d")
    path = tmp_path / "d/journal.jsonl"
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.mkdir() if kind == "folder" else path.symlink_to(kind)
    with seconds(20), pytest.raises(ValueError, match=r"journal\.jsonl is .*no regular file"):
        run([tmp_path / "a.jsonl"], tmp_path / "d")


def test_a_link_to_the_right_file_counts_as_the_file(dataset_path: Path) -> None:
    path = dataset_path / "shard_00000/tokens.bin"
    shutil.move(path, dataset_path.parent / "elsewhere")
    path.symlink_to(dataset_path.parent / "elsewhere")
    assert verify(dataset_path) == []


# ---- anything as content


def anything(depth: int = 3) -> st.SearchStrategy[Any]:
    odd = st.sampled_from(
        [-1, 0, 1, 2**31, 2**63, 10**400, 1e308, True, False, None, "", "../x", "a/b", "\ud800", "64"]
    )
    return st.recursive(odd | st.integers() | st.text(max_size=5), lambda s: st.lists(s, max_size=3), max_leaves=depth)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values within a JSON value are."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


def told(path: Path, text: bytes, read: Any, name: str) -> None:
    """`read` of a file with this content either works or raises a ValueError that names it."""
    before = path.read_bytes()
    path.write_bytes(text)
    try:
        with seconds(20):
            read()
    except ValueError as error:
        assert name in str(error), str(error)[:300]
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("write", [write_dataset, write_older])
def test_any_value_in_any_place_of_a_manifest_is_a_value_error_that_names_it(tmp_path: Path, write: Any) -> None:
    """Would catch text taken for a number, true for 1, and an error from deep inside of numpy."""
    write(tmp_path, [weighted_images(np.random.default_rng(0), 2)], image_rules=IMAGE_RULES)
    path = tmp_path / "manifest.json"
    values = json.loads(path.read_text())
    where = [at for at in places(values) if at]
    name = "manifest" if write is write_dataset else str(tmp_path)  # without a checksum it is the shard that differs

    @FUZZ
    @given(st.data())
    def check(data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(where))
        changed = replaced(values, at, data.draw(anything()))
        told(path, json.dumps(changed).encode(), lambda: PackedDataset(tmp_path), name)

    check()
    told(path, b"[" * 200_000, lambda: DatasetManifest.read(tmp_path), "manifest.json")
    told(path, b'{"a":' * 100_000, lambda: DatasetManifest.read(tmp_path), "manifest.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seq_length", True, "`seq_length` is True, it must be an integer of 1 to 2147483647"),
        ("seq_length", "32", "`seq_length` is '32'"),
        ("pad_multiple", 33, "`pad_multiple` is 33, it must be an integer of 1 to 32"),
        ("num_rejected", -1, "`num_rejected` is -1"),
        ("tokenizer.vocab_size", "100", "`tokenizer.vocab_size` is '100'"),
        ("tokenizer.eos_id", 100, "`tokenizer.eos_id` is 100, it must be null or an integer of 0 to 99"),
        ("shards.0.files.1.size", -4, r"`shards\[0\].files\[1\].size` is -4"),
        ("shards.0.files.1.name", "a/b", r"`shards\[0\].files\[1\].name` is 'a/b', it must be a plain name"),
        ("shards.0.num_tokens", 10**400, r"`shards\[0\].num_tokens` is a number of 1329 bits"),
        ("shards.1.name", "shard_00000", "`shards` names shard_00000 more than once"),
        ("cp_degrees.0", 0, r"`cp_degrees\[0\]` is 0"),
        ("sources.0", 3, r"`sources\[0\]` is 3, it must be text"),
        ("image_rules", {"token_ids": {"image_patch": True}}, "`token_ids.image_patch` is True"),
        ("image_rules", {"image_mean": [10**400, 0, 0]}, "`image_rules`"),
    ],
)
def test_each_field_of_a_manifest_has_its_type_and_range(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    rng = np.random.default_rng(0)
    write_older(tmp_path, [random_packs(rng, 2), random_packs(rng, 1)])
    path = tmp_path / "manifest.json"
    at = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
    path.write_text(json.dumps(replaced(json.loads(path.read_text()), at, value)))
    with pytest.raises(ValueError, match=rf"manifest\.json: {message}"):
        PackedDataset(tmp_path)


def test_any_line_of_a_journal_is_a_value_error_that_names_it(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", 30)
    run([tmp_path / "a.jsonl"], tmp_path / "d")
    path = tmp_path / "d/journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    settings_ = json.loads(lines[0])["settings"]

    def read() -> None:
        Journal(tmp_path / "d", settings_)

    @FUZZ
    @given(st.data())
    def check(data: st.DataObject) -> None:
        value = json.loads(lines[1])
        at = data.draw(st.sampled_from([at for at in places(value) if at]))
        line = json.dumps(replaced(value, at, data.draw(anything()))).encode() + b"\n"
        told(path, b"".join([lines[0], line, *lines[2:]]), read, "journal.jsonl")

    check()
    for line in (b"[" * 100_000, b"{}", b"3", b"null", b'{"settings": 3}', b"\xff"):
        told(path, line + b"\n" + lines[1], read, str(tmp_path))
        told(path, lines[0] + line + b"\n", read, "journal.jsonl")


HEADERS = [
    b"{'descr': '<i8', 'fortran_order': False, 'shape': (",
    b"(" * 3000,
    b"{'descr': [('a', 'O')], 'fortran_order': False, 'shape': (1,), }\n",
    b"{'descr': '<i4', 'fortran_order': True, 'shape': (-1, -1), }\n",
    b"{'descr': '|V0', 'fortran_order': False, 'shape': (99999999999,), }\n",
    b"'''",
    b"\\",
    b"\x00\xff",
]


def test_any_header_of_a_table_is_a_value_error_that_names_it(tmp_path: Path) -> None:
    """Would catch the errors of Python's own tokenizer, by which numpy reads a header."""
    path = tmp_path / "packs.npy"
    table = np.zeros(3, tables.PACK_DTYPE)
    tables.write_table(path, table)
    sound = path.read_bytes()

    def read() -> None:
        tables.read_table(path, tables.PACK_DTYPE)

    for header in HEADERS:
        text = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        with pytest.raises(ValueError, match=r"packs\.npy"):
            path.write_bytes(text + bytes(96))
            read()
    path.write_bytes(sound)

    @FUZZ
    @given(
        st.lists(st.tuples(st.integers(0, len(sound) - 1), st.binary(min_size=1, max_size=3)), min_size=1, max_size=3)
    )
    def check(changes: list[tuple[int, bytes]]) -> None:
        text = bytearray(sound)
        for place, value in changes:
            text[place : place + len(value)] = value
        told(path, bytes(text), read, "packs.npy")

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packs", "segments", "units", "tokens.idx", "images.idx", "shards_cp2"])
def test_any_numbers_in_a_table_are_a_value_error_that_names_the_shard(dataset_path: Path, name: str) -> None:
    """With right hashes, as a faulty builder would write them."""
    shard = dataset_path / "shard_00000"
    path = shard / (name if "." in name else f"{name}.npy")
    sound = path.read_bytes()
    start = 34 if name.endswith("idx") else sound.index(b"\n") + 1  # behind the header

    @FUZZ
    @given(st.integers(start, len(sound) - 1), st.sampled_from([b"\xff" * 8, b"\x7f", b"\x80", b"\x01", bytes(8)]))
    def check(place: int, value: bytes) -> None:
        text = (sound[:place] + value + sound[place + len(value) :])[: len(sound)]
        path.write_bytes(text)
        sign(dataset_path)
        try:
            for line in verify(dataset_path):
                assert "shard_0000" in line or "pack " in line
            PackedDataset(dataset_path)
        except ValueError as error:
            assert "shard_00000" in str(error)
        finally:
            path.write_bytes(sound)

    check()


# ---- descriptors


@pytest.mark.slow
def test_hundreds_of_shards_need_few_descriptors(tmp_path: Path) -> None:
    """Would catch maps that stay open: 4 of a text shard and 12 of an image shard, of 1,024 that a process has."""
    shards = [weighted_images(np.random.default_rng(0), 2)] * (OPEN_SHARDS + 20)
    write_dataset(tmp_path / "d", shards, image_rules=IMAGE_RULES)
    code = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from megacp.core.data.reader import OPEN_SHARDS
from megacp.core.data.reader import PackedDataset
dataset = PackedDataset(sys.argv[1])
for i in [*range(len(dataset)), *range(0, len(dataset), 7)]:
    pack = dataset.pack(i)
    assert pack.images.read(int(pack.images.units["item"][0]))
open_files = len(os.listdir("/proc/self/fd"))
assert open_files <= 3 * OPEN_SHARDS + 20, open_files
print(len(dataset))
"""
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "d")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{2 * len(shards)}\n" and not done.stderr


@pytest.mark.slow
def test_a_pack_outlives_the_shard_it_came_from(tmp_path: Path) -> None:
    """Would catch a descriptor that is closed, or given to another file, while a thread still reads images by it."""
    rng = np.random.default_rng(0)
    write_dataset(tmp_path, [weighted_images(rng, 1) for _ in range(OPEN_SHARDS + 2)], image_rules=IMAGE_RULES)
    dataset = PackedDataset(tmp_path)
    first = dataset.pack(0).images
    assert first is not None
    before = first.read(0)
    for i in range(1, len(dataset)):
        dataset.pack(i)
    assert first.read(0) == before
