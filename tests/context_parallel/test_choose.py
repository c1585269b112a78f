"""`auto`: a rule on the counts of plans, the same on every rank, that stands in the config from then on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from bench.steps import Subject
from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.choose import needed_share, resolve_auto
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.data.batch import PackedBatch
from megacp.core.ops.mask import allowed
from tests.reference.packs import metadata, random_batch

AUTO = {"cp_comm_type": "auto", "cp_layout": "auto"}


def config_of(cp: int, heads: int = 8, groups: int = 2, **values: Any) -> RunConfig:
    sizes = {"num_attention_heads": heads, "num_query_groups": groups, "hidden_size": 8 * heads, "seq_length": 512}
    return with_values(RunConfig(), {**sizes, "context_parallel_size": cp, **AUTO, **values})


def causal(tokens: int, documents: int) -> PackedBatch:
    row = random_batch(np.random.default_rng(0), tokens, documents=1)
    return PackedBatch(
        **{**vars(row), "document": np.repeat(np.arange(documents), tokens // documents).astype(np.int32)}
    )


def uneven() -> PackedBatch:
    """One long document behind short ones, whose tokens see less."""
    row = causal(512, 1)
    document = np.concatenate([np.arange(96) // 8, np.full(416, 12)]).astype(np.int32)
    return dataclasses.replace(row, document=document)


@pytest.mark.parametrize(
    ("row", "values", "chosen"),
    [
        (causal(512, 32), {}, ("kv_exchange", "balanced")),
        (causal(512, 1), {}, ("p2p", "zigzag")),
        (causal(512, 1), {"cp": 8}, ("a2a", "contiguous")),
        (causal(512, 1), {"cp": 8, "heads": 12, "groups": 4}, ("p2p", "zigzag")),  # 12 heads do not divide by 8
        (causal(512, 1), {"cp": 8, "cp_comm_type": "all_gather"}, ("all_gather", "zigzag")),
        (causal(512, 32), {"cp_layout": "zigzag"}, ("kv_exchange", "zigzag")),
        (uneven(), {}, ("p2p", "balanced")),
        (causal(512, 32), {"cp": 1}, ("p2p", "zigzag")),
    ],
)
def test_the_rule(row: PackedBatch, values: dict[str, Any], chosen: tuple[str, str]) -> None:
    config = config_of(**{"cp": 4, **values})
    found, line = resolve_auto(config, lambda: [row])
    assert (found.parallel.cp_comm_type, found.parallel.cp_layout) == chosen
    assert (line is None) == (found.parallel.context_parallel_size == 1)


def test_nothing_is_read_where_nothing_is_left_to_choose() -> None:
    config = config_of(4, cp_comm_type="a2a", cp_layout="zigzag")
    assert resolve_auto(config, lambda: pytest.fail("rows were read")) == (config, None)  # type: ignore[arg-type]


def test_the_share_is_that_of_the_dense_mask() -> None:
    meta = metadata(random_batch(np.random.default_rng(1), 48, documents=3, branches=True, images=True))
    indices = LAYOUTS["balanced"].deal(meta, 4)
    rows = sum(int(np.delete(allowed(meta.take(mine), meta).any(0), mine).sum()) for mine in indices)
    assert needed_share((meta, indices)) == rows / (4 * 36)


def test_a_measurement_refuses_auto() -> None:
    with pytest.raises(ValueError, match="--cp-comm-type"):
        Subject(0, 1, config_of(2), None)  # type: ignore[arg-type]
