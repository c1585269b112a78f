"""Rollouts with a common beginning as one tree: the gradient of all of them at lower cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megacp.engine.rows.batch import PackedBatch
from megacp.prepare.records.documents import DocumentMaker
from megacp.prepare.records.record import RecordRules
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.training.data.collate import collate
from tests.prepare.records.test_trees import pack_of
from tests.ranks import grid, run_ranks
from tests.reference.sharding import assemble
from tests.reference.training import config_of, train

VALUES: dict[str, Any] = {
    "vocab_size": 257,
    "seq_length": 512,
    "num_query_groups": 2,
    "clip_grad": 0.0,
}


def rows(rollouts: Sequence[dict[str, Any]]) -> tuple[PackedBatch, list[PackedBatch]]:
    """Return the tree of some records, and each record as a row."""
    maker, rules = DocumentMaker(load_tokenizer("byte"), True, {}), RecordRules(prefix_tree=True)
    samples = [
        parse_record({"rollouts": rollouts}, rules),
        *(parse_record(one, rules) for one in rollouts),
    ]
    texts = [(*([sample.prefix] if sample.prefix else []), *sample.branches) for sample in samples]
    documents = list(maker.encode(texts, [sample.parents for sample in samples]))
    assert all(document.problem is None for document in documents)
    tree, *apart = (collate([pack_of(document)]) for document in documents)
    return tree, apart


def family() -> list[dict[str, Any]]:
    """Return six rollouts of one prompt: some agree on more than the prompt, two are equal, and all
    have different weights.
    """
    texts = [
        "yes, by all means",
        "yes, but not now",
        "yes, but not now",
        "no",
        "no, never",
        "yes, by all",
    ]
    return [
        {"prompt": "shall we go on with this? ", "completion": text, "weight": 0.5 + i}
        for i, text in enumerate(texts)
    ]


def gradients(
    rank: int, world_size: int, shape: dict[str, int], batches: list[PackedBatch]
) -> tuple[list[tuple[float, float]], list[Any]]:
    config = config_of({**VALUES, "cp_layout": "balanced", "cp_comm_type": "kv_exchange"}, shape)
    reports, found, *_ = train(grid(**shape), config, [batches])
    return reports, found


@pytest.mark.parametrize(
    "shape",
    [{}, pytest.param({"tp": 2, "pp": 2, "cp": 2}, marks=pytest.mark.slow)],
    ids=["one process", "tp 2 x pp 2 x cp 2"],
)
def test_the_gradient_of_a_tree_is_the_sum_over_its_rollouts(shape: dict[str, int]) -> None:
    tree, apart = rows(family())
    assert len(tree) < 0.6 * sum(map(len, apart)) and tree.weight_sum == sum(
        batch.weight_sum for batch in apart
    )
    world = int(np.prod([*shape.values()], dtype=int))
    merged, separate = (run_ranks(gradients, world, shape, batches) for batches in ([tree], apart))
    np.testing.assert_allclose(merged[0][0], separate[0][0], rtol=1e-12)
    one, other = (assemble([found[0] for _, found in results]) for results in (merged, separate))
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(
            value, other[name], rtol=0, atol=1e-10 * np.abs(other[name]).max(), err_msg=name
        )
