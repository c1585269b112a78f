"""The planned memory of a rank beside what a real one allocates, in state and at the peak of a step."""

from __future__ import annotations

from typing import Any

import pytest

from megacp.core.planner.memory import PHASES, RankMemory
from tests.plan.one_rank import state_bytes, step_peak
from tests.ranks import run_ranks

TP, CP, PP = "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"
SHARING, INSTANCES = "data_parallel_sharding_strategy", "num_distributed_optimizer_instances"
BATCH, CHUNK, RECOMPUTE = "global_batch_size", "cross_entropy_chunk_tokens", "recompute_granularity"
WAITING, CHUNKS = "pipeline_schedule", "num_virtual_stages_per_pipeline_rank"
HALF = {"dtype": "bfloat16"}
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")


def on_ranks(function: Any, world: int, values: dict[str, Any]) -> list[tuple[int, RankMemory]]:
    return [function(0, 1, values)] if world == 1 else run_ranks(function, world, values, timeout=120.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("world", "values"),
    [
        (2, {BATCH: 2}),
        (4, {BATCH: 4, **HALF, "untie_embeddings_and_output_weights": True}),
        (4, {BATCH: 4, CP: 2, INSTANCES: 2, **HALF}),
        (4, {BATCH: 4, PP: 2, TP: 2, **HALF}),
        (2, {BATCH: 2, TP: 2, **HALF, "lora_rank": 8, "lora_targets": "all"}),
    ],
    ids=str,
)
def test_the_state_of_a_rank_is_the_planned_one(strategy: str, world: int, values: dict[str, Any]) -> None:
    """Storages, not views: would catch a share that keeps the whole, and master weights beside shards.

    Two percent are for padding.
    """
    for held, planned in on_ranks(state_bytes, world, {SHARING: strategy, **values}):
        assert held == pytest.approx(planned.weights + planned.gradients + planned.optimizer, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "values"),
    [
        (1, {BATCH: 2}),
        (1, {BATCH: 2, "activation_offload": 0.5}),
        (1, {BATCH: 2, RECOMPUTE: "full", "lora_rank": 8}),
        (2, {BATCH: 4, **HALF}),
        (2, {BATCH: 4, SHARING: "optim_grads_params", **HALF, "lora_rank": 8, "lora_targets": "all"}),
        (2, {BATCH: 4, SHARING: "optim_grads", "seq_length": 1024}),  # else its one bucket is most of all
        (2, {BATCH: 4, SHARING: "optim_grads_params", "untie_embeddings_and_output_weights": True}),
        (2, {BATCH: 4, SHARING: "optim_grads_params", RECOMPUTE: "full", **HALF, "seq_length": 512}),
        (2, {BATCH: 4, CP: 2, SHARING: "optim_grads", CHUNK: 128, **HALF}),
        (2, {BATCH: 2, TP: 2, RECOMPUTE: "full"}),
        (2, {BATCH: 2, TP: 2, **HALF, CHUNK: 128, "activation_offload": 3.0}),
        (2, {BATCH: 4, PP: 2, SHARING: "optim_grads"}),
        (4, {BATCH: 8, PP: 2, SHARING: "optim_grads_params"}),
        (2, {BATCH: 4, PP: 2, "activation_offload": 4.0, "num_layers": 8}),
        (2, {BATCH: 4, PP: 2, WAITING: "zero_bubble"}),
        (4, {BATCH: 4, PP: 4, WAITING: "zero_bubble", "num_layers": 4}),
        (4, {BATCH: 4, PP: 2, TP: 2, WAITING: "zero_bubble", RECOMPUTE: "selective"}),
        (2, {BATCH: 4, PP: 2, WAITING: "zero_bubble", RECOMPUTE: "full"}),
        (2, {BATCH: 4, PP: 2, WAITING: "zero_bubble", "activation_offload": 1.0}),
        (2, {BATCH: 4, PP: 2, WAITING: "zero_bubble", CHUNKS: 2, "activation_offload": 2.0, "num_layers": 8}),
        (4, {BATCH: 8, SHARING: "optim_grads_params", INSTANCES: 2, **HALF}),
        (4, {BATCH: 2, TP: 2, CP: 2, SHARING: "optim_grads_params", RECOMPUTE: "selective"}),
    ],
    ids=str,
)
def test_the_peak_of_a_step_is_the_largest_planned_phase(world: int, values: dict[str, Any]) -> None:
    """All allocations of a rank, from before the model is built to the end of its second step.

    Would catch a second copy of anything that is as large as a block's activations or a share of the parameters.
    """
    for peak, planned in on_ranks(step_peak, world, values):
        assert peak - planned.host == pytest.approx(planned.total, rel=0.05)  # a CPU's memory is the host's too


def test_a_phase_is_the_sum_of_its_terms_and_the_total_the_largest_phase() -> None:
    """Would catch a term that is shown but lives nowhere, and host memory taken for the device's."""
    terms = RankMemory(*(2**i for i in range(len(RankMemory.__dataclass_fields__))))
    assert {term for terms in PHASES.values() for term in terms} == set(vars(terms)) - {"host"}
    assert terms.peaks["loss"] == sum(getattr(terms, name) for name in PHASES["loss"])
    assert terms.total == max(terms.peaks.values())
