"""Low-rank pairs: the same numbers on every grid as on one process; the converter's tests have those of peft."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.ranks import grid, run_ranks
from tests.reference.sharding import assemble
from tests.reference.training import Values, config_of, step_batches, train

TOLERANCE = 1e-10
"""As in the golden gradients: float64, sums in another order."""
PAIRS: Values = {"lora_rank": 3, "lora_alpha": 7.5, "lora_targets": "all"}
PAIRED: dict[str, Values] = {
    "all linears": {**PAIRS, "qk_layernorm": "head", "add_qkv_bias": True, "num_query_groups": 2},
    "q and v, tied": {**PAIRS, "lora_targets": None, "hidden_dropout": 0.1},
    "output, up and down, norms after": {
        **PAIRS,
        "lora_targets": "output,up,down",
        "norm_position": "after",
        "untie_embeddings_and_output_weights": True,
        "clip_grad": 0.05,
    },
}
FULL, GRADIENTS = ({"data_parallel_sharding_strategy": name} for name in ("optim_grads_params", "optim_grads"))
Case = tuple[dict[str, int], str, Values]
TWO: list[Case] = [
    ({"tp": 2}, "all linears", {}),
    ({"tp": 2}, "output, up and down, norms after", {"sequence_parallel": False, "recompute_granularity": "full"}),
    ({"pp": 2}, "q and v, tied", {"num_virtual_stages_per_pipeline_rank": 2, "activation_offload": 0.5}),
    ({"cp": 2}, "all linears", {**FULL, "recompute_granularity": "selective", "cp_comm_type": "kv_exchange"}),
    ({"dp": 2}, "output, up and down, norms after", {**GRADIENTS, "mlp_chunk_tokens": 7}),
]
FOUR: list[Case] = [
    ({"tp": 2, "dp": 2}, "all linears", {**FULL, "recompute_granularity": "full"}),
    ({"tp": 2, "pp": 2}, "output, up and down, norms after", {"mlp_chunk_tokens": 7, "ddp_bucket_size": 300}),
    ({"cp": 2, "pp": 2}, "all linears", {**FULL, "num_virtual_stages_per_pipeline_rank": 2}),
    ({"tp": 2, "cp": 2}, "q and v, tied", {"recompute_granularity": "selective", **GRADIENTS}),
    ({"tp": 4}, "all linears", {"num_query_groups": 4, "sequence_parallel": False}),
    ({"dp": 4}, "q and v, tied", {**FULL, "num_distributed_optimizer_instances": 2}),
]


def steps() -> list[list[Any]]:
    """Two: B is zero in the first, so A has a gradient from the second on."""
    return [step_batches(4, seed) for seed in (1, 2)]


@functools.cache
def one_process(name: str, groups: int) -> tuple[Any, ...]:
    config = config_of({**PAIRED[name], "num_query_groups": groups, "attention_kernel": "dense"}, {})
    reports, gradients, weights, validation = train(grid(), config, steps())
    return reports, [assemble([pieces]) for pieces in gradients], assemble([weights]), validation


def on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    return [
        train(grid(**shape), config_of({**PAIRED[name], **values}, shape), steps()) for shape, name, values in cases
    ]


def close(what: str, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in found.items():
        error, largest = np.abs(value - expected[name]).max(), np.abs(expected[name]).max()
        assert error <= TOLERANCE * largest + 1e-15, f"{what} of {name}: off by {error:.1e} of {largest:.1e}"


def check(cases: list[Case], ranks: int) -> None:
    results = run_ranks(on_ranks, ranks, cases, timeout=240)
    for number, (shape, name, values) in enumerate(cases):
        groups = {**PAIRED[name], **values}.get("num_query_groups", 4)
        reports, gradients, weights, validation = one_process(name, groups)
        what = f"{shape} {name} {values}"
        for found_reports, _, _, found_validation in (rank[number] for rank in results):
            np.testing.assert_allclose(found_reports, reports, rtol=TOLERANCE, err_msg=what)
            np.testing.assert_allclose(found_validation, validation, rtol=TOLERANCE, err_msg=what)
        for step in range(2):
            found = assemble(rank[number][1][step] for rank in results)
            close(f"step {step + 1} gradient, {what}", found, gradients[step])
        close(f"weight, {what}", assemble(rank[number][2] for rank in results), weights)
        assert all(".lora_" in key for key in gradients[0]), "the model itself has no gradient"
        assert all(np.abs(gradients[1][key]).max() > 0 for key in gradients[1])


@pytest.mark.slow
def test_two_ranks_equal_one_process() -> None:
    check(TWO, 2)


@pytest.mark.slow
def test_four_ranks_equal_one_process() -> None:
    check(FOUR, 4)
