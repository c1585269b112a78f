"""Heads for sequence: K/V heads that do not divide by the ranks, and a kernel that autograd differentiates."""

from __future__ import annotations

import pytest
import torch

from megacp.core.context_parallel.a2a import HeadsForSequence, key_copies
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.context_parallel.transport import WholeAttention
from megacp.core.ops.flex import FlexKernel
from tests.context_parallel.test_attention import Case, attend, batch_of, compare, on_ranks, qkv_and_gradient
from tests.ops.test_flex import dense
from tests.ranks import grid, run_ranks


@pytest.mark.parametrize(
    ("world_size", "heads", "hierarchies"),
    [
        (2, (6, 3), [(1, 2)]),  # 3 groups over 2 ranks: a copy of each K/V head for each of its query heads
        pytest.param(4, (12, 2), [(2, 2), (4, 1), (1, 4)], marks=pytest.mark.slow),  # 2 groups over 4 ranks
        pytest.param(6, (12, 4), [(2, 3), (3, 2)], marks=pytest.mark.slow),  # 4 groups over 6 ranks
        pytest.param(8, (8, 1), [(2, 4), (8, 1)], marks=pytest.mark.slow),  # one K/V head for all
    ],
    ids=str,
)
def test_key_heads_need_not_divide_by_the_ranks(
    world_size: int, heads: tuple[int, int], hierarchies: list[tuple[int, int]]
) -> None:
    cases = [Case("a2a", "balanced", mask, heads=heads) for mask in ("holes", "causal")]
    cases += [Case("a2a+p2p", layout, "holes", heads=heads, hierarchy=h) for h in hierarchies for layout in LAYOUTS]
    compare(run_ranks(on_ranks, world_size, cases), cases, 1e-12)


def test_copies_are_as_few_as_divide_by_the_ranks() -> None:
    found = [key_copies(*sizes) for sizes in ((8, 8, 2), (8, 2, 2), (8, 2, 8), (12, 4, 6), (8, 1, 4))]
    assert found == [1, 1, 4, 3, 4]
    with pytest.raises(ValueError, match="--context-parallel-size"):
        key_copies(8, 2, 3)


def test_gradients_of_copies_are_summed_wider_than_they_travel() -> None:
    results = run_ranks(copies_on_rank, 4)
    for dv in results:
        assert torch.equal(dv, torch.full_like(dv, 260.0))


def copies_on_rank(rank: int, world_size: int) -> torch.Tensor:
    """dv of tokens that see themselves alone; 8 query heads, a K/V head copied to each rank: 256, 1, 1, 1."""
    cp = grid(cp=world_size).cp
    batch = shard_batch(batch_of(Case("", "", "one-token documents", 4)), cp, LAYOUTS["contiguous"])
    q, k, v = (torch.ones(1, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 1, 1))
    dout = torch.tensor([256.0, 0, 1, 0, 1, 0, 1, 0], dtype=torch.bfloat16)[None, :, None].expand(1, 8, 8)
    transport = HeadsForSequence("a2a", cp, WholeAttention(FlexKernel(Once(), 8)))
    return torch.autograd.grad(transport.attend(q, k, v, batch.plan, 1.0), v, dout)[0]


class Once:
    """`flex_attention` differentiated by autograd; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def __call__(self, *qkv: torch.Tensor, **options: object) -> torch.Tensor:
        self.calls.append(torch.is_grad_enabled())
        return dense(*qkv, **options)


def whole_on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[list, list[bool]]]:
    """As `on_ranks`, by a kernel that autograd differentiates, with its calls."""
    found, cp = [], grid(cp=world_size).cp
    for case in cases:
        batch, kernel = shard_batch(batch_of(case), cp, LAYOUTS[case.layout]), Once()
        transport = HeadsForSequence("a2a", cp, WholeAttention(FlexKernel(kernel, 8)))
        results = attend(batch, transport, qkv_and_gradient(case, batch.num_tokens * world_size))
        found.append(([(batch.plan.local, results)], kernel.calls))
    return found


def test_a_kernel_that_autograd_differentiates_runs_once() -> None:
    cases = [Case("a2a", "balanced", mask, heads=(4, 2)) for mask in ("holes", "causal")]
    ranks = run_ranks(whole_on_ranks, 2, cases)
    for number, case in enumerate(cases):
        compare([rank[number][0] for rank in ranks], [case], 1e-12)
        assert all(rank[number][1] == [True] for rank in ranks)
