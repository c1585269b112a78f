"""A tiny vision-language model in float64: any grid, transport, strategy and feature exchange equals
one process.

Rows have several documents with branches, images of several crops and videos; some rows are only
text. With large cp, most rows leave ranks without images. All gradients (tower, connector,
embedding, text) and the updated parameters of two steps are compared, to 1e-10 relative. Sums in
another order differ by 1e-15.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from megacp.distributed.grid import single_axis
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.rows.rank import DataRank
from megacp.engine.step.rows import Rows
from megacp.training.data.mock import MockRules
from megacp.verify.cases import MODELS
from megacp.verify.parity import (
    ParitySetup,
    StepTrace,
    assemble,
    compare,
    microbatches,
    prepare,
    train_rank,
)
from tests.ranks import run_ranks
from tests.reference.packs import branched

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
SHARDED, PARAMS = "data_parallel_sharding_strategy", "optim_grads_params"
BETWEEN = {"seed": 8, "global_batch_size": 4}
"""The second of four rows of each step has no image; other rows have fewer units than ranks."""

OFFLOADED = {"activation_offload": 0.5, "mlp_chunk_tokens": 7}

CASES: list[Any] = [
    (2, {CP: 2}, "stored"),
    (2, {CP: 2, "cp_comm_type": "all_gather"}, "computed"),
    (2, {CP: 2, "vision_shards": "replicate", **BETWEEN}, "stored"),
    (3, {CP: 3, **BETWEEN}, "computed"),
    (4, {CP: 2, PP: 2, **BETWEEN}, "stored"),
    (8, {CP: 4, TP: 2, "cp_comm_type": "kv_exchange", **BETWEEN}, "stored"),
    (2, {TP: 2}, "computed"),
    (2, {PP: 2, "image_attention": "image"}, "stored"),
    (3, {CP: 3, "cp_layout": "balanced", "cp_comm_type": "kv_exchange"}, "stored"),
    (4, {CP: 4, "cp_comm_type": "a2a", "image_attention": "causal"}, "computed"),
    (4, {CP: 2, TP: 2, "recompute_granularity": "full"}, "computed"),
    (4, {CP: 2, TP: 2, "sequence_parallel": False, "cp_layout": "contiguous"}, "stored"),
    (4, {CP: 2, PP: 2, "num_virtual_stages_per_pipeline_rank": 2}, "stored"),
    (
        4,
        {
            CP: 4,
            "cp_comm_type": "a2a+p2p",
            "hierarchical_context_parallel_sizes": (2, 2),
            "micro_batch_size": 2,
        },
        "stored",
    ),
    (
        4,
        {
            CP: 2,
            "cp_comm_type": "kv_exchange",
            "cp_layout": "balanced",
            "dynamic_context_parallel": True,
        },
        "stored",
    ),
    (8, {CP: 8, "cp_layout": "zigzag_document"}, "computed"),
    (4, {CP: 2, PP: 2, "pipeline_schedule": "zero_bubble", **BETWEEN}, "stored"),
    (8, {CP: 2, TP: 2, PP: 2, "vision_shards": "replicate"}, "stored"),
    (2, {CP: 2, SHARDED: PARAMS, **BETWEEN}, "stored"),
    (2, {SHARDED: PARAMS, "freeze": "vision", **BETWEEN}, "stored"),
    (3, {CP: 3, SHARDED: PARAMS, "freeze": "text", **BETWEEN}, "computed"),
    (4, {CP: 2, PP: 2, SHARDED: PARAMS, "num_virtual_stages_per_pipeline_rank": 2}, "stored"),
    (4, {CP: 2, TP: 2, SHARDED: "optim_grads", "freeze": "connector"}, "stored"),
    (2, {CP: 2, SHARDED: PARAMS, "lora_rank": 3, "lora_targets": "all", **BETWEEN}, "stored"),
    (
        4,
        {
            TP: 2,
            PP: 2,
            "lora_rank": 3,
            "lora_targets": "output,up,down",
            "norm_position": "after",
            **OFFLOADED,
        },
        "stored",
    ),
    (
        4,
        {CP: 2, PP: 2, SHARDED: PARAMS, "lora_rank": 3, **OFFLOADED, "tiny_biased": True},
        "stored",
    ),
    (
        4,
        {
            CP: 2,
            SHARDED: PARAMS,
            "cp_comm_type": "kv_exchange",
            "cp_layout": "balanced",
            "dynamic_context_parallel": True,
            "recompute_granularity": "full",
        },
        "stored",
    ),
    (8, {CP: 2, TP: 2, SHARDED: PARAMS, "num_distributed_optimizer_instances": 2}, "computed"),
]


QWEN3_5 = {"tiny_qwen3_5": True}
CASES += [
    (
        2,
        {CP: 2, "additional_vocab_size": 0, **QWEN3_5},
        "stored",
    ),  # images in rows of the table of words
    (4, {CP: 4, "cp_layout": "balanced", **BETWEEN, **QWEN3_5}, "computed"),
    (8, {CP: 2, TP: 2, PP: 2, "recompute_granularity": "full", **QWEN3_5}, "stored"),
    (8, {CP: 4, TP: 2, "cp_comm_type": "a2a", SHARDED: PARAMS, **QWEN3_5}, "computed"),
    (3, {CP: 3, "vision_shards": "replicate", **BETWEEN, **QWEN3_5}, "stored"),
    (
        4,
        {
            CP: 2,
            TP: 2,
            "lora_rank": 3,
            "lora_targets": "all",
            "recompute_granularity": "full",
            **QWEN3_5,
        },
        "stored",
    ),
]
MAMBA2 = {"tiny_mamba2": True}
CASES += [
    (
        2,
        {
            CP: 2,
            "cp_layout": "balanced",
            SHARDED: PARAMS,
            "recompute_granularity": "full",
            **MAMBA2,
        },
        "stored",
    ),
    (
        4,
        {CP: 2, TP: 2, "cp_comm_type": "a2a", "recompute_granularity": "selective", **MAMBA2},
        "stored",
    ),
    (4, {CP: 2, PP: 2, "pipeline_schedule": "zero_bubble", **MAMBA2}, "stored"),
]
CASES += [
    pytest.param(
        8,
        {TP: tp, PP: pp, CP: cp, "global_batch_size": max(2, 8 // (tp * pp * cp)), **QWEN3_5},
        "stored",
        marks=pytest.mark.long,
    )
    for tp, pp, cp in itertools.product((1, 2, 4, 8), repeat=3)
    if tp * pp * cp <= 8
]
"""Return every factorization of eight ranks."""


def setup_of(world: int, values: dict[str, Any]) -> ParitySetup:
    model = next(iter(MODELS.keys() & values.keys()), "tiny_vlm")
    values = {name: value for name, value in values.items() if name != model}
    config = with_values(RunConfig(), {"cp_comm_type": "p2p", **values})
    return prepare(config, frozenset(values), model=model, mask="mixed", world_size=world)


def one_process(setup: ParitySetup) -> list[StepTrace]:
    return _one_process(setup.reference, setup.rules)


@functools.cache
def _one_process(config: RunConfig, rules: MockRules) -> list[StepTrace]:
    (traces,) = run_ranks(train_rank, 1, config, rules, 2, "computed")
    return traces


@pytest.mark.slow
@pytest.mark.parametrize(("world", "values", "strategy"), CASES)
def test_a_grid_trains_the_vision_language_model_like_one_process(
    world: int, values: dict, strategy: str
) -> None:
    setup = setup_of(world, values)
    expected = one_process(setup)
    ranks = run_ranks(train_rank, world, setup.config, setup.rules, 2, strategy, timeout=240)
    for comparison in compare(expected, ranks):
        assert not comparison.beyond(), comparison


@pytest.mark.slow
def test_the_rows_hold_what_the_comparison_is_about() -> None:
    setup = setup_of(1, {})
    gradients = assemble(one_process(setup)[0].gradients)
    largest = {name: np.abs(value).max() for name, value in gradients.items()}
    seen = [value for name, value in largest.items() if name.startswith(("vision", "connector"))]
    floor = 1e-3 * max(largest.values())  # `compare` treats smaller gradients as rounding
    assert len(seen) > 20 and sum(value > floor for value in seen) > 0.9 * len(seen), largest
    rows = Rows(single_axis("cp"), DataRank(), 1)
    config = with_values(setup.config, {"global_batch_size": 40})
    batches = microbatches(config, setup.rules, 1, rows)
    counts = [batch.vision.num_features for batch in batches if batch.vision is not None]
    units = [len(batch.vision.cum_crop_bounds) for batch in batches if batch.vision is not None]
    assert len(counts) == 40 and 0 in counts and min(units) < 2 and max(units) >= 8
    assert any(branched(batch) for batch in batches)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_text_alone_stands_between_images_and_ranks_starve_in_steps_that_are_compared(
    cp: int,
) -> None:
    setup = setup_of(cp, {CP: cp, **BETWEEN})
    for step in (1, 2):
        batches = microbatches(
            setup.config, setup.rules, step, Rows(single_axis("cp"), DataRank(), 1)
        )
        units = [len(batch.vision.cum_crop_bounds) for batch in batches if batch.vision is not None]
        assert len(units) == 4 and units[1] == 0 and min(units[0], *units[2:]) > 0
        assert cp == 2 or any(0 < count < cp for count in units)
