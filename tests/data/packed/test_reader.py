"""The packed dataset on disk: exact round trips, atomic shards."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megacp.core.data.reader import PackedDataset
from megacp.prepare.build.writer import Segment, ShardWriter
from megacp.prepare.verify import verify
from tests.data.datasets import random_packs, write_dataset


@pytest.mark.parametrize("weighted", [False, True])
def test_packs_come_back_exactly(tmp_path: Path, weighted: bool) -> None:
    rng = np.random.default_rng(3)
    shards = [random_packs(rng, 6, vocab_size=100_000), random_packs(rng, 3, vocab_size=100_000)]
    if weighted:  # weights begin in the middle of the first shard: what came before is ones
        for pack in shards[0][3:]:
            pack[0] = dataclasses.replace(pack[0], weights=rng.random(len(pack[0].tokens)).astype(np.float32))
    manifest = write_dataset(tmp_path, shards, vocab_size=100_000, pad_multiple=4)
    dataset = PackedDataset(tmp_path)
    assert len(dataset) == 9 and dataset.manifest == manifest
    for i, segments in enumerate(shards[0] + shards[1]):
        pack = dataset.pack(i)
        assert pack.index == i and np.array_equal(pack.tokens, np.concatenate([s.tokens for s in segments]))
        assert pack.segments["source_offset"].tolist() == [s.source_offset for s in segments]
        assert (pack.segments["padded_length"] % 4 == 0).all()
        expected = np.concatenate([np.ones(len(s.tokens)) if s.weights is None else s.weights for s in segments])
        assert (pack.weights is not None) == (weighted and i < 6)
        assert pack.weights is None or np.array_equal(pack.weights, expected.astype(np.float32))
    assert verify(tmp_path) == []
    assert dataset.manifest.num_tokens == sum(len(s.tokens) for shard in shards for pack in shard for s in pack)
    with pytest.raises(IndexError, match="pack 9 of"):
        dataset.pack(9)


def test_weights_of_one_are_not_stored_and_change_no_byte(tmp_path: Path) -> None:
    packs = random_packs(np.random.default_rng(0), 3)
    ones = [[dataclasses.replace(s, weights=np.ones(len(s.tokens), np.float32)) for s in pack] for pack in packs]
    manifest = write_dataset(tmp_path / "a", [packs])
    assert manifest == write_dataset(tmp_path / "b", [ones])  # with the hashes of all files
    assert "weights.bin" not in [file.name for file in manifest.shards[0].files]


def test_a_shard_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    packs = random_packs(np.random.default_rng(0), 2)
    target = tmp_path / "shard_00000"
    with pytest.raises(KeyboardInterrupt), ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[0])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    killed = ShardWriter(target, 100, 32)  # a build that is killed leaves its temporary directory
    killed.add_pack(packs[0])
    killed._tokens.abandon()  # the operating system closes what a killed process held open
    with ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[1])
        entry = writer.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["shard_00000"]
    assert {file.name: file.size for file in entry.files} == {p.name: p.stat().st_size for p in target.iterdir()}
    with ShardWriter(target, 100, 32) as writer:
        writer.add_pack(packs[1])
        with pytest.raises(ValueError, match="exists already; nothing was overwritten"):
            writer.commit()
        assert writer.commit(replace=True) == entry
    with ShardWriter(tmp_path / "empty", 100, 32) as writer, pytest.raises(ValueError, match="at least one pack"):
        writer.commit()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "0 segments"),
        ([Segment(np.arange(20)), Segment(np.arange(13))], "2 segments with 36 padded tokens.*--seq-length 32"),
        ([Segment(np.zeros(0, np.int64))], r"integers \[n\], n >= 1"),
        ([Segment(np.ones(3))], "got float64"),
        ([Segment(np.array([1, 100]), source_offset=77)], "offset 77: token ids 1..100, the vocabulary is 0..99"),
        ([Segment(np.array([-1]))], "token ids -1"),
        ([Segment(np.arange(3), weights=np.ones(2))], r"weights must be \(3,\)"),
        ([Segment(np.arange(3), weights=np.array([1, -1, 1]))], "not negative"),
        ([Segment(np.arange(3), weights=np.array([1, np.inf, 1]))], "finite"),
        ([Segment(np.arange(3), branch_starts=(0, 2))], "branches must start"),
        ([Segment(np.arange(3), branch_starts=(2, 2))], "branches must start"),
        ([Segment(np.arange(3), branch_starts=(3,))], "branches must start"),
    ],
)
def test_a_bad_pack_is_refused_and_leaves_the_shard_usable(
    tmp_path: Path, segments: list[Segment], message: str
) -> None:
    good = [Segment(np.arange(5))]
    entries = []
    for name in ("a", "b"):
        with ShardWriter(tmp_path / name, 100, 32, pad_multiple=4) as writer:
            writer.add_pack(good)
            if name == "b":
                with pytest.raises(ValueError, match=f"b pack 1.*{message}"):
                    writer.add_pack(segments)
            writer.add_pack(good)
            entries.append(dataclasses.replace(writer.commit(), name=""))
    assert entries[0] == entries[1]
