"""Transformer Engine's context parallelism over gloo, called through megacp's attention.

Its autograd functions, token order, groups and cumulative lengths are the real ones; cuDNN's calls
are replaced by reference math (engine_math.py). In float64 the tolerance is 1e-11: some thousand
roundings of sums of up to ten terms of size one. A token in a wrong place causes an error of size
one. In bfloat16 the ring's sums are less accurate; the tests state by how much.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import WholeAttention
from megacp.attention.ops.cudnn import CudnnKernel, fused_calls
from megacp.attention.ops.kernel import Heads, Kernel
from megacp.attention.ops.kernels import auto_kernel, select_kernel
from megacp.attention.ops.mask import Metadata, Reach, allowed, tile_table
from megacp.attention.ops.tile_kernels import MathKernel, dense_attention
from megacp.distributed.grid import build_grid, single_axis
from megacp.distributed.shape import GridShape
from megacp.engine.backends.native import NativeBackend
from megacp.engine.backends.thd import Sequences, thd_sequences
from megacp.engine.backends.transformer_engine import packed_attention, selector_problem
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig, with_values
from tests.attention.ops.test_kernels import by_autograd, by_tiles
from tests.engine.backends.engine_layers import UTILITIES
from tests.engine.backends.engine_math import UTILS, emulated, selecting
from tests.engine.backends.engine_stub import NEWEST, needs_engine, needs_release
from tests.ranks import grid, run_ranks

TOLERANCE = 1e-11


class Case(NamedTuple):
    """A computation, and the layout and transport that perform it."""

    lengths: tuple[int, ...]
    padding: int = 0
    comm_type: str = "p2p"
    inner: int = 1
    layout: str = "zigzag_document"
    heads: Heads = Heads(8, 4, 8)
    dtype: torch.dtype = torch.float64
    release: str = NEWEST
    window: int = 0


pytestmark = needs_engine


def row(
    lengths: tuple[int, ...], padding: int, cp: int, layout: str = "zigzag_document"
) -> Metadata:
    """Return a row of documents with these lengths and the padding that the layout needs."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    document = np.append(document, np.full(padding, -1))

    def metadata(document: np.ndarray) -> Metadata:
        return Metadata.of_documents(document)

    chosen = LAYOUTS["contiguous" if cp == 1 else layout]
    length = chosen.padded_length(metadata(document), cp, 1)
    return metadata(np.append(document, np.full(length - len(document), -1)))


def plan_of(
    metadata: Metadata, cp: int, rank: int, layout: str = "zigzag_document"
) -> AttentionPlan:
    chosen = LAYOUTS["contiguous" if cp == 1 else layout]
    return AttentionPlan(chosen.deal(metadata, cp), metadata, rank)


def tensors(tokens: int, heads: Heads, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the output for a whole row."""
    generator = torch.Generator().manual_seed(5)
    sizes = (heads.heads, heads.groups, heads.groups, heads.heads)
    return [
        torch.randn(tokens, n, heads.dim, generator=generator, dtype=torch.float64).to(dtype)
        for n in sizes
    ]


def reference(metadata: Metadata, case: Case) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of the whole row from one dense softmax in float64."""
    q, k, v, dout = (x.double() for x in tensors(len(metadata), case.heads, case.dtype))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    real = torch.from_numpy(metadata.document >= 0)
    mask = torch.from_numpy(allowed(metadata, metadata, Reach(case.window)))
    out = dense_attention(q, k, v, mask, case.heads.dim**-0.5)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout * real[:, None, None])]


def errors(
    found: list[torch.Tensor], expected: list[torch.Tensor], indices: np.ndarray
) -> list[tuple[float, float]]:
    """Return two errors of each tensor.

    The first is the largest error relative to the largest value, and the second this rank's share
    of the square of the relative error in the 2-norm.
    """
    apart = [(a - b[torch.from_numpy(indices)]).abs() for a, b in zip(found, expected, strict=True)]
    norms = [(float(b.abs().max()), float(b.square().sum())) for b in expected]
    return [
        (float(x.max()) / most, float(x.square().sum()) / squares)
        for x, (most, squares) in zip(apart, norms, strict=True)
    ]


def packed_errors(rank: int, world: int, case: Case, kernel: str = "") -> list[tuple[float, float]]:
    """Return the errors of out, dq, dk, dv on this rank, including padding, where all must be 0.

    `kernel` selects megacp's transport instead.
    """
    heads, axis, cpu = case.heads, grid(cp=world).cp, torch.device("cpu")
    model = ModelConfig(
        hidden_size=heads.heads * heads.dim,
        num_attention_heads=heads.heads,
        num_query_groups=heads.groups,
    )
    metadata = row(case.lengths, case.padding, world, case.layout)
    plan = plan_of(metadata, world, rank, case.layout).within(Reach(case.window))
    whole = tensors(len(metadata), heads, case.dtype)
    mine = torch.from_numpy(plan.local)
    q, k, v = (x[mine].requires_grad_() for x in whole[:3])
    with emulated(case.release, case.dtype):
        if kernel:
            where, sizes = (
                torch.device("cuda" if kernel == "cudnn" else "cpu"),
                (case.inner, world // case.inner),
            )
            transport = select_transport(
                case.comm_type, kernel, axis, where, sizes, tell=TOLD.append
            )
            out = transport.attend(q, k, v, plan, heads.dim**-0.5)
        else:
            sequences = thd_sequences(plan)
            assert isinstance(sequences, Sequences), sequences
            packed = packed_attention(
                model, single_axis("tp"), axis, case.comm_type, case.inner, cpu
            )
            with asked() as params:
                asking = (
                    packed,
                    heads,
                    case.dtype,
                    len(metadata),
                    int(sequences.padded.max()),
                    case.window,
                )
                assert selector_problem(*asking) is None and isinstance(
                    packed.sequences(plan), Sequences
                )
                out = packed(q, k, v, plan, sequences)
            assert not (found := differences(*params)), found
        # the next layer may send any gradient for padding; it must not affect any token
        out.backward(whole[3][mine])
    return errors([out.detach(), q.grad, k.grad, v.grad], reference(metadata, case), plan.local)


@contextmanager
def asked() -> Iterator[list[Any]]:
    """Record the questions to the selector."""
    utils, found = sys.modules[UTILS], list[Any]()
    select = utils.get_attention_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            utils, "get_attention_backend", lambda params: found.append(params) or select(params)
        )
        yield found


OF_A_ROW = (
    "batch_size",
    "max_seqlen_q",
    "max_seqlen_kv",
    "num_tokens_q",
    "num_tokens_kv",
    "pad_between_seqs",
)


def differences(start: Any, forward: Any) -> list[str]:
    """Return the differences between the question at the start of a run and the question of a
    forward.

    Arguments that depend on a row are left out.
    """
    names = {field.name for field in fields(start)} - {*OF_A_ROW, "fp8_meta"}
    return [name for name in names if getattr(start, name) != getattr(forward, name)]


PACKS = [((32,), 0), ((24, 8, 40), 0), ((19, 5, 1, 30), 0), ((11, 20), 13)]


@pytest.mark.parametrize("lengths, padding", PACKS)
@pytest.mark.slow
def test_packed_attention_of_one_rank_is_the_dense_one(
    lengths: tuple[int, ...], padding: int
) -> None:
    found = run_ranks(packed_errors, 1, Case(lengths, padding, layout="contiguous"))
    assert np.max(found) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "comm_type, inner", [("p2p", 1), ("all_gather", 1), ("a2a", 1), ("a2a+p2p", 2)]
)
@pytest.mark.parametrize("lengths, padding", PACKS)
def test_packed_attention_of_several_ranks_is_the_dense_one(
    comm_type: str, inner: int, ranks: int, lengths: tuple[int, ...], padding: int
) -> None:
    if inner < ranks:
        found = run_ranks(packed_errors, ranks, Case(lengths, padding, comm_type, inner))
        assert np.max(found) < TOLERANCE


LONG = (50, 5, 1, 90)
MANY = [
    (3, Case(LONG)),
    (3, Case(LONG, comm_type="all_gather")),
    (3, Case(LONG, comm_type="a2a", heads=Heads(6, 6, 8))),
    (8, Case(LONG)),
    (8, Case(LONG, comm_type="a2a", heads=Heads(16, 16, 8))),
    (8, Case(LONG, comm_type="a2a+p2p", inner=2)),
    *(
        (2, Case(LONG, comm_type=comm_type, window=window))
        for comm_type in ("a2a", "all_gather")
        for window in (2, 7, 70)
    ),
    (3, Case(LONG, comm_type="all_gather", window=33)),
    *(
        (2, Case(LONG, comm_type=comm_type, release="2.18"))
        for comm_type in ("p2p", "all_gather", "a2a")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, case",
    [
        pytest.param(*some, marks=needs_release(some[1].release), id=str(i))
        for i, some in enumerate(MANY)
    ],
)
def test_an_odd_and_a_large_number_of_ranks_and_the_least_release_are_the_dense_one(
    ranks: int, case: Case
) -> None:
    assert np.max(run_ranks(packed_errors, ranks, case)) < TOLERANCE


@pytest.mark.slow
def test_sums_of_halves_cost_the_ring_a_rounding_for_each_rank_and_ours_none() -> None:
    """A ring of n ranks adds n results in bfloat16, and each result is rounded before.

    The error is at most n u times their sizes with u = 2^-8 (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.4), here relative to the largest value. megacp's ring adds in float32.
    """
    found = {}
    for ranks, native in itertools.product((1, 3, 8), ("", "math")):
        layout = "contiguous" if ranks == 1 else "zigzag_document"
        case = Case((192, 96), layout=layout, heads=Heads(4, 2, 16), dtype=torch.bfloat16)
        each = np.array(run_ranks(packed_errors, ranks, case, native))  # [ranks, 4, 2]
        assert each[..., 0].max() < ranks * 2.0**-8 or native == "math"
        found[ranks, native] = np.sqrt(each[..., 1].sum(0))
    for ranks, least in ((3, 1.2), (8, 1.5)):
        assert (found[ranks, ""] > least * found[1, ""]).all()
        assert (found[ranks, "math"] < 1.3 * found[1, "math"]).all()


TOLD: list[str] = []
"""Log lines of the kernel that chooses by row."""
DEALT = [((19, 5, 1, 30), 13), ((5, 1), 40), ((64,), 0)]
"""Document lengths and padding. The second row leaves some ranks without tokens."""


def kernel_errors(rank: int, world: int, transports: list[str]) -> float:
    """Return the largest error of cuDNN's kernel over layouts and packs."""
    heads, inner = (
        Heads(*{1: (4, 2), 3: (6, 2), 8: (16, 4)}.get(world, (8, 2)), 8),
        2 if world % 2 == 0 else 1,
    )
    cases = [
        Case(lengths, padding, comm_type, inner, layout, heads)
        for comm_type, layout, (lengths, padding) in itertools.product(transports, LAYOUTS, DEALT)
        if "p2p" != comm_type[4:] or inner > 1
    ]
    cases += [
        Case(LONG, 3, "a2a", layout=layout, heads=heads, window=7)
        for layout in ("contiguous", "balanced")
    ]
    worst = max(np.max(packed_errors(rank, world, case, "cudnn")) for case in cases)
    assert set(TOLD) == {"attention: using cuDNN for documents with a causal mask"}
    return float(worst)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_cudnns_kernel_in_our_transports_is_the_dense_one_under_every_layout(ranks: int) -> None:
    transports = ["p2p", "all_gather", "kv_exchange", "a2a", "a2a+p2p"] if ranks > 1 else ["p2p"]
    assert max(run_ranks(kernel_errors, ranks, transports)) < TOLERANCE


def by_parts(kernel: Kernel, device: str, case: Case, cp: int) -> Any:
    """Return out, dq, dk, dv of a row from two calls per rank, and the exact values.

    A rank first processes its keys, then all other keys.
    """
    metadata, scale = row(case.lengths, case.padding, cp, case.layout), case.heads.dim**-0.5
    given = tensors(len(metadata), case.heads, case.dtype)
    found = [torch.zeros_like(x, dtype=torch.float64) for x in (given[0], *given[:3])]
    q, k, v, dout = (x.to(device) for x in given)
    for rank in range(cp):
        plan = plan_of(metadata, cp, rank, case.layout)
        others = np.setdiff1d(plan.indices, plan.local)
        sources = [(plan.local, plan.table(rank)), (others, plan.tiles(plan.local, others))]
        out, dq, dk, dv = (
            x.cpu().double()
            for x in by_tiles(kernel, [q[plan.local], k, v, dout[plan.local]], sources, scale)
        )
        found[0][plan.local], found[1][plan.local] = out, dq
        found[2] += dk
        found[3] += dv
    return zip(
        found,
        by_autograd([x.double() for x in given], allowed(metadata, metadata), scale),
        strict=True,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_cudnns_kernel_are_merged_to_the_dense_one(layout: str) -> None:
    with emulated():
        kernel = select_kernel("cudnn", torch.device("cuda"))
        for lengths, padding in DEALT:
            for found, exact in by_parts(kernel, "cpu", Case(lengths, padding, layout=layout), 3):
                assert (found - exact).abs().max() < TOLERANCE * exact.abs().max()


def whole_row(
    kernel: Kernel, device: str, heads: Heads, dtype: torch.dtype, window: int = 0
) -> Any:
    """Return the same from a single call on a rank with the whole row, including padding."""
    metadata = Metadata.of_documents(np.repeat([-1, 0, -1, 1, 2, -1], [3, 90, 2, 1, 40, 5]))
    plan = AttentionPlan(np.arange(141)[None], metadata, 0).within(Reach(window))
    given = tensors(141, heads, dtype)
    q, k, v, dout = (x.to(device).requires_grad_() for x in given)
    out = WholeAttention(kernel).attend(q, k, v, plan, heads.dim**-0.5)
    found = [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]
    exact = by_autograd(
        [x.double() for x in given], allowed(metadata, metadata, plan.reach), heads.dim**-0.5
    )
    return zip(found, exact, strict=True)


@pytest.mark.parametrize("window", [0, 17, 90])
def test_a_whole_row_of_cudnns_kernel_is_the_dense_one_whose_padding_sees_nothing(
    window: int,
) -> None:
    with emulated():
        kernel = select_kernel("cudnn", torch.device("cuda"))
        for found, exact in whole_row(kernel, "cpu", Heads(4, 2, 8), torch.float64, window):
            assert (found - exact).abs().max() < TOLERANCE * exact.abs().max()


MORE = "their mask is not causal per document"


def test_rows_that_cudnn_does_not_take_are_left_to_another_kernel() -> None:
    plan, heads = plan_of(row((20, 12), 0, 2), 2, 0), Heads(4, 2, 8)
    images = Metadata.of_documents(np.zeros(12, int), span=np.repeat([0, 1], 6))
    chunked = Metadata.of_documents(
        np.zeros(4, int), span=np.repeat([1, 0], [3, 1])
    )  # the same number of pairs as in a triangle
    with selecting(), pytest.MonkeyPatch.context() as patch:
        assert not isinstance(fused_calls(plan.table(0), heads, False), str)
        for table, width, words in (
            (plan.table(0), 136, "heads wider than 128, and these are 136"),
            (plan.table(0), 60, "heads of 60 and 60"),
            (images.own_table, 8, MORE),
            (tile_table(chunked, chunked, Reach(chunk=3)), 8, MORE),
            (plan.within(Reach(window=4)).table(0), 8, MORE),
            (plan.within(Reach(window=4)).table(1), 8, MORE),
        ):
            assert words in fused_calls(table, heads._replace(dim=width), False)
        long = Metadata.of_documents(np.zeros(9216, int)).own_table
        assert not isinstance(fused_calls(long, Heads(16, 2, 64), False), str)
        assert "workspace limitation" in fused_calls(long, Heads(16, 2, 64), True)
        patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        assert select_kernel("cudnn", torch.device("cuda")).deterministic
        patch.setattr(sys.modules[UTILITIES], "get_device_compute_capability", lambda: (12, 0))
        assert "log-sum-exps" in fused_calls(plan.table(1), heads, False)
    told: list[str] = []
    given = tensors(12, heads, torch.float64)
    with emulated():
        found = by_tiles(
            CudnnKernel(MathKernel(), told.append), given, [(np.arange(12), images.own_table)], 0.3
        )
    for mine, exact in zip(found, by_autograd(given, allowed(images, images), 0.3), strict=True):
        torch.testing.assert_close(mine, exact, rtol=TOLERANCE, atol=TOLERANCE)
    assert set(told) == {f"attention: using FlexAttention for some rows, because {MORE}"}


def test_auto_takes_cudnns_kernel_where_transformer_engine_is_and_tells_once() -> None:
    settings = {"dtype": "bfloat16", "hidden_size": 32, "num_attention_heads": 4}
    plan = plan_of(row((9, 3), 2, 1), 1, 0)
    q, k, v, _ = tensors(14, Heads(4, 4, 8), torch.bfloat16)
    with emulated(dtype=torch.bfloat16):
        backend = NativeBackend(
            build_grid(GridShape(), 0, "cuda"), with_values(RunConfig(), settings)
        )
        backend.prepare(plan)
        assert [auto_kernel("cuda", dtype) for dtype in (torch.bfloat16, torch.float16)] == [
            "cudnn",
            "flex",
        ]
        outs = [backend.attention(q, k, v, plan, 0.3) for _ in range(2)]
    assert backend.warnings() == ["attention: using cuDNN for documents with a causal mask"]
    assert torch.equal(*outs) and not outs[0].isnan().any() and not outs[0][12:].any()
