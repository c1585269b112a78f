"""Tokenized Megatron datasets become packs with their own documents and tokens."""

from __future__ import annotations

import io
import itertools
import shutil
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.prepare import command as preprocess
from megacp.prepare.packs.run import build
from megacp.prepare.verify import verify
from megacp.training.data.manifest import DatasetManifest
from tests.prepare.packs import builds
from tests.storage.stores import memory

END = 256
"""End of a document of the byte tokenizer, whose ids are 0 to 256."""
DOCUMENTS: list[list[list[int]]] = [
    [[1, 2, 3], [4, 5]],  # a document of two sequences
    [],  # a document without a sequence
    [[6, 7, END]],  # a document that already has its end
    [[]],  # a document with an empty sequence
    [[8, 9]],
]
"""Documents, each a list of sequences."""
PACKED = [[1, 2, 3, 4, 5, END], [6, 7, END], [8, 9, END]]
CODES = {"uint8": 1, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}


def write_dataset(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "int32"
) -> Path:
    """Write PREFIX.bin and PREFIX.idx in the published format; return the path of the .idx."""
    sequences = [np.array(each, dtype) for each in itertools.chain.from_iterable(documents)]
    lengths = [len(each) for each in sequences]
    pointers = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    boundaries = np.cumsum([0, *map(len, documents)])
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    header += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(boundaries))
    arrays = (lengths, "<i4"), (pointers, "<i8"), (boundaries, "<i8")
    index = header + b"".join(np.array(values, kind).tobytes() for values, kind in arrays)
    Path(f"{prefix}.bin").write_bytes(b"".join(each.tobytes() for each in sequences))
    Path(f"{prefix}.idx").write_bytes(index)
    return Path(f"{prefix}.idx")


def many(count: int) -> list[list[list[int]]]:
    """Return documents of one to four sequences of random bytes."""
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(count):
        lengths = rng.integers(0, 20, rng.integers(1, 5))
        documents.append([rng.integers(0, 256, length).tolist() for length in lengths])
    return documents


def expected(documents: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return the packed documents: their joined sequences and the end, unless they are empty."""
    joined = [list(itertools.chain.from_iterable(document)) for document in documents]
    return [[*tokens, END] for tokens in joined if tokens]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_documents_of_the_published_format_are_packed_unchanged(tmp_path: Path, dtype: str) -> None:
    documents = DOCUMENTS if dtype != "uint8" else [[[1, 2, 3], [4, 5]], [[8, 9]]]
    path = write_dataset(tmp_path / "x_text_document", documents, dtype)
    summary = builds.run([path], tmp_path / "d")
    packed = PACKED if dtype != "uint8" else [PACKED[0], PACKED[2]]
    assert builds.documents(tmp_path / "d") == packed
    assert summary.documents == len(packed) and verify(tmp_path / "d") == []


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.slow
def test_documents_of_megatron_cores_own_builder_are_packed_unchanged(
    tmp_path: Path, dtype: str
) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and megatron at import
        theirs = pytest.importorskip(
            "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
        )
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=getattr(np, dtype))
    for document in DOCUMENTS:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    # both write the same bytes, so the other tests may use files written by hand
    own = write_dataset(tmp_path / "own", DOCUMENTS, dtype)
    assert own.read_bytes() == (tmp_path / "x.idx").read_bytes()
    assert (tmp_path / "own.bin").read_bytes() == (tmp_path / "x.bin").read_bytes()
    builds.run([tmp_path / "x.idx"], tmp_path / "d")
    assert builds.documents(tmp_path / "d") == PACKED


@pytest.mark.parametrize("name", ["x.v2_text_document", "x.v2_text_document.bin", "x.*"])
def test_the_prefix_the_bin_and_a_pattern_name_the_dataset_too(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_dataset(tmp_path / "x.v2_text_document", DOCUMENTS)
    code = preprocess.main(
        f"build --input {tmp_path / name} --output {tmp_path / 'd'} --tokenizer byte "
        "--seq-length 128 --workers 1".split()
    )
    said = capsys.readouterr()
    assert code == 0 and f"note: --input {path} has 2 documents without tokens" in said.err
    assert DatasetManifest.read(tmp_path / "d").sources == (str(path),)
    assert builds.documents(tmp_path / "d") == PACKED


def test_the_end_of_a_document_is_optional(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "x", DOCUMENTS)
    builds.run([path], tmp_path / "d", append_eod=False)
    assert builds.documents(tmp_path / "d") == [[1, 2, 3, 4, 5], [6, 7, END], [8, 9]]


def test_workers_and_units_write_the_bytes_of_one_process(tmp_path: Path) -> None:
    documents = many(60)
    path = write_dataset(tmp_path / "x", documents)
    shape: dict[str, Any] = {"seq_length": 64, "oversize": "split", "unit_bytes": 900}
    builds.run([path], tmp_path / "one", **shape)
    assert builds.documents(tmp_path / "one") == expected(documents)
    whole = builds.visible(tmp_path / "one")
    assert sum(name.endswith("tokens.bin") for name in whole) > 5
    builds.run([path], tmp_path / "two", workers=2, **shape)
    for number in (2, 0, 1):
        parts = builds.settings([path], tmp_path / "three", **shape)
        build(parts, io.StringIO(), part=(number, 3))
    build(parts, io.StringIO(), builds_missing=False)
    assert builds.visible(tmp_path / "two") == builds.visible(tmp_path / "three") == whole


def test_the_validation_share_divides_the_documents(tmp_path: Path) -> None:
    documents = [[[i % 256] * 1500] for i in range(40)]
    path = write_dataset(tmp_path / "x", documents)
    settings = builds.settings([path], tmp_path / "d", seq_length=2048, valid_share=0.4)
    for share in settings.shares:
        build(share, io.StringIO())
    learning = builds.documents(tmp_path / "d")
    checking = builds.documents(tmp_path / "d/valid")
    assert sorted(learning + checking) == sorted(expected(documents)) and checking


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_a_dataset_in_a_store_gives_the_same_packs(tmp_path: Path, suffix: str) -> None:
    path = write_dataset(tmp_path / "x", DOCUMENTS)
    store = memory()
    for name in ("x.idx", "x.bin"):
        (store / name).write((tmp_path / name).read_bytes())
    builds.run([f"{store}/x.{suffix}"], tmp_path / "d", unit_bytes=20)
    builds.run([path], tmp_path / "e", unit_bytes=20)
    assert builds.documents(tmp_path / "d") == builds.documents(tmp_path / "e") == PACKED
    (store / "x.bin").write(b"1234")
    with pytest.raises(ValueError, match="x.bin: 4 bytes, but .*x.idx describes 40"):
        builds.run([f"{store}/x.idx"], tmp_path / "f")
    with pytest.raises(ValueError, match="no such file: .*/y.idx$"):
        builds.run([f"{store}/y.idx"], tmp_path / "f")


# ---- datasets that cannot be read


def rewrite(suffix: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a function that changes the bytes of one of the two files."""

    def apply(path: Path) -> None:
        file = path.with_suffix(suffix)
        file.write_bytes(change(file.read_bytes()))

    return apply


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no bin": (
        lambda path: path.with_suffix(".bin").unlink(),
        r"--input: no such file: \S+x.bin; .* two files .* copy both",
    ),
    "no idx": (Path.unlink, r"--input: no such file: \S+x.idx; .* two files .* copy both"),
    "bin cut": (
        rewrite(".bin", lambda data: data[:-4]),
        r"x.bin: 36 bytes, but \S+x.idx describes 40\. .*truncated.*copy both again",
    ),
    "idx cut": (
        rewrite(".idx", lambda data: data[:-4]),
        r"x.idx: is damaged or not a Megatron index.*copy both again",
    ),
    "header cut": (
        rewrite(".idx", lambda data: data[:20]),
        r"x.idx has 20 bytes, but its header has 34: the file is truncated",
    ),
    "magic": (
        rewrite(".idx", lambda data: b"TNTIDX" + data[6:]),
        r"x.idx begins with b'TNTIDX.*begins with b'MMIDIDX.*Megatron's tools",
    ),
    "version": (
        rewrite(".idx", lambda data: data[:9] + struct.pack("<Q", 2) + data[17:]),
        r"x.idx has version 2 and type code 4; supported are version 1",
    ),
    "floats": (
        lambda path: write_dataset(path.with_suffix(""), DOCUMENTS, "float32"),
        r"x.idx: its values are float32, but token ids are integers",
    ),
    "modes": (
        rewrite(".idx", lambda data: data + bytes([0, 0, 1, 0, 0])),
        r"x.idx: 1 of its sequences are not text .*build from the original records",
    ),
    "boundaries": (
        rewrite(".idx", lambda data: data[:-8] + struct.pack("<Q", 4)),
        r"x.idx: its 6 document boundaries do not divide its 5 sequences",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_damaged_or_foreign_dataset_ends_the_build_with_advice(tmp_path: Path, name: str) -> None:
    damage, message = DEFECTS[name]
    path = write_dataset(tmp_path / "x", DOCUMENTS)
    damage(path)
    with pytest.raises(ValueError, match=message):
        build(builds.settings([path.with_suffix(".bin")], tmp_path / "d"), io.StringIO())
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("token", [257, -1])
def test_a_token_outside_the_vocabulary_names_the_document_and_the_ids(
    tmp_path: Path, token: int
) -> None:
    path = write_dataset(tmp_path / "x", [[[1] * 10, [2] * 10], [[3], [4, token]]])
    reason = (
        rf"{path}:2: token 3 of this document has the id {token}, but the ids of --tokenizer are 0 "
        "to 256: give the tokenizer"
    )
    with pytest.raises(ValueError, match=reason):
        builds.run([path], tmp_path / "d", unit_bytes=50)
    skipped = builds.run([path], tmp_path / "d", unit_bytes=50, on_error="skip")
    assert (len(skipped.results), skipped.documents) == (2, 1)


def test_a_long_document_is_refused_with_the_flags_that_help(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "x", [[[1] * 100, [2] * 100]])
    with pytest.raises(ValueError, match=f"{path}:1: .* 201 tokens.*--oversize split"):
        builds.run([path], tmp_path / "d")
    with pytest.raises(ValueError, match="800 bytes, more than --max-record-bytes 799"):
        builds.run([path], tmp_path / "d", max_record_bytes=799)


def test_a_packed_dataset_is_not_an_input(tmp_path: Path) -> None:
    builds.run([write_dataset(tmp_path / "x", DOCUMENTS)], tmp_path / "d")
    inside = tmp_path / "d/shard_00000/tokens.idx"
    with pytest.raises(ValueError, match=f"finished dataset .*--data-path {tmp_path / 'd'}"):
        builds.run([inside], tmp_path / "e")


def test_a_changed_bin_is_other_input(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "x", DOCUMENTS)
    builds.run([path], tmp_path / "d")
    shutil.copy(path, tmp_path / "before.idx")
    write_dataset(tmp_path / "x", [*DOCUMENTS[:-1], [[8, 10]]])
    assert path.read_bytes() == (tmp_path / "before.idx").read_bytes()
    with pytest.raises(ValueError, match="begun with other settings or other input"):
        builds.run([path], tmp_path / "d")
    write_dataset(tmp_path / "x", [*DOCUMENTS[:-1], [[8, 9, 10]]])
    builds.run([path], tmp_path / "d", overwrite=True)
    assert builds.documents(tmp_path / "d")[-1] == [8, 9, 10, END]
