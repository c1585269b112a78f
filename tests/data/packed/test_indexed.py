"""Megatron's `.bin` / `.idx`: exact round trips, interoperation both ways, and damage of every kind named at open."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.data.reader import PackedDataset
from megacp.core.data.tables import IndexedReader, StoredFile, token_dtype, with_suffix
from megacp.prepare.build.writer import IndexedWriter
from tests.data.datasets import damage, random_packs, write_dataset


def megatron() -> ModuleType:
    """Megatron-core's own indexed dataset, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and megatron at import
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")


def opened(prefix: Path) -> IndexedReader:
    return IndexedReader(*(StoredFile(with_suffix(prefix, suffix)) for suffix in (".idx", ".bin")))


def values_of(reader: IndexedReader, start: int, stop: int) -> np.ndarray:
    """Sequences start..stop, joined."""
    return np.frombuffer(reader.stored(start, stop), reader.dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=4), min_size=1, max_size=6),
    st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"]),
)
def test_indexed_files_round_trip_in_every_dtype(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "a.b"
    writer = IndexedWriter(prefix, np.dtype(dtype))
    expected = []
    for lengths in documents:
        for length in lengths:
            expected.append(np.arange(length).astype(dtype))
            writer.add_sequence(np.arange(length))
        writer.end_document()
    writer.close()
    reader = opened(prefix)
    assert reader.dtype == np.dtype(dtype) and len(reader) == len(expected)
    assert all(np.array_equal(values_of(reader, i, i + 1), values) for i, values in enumerate(expected))
    assert reader.boundaries.tolist() == [0, *np.cumsum([len(lengths) for lengths in documents])]


def test_ids_have_megatrons_dtype() -> None:
    assert token_dtype(65_499) == np.uint16 and token_dtype(65_500) == np.int32


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.slow
def test_we_read_files_of_megatron_core_exactly_and_write_the_same_bytes(tmp_path: Path, multimodal: bool) -> None:
    import torch

    theirs = megatron()
    rng = np.random.default_rng(1)
    documents = [[rng.integers(0, 60_000, n) for n in lengths] for lengths in ((4, 9), (1,), (30, 2, 2))]
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=np.uint16, multimodal=multimodal)
    writer = IndexedWriter(tmp_path / "o", np.dtype("<u2"))
    for document in documents:
        for sequence in document:
            builder.add_item(torch.from_numpy(sequence))
            writer.add_sequence(sequence)
        builder.end_document()
        writer.end_document()
    builder.finalize(str(tmp_path / "t.idx"))
    writer.close()
    reader = opened(tmp_path / "t")
    for i, document in enumerate(documents):
        assert np.array_equal(values_of(reader, *reader.boundaries[i : i + 2].tolist()), np.concatenate(document))
    assert (tmp_path / "t.bin").read_bytes() == (tmp_path / "o.bin").read_bytes()
    modes = len(reader) if multimodal else 0
    assert (tmp_path / "t.idx").read_bytes() == (tmp_path / "o.idx").read_bytes() + bytes(modes)


@pytest.mark.slow
def test_megatron_core_reads_a_packed_shard_document_by_document(tmp_path: Path) -> None:
    theirs = megatron()
    write_dataset(tmp_path, [random_packs(np.random.default_rng(0), n) for n in (5, 4)])
    dataset, stock = PackedDataset(tmp_path), theirs.IndexedDataset(str(tmp_path / "shard_00001" / "tokens"))
    for local, (start, stop) in enumerate(itertools.pairwise(stock.document_indices)):
        pack, sequences = dataset.pack(5 + local), [stock[i] for i in range(start, stop)]
        assert [len(s) for s in sequences] == pack.segments["true_length"].tolist()
        assert np.array_equal(np.concatenate(sequences), pack.tokens)


@pytest.mark.parametrize(
    ("file", "offset", "value"),
    [
        ("x.idx", 0, b"NUMPY"),  # the magic
        ("x.idx", 9, b"\x02"),  # the version
        ("x.idx", 17, b"\x63"),  # the dtype
        ("x.idx", 18, b"\x07"),  # sequences
        ("x.idx", 34, b"\xff\xff\xff\xff"),  # a length
        ("x.idx", 34 + 3 * 4 + 8, b"\x02"),  # a pointer
        ("x.idx", 40, None),
        ("x.idx", 20, None),
        ("x.bin", 12, None),
    ],
)
def test_a_damaged_or_cut_file_is_named(tmp_path: Path, file: str, offset: int, value: bytes | None) -> None:
    writer = IndexedWriter(tmp_path / "x", np.dtype("<i4"))
    for length in (2, 3, 1):
        writer.add_sequence(np.arange(length))
    writer.end_document()
    writer.close()
    os.truncate(tmp_path / file, offset) if value is None else damage(tmp_path / file, offset, value)
    with pytest.raises(ValueError, match=file):
        opened(tmp_path / "x")
