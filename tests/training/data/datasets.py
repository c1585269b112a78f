"""Small packed datasets for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megacp.prepare.packs.writer import Segment, ShardWriter
from megacp.prepare.records.documents import SegmentUnit
from megacp.storage import files
from megacp.training.data.manifest import DatasetManifest, FileEntry, TokenizerInfo


def write_dataset(
    directory: Path,
    shards: Sequence[Sequence[Sequence[Segment]]],
    vocab_size: int = 100,
    seq_length: int = 32,
    pad_multiple: int = 1,
    image_rules: dict[str, Any] | None = None,
) -> DatasetManifest:
    """Write shards -> packs -> segments as a finished dataset."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, packs in enumerate(shards):
        with ShardWriter(
            directory / f"shard_{number:05d}", vocab_size, seq_length, pad_multiple
        ) as writer:
            for pack in packs:
                writer.add_pack(pack)
            entries.append(writer.commit())
    manifest = DatasetManifest(
        config_fingerprint="f" * 64,
        tokenizer=TokenizerInfo("byte", "0" * 64, vocab_size, eos_id=1, bos_id=None, pad_id=None),
        seq_length=seq_length,
        pad_multiple=pad_multiple,
        sources=("a.jsonl", "b.jsonl"),
        shards=tuple(entries),
        image_rules=image_rules,
    )
    manifest.write(directory)
    return manifest


IMAGE_RULES = {"token_ids": {"image_patch": 5}}


def weighted_images(rng: np.random.Generator, count: int) -> list[list[Segment]]:
    """Return `count` packs of two segments: one with an undecodable image of 100 to 200 bytes, one
    with weights.
    """

    def image() -> bytes:
        return rng.bytes(int(rng.integers(100, 200)))

    packs = []
    for _ in range(count):
        tokens = np.array([7, 5, 5, 5, 9, *rng.integers(10, 100, 4)])
        unit = SegmentUnit(item=0, start=0, num_tokens=5, num_crops=1, num_pooled=3)
        weights = rng.random(6).astype(np.float32)
        packs.append(
            [
                Segment(tokens, units=(unit,), items=(image,)),
                Segment(rng.integers(10, 100, 6), weights=weights),
            ]
        )
    return packs


def sign(directory: Path) -> DatasetManifest:
    """Rewrite the manifest with the current sizes and hashes of the listed files."""
    manifest = DatasetManifest.read(directory)
    entries = []
    for entry in manifest.shards:
        found = [
            (file.name, *files.sha256_of(directory / entry.name / file.name))
            for file in entry.files
        ]
        entries.append(
            dataclasses.replace(entry, files=tuple(FileEntry(*values) for values in found))
        )
    signed = dataclasses.replace(manifest, shards=tuple(entries))
    signed.write(directory)
    return signed


def damage(path: Path, offset: int, value: bytes) -> None:
    """Overwrite bytes of a file at `offset`, keeping its size."""
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)


def random_packs(
    rng: np.random.Generator, count: int, seq_length: int = 32, vocab_size: int = 100
) -> list[list[Segment]]:
    """Return `count` packs of one to four segments without weights."""
    packs = []
    for _ in range(count):
        lengths = rng.integers(1, seq_length // 4 + 1, rng.integers(1, 5))
        packs.append(
            [Segment(rng.integers(0, vocab_size, n), source_offset=int(n)) for n in lengths]
        )
    return packs
