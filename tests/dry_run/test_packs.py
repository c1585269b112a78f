"""Test the imbalance of the ranks of a row by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megacp.attention.ops.mask import Metadata
from megacp.dry_run.packs import PackSample, sample_of
from megacp.engine.config.run import RunConfig, with_values

CP, KV = "context_parallel_size", {"cp_comm_type": "kv_exchange"}
SMALL = {"vocab_size": 4096, "seq_length": 1024, "num_layers": 4, "global_batch_size": 8}


def sizes(**values: object) -> RunConfig:
    return with_values(RunConfig(), {**SMALL, **values})


def documents(*lengths: int) -> Metadata:
    return Metadata.of_documents(np.repeat(np.arange(len(lengths)), lengths))


def test_what_ranks_of_a_row_have_by_hand() -> None:
    """Contiguous halves of a causal document have 1/4 and 3/4 of its area.

    The second half needs all keys of the first half.
    """
    halves, spans = sizes(**{CP: 2, **KV, "cp_layout": "contiguous"}), documents(256, 256, 512)
    assert PackSample().shared(halves) == (pytest.approx(1.5, rel=1e-3), 1.0)
    assert PackSample().shared(with_values(halves, {"cp_layout": "zigzag"})) == (1.0, 1.0)
    assert PackSample().shared(with_values(halves, {"cp_comm_type": "a2a"})) == (1.0, 0.0)
    swapped = {CP: 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}
    assert PackSample().shared(with_values(halves, swapped)) == (pytest.approx(1.5, rel=1e-3), 0.0)
    assert sample_of(halves, [spans]).shared(halves) == (pytest.approx(8 / 6, rel=1e-2), 0.0)
    rows = sample_of(sizes(), [documents(1024), spans]).joined(2)
    assert rows.areas == (pytest.approx((1 + 3 / 8) / 2, rel=1e-2),)
    assert np.bincount(rows.rows[0].document).tolist() == [1024, 256, 256, 512]
