"""Several datasets made with the same tokenizer and lengths become one directory: packs are copied, not repacked.

Every byte is checked against its manifest on the way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megacp.core.data import tables
from megacp.core.data.manifest import DatasetManifest, ShardEntry
from megacp.core.data.reader import PackedDataset
from megacp.core.data.tables import StoredFile
from megacp.core.storage import files
from megacp.core.storage.wording import listed
from megacp.prepare.build.faults import storage_faults
from megacp.prepare.build.journal import is_dataset, locked, prepare_directory
from megacp.prepare.build.run import copy_tokenizer
from megacp.prepare.build.unit import shard_name
from megacp.prepare.build.upload import REJECTS_NAME, TOKENIZER_DIRECTORY
from megacp.prepare.build.writer import write_table

_SHOWN = 5
"""Datasets, and differences of each, that are told at most."""
_FLAGS = {
    "begins_with": " (a first token of documents: build with --prepend-bos or --no-prepend-bos)",
}
_MUST_AGREE = ("tokenizer", "seq_length", "pad_multiple", "image_rules", "cp_degrees", "chat_template")


def _differences(name: str, first: DatasetManifest, other: DatasetManifest) -> list[str]:
    """In words what differs between a value of two manifests; of two tables, the entries that do."""
    a, b = asdict(first)[name], asdict(other)[name]
    if a == b:
        return []
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [f"{name} {_short(b)}, not {_short(a)}"]
    keys = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    return [f"{name}.{key} {_short(b.get(key))}, not {_short(a.get(key))}{_FLAGS.get(key, '')}" for key in keys]


def _all_differences(manifests: Sequence[DatasetManifest], other: DatasetManifest) -> list[str]:
    """In words in what a dataset differs from the first one and must not."""
    found = [text for name in _MUST_AGREE for text in _differences(name, manifests[0], other)]
    if (end := manifests[0].ends_with) != other.ends_with:
        found.append(f"a last token {_short(other.ends_with)}, not {_short(end)} (--append-eod, --eod-token)")
    return found


def _short(value: Any) -> str:
    text = "none" if value is None else "some" if isinstance(value, dict) and len(value) > 4 else str(value)
    return text if len(text) <= 20 else text[:12] + "..."


def merge(inputs: Sequence[str], output: str, overwrite: bool = False) -> DatasetManifest:
    """Copy the shards of `inputs`, in that order, into `output`, numbered anew, and write its manifest.

    ValueError: fewer than two inputs, all mismatches between them, a damaged input, an output that is not empty.
    """
    if len(inputs) < 2:
        raise ValueError(f"merge needs at least two datasets, got {len(inputs)}")
    directory = Path(output)
    if directory.resolve() in [Path(path).resolve() for path in inputs]:
        raise ValueError(f"--output {output} is one of the datasets to merge")
    manifests = [PackedDataset(path).manifest for path in inputs]
    mismatches = [
        f"{path} has {listed(found, _SHOWN)}"
        for path, manifest in zip(inputs[1:], manifests[1:], strict=True)
        if (found := _all_differences(manifests, manifest))
    ]
    if mismatches:
        raise ValueError(f"these datasets cannot be merged with {inputs[0]}: {listed(mismatches, _SHOWN, '; ')}")
    with storage_faults(directory):
        return _merged(inputs, manifests, directory, overwrite)


def _merged(
    inputs: Sequence[str], manifests: Sequence[DatasetManifest], directory: Path, overwrite: bool
) -> DatasetManifest:
    """The datasets of `inputs`, which fit each other, as one in `directory`."""
    first = manifests[0]
    prepare_directory(directory, overwrite)
    if is_dataset(directory):
        raise ValueError(
            f"--output {directory} holds a dataset; nothing was overwritten, give --overwrite to replace it"
        )
    with locked(directory):
        shards: list[ShardEntry] = []
        shift = 0
        for path, manifest in zip(inputs, manifests, strict=True):
            for entry in manifest.shards:
                shards.append(_copy_shard(Path(path) / entry.name, entry, directory / shard_name(len(shards)), shift))
            shift += len(manifest.sources)
        rejects = [Path(path) / REJECTS_NAME for path in inputs]
        files.write_atomically(directory / REJECTS_NAME, b"".join(p.read_bytes() for p in rejects if p.exists()))
        copy_tokenizer(sorted((Path(inputs[0]) / TOKENIZER_DIRECTORY).glob("*")), directory)
        result = dataclasses.replace(
            first,
            config_fingerprint=hashlib.sha256("\n".join(one.fingerprint for one in manifests).encode()).hexdigest(),
            sources=tuple(source for manifest in manifests for source in manifest.sources),
            shards=tuple(shards),
            num_rejected=sum(manifest.num_rejected for manifest in manifests),
            document_end={"token": first.ends_with},
        )
        result.write(directory)
    return result


def _copy_shard(source: Path, entry: ShardEntry, target: Path, shift: int) -> ShardEntry:
    """Copy one shard and compare its hashes; its segments' `source_file` grows by `shift`."""
    temporary = target.with_name(f".{target.name}.partial")
    shutil.copytree(source, temporary)
    for file in entry.files:
        found = files.sha256_of(temporary / file.name, file.size)[1]
        if found != file.sha256:
            raise ValueError(f"{source / file.name}: sha256 is {found}, the manifest says {file.sha256}")
    copies = list(entry.files)
    if shift:
        path = temporary / "segments.npy"
        table = np.array(tables.table_of(StoredFile(path), tables.SEGMENT_DTYPE))
        table["source_file"] += shift
        written = write_table(path, table)
        copies = [written if file.name == written.name else file for file in copies]
    files.sync_below(temporary)
    files.place_folder(temporary, target)
    return dataclasses.replace(entry, name=target.name, files=tuple(copies))
