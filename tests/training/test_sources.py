"""Datasets that do not fit the run are refused before a process group exists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megacp.config.run import RunConfig, with_values
from megacp.training.sources import open_sources
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
