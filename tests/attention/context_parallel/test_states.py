"""States along paths: rules and the short convolution on ranks equal the token-by-token reference."""

from __future__ import annotations

import functools
import resource
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.steps import QUICK_SIZES
from megacp.attention.context_parallel import state_plan, states
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.state_transport import StateTransport
from megacp.attention.ops import recurrence
from megacp.distributed.grid import build_grid, single_axis
from megacp.distributed.shape import GridShape
from megacp.engine.backends.native import NativeBackend
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.shard import shard_batch
from tests.ranks import grid, run_ranks
from tests.reference import recurrence as reference
from tests.reference.head_loss import peak_bytes_of
from tests.reference.packs import random_batch

GROUPS, HEADS, KEYS, VALUES, TAPS = 2, 4, 6, 5, 4
WEIGHT = 6
"""Index of the convolution's weight in `tensors_of`, the only tensor without tokens."""
TOKENS, SHORT_CHUNK = 47, 4
ROWS: dict[str, dict[str, Any]] = {
    "one document": {"documents": 1},
    "packed": {"documents": 5},
    "one-token documents": {"documents": 10_000},
    "two tokens": {"documents": 2, "tokens": 2},
    "branches and spans": {"documents": 3, "branches": True, "images": True},
    "trees with padding": {"documents": 2, "images": True, "padding": True, "depth": 5},
    "padding alone": {"documents": 0, "tokens": 9},
}
Case = tuple[str, str, int]
"""Row, layout and seed. With odd seeds heads are exchanged for sequence, if ranks divide 2 key
heads.
"""


def batch_of(case: Case) -> PackedBatch:
    return random_batch(
        np.random.default_rng([len(case[0]), case[2]]), **{"tokens": TOKENS, **ROWS[case[0]]}
    )


def tensors_of(tokens: int, local: np.ndarray) -> list[Tensor]:
    """Return q, k, v, log decay and beta; channels and their weight; gradients of both results. All
    of them are for some tokens.
    """
    g = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, n, d) for n, d in ((GROUPS, KEYS), (GROUPS, KEYS), (HEADS, VALUES))]
    q, k, v, dout = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in (*shapes, shapes[-1])
    )
    decay, beta = (torch.rand(tokens, HEADS, generator=g, dtype=torch.float64) for _ in range(2))
    x, dx = (torch.randn(tokens, 3, generator=g, dtype=torch.float64) for _ in range(2))
    every = [
        q,
        k,
        v,
        -3 * decay,
        beta,
        x,
        torch.randn(3, TAPS, generator=g, dtype=torch.float64),
        dout,
        dx,
    ]
    return [x if place == WEIGHT else x[local] for place, x in enumerate(every)]


def results(functions: tuple[Any, Any, Any], tensors: list[Tensor]) -> list[Tensor]:
    """Return the outputs of the delta rule and the convolution with all input gradients, then the
    same for Mamba-2.
    """
    *inputs, dout, dx = tensors
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, convolved = functions[0](*leaves[:5]), functions[1](*leaves[5:])
    dual = functions[2](*leaves[:4])
    found = (
        torch.autograd.grad((out, convolved), leaves, (dout, dx)),
        torch.autograd.grad(dual, leaves[:4], dout),
    )
    return [out.detach(), convolved.detach(), *found[0], dual.detach(), *found[1]]


@mock.patch.object(state_plan, "CHUNK", SHORT_CHUNK)
def on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    axis, found = grid(cp=world_size).cp if world_size > 1 else single_axis("cp"), []
    for case in cases:
        plan = shard_batch(batch_of(case), axis, LAYOUTS[case[1]]).plan
        here = tensors_of(plan.indices.size, plan.local)
        by_heads = case[2] % 2 == 1 and GROUPS % world_size == 0
        delta, dual = (
            StateTransport(rule, axis, by_heads, TAPS)
            for rule in (recurrence.gated_delta_rule, recurrence.state_space_dual)
        )
        functions = (
            functools.partial(delta.move, plan),
            functools.partial(delta.convolve, plan=plan),
            functools.partial(dual.move, plan),
        )
        found.append((plan.local, results(functions, here)))
    return found


@functools.cache
def expected(case: Case, tokens: int) -> list[Tensor]:
    leave = batch_of(case).with_padding_to(tokens).leave
    functions = reference.gated_delta_rule, reference.convolution, reference.state_space_dual
    along = [functools.partial(function, leave=leave) for function in functions]
    return results(tuple(along), tensors_of(tokens, np.arange(tokens)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_states_and_taps_follow_their_paths_over_ranks_under_every_layout(ranks: int) -> None:
    """Segments range from one token to more than a rank; chunks are shorter and longer than
    segments. float64 over 47 updates.
    """
    cases = [(row, layout, seed) for row in ROWS for layout in LAYOUTS for seed in range(2)]
    everyone = run_ranks(on_ranks, ranks, cases) if ranks > 1 else [on_ranks(0, 1, cases)]
    for number, case in enumerate(cases):
        tokens = np.concatenate([found[number][0] for found in everyone])
        want = expected((case[0], "", case[2]), len(tokens))
        for place, exact in enumerate(want):
            parts = [found[number][1][place] for found in everyone]
            if (
                place == 2 + WEIGHT
            ):  # the gradient of the convolution's weight is the sum over ranks
                error = (torch.stack(parts).sum(0) - exact).abs().max()
            else:
                error = (torch.cat(parts) - exact[tokens]).abs().max()
            assert error <= 1e-12 * exact.abs().max() + 1e-15, (case, place)


@pytest.mark.parametrize("rule", ["gated_delta_rule", "state_space_dual"])
def test_heads_one_after_the_other_are_the_same_in_less_memory(rule: str) -> None:
    plan = shard_batch(
        random_batch(np.random.default_rng(0), 96, documents=2),
        single_axis("cp"),
        LAYOUTS["zigzag"],
    ).plan
    *inputs, dout, _ = tensors_of(96, plan.local)
    leaves = [x.requires_grad_() for x in inputs[: 4 if rule == "state_space_dual" else 5]]

    def work() -> list[Tensor]:
        out = states.recur(getattr(recurrence, rule), plan, single_axis("cp"), *leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    together, peak = work(), peak_bytes_of(work)
    with mock.patch.object(states, "LARGE", 1):
        for one, other in zip(work(), together, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-12, atol=1e-12
            )  # float64, sums of a few hundred terms
        assert peak_bytes_of(work) < 0.75 * peak


def cleared_pages(rank: int, world_size: int) -> int:
    """Return the fewest page faults of three repeated forwards and backwards of a rule whose values
    take 4 MiB.
    """
    model = {**QUICK_SIZES, "linear_attention_freq": "[1]"}
    rule = NativeBackend(build_grid(GridShape(), 0), with_values(RunConfig(), model)).states(
        recurrence.gated_delta_rule
    )
    plan = shard_batch(
        random_batch(np.random.default_rng(0), 2048, documents=1),
        single_axis("cp"),
        LAYOUTS["zigzag"],
    ).plan
    heads = [(1, 128), (1, 128), (4, 128), (4,), (4,)]
    cleared = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        leaves = [torch.zeros(2048, *shape, requires_grad=True) for shape in heads]
        rule.move(plan, *leaves).sum().backward()
        cleared.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(cleared[1:])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap is what is set")
def test_what_a_rule_makes_on_its_way_is_not_mapped_anew_each_time() -> None:
    """Temporaries of the rule have about 80,000 pages."""
    assert run_ranks(cleared_pages, 1)[0] < 20_000


def traffic(rank: int, world_size: int, tokens: int, layout: str, rule: str) -> dict[str, int]:
    axis = grid(cp=world_size).cp
    batch = random_batch(np.random.default_rng(0), tokens, documents=1)
    plan = shard_batch(batch, axis, LAYOUTS[layout]).plan
    *inputs, dout, dx = tensors_of(plan.indices.size, plan.local)
    leaves = [x.requires_grad_() for x in inputs]
    before = axis.traffic.copy()
    convolved = states.short_convolution(*leaves[5:], plan, axis)
    inputs = leaves[: 4 if rule == "state_space_dual" else 5]
    out = states.recur(getattr(recurrence, rule), plan, axis, *inputs)
    torch.autograd.grad(convolved, leaves[5:], dx)
    torch.autograd.grad(out, inputs, dout)
    return dict(axis.traffic - before)


def test_messages_are_maps_and_a_few_rows_whatever_the_length() -> None:
    """One document on three ranks sends A and B for each segment that another segment continues:
    one per rank in a contiguous layout, two on rank 1 in zigzag. Gradients have the size of B. The
    convolution sends three rows of channels before each segment, and their gradients. A rule with
    one decay per head sends a single column of A.
    """
    size, ranks = 8, 3
    columns = {"gated_delta_rule": KEYS, "state_space_dual": 1}
    for layout, most, sent, came in (
        ("contiguous", 1, (3, 3, 0), (0, 3, 3)),
        ("zigzag", 2, (3, 6, 3), (3, 6, 3)),
    ):
        maps = {
            rule: size * most * HEADS * KEYS * (of_turn + 2 * VALUES) * 2
            for rule, of_turn in columns.items()
        }
        rows = [size * 3 * (there + back) for there, back in zip(sent, came, strict=True)]
        for tokens, rule in (
            (48, "gated_delta_rule"),
            (192, "gated_delta_rule"),
            (192, "state_space_dual"),
        ):
            found = run_ranks(traffic, ranks, tokens, layout, rule)
            assert [(one["all_gather"], one["all_to_all"]) for one in found] == [
                (maps[rule], row) for row in rows
            ]
