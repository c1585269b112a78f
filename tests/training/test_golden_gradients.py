"""Golden gradients: in float64, any grid with any options equals one process with a dense mask.

Compared are the loss, the gradient norm, every gradient of two steps, the weights after them, and
the validation loss, to 1e-10 relative. Sums in another order change the last bits of float64
(1e-16); depth and AdamW amplify this to about 1e-12. A lost, doubled or misplaced gradient differs
by far more. Copies (replicated weights, tied embeddings) must have the same bits everywhere.

A fixed covering design deals the options to the grids: every option meets every axis, but not every
other option.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from megacp.engine.models.costs import first_trained_stage
from tests.ranks import grid, run_ranks
from tests.reference.sharding import assemble
from tests.reference.training import (
    GEMMA,
    MAMBA2,
    MOE,
    QWEN3_5,
    Values,
    config_of,
    step_batches,
    train,
)

TOLERANCE = 1e-10

MODELS: dict[str, Values] = {
    "tied, biases, norms after and over all heads, layers without rope, yarn": {
        **dict.fromkeys(("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias"), True),
        "qk_layernorm": "all_heads",
        "norm_position": "after",
        "no_rope_freq": "2",
        "rope_scaling": "yarn",
        "rope_scaling_factor": 4.0,
        "rope_original_max_positions": 16,
    },
    "untied, as Gemma 3": {"untie_embeddings_and_output_weights": True, **GEMMA},
    "tied, dropout, as Qwen3.5": {
        **QWEN3_5,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 8),
        "hidden_dropout": 0.15,
        "clip_grad": 0.0,
    },
}
_HYBRID: Values = {
    **MAMBA2,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    "lora_rank": 2,
    "lora_alpha": 6.0,
    "lora_targets": "q,v",
}
HYBRIDS: dict[str, Values] = {
    "pairs on the last layer": {**_HYBRID, "linear_attention_freq": "[1,1,1,0]"},
    "pairs on the third layer": {**_HYBRID, "linear_attention_freq": "[1,1,0,1]"},
    "pairs on both ends": {**_HYBRID, "linear_attention_freq": "[0,1,1,0]", "hidden_dropout": 0.15},
    "pairs on the last layer, experts": {**_HYBRID, **MOE, "linear_attention_freq": "[1,1,1,0]"},
}
"""Low-rank pairs on q and v. Mamba-2 layers have no q and v, so stages with only such layers train
nothing.
"""
Shape = dict[str, int]


def shapes(ranks: int) -> list[Shape]:
    """Return every factorization of `ranks` over the four axes."""
    axes = ("dp", "tp", "pp", "cp")
    found = itertools.product(*[[n for n in range(1, ranks + 1) if ranks % n == 0]] * 4)
    return [dict(zip(axes, sizes, strict=True)) for sizes in found if np.prod(sizes) == ranks]


TRANSPORTS = ("p2p", "all_gather", "a2a", "kv_exchange", "a2a+p2p")
LAYOUTS = ("zigzag", "balanced", "contiguous", "zigzag_document")
STRATEGIES = ("optim", "optim_grads_params", "optim_grads")


def context_options(number: int, cp: int) -> Values:
    """Return the flags of a case's transport and layout; a hierarchy has groups of two ranks."""
    transport = TRANSPORTS[number % 5]
    hierarchy = (2, cp // 2) if transport == "a2a+p2p" and cp > 1 else None
    layout = LAYOUTS[(number + number // 5) % 4]
    return {
        "cp_comm_type": transport,
        "cp_layout": layout,
        "hierarchical_context_parallel_sizes": hierarchy,
    }


def cases_of(shape: Shape, count: int) -> list[tuple[str, Values, Values]]:
    """Return `count` cases for a grid: (model, options of grid and reference, options of the grid)."""
    start = [s for n in (1, 2, 4, 8) for s in shapes(n)].index(shape)
    cases = []
    for number in range(start, start + count):
        bits = [(number * 5 + number // 2) >> i & 1 for i in range(4)]
        name = list(MODELS)[number % len(MODELS)]
        virtual = shape["pp"] > 1 and number % 2 == 0 and shape["pp"] < 8
        chunks = shape["pp"] * (2 if virtual else 1)
        layers = max(chunks, min(4, 2 * chunks))  # two a chunk while four suffice
        groups = 8 if shape["tp"] == 8 or bits[3] else max(2, shape["tp"])
        options: Values = {
            "num_virtual_stages_per_pipeline_rank": 2 if virtual else 1,
            "recompute_granularity": ("none", "selective", "full")[(number + start) % 3],
            "sequence_parallel": bool(bits[0]),
            **context_options(number, shape["cp"]),
            "ddp_bucket_size": 25_000_000 if bits[0] else 3000,
            "attention_kernel": ("flash", "math")[bits[3]],
            "data_parallel_sharding_strategy": STRATEGIES[(2 * number + start) % 3],
            "num_distributed_optimizer_instances": 2 if shape["dp"] > 1 and number % 2 else 1,
            "activation_offload": (0.5, 0.0, 1.0)[(number // 2 + start) % 3],
            "mlp_chunk_tokens": (7, 0, 100)[(number + start // 3) % 3],
        }
        cases.append(
            (
                name,
                {"num_layers": layers, "num_query_groups": groups, "num_attention_heads": 8},
                options,
            )
        )
    return cases


def microbatches(shape: Shape) -> int:
    """Return the number of packs in a step: the same on each replica, with each of the four kinds,
    and at least one per replica and stage.
    """
    return shape["dp"] * max(-(-4 // shape["dp"]), shape["pp"])


def steps(count: int) -> list[list[Any]]:
    """Return two steps of packs that differ in length, documents, branches, spans, padding and loss
    weights.
    """
    return [step_batches(count, seed) for seed in (1, 2)]


@functools.cache
def one_process(name: str, sizes: tuple[tuple[str, int], ...], count: int) -> tuple[Any, ...]:
    config = config_of({**(MODELS | HYBRIDS)[name], **dict(sizes), "attention_kernel": "dense"}, {})
    reports, gradients, weights, validation = train(grid(), config, steps(count))
    return reports, [assemble([pieces]) for pieces in gradients], assemble([weights]), validation


def on_ranks(
    rank: int, world_size: int, shape: Shape, cases: list[tuple[str, Values, Values]]
) -> list[Any]:
    configs = [
        config_of({**(MODELS | HYBRIDS)[name], **sizes, **options}, shape)
        for name, sizes, options in cases
    ]
    return [train(grid(**shape), config, steps(microbatches(shape))) for config in configs]


def compare(what: str, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        largest = np.abs(expected[name]).max()
        error = np.abs(value - expected[name]).max()
        assert error <= TOLERANCE * largest + 1e-15, (
            f"{what} of {name}: off by {error:.1e} of {largest:.1e}"
        )


def check(shape: Shape, count: int, done: int = 0) -> None:
    """Compare the first `count` cases of a grid, without the cases of another test."""
    cases = cases_of(shape, count)[done:]
    if (
        count == 3 and done == 0 and shape["tp"] > 1
    ):  # states over tp with and without sequence parallelism
        name, sizes, options = cases[-1]
        cases.append(
            (name, sizes, {**options, "sequence_parallel": not options["sequence_parallel"]})
        )
    compare_with_one_process(shape, cases)


def compare_with_one_process(shape: Shape, cases: list[tuple[str, Values, Values]]) -> None:
    world_size = int(np.prod([shape[axis] for axis in ONE]))
    ranks = run_ranks(on_ranks, world_size, shape, cases, timeout=240)
    for number, (name, sizes, options) in enumerate(cases):
        results = [rank[number] for rank in ranks]
        reports, gradients, weights, validation = one_process(
            name, tuple(sizes.items()), microbatches(shape)
        )
        what = f"{shape} {name} {sizes} {options}"
        for found_reports, _, _, found_validation in results:
            np.testing.assert_allclose(
                found_reports, reports, rtol=TOLERANCE, err_msg=f"loss, norm: {what}"
            )
            np.testing.assert_allclose(found_validation, validation, rtol=TOLERANCE, err_msg=what)
        for step in range(2):
            found = assemble(result[1][step] for result in results)
            compare(f"step {step + 1} gradient, {what}", found, gradients[step])
        compare(f"weight, {what}", assemble(result[2] for result in results), weights)


def name_of(shape: Shape) -> str:
    return "-".join(f"{axis}{size}" for axis, size in shape.items() if size > 1)


@pytest.mark.parametrize("shape", shapes(2), ids=name_of)
def test_two_ranks_equal_one_process(shape: Shape) -> None:
    check(shape, 3)  # with dropout over tp, and full sharding over dp


@pytest.mark.slow
@pytest.mark.parametrize("shape", shapes(4), ids=name_of)
def test_every_factorization_of_four_ranks_equals_one_process(shape: Shape) -> None:
    check(shape, 2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", shapes(4), ids=name_of)
def test_more_options_on_four_ranks_equal_one_process(shape: Shape) -> None:
    check(shape, 3, done=2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", shapes(8), ids=name_of)
def test_every_factorization_of_eight_ranks_equals_one_process(shape: Shape) -> None:
    check(shape, 1)


V, STRATEGY = "num_virtual_stages_per_pipeline_rank", "data_parallel_sharding_strategy"
TIED, UNTIED, _ = MODELS
ONE: Shape = dict.fromkeys(("dp", "tp", "pp", "cp"), 1)
UNEVEN: list[tuple[Shape, str, Values, Values]] = [
    ({"dp": 3, "tp": 2}, UNTIED, {}, {}),
    ({"cp": 3}, UNTIED, {"hidden_dropout": 0.1}, {"recompute_granularity": "full"}),
    ({"cp": 3, "pp": 2}, TIED, {}, {V: 2}),
    ({"dp": 6}, UNTIED, {}, {"num_distributed_optimizer_instances": 2}),
    ({"dp": 3, "cp": 2}, TIED, {}, {STRATEGY: "optim_grads", "ddp_bucket_size": 500}),
]
"""Widths of 32 and 48 and a vocabulary of 53 leave some ranks of 3 and 6 with fewer or no rows."""


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "name", "sizes", "options"), UNEVEN)
def test_shards_of_uneven_rows_train_like_one_process(
    shape: Shape, name: str, sizes: Values, options: Values
) -> None:
    sharded = {
        STRATEGY: STRATEGIES[1],
        "cp_layout": "balanced",
        "cp_comm_type": "kv_exchange",
        **options,
    }
    compare_with_one_process({**ONE, **shape}, [(name, sizes, sharded)])


LAST, THIRD, ENDS, ROUTED = HYBRIDS
RECOMPUTE, OFFLOAD = "recompute_granularity", "activation_offload"
PARTLY_TRAINED: list[tuple[Shape, int, list[tuple[str, Values]]]] = [
    (
        {"pp": 2},
        1,
        [
            (LAST, {RECOMPUTE: "full", OFFLOAD: 0.5}),
            (THIRD, {RECOMPUTE: "selective", OFFLOAD: 1.0}),
            (ROUTED, {"mlp_chunk_tokens": 7}),
        ],
    ),
    (
        {"pp": 2},
        3,
        [(LAST, {V: 2, RECOMPUTE: "selective"}), (ROUTED, {V: 2, RECOMPUTE: "full", OFFLOAD: 1.0})],
    ),
    ({"pp": 2}, 2, [(THIRD, {V: 2})]),
    ({"pp": 2}, 0, [(ENDS, {}), (ENDS, {V: 2, RECOMPUTE: "full", OFFLOAD: 0.5})]),
]
"""Grid, the first virtual stage that trains parameters, and (model, options). Later stages without
trained parameters pass the gradient on."""
ON_MORE_RANKS: list[tuple[Shape, int, list[tuple[str, Values]]]] = [
    ({"pp": 4}, 3, [(LAST, {}), (ROUTED, {RECOMPUTE: "full"})]),
    ({"pp": 4}, 2, [(THIRD, {OFFLOAD: 1.0})]),
    ({"pp": 4}, 0, [(ENDS, {})]),
    (
        {"pp": 2, "dp": 2},
        1,
        [(LAST, {STRATEGY: "optim_grads_params"}), (ROUTED, {STRATEGY: "optim_grads"})],
    ),
    ({"pp": 2, "dp": 2}, 3, [(LAST, {STRATEGY: "optim_grads_params", V: 2, RECOMPUTE: "full"})]),
    ({"pp": 2, "dp": 2, "ep": 2}, 3, [(ROUTED, {STRATEGY: "optim_grads_params", V: 2})]),
    ({"pp": 2, "tp": 2}, 1, [(LAST, {"sequence_parallel": True}), (THIRD, {})]),
    ({"pp": 2, "tp": 2, "ep": 2}, 3, [(ROUTED, {"sequence_parallel": True, V: 2})]),
    (
        {"pp": 2, "cp": 2, "ep": 2},
        1,
        [(ROUTED, {"cp_comm_type": "kv_exchange", "cp_layout": "balanced"})],
    ),
    (
        {"pp": 2, "cp": 2},
        2,
        [(THIRD, {V: 2, "cp_comm_type": "all_gather", STRATEGY: "optim_grads_params"})],
    ),
]


def compare_partly_trained(
    shape: Shape, first_trained: int, models: list[tuple[str, Values]]
) -> None:
    whole = {**ONE, "ep": 1, **shape}
    ranks = int(np.prod([whole[axis] for axis in ONE]))
    cases = [(name, {"num_layers": 4}, options) for name, options in models]
    for name, sizes, options in cases:
        config = config_of({**HYBRIDS[name], **sizes, **options}, whole)
        assert first_trained_stage(config, ranks) == first_trained
    compare_with_one_process(whole, cases)


@pytest.mark.parametrize(("shape", "first_trained", "models"), PARTLY_TRAINED)
def test_stages_that_train_nothing_equal_one_process(
    shape: Shape, first_trained: int, models: list[tuple[str, Values]]
) -> None:
    compare_partly_trained(shape, first_trained, models)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("shape", "first_trained", "models"), ON_MORE_RANKS)
def test_stages_that_train_nothing_equal_one_process_on_more_ranks(
    shape: Shape, first_trained: int, models: list[tuple[str, Values]]
) -> None:
    compare_partly_trained(shape, first_trained, models)


def test_the_design_covers_every_option_on_every_axis_it_acts_on() -> None:
    cases = [
        (shape, case)
        for n, count in ((2, 2), (4, 3), (8, 1))
        for shape in shapes(n)
        for case in cases_of(shape, count)
    ]
    wanted = {
        "recompute_granularity": ("none", "selective", "full"),
        "sequence_parallel": (False, True),
        "cp_comm_type": TRANSPORTS,
        "cp_layout": LAYOUTS,
        "attention_kernel": ("flash", "math"),
        "data_parallel_sharding_strategy": STRATEGIES,
        "activation_offload": (0.0, 0.5, 1.0),
        "mlp_chunk_tokens": (0, 7, 100),
    }
    for axis, (option, values) in itertools.product(("dp", "tp", "pp", "cp"), wanted.items()):
        met = {options[option] for shape, (_, _, options) in cases if shape[axis] > 1}
        assert met == set(values), (axis, option)
    for axis in ("dp", "tp", "pp", "cp"):
        on_axis = [case for shape, case in cases if shape[axis] > 1]
        assert {name for name, _, _ in on_axis} == set(MODELS)
        assert any(sizes["num_query_groups"] < 8 for _, sizes, _ in on_axis)
    on_pipeline = {
        (s["pp"], name, o["num_virtual_stages_per_pipeline_rank"])
        for s, (name, _, o) in cases
        if s["pp"] > 1
    }
    assert {(2, name, v) for name in MODELS for v in (1, 2)} <= on_pipeline
    ring = {
        (o["cp_comm_type"], o["cp_layout"], o["sequence_parallel"])
        for s, (_, _, o) in cases
        if s["cp"] > 1 < s["tp"]
    }
    assert len(ring) >= 6
    sharded = {
        (o["data_parallel_sharding_strategy"], o["num_distributed_optimizer_instances"])
        for s, (_, _, o) in cases
        if s["dp"] * s["cp"] > o["num_distributed_optimizer_instances"]
    }
    assert sharded == set(itertools.product(STRATEGIES, (1, 2)))
