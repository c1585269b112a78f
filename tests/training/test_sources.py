"""Datasets that do not fit the run are refused before a process group exists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megacp.config.run import RunConfig, with_values
from megacp.training.sources import loader_options, open_sources
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


def test_every_worker_has_a_step_to_read() -> None:
    """Would catch threads beyond the second that only wait."""
    for workers, steps in ((0, 0), (1, 2), (2, 2), (8, 8)):
        options = loader_options(with_values(RunConfig(), {"num_workers": workers}), 1)
        assert (options.prefetch, options.num_threads) == (steps, max(1, workers))
