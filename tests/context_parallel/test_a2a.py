"""Heads for sequence: how heads are dealt, and that any deal is exact."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacp.core.context_parallel.a2a import HeadsForSequence, WholeHeadsForSequence, dot_products, stand_in
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.local import LocalAttention
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.context_parallel.sizes import AttentionSizes, head_messages, head_shares
from megacp.core.distributed.grid import single_axis
from megacp.core.ops.flex import FlexKernel
from megacp.core.ops.kernel import QKV
from megacp.core.ops.tile_kernels import MathKernel
from tests.context_parallel.test_attention import DIM, Case, attend, batch_of, compare, on_ranks, qkv_and_gradient
from tests.ops.test_flex import dense
from tests.ranks import grid, run_ranks
from tests.reference.packs import random_batch


@pytest.mark.parametrize(
    ("world_size", "heads", "hierarchies"),
    [
        (3, (6, 2), [(3, 1)]),  # the middle rank has a head of either group
        (3, (8, 4), [(3, 1)]),  # two and one head of neighbouring groups: two runs on a rank
        (4, (6, 2), [(2, 2), (4, 1), (1, 4)]),  # three heads of a group over two ranks
        (4, (6, 6), [(2, 2)]),  # six groups over four ranks
        (6, (8, 2), [(2, 3), (3, 2), (6, 1)]),  # four heads of a group over three ranks
        (6, (28, 4), [(3, 2)]),  # 7 + 2, 5 + 5, 2 + 7 heads: a ring for each run
        pytest.param(8, (8, 1), [(2, 4), (4, 2), (8, 1)], marks=pytest.mark.slow),  # one K/V head for all
    ],
    ids=str,
)
@pytest.mark.slow
def test_heads_that_do_not_divide_by_the_ranks_are_dealt_unevenly(
    world_size: int, heads: tuple[int, int], hierarchies: list[tuple[int, int]]
) -> None:
    """Would catch K/V heads that go to the wrong rank, and replicated ones whose gradients are not summed."""
    cases = [Case("a2a", "balanced", mask, heads=heads) for mask in ("holes", "causal")]
    cases += [Case("a2a+p2p", layout, "holes", heads=heads, hierarchy=h) for h in hierarchies for layout in LAYOUTS]
    compare(run_ranks(on_ranks, world_size, cases), cases, 1e-12)


class Once:
    """`flex_attention` in float64, differentiated by autograd; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def __call__(self, *qkv: torch.Tensor, **options: object) -> torch.Tensor:
        self.calls.append(torch.is_grad_enabled())
        return dense(*qkv, **options)


def whole_on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[list, list[bool], int]]:
    """As `on_ranks`, by a kernel that autograd differentiates, with its calls and the bytes sent."""
    found, cp = [], grid(cp=world_size).cp
    for case in cases:
        batch = shard_batch(batch_of(case), cp, LAYOUTS[case.layout])
        kernel = Once()
        cp.traffic.clear()
        transport = WholeHeadsForSequence(cp, FlexKernel(kernel, 8))
        results = attend(batch, transport, qkv_and_gradient(case, batch.num_tokens * world_size))
        sent = cp.traffic.total
        found.append(([(batch.plan.local, results)], kernel.calls, sent))
    return found


@pytest.mark.parametrize(("world_size", "heads"), [(2, (4, 2)), (3, (8, 4)), (4, (6, 2))], ids=str)
def test_a_kernel_that_autograd_differentiates_runs_once(world_size: int, heads: tuple[int, int]) -> None:
    """Would catch a backward that makes the forward again, dot products that nobody needs, and gradients of replicated
    K/V heads that are not summed. 6 heads of 2 groups over 4 ranks are dealt unevenly, and a rank may have two runs.
    """
    cases = [Case("a2a", "balanced", mask, heads=heads) for mask in ("holes", "causal")]
    ranks = run_ranks(whole_on_ranks, world_size, cases)
    for number, case in enumerate(cases):
        compare([rank[number][0] for rank in ranks], [case], 1e-12)
        for rank, found in enumerate(ranks):
            _, calls, sent = found[number]
            shares = head_shares(*heads, world_size)
            assert calls == [True] * len(shares[rank].runs)
            tokens = len(found[number][0][0][0])
            messages = head_messages(AttentionSizes(tokens, *heads, DIM, 8, 8), world_size, rank)
            dots = tokens * 8 * (heads[0] - len(range(heads[0])[shares[rank].heads]))
            assert sent == sum(dataclasses.astuple(messages)) - dots


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 2), (5, 5), (28, 4)], ids=str)
def test_every_head_is_dealt_once_beside_its_group(heads: tuple[int, int]) -> None:
    """Runs lie in order, and each of a run's groups serves equally many of its heads."""
    count, groups = heads
    for ranks in range(1, count + 1):
        shares = head_shares(count, groups, ranks)
        assert [h for share in shares for h in range(count)[share.heads]] == list(range(count))
        for share in shares:
            served = [run.heads // run.groups for run in share.runs for _ in range(run.groups)]
            found = [g for g, times in zip(range(groups)[share.groups], served, strict=True) for _ in range(times)]
            assert found == [h // (count // groups) for h in range(count)[share.heads]]
    with pytest.raises(ValueError, match=rf"{count + 1} ranks a head of its own, there are {count} heads"):
        head_shares(count, groups, count + 1)


def best_deal(heads: int, groups: int, ranks: int) -> tuple[int, int]:
    """Brute force over all ways to cut the heads: the least largest share, and then the fewest K/V heads on ranks."""
    deals = []
    for inner in itertools.combinations(range(1, heads), ranks - 1):
        cuts = list(itertools.pairwise((0, *inner, heads)))
        copies = sum(len({head // (heads // groups) for head in range(*cut)}) for cut in cuts)
        deals.append((max(high - low for low, high in cuts), copies))
    return min(deals)


SMALL = [(groups * each, groups) for groups in range(1, 5) for each in range(1, 5) if groups * each <= 12]


@pytest.mark.parametrize("heads", SMALL, ids=str)
def test_no_deal_has_a_smaller_largest_share_or_as_small_a_one_with_fewer_keys(heads: tuple[int, int]) -> None:
    for ranks in range(1, heads[0] + 1):
        shares = head_shares(*heads, ranks)
        most = max(len(range(heads[0])[share.heads]) for share in shares)
        copies = sum(len(range(heads[1])[share.groups]) for share in shares)
        assert (most, copies) == best_deal(*heads, ranks)


@pytest.mark.parametrize(
    ("heads", "ranks", "shares", "over_mean"),
    [
        ((6, 2), 3, [2, 2, 2], 1.0),
        ((28, 4), 6, [5, 4, 5, 5, 4, 5], 1.08),
        ((28, 4), 3, [10, 9, 9], 1.08),
        ((40, 8), 6, [7, 7, 7, 7, 6, 6], 1.05),
        ((32, 8), 8, [4] * 8, 1.0),
    ],
    ids=str,
)
def test_the_slowest_rank_has_little_more_than_the_mean(
    heads: tuple[int, int], ranks: int, shares: list[int], over_mean: float
) -> None:
    """Whole groups would give 6/2 over 3 ranks as 3, 1, 2 and 28/4 over 6 as 7, 3, 4, 7, 3, 4: 1.5 times the mean."""
    found = [len(range(heads[0])[share.heads]) for share in head_shares(*heads, ranks)]
    assert sorted(found) == sorted(shares)
    assert max(found) / (heads[0] / ranks) <= over_mean


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_stands_for_the_output_has_its_dot_product_with_the_gradient(dtype: torch.dtype) -> None:
    """Rows of zeros and of gradients that underflow when squared are among them."""
    g = torch.Generator().manual_seed(0)
    out, dout = (torch.randn(64, 3, 8, generator=g).to(dtype) for _ in range(2))
    dout[::4] = 0.0
    dout[1::4] *= 1e-30
    dots = dot_products(out, dout)
    found = stand_in(dout, dots)
    assert found.dtype == dtype and int((found != 0).sum(-1).max()) == 1
    exact = (out.double() * dout.double()).sum(-1)
    # sums of 8 products in the accumulation dtype, then one rounding to the dtype of the gradient
    summed = 8 * torch.finfo(dots.dtype).eps * (out.double() * dout.double()).abs().sum(-1)
    error = ((found.double() * dout.double()).sum(-1) - exact).abs()
    assert (error <= summed + torch.finfo(dtype).eps * exact.abs()).all()
    assert found.abs().max() <= 8 * out.abs().max()


class Writes(TorchDispatchMode):
    """Bytes that copying operations write; messages, arithmetic and empty tensors are left out."""

    COPIES = (
        "cat",
        "stack",
        "clone",
        "copy_",
        "_to_copy",
        "add_",
        "index",
        "index_put_",
        "index_select",
        "index_copy_",
    )

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.COPIES:
            self.bytes += sum(x.numel() * x.element_size() for x in tree_leaves(result))
        return result


class NoAttention(LocalAttention):
    """Returns its queries as the output, and its inputs as gradients."""

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return qkv[0], (*qkv, qkv[0], qkv[0][..., 0])

    def backward(self, kept: tuple[torch.Tensor, ...], dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        return dout, kept[1], kept[2]


def copied(rank: int, world_size: int, heads: tuple[int, int]) -> tuple[int, int]:
    """Elements that either pass copies; the own block of an exchange is gloo's, which is not looked into."""
    cp = dataclasses.replace(grid(cp=world_size).cp, local=None)
    batch = shard_batch(random_batch(np.random.default_rng(0), 48, documents=3), cp, LAYOUTS["zigzag"])
    q, k, v = (torch.ones(batch.num_tokens, count, 8) for count in (heads[0], heads[1], heads[1]))
    transport = HeadsForSequence("a2a", cp, NoAttention(single_axis("inner"), MathKernel()))
    with Writes() as forward:
        out, kept = transport.forward((q, k, v), batch.plan, 1.0)
    with Writes() as backward:
        transport.backward(kept, out, batch.plan, 1.0)
    return forward.bytes // 4, backward.bytes // 4


@pytest.mark.parametrize("heads", [(8, 4), (6, 3), (7, 1)], ids=str)
def test_what_travels_is_copied_once_where_it_leaves_and_once_where_it_arrives(heads: tuple[int, int]) -> None:
    """Over all ranks: with q, k, v and back the output, in backward with a number a head besides.

    A rank reads a K/V head for each other rank that needs it, so replicated ones count as often as they are sent.
    """
    world = 2
    shares = head_shares(*heads, world)
    tokens, width = 48 // world, 8
    keys = sum(share.groups.stop - share.groups.start for share in shares)
    there, back = tokens * width * (heads[0] + 2 * keys), tokens * width * heads[0]
    results = run_ranks(copied, world, heads)
    forward, backward = (sum(result[number] for result in results) for number in (0, 1))
    assert forward == world * 2 * (there + back)
    assert backward == world * 2 * (there + back + tokens * heads[0])
