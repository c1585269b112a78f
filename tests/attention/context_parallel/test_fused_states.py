"""A kernel for whole sequences gives the same results as our gated delta rule.

A reference with the parameters of the package replaces the kernel.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacp.attention.context_parallel import fused_states
from megacp.attention.context_parallel.fused_states import (
    FUSED,
    flash_linear_attention,
    fused_convolved,
    fused_recur,
    linear_attention_problem,
)
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.states import recur, recur_by_heads
from megacp.attention.ops.recurrence import convolved_delta_rule, gated_delta_rule
from megacp.distributed.grid import single_axis
from megacp.engine.rows.shard import shard_batch
from megacp.engine.step.step import ParallelModel
from tests.attention.context_parallel.test_states import (
    GROUPS,
    ROWS,
    TOKENS,
    Case,
    batch_of,
    tensors_of,
)
from tests.ranks import grid, run_ranks
from tests.reference.fused import chunk_gated_delta_rule
from tests.reference.training import QWEN3_5, config_of, step_batches, train


def both(rank: int, world_size: int, cases: list[Case]) -> list[list[list[torch.Tensor]]]:
    """Return out and all gradients on a rank, by our rule and by the kernel. Ranks with only
    padding (last seed) take part too.
    """
    axis, found = grid(cp=world_size).cp if world_size > 1 else single_axis("cp"), []
    for case in cases:
        batch = batch_of(case)
        plan = shard_batch(
            batch.with_padding_to(3 * TOKENS) if case[2] == 2 else batch, axis, LAYOUTS[case[1]]
        ).plan
        tensors = tensors_of(plan.indices.size, plan.local)
        for run in (recur, gated_delta_rule), (fused_recur, chunk_gated_delta_rule):
            move = functools.partial(*run)
            if case[2] == 1 and GROUPS % world_size == 0:
                move = functools.partial(recur_by_heads, move)
            leaves = [x.clone().requires_grad_() for x in tensors[:5]]
            out = move(plan, axis, *leaves)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, tensors[-2])])
    return [found[::2], found[1::2]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_kernel_over_levels_and_ranks_equals_our_rule(ranks: int) -> None:
    """Both are in float64, over 47 updates."""
    cases = [(row, layout, seed) for row in ROWS for layout in LAYOUTS for seed in range(3)]
    everyone = run_ranks(both, ranks, cases) if ranks > 1 else [both(0, 1, cases)]
    for number, case in enumerate(cases):
        ours, kernel = (
            zip(*(found[way][number] for found in everyone), strict=True) for way in range(2)
        )
        for place, (exact, got) in enumerate(
            zip(map(torch.cat, ours), map(torch.cat, kernel), strict=True)
        ):
            assert (got - exact).abs().max() <= 1e-12 * exact.abs().max(), (case, place)


def test_both_passes_of_the_kernel_have_memory_for_what_triton_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA, backward runs in a separate thread, in which no allocator is set."""
    lent = list[torch.device]()
    monkeypatch.setattr(fused_states, "lend_scratch", lent.append)
    plan = shard_batch(
        batch_of((next(iter(ROWS)), "contiguous", 0)), single_axis("cp"), LAYOUTS["contiguous"]
    ).plan
    leaves = [x.requires_grad_() for x in tensors_of(plan.indices.size, plan.local)[:5]]
    out = fused_recur(chunk_gated_delta_rule, plan, single_axis("cp"), *leaves)
    forward = len(lent)
    out.sum().backward()
    assert 0 < forward < len(lent) and {*lent} == {torch.device("cpu")}


def test_a_row_of_the_table_decides_which_one_a_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls = config_of(QWEN3_5, {}), []

    def kernel(*inputs: torch.Tensor, **options: Any) -> Any:
        calls.append(inputs)
        return chunk_gated_delta_rule(*inputs, **options)

    ours = train(grid(), config, [step_batches(3, 1)])
    assert {row[1:] for row in FUSED} == {("cuda", torch.bfloat16)} and not calls
    monkeypatch.setitem(FUSED, (convolved_delta_rule, "cpu", torch.float64), fused_convolved)
    monkeypatch.setattr(fused_states, "flash_linear_attention", lambda: kernel)
    assert ParallelModel(config, grid()).backend.warnings() == [
        "states: kernels of flash-linear-attention"
    ]
    fused = train(grid(), config, [step_batches(3, 1)])
    assert calls and fused[0][0] == pytest.approx(ours[0][0], rel=1e-11)
    monkeypatch.setattr(fused_states, "flash_linear_attention", lambda: None)
    (told,) = ParallelModel(config, grid()).backend.warnings()
    assert "plain torch, because flash-linear-attention is not installed" in told


def test_the_package_is_taken_where_it_and_its_compiler_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace())
    package = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", package)
    monkeypatch.setattr(fused_states, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kinds = (
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.7.1", False),
        ((8, 0), "3.6.0", False),
        ((9, 0), "3.3.1", False),
    )
    for capability, release, refused in kinds:
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda capability=capability: capability
        )
        monkeypatch.setattr(fused_states, "version", lambda name, release=release: release)
        assert (
            (flash_linear_attention() is None)
            == refused
            == (f"Triton {release}" in str(linear_attention_problem()))
        )
    monkeypatch.setattr(fused_states, "find_spec", lambda name: object() if name == "fla" else None)
    assert flash_linear_attention() is None


def test_the_stand_in_has_the_parameters_of_the_package() -> None:
    package = pytest.importorskip(
        "fla.ops.gated_delta_rule", reason="fla is not installed (extra: fla)"
    )
    theirs, ours = (
        {name: one.default for name, one in inspect.signature(function).parameters.items()}
        for function in (package.chunk_gated_delta_rule, chunk_gated_delta_rule)
    )
    assert theirs == ours
