"""A mixture of experts on any grid equals one process: loss, norm, gradients, weights and routes.

One process is compared with a dense reference in tests/engine/models/test_language.py. In float64
every grid chooses the same experts, unless two scores at the edge of the choice are closer than
rounding. The tests assert that this does not happen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megacp.engine.config.model import ModelConfig
from megacp.engine.data_parallel.boxes import TensorBox
from megacp.engine.data_parallel.parameter import ParameterSpec
from megacp.engine.expert_parallel import layer, router
from megacp.engine.layers.moe import router_tensor
from megacp.engine.layers.table import Tensor
from megacp.engine.models import init
from megacp.engine.models.block import Block, BlockInputs
from megacp.engine.step.step import ParallelModel
from tests.ranks import grid, run_ranks
from tests.reference.sharding import assemble
from tests.reference.training import (
    BALANCE,
    GPT_OSS,
    MOE,
    SIGMOID,
    Values,
    config_of,
    parameter_pieces,
    train,
)
from tests.training.test_golden_gradients import (
    STRATEGIES,
    TOLERANCE,
    Shape,
    compare,
    context_options,
    microbatches,
    shapes,
    steps,
)

SHARED: Values = {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True}
BALANCED = {**MOE, "num_experts": 24, **BALANCE}
MODELS: dict[str, Values] = {
    "softmax of the chosen, a gated shared expert": {**BALANCED, **SHARED},
    "of all, dropout": {**BALANCED, "moe_router_pre_softmax": True, "hidden_dropout": 0.1},
    "equal scores": {**MOE, "num_experts": 24, "moe_router_topk": 2, "norm_position": "after"},
    "sigmoids in groups": {**BALANCED, **SIGMOID, **SHARED, "moe_router_bias": True},
    "as gpt-oss": {**GPT_OSS, "num_experts": 24, "init_method_std": 0.1},
    "pairs": {
        **{**MOE, **SHARED, "num_experts": 24, "lora_rank": 2, "lora_alpha": 6.0},
        "lora_targets": "q,k,v,output,gate,up,down,experts.gate+up:3:7,shared.down:1:4",
    },
}
"""Models by name.

In "equal scores" all scores are 0 in the first step, and most stay 0. Experts are then chosen only
by index, and some get no tokens.
"""
EQUAL_ROWS: dict[str, Values] = {
    "equal rows, one of all": {
        **MOE,
        "num_experts": 6,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
    "equal rows, balanced": {**BALANCED, "moe_router_topk": 4, **SHARED},
    "equal rows, sigmoids in groups": {**BALANCED, **SIGMOID, "moe_router_bias": True},
    "equal rows, an odd number": {**MOE, "num_experts": 15, "moe_router_topk": 2},
}
"""Routers that start with two or more copies of each row.

Without special treatment of equal rows, products and choices would depend on the grid.
"""
Case = tuple[Shape, str, Values, Values]
"""Grid, model, values that the reference also needs, and options of the grid only."""
Choices = dict[tuple[int, int], set[tuple[int, ...]]]
"""Experts chosen for each token, in training and in validation: (layer, token name) -> experts."""


def grids(ranks: int) -> list[Shape]:
    """Return every factorization, with every ep that divides the ranks of a stage."""
    stages = [(shape, ranks // shape["pp"]) for shape in shapes(ranks)]
    return [
        {**shape, "ep": ep}
        for shape, stage in stages
        for ep in range(1, stage + 1)
        if stage % ep == 0
    ]


def case_of(shape: Shape, number: int) -> Case:
    name = list(MODELS)[(number + number // len(MODELS)) % len(MODELS)]
    virtual = 2 if 1 < shape["pp"] < 8 and number % 3 == 0 else 1
    zero_bubble = shape["pp"] > 1 and virtual == 1 and number % 2 == 0 and name != "pairs"
    alike = shape["tp"] * shape["cp"] * shape["dp"] // shape["ep"]
    options: Values = {
        "num_virtual_stages_per_pipeline_rank": virtual,
        "pipeline_schedule": "zero_bubble" if zero_bubble else "1f1b",
        "recompute_granularity": ("none", "selective", "full")[number % 3],
        "data_parallel_sharding_strategy": "optim"
        if zero_bubble
        else STRATEGIES[(number + number // 8 + 1) % 3],
        "num_distributed_optimizer_instances": 2
        if shape["dp"] % 2 == 0 == alike % 2 and number % 2
        else 1,
        "activation_offload": 0.5 * (number % 5 == 0),
        "mlp_chunk_tokens": 0 if zero_bubble else (0, 7, 100)[(number // 2) % 3],
        "ddp_bucket_size": 3000 if number % 2 else 25_000_000,
        **context_options(number, shape["cp"]),
    }
    width = 48 if shape["tp"] == 3 else 32
    heads = {
        "num_attention_heads": 24 if shape["tp"] == 3 else 8,
        "num_query_groups": 24 if shape["tp"] == 3 else 8,
    }
    sizes = {
        "num_layers": max(2, virtual * shape["pp"]),
        "hidden_size": width,
        "kv_channels": 4,
        **heads,
    }
    return shape, name, sizes, options


def dealt(ranks: int) -> list[Case]:
    return [case_of(shape, number) for number, shape in enumerate(grids(ranks))]


@contextmanager
def watched(name: str) -> Iterator[tuple[Choices, list[float]]]:
    """Return this rank's choices, and the distance between the last chosen score and the next one.

    Pairs in which both scores are 0 are left out. Copies of a row stay equal up to rounding, which
    decides nothing, so distances of the size of rounding are left out too.
    """
    choices: Choices = defaultdict(set)
    margins: list[float] = []
    run, choose, draw = Block.forward, layer.choose, init._drawn

    def forward(self: Block, x: torch.Tensor, inputs: BlockInputs) -> torch.Tensor:
        out = run(self, x, inputs)
        if self.is_routed and inputs.routes is not None:
            chosen = inputs.routes.by_layer[self.layer].chosen.tolist()
            for token, experts in zip(
                inputs.token_names[inputs.routes.places].tolist(), chosen, strict=True
            ):
                choices[self.layer, token].add(tuple(experts))
        return out

    def choice(scores: torch.Tensor, count: int) -> torch.Tensor:
        edge = scores.sort(descending=True).values[:, count - 1 : count + 1]
        gaps = (edge[:, 0] - edge[:, 1])[edge.any(1)]
        margins.extend((gaps[gaps > 1e-12] if name in EQUAL_ROWS else gaps).tolist())
        return choose(scores, count)

    def copied(box: TensorBox, tensor: str, seed: int, spec: ParameterSpec) -> torch.Tensor:
        """Initialise a router with two or three copies of each row, at distances of at least 1."""
        if name not in EQUAL_ROWS or not tensor.endswith("router.weight"):
            return draw(box, tensor, seed, spec)
        experts, width = box.global_shape
        whole = dataclasses.replace(box, tensor=torch.empty(experts, width), offsets=(0, 0))
        rows = [expert * 2 // 3 % (experts // 2) for expert in range(experts)]
        first, count = box.offsets[0], len(box.tensor)
        return draw(whole, tensor, seed, spec)[rows][first : first + count]

    def drawn(model: ModelConfig) -> Tensor:
        tensor = router_tensor(model)
        return dataclasses.replace(tensor, std=0.0) if name == "equal scores" else tensor

    with (
        mock.patch.object(Block, "forward", forward),
        mock.patch.object(layer, "choose", choice),
        mock.patch.object(router, "choose", choice),
        mock.patch.object(layer, "router_tensor", drawn),
        mock.patch.object(init, "_drawn", copied),
    ):
        yield choices, margins


@functools.cache
def one_process(name: str, sizes: tuple[tuple[str, int], ...], count: int) -> tuple[Any, ...]:
    config = config_of(
        {**(MODELS | EQUAL_ROWS | CELLS)[name], **dict(sizes), "attention_kernel": "dense"}, {}
    )
    with watched(name) as (choices, margins):
        reports, gradients, weights, validation = train(grid(), config, steps(count))
    assert min(margins, default=1) > 1e-9, "a choice hangs on the order of a sum"
    return (
        reports,
        [assemble([pieces]) for pieces in gradients],
        assemble([weights]),
        validation,
        choices,
    )


def on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    results = []
    for shape, name, sizes, options in cases:
        config = config_of({**(MODELS | EQUAL_ROWS | CELLS)[name], **sizes, **options}, shape)
        with watched(name) as (choices, _):
            results.append((*train(grid(**shape), config, steps(microbatches(shape))), choices))
    return results


def check(ranks: int, cases: list[Case]) -> None:
    found = run_ranks(on_ranks, ranks, cases, timeout=280)
    for number, (shape, name, sizes, options) in enumerate(cases):
        results, what = [of_rank[number] for of_rank in found], f"{shape} {name} {options}"
        reports, gradients, weights, validation, routes = one_process(
            name, tuple(sizes.items()), microbatches(shape)
        )
        choices: Choices = defaultdict(set)
        for found_reports, _, _, found_validation, chosen in results:
            np.testing.assert_allclose(
                found_reports, reports, rtol=TOLERANCE, err_msg=f"loss, norm: {what}"
            )
            np.testing.assert_allclose(found_validation, validation, rtol=TOLERANCE, err_msg=what)
            for token, experts in chosen.items():
                choices[token] |= experts
        assert choices == routes, f"routes: {what}"
        for step in range(2):
            compare(
                f"step {step + 1} gradient, {what}",
                assemble(r[1][step] for r in results),
                gradients[step],
            )
        compare(f"weight, {what}", assemble(r[2] for r in results), weights)


def test_two_ranks_equal_one_process() -> None:
    cases = dealt(2)
    check(2, [cases[1], cases[3], case_of(cases[1][0], 2), case_of(cases[6][0], 5), cases[6]])


ONE: Shape = dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), 1)
WIDTH: Values = {
    "num_layers": 2,
    "hidden_size": 32,
    "kv_channels": 4,
    "num_attention_heads": 8,
    "num_query_groups": 8,
}
FIRST, EVEN, GROUPED, ODD = EQUAL_ROWS
STRATEGY = "data_parallel_sharding_strategy"
ON_TWO: list[tuple[Shape, str, Values]] = [
    ({"cp": 2}, FIRST, {}),
    ({"cp": 2, "ep": 2}, GROUPED, {"recompute_granularity": "full"}),
    ({"dp": 2, "ep": 2}, EVEN, {STRATEGY: "optim_grads_params"}),
    ({"dp": 2}, GROUPED, {STRATEGY: "optim_grads_params"}),
    ({"pp": 2}, ODD, {"recompute_granularity": "selective"}),
    ({"tp": 2, "ep": 2}, FIRST, {}),
]
ON_MORE: list[tuple[Shape, str, Values]] = [
    *(
        ({"cp": 4}, name, {"cp_layout": "balanced", "cp_comm_type": "kv_exchange"})
        for name in EQUAL_ROWS
    ),
    *(({"pp": 2, "cp": 2, "ep": 2}, name, {}) for name in (FIRST, EVEN, GROUPED)),
    *(
        ({"tp": 2, "cp": 2, "ep": 2}, name, {"mlp_chunk_tokens": 7})
        for name in (FIRST, EVEN, GROUPED)
    ),
    *(({"tp": 2, "dp": 2}, name, {STRATEGY: "optim_grads_params"}) for name in (ODD, GROUPED)),
]


def check_equal_rows(ranks: int, cases: list[tuple[Shape, str, Values]]) -> None:
    check(ranks, [({**ONE, **shape}, name, WIDTH, options) for shape, name, options in cases])


def test_equal_rows_of_the_router_are_chosen_alike_on_two_ranks() -> None:
    check_equal_rows(2, ON_TWO)


@pytest.mark.slow
@pytest.mark.long
def test_equal_rows_of_the_router_are_chosen_alike_on_four_ranks() -> None:
    check_equal_rows(4, ON_MORE)


TWO_GROUPS: Values = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
CELLS: dict[str, Values] = {
    "two groups, biases": {
        **BALANCED,
        **SIGMOID,
        **TWO_GROUPS,
        "add_mlp_bias": True,
        "moe_router_bias": True,
    },
}
"""Options that no other fast test combines with ep."""


def test_biases_and_two_groups_over_ranks_that_share_experts_equal_one_process() -> None:
    (grouped,) = CELLS
    cases: list[tuple[Shape, str, Values]] = [
        ({"dp": 2, "ep": 2}, grouped, {STRATEGY: "optim_grads"}),
        ({"dp": 2, "ep": 1}, grouped, {STRATEGY: "optim_grads_params"}),
        ({"tp": 2, "ep": 2}, grouped, {"recompute_granularity": "full"}),
        ({"cp": 2, "ep": 2}, "as gpt-oss", {"mlp_chunk_tokens": 7}),
    ]
    check(2, [({**ONE, **shape}, name, WIDTH, options) for shape, name, options in cases])


def test_a_router_of_equal_rows_is_drawn_as_one() -> None:
    with watched(ODD):
        model = ParallelModel(config_of({**EQUAL_ROWS[ODD], **WIDTH}, {}), grid())
    (router_,) = (
        x for name, x in assemble([parameter_pieces(model)]).items() if "1.mlp.router" in name
    )
    assert len(np.unique(router_, axis=0)) == 7 and len(router_) == 15


PARTS = {3: 1, 4: 3, 8: 6}
SOME = [
    (ranks, part)
    for ranks, count in PARTS.items()
    for part in range(count)
    if ranks < 8 or part == 0
]
REST = [pytest.param(8, part, marks=pytest.mark.long) for part in range(1, PARTS[8])]
"""The remaining cases of the 65 on eight ranks, for `make test-all`."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "part"), [*SOME, *REST])
def test_every_grid_with_every_ep_equals_one_process(ranks: int, part: int) -> None:
    check(ranks, dealt(ranks)[part :: PARTS[ranks]])


@pytest.mark.slow
def test_rows_and_stages_over_two_ranks_equal_one_process() -> None:
    check(2, dealt(2)[:6:2] + dealt(2)[5:6])


def test_the_design_covers_what_a_grid_can_be_asked_for() -> None:
    cases = [case for ranks in (2, 3, 4, 8) for case in dealt(ranks) if case[0]["ep"] > 1]
    assert {name for _, name, _, _ in cases} == set(MODELS)
    kept = {(o["data_parallel_sharding_strategy"], o["recompute_granularity"]) for *_, o in cases}
    kept |= {(o["data_parallel_sharding_strategy"], o["activation_offload"]) for *_, o in cases}
    kept |= {
        (o["data_parallel_sharding_strategy"], o["num_virtual_stages_per_pipeline_rank"])
        for *_, o in cases
    }
    assert len(kept) == 3 * (3 + 2 + 2)
    met = {key: {options[key] for *_, options in cases} for key in cases[0][-1]}
    assert {key: len(values) for key, values in met.items()} == {
        "num_virtual_stages_per_pipeline_rank": 2,
        "pipeline_schedule": 2,
        "recompute_granularity": 3,
        "data_parallel_sharding_strategy": 3,
        "num_distributed_optimizer_instances": 2,
        "activation_offload": 2,
        "mlp_chunk_tokens": 3,
        "ddp_bucket_size": 2,
        "cp_comm_type": 5,
        "cp_layout": 4,
        "hierarchical_context_parallel_sizes": len(met["hierarchical_context_parallel_sizes"]),
    }
