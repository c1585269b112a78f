"""Datasets that do not fit the run are refused before a process group exists."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megacp.core.config.run import RunConfig, with_values
from megacp.core.training.sources import open_sources
from tests.data.datasets import random_packs, write_dataset


def config_of(path: Path, layout: str, cp: int) -> RunConfig:
    values = {"data_path": str(path), "cp_layout": layout, "context_parallel_size": cp, "vocab_size": 0}
    return with_values(RunConfig(), values)


def test_stored_padding_of_another_degree_is_refused_for_zigzag_in_documents(tmp_path: Path) -> None:
    """Would catch a dataset padded for cp 2 that is filled up a second time for cp 4."""
    manifest = write_dataset(tmp_path / "four", [random_packs(np.random.default_rng(0), 3)], pad_multiple=4)
    base = {"seq_length": manifest.seq_length}

    def opened(layout: str, cp: int) -> None:
        open_sources(with_values(config_of(tmp_path / "four", layout, cp), base))

    opened("zigzag_document", 2)
    opened("zigzag_document", 1)
    opened("balanced", 4)
    with pytest.raises(
        ValueError, match="multiples of 4, --cp-layout zigzag_document at --context-parallel-size 4 needs"
    ):
        opened("zigzag_document", 4)
    write_dataset(tmp_path / "one", [random_packs(np.random.default_rng(0), 3)], pad_multiple=1)
    open_sources(with_values(config_of(tmp_path / "one", "zigzag_document", 4), base))


def test_what_is_wrong_with_both_datasets_is_told_at_once(tmp_path: Path) -> None:
    packs = [random_packs(np.random.default_rng(0), 3)]
    write_dataset(tmp_path / "older", packs)
    manifest = write_dataset(tmp_path / "newer", packs)
    values = {
        "data_path": str(tmp_path / "older"),
        "valid_data_path": str(tmp_path / "newer"),
        "vocab_size": 0,
        "seq_length": 32,
    }
    _, sources = open_sources(with_values(RunConfig(), values))
    assert sources.fingerprint == sources.train.manifest.fingerprint
    assert sources.valid.manifest == manifest
    for name in ("older", "newer"):
        (tmp_path / name / "shard_00000/tokens.bin").unlink()
    with pytest.raises(ValueError) as error:
        open_sources(with_values(RunConfig(), values))
    first, second = str(error.value).splitlines()
    assert first.startswith(f"--data-path {tmp_path / 'older'}: ") and "tokens.bin: no such file" in first
    assert second.startswith(f"--valid-data-path {tmp_path / 'newer'}: ")


@pytest.mark.parametrize(
    ("ends", "differ"),
    [
        ([(1, {"token": 1}), (1, {"token": None})], True),
        ([(1, {"token": 1}), (2, {"token": 2})], True),
        ([(1, None), (2, None)], True),
        ([(1, None), (1, {"token": 1})], False),
        ([(1, {"token": None}), (2, {"token": None})], False),
    ],
)
def test_validation_documents_end_as_those_of_training(
    tmp_path: Path, ends: list[tuple[int, dict[str, int | None] | None]], differ: bool
) -> None:
    """Would catch a validation loss on an end token that was never learned."""
    for name, (eos, end) in zip("ab", ends, strict=True):
        manifest = write_dataset(tmp_path / name, [random_packs(np.random.default_rng(0), 3)])
        tokenizer = dataclasses.replace(manifest.tokenizer, eos_id=eos)
        dataclasses.replace(manifest, tokenizer=tokenizer, document_end=end).write(tmp_path / name)
    paths = {"data_path": str(tmp_path / "a"), "valid_data_path": str(tmp_path / "b")}
    config = with_values(RunConfig(), {**paths, "vocab_size": 0, "seq_length": 32})
    if not differ:
        assert open_sources(config)[1].document_end == ends[1][1]
        return
    with pytest.raises(ValueError, match="--valid-data-path .* last token .*--eod-token"):
        open_sources(config)
