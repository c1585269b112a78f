"""Small packed datasets for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megacp.data.manifest import Manifest, TokenizerInfo
from megacp.data.shard_writer import Segment, ShardWriter


def write_dataset(
    directory: Path,
    shards: Sequence[Sequence[Sequence[Segment]]],
    vocab_size: int = 100,
    seq_length: int = 32,
    pad_multiple: int = 1,
) -> Manifest:
    """Write shards -> packs -> segments as a finished dataset."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, packs in enumerate(shards):
        with ShardWriter(directory / f"shard_{number:05d}", vocab_size, seq_length, pad_multiple) as writer:
            for pack in packs:
                writer.add_pack(pack)
            entries.append(writer.commit())
    manifest = Manifest(
        config_fingerprint="f" * 64,
        tokenizer=TokenizerInfo("byte", "0" * 64, vocab_size, eos_id=1, bos_id=None, pad_id=None),
        seq_length=seq_length,
        pad_multiple=pad_multiple,
        sources=("a.jsonl", "b.jsonl"),
        shards=tuple(entries),
    )
    manifest.write(directory)
    return manifest


def damage(path: Path, offset: int, value: bytes) -> None:
    """Overwrite bytes of a file at `offset`, keeping its size."""
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)


def random_packs(
    rng: np.random.Generator, count: int, seq_length: int = 32, vocab_size: int = 100
) -> list[list[Segment]]:
    """`count` packs of one to four segments without weights."""
    packs = []
    for _ in range(count):
        lengths = rng.integers(1, seq_length // 4 + 1, rng.integers(1, 5))
        packs.append([Segment(rng.integers(0, vocab_size, n), source_offset=int(n)) for n in lengths])
    return packs
