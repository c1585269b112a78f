"""Every transport with every layout, mask and degree equals dense attention on one process, forward
and backward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacp.attention.context_parallel import ring
from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.kv_exchange import KVExchange, exchange_of
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.ring import RingAttention
from megacp.attention.context_parallel.transport import LocalAttention
from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.attention.ops.kernel import KV, QKV, Heads, Partial, Saved
from megacp.attention.ops.mask import Metadata, Reach, TileTable, allowed
from megacp.attention.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies, rotate
from megacp.attention.ops.tile_kernels import Allowed, MathKernel
from megacp.distributed import collectives
from megacp.distributed.collectives import Pending
from megacp.distributed.grid import Axis, single_axis
from megacp.engine.config.training import RECOMPUTE_MODES
from megacp.engine.models.recompute import run_block
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.shard import LocalBatch, shard_batch
from megacp.engine.save import Save
from tests.ranks import RankError, grid, run_ranks
from tests.reference import attention as reference
from tests.reference.packs import metadata, random_batch, video_batch

DIM = 8

MASKS = {
    "causal": {"documents": 1},
    "packed": {"documents": 5},
    "one-token documents": {"documents": 10_000},
    "branches and spans": {"documents": 3, "branches": True, "images": True},
    "holes": {"documents": 4, "branches": True, "images": True, "padding": True},
    "trees": {"documents": 2, "images": True, "padding": True, "depth": 5},
    "windows": {"documents": 2, "images": True, "padding": True, "depth": 4},
    "chunks": {"documents": 3, "images": True, "depth": 3},
    "padding alone": {"documents": 0},
}
REACHES = {"windows": Reach(window=6), "chunks": Reach(chunk=7)}
HIERARCHIES = {1: (), 2: (2, 1), 3: (1, 3), 4: (2, 2), 6: (2, 3), 8: (4, 2)}
HEADS = {3: (6, 2), 6: (12, 4)}
"""Degrees that do not divide 8 query heads; the K/V heads need not be divisible."""


@dataclass(frozen=True)
class Case:
    """One attention call."""

    transport: str
    layout: str
    mask: str
    tokens: int = 45
    kernel: str = "auto"
    rotary: bool = False
    dtype: torch.dtype = torch.float64
    heads: tuple[int, int] = (8, 2)
    hierarchy: tuple[int, int] = ()
    seed: int = 0
    window: int = 0
    chunk: int = 0
    sinks: bool = False
    cap: float = 0.0
    recompute: str = "none"
    pack: tuple[tuple[str, int], ...] = ()
    """Arguments of `random_batch`, instead of the name of a mask."""

    @property
    def reach(self) -> Reach:
        return (
            Reach(self.window, self.chunk)
            if self.window or self.chunk
            else REACHES.get(self.mask, Reach())
        )


def batch_of(case: Case) -> PackedBatch:
    if case.mask == "video":
        return video_batch(max(1, case.tokens // 7), 2, 5)
    rng = np.random.default_rng([len(case.mask), case.tokens, case.seed])
    return random_batch(rng, case.tokens, **(dict(case.pack) or MASKS[case.mask]))


def qkv_and_gradient(case: Case, tokens: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(tokens)
    heads, groups = case.heads
    shapes = [(tokens, count, DIM) for count in (heads, groups, groups, heads)]
    return [
        torch.randn(*shape, generator=g, dtype=torch.float64).to(case.dtype) for shape in shapes
    ]


def sinks_of(case: Case) -> list[Tensor]:
    """float64 `[heads]`, if the case has sinks."""
    return [torch.linspace(-2.0, 2.0, case.heads[0], dtype=torch.float64)] if case.sinks else []


def attend(
    batch: LocalBatch, transport: object, tensors: list[Tensor], case: Case | None = None
) -> list[Tensor]:
    """Return this rank's rows of out, dq, dk, dv, and its part of the sinks' gradient.

    q and k are rotated by the positions that were sharded with the tokens.
    """
    case = case or Case("", "", "")
    index = torch.from_numpy(batch.plan.local)
    q, k, v, dout = (x[index].clone() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v, *sinks_of(case))]

    def layer(q: Tensor, k: Tensor, v: Tensor, save: Save) -> Tensor:
        if case.rotary:
            angles = cos_sin(
                batch.position_ids, inverse_frequencies(DIM, 100.0, RotaryScaling()), q.dtype
            )
            q, k = rotate(q, *angles), rotate(k, *angles)
        sinks = leaves[3] if case.sinks else None
        return transport.attend(
            q, k, v, batch.plan.within(case.reach), DIM**-0.5, sinks, save.results
        )

    out = run_block(layer, RECOMPUTE_MODES[case.recompute], q, k, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@functools.cache
def transport_of(
    world_size: int, name: str, kernel: str, hierarchy: tuple[int, int], cap: float
) -> object:
    """Return the transport, cached on each rank, because a2a+p2p creates process groups."""
    return select_transport(
        name, kernel, grid(cp=world_size).cp, torch.device("cpu"), hierarchy, cap
    )


def on_ranks(rank: int, world_size: int, cases: list[Case]) -> list:
    results = []
    for case in cases:
        batch = shard_batch(
            batch_of(case), grid(cp=world_size).cp, LAYOUTS[case.layout], mix={case.reach: 1}
        )
        chosen = transport_of(world_size, case.transport, case.kernel, case.hierarchy, case.cap)
        tensors = qkv_and_gradient(case, batch.num_tokens * world_size)
        results.append((batch.plan.local, attend(batch, chosen, tensors, case)))
    return results


@functools.cache
def dense(case: Case, padded: int) -> list[Tensor]:
    """Return the result of `attend` by autograd with an explicit mask, without plans, layouts and
    kernels.
    """
    batch = batch_of(case).with_padding_to(padded)
    *inputs, dout = (x.double() for x in qkv_and_gradient(case, padded))
    leaves = [x.requires_grad_() for x in (*inputs, *sinks_of(case))]
    q, k, v, *sinks = leaves
    if case.rotary:
        angle = torch.from_numpy(batch.position_ids)[:, None] * 100.0 ** (
            -torch.arange(0, DIM, 2).double() / DIM
        )
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * turn)
            .transpose(-1, -2)
            .flatten(-2)
            for x in (q, k)
        )
    meta = Metadata(batch.leave, batch.span, np.arange(padded), batch.position_ids)
    mask = reference.visible(meta, meta, case.reach)
    out = reference.attention(q, k, v, mask, DIM**-0.5, *sinks or [None], case.cap)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def cancelled(case: Case, padded: int) -> float:
    """Return the largest of two equal terms whose difference is exactly 0.

    dq and dk are exactly 0 for a query with a single key: dS = P (dP - D) with P = 1 and dP = D =
    dout . v. Both terms are rounded separately, in an order that depends on the processor.
    """
    q, k, v, dout = (x.double() for x in qkv_and_gradient(case, padded))
    k, v = (
        x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)
    )  # [T, groups, d] -> [T, heads, d]
    terms = (dout * v).sum(-1, keepdim=True) * DIM**-0.5
    return max(float((terms * x).abs().max()) for x in (q, k))


@functools.cache
def float32_bounds(case: Case, padded: int) -> list[float]:
    """Return bounds on the error of out, dq, dk, dv by rounding to float32."""
    meta = metadata(batch_of(case).with_padding_to(padded))
    tensors = [x.double() for x in qkv_and_gradient(case, padded)]
    return reference.rounding(*tensors, allowed(meta, meta, case.reach), DIM**-0.5)


def compare(results: list[list], cases: list[Case], tolerance: float | None) -> None:
    """Compare with a `tolerance` relative to the largest exact value, or with the bounds of
    float32.
    """
    for number, case in enumerate(cases):
        indices = np.concatenate([result[number][0] for result in results])
        # the reference depends only on mask, tokens and tensors
        plain = replace(case, transport="", layout="", kernel="", hierarchy=())
        expected = dense(plain, len(indices))
        for position, name in enumerate(("out", "dq", "dk", "dv", "dsinks")[: len(expected)]):
            parts = [result[number][1][position].double() for result in results]
            error = (
                torch.cat(parts) - expected[position][indices]
                if position < 4
                else sum(parts) - expected[position]
            )
            error = error.abs().max().item()
            if tolerance is None:
                limit = float32_bounds(plain, len(indices))[position]
            else:
                limit = tolerance * (
                    expected[position].abs().max().item() or cancelled(plain, len(indices))
                )
            assert error <= limit, (name, case, error, limit)


def all_cases(world_size: int, tokens: tuple[int, ...]) -> list[Case]:
    """Every transport works with every layout and mask.

    On more than 2 ranks, each pair of transport, layout and mask is covered, but not each triple.
    """
    return [
        Case(
            transport,
            layout,
            mask,
            count,
            heads=HEADS.get(world_size, (8, 2)),
            hierarchy=HIERARCHIES[world_size] if transport == "a2a+p2p" else (),
            recompute=("none", "full")[m % 2],
        )
        for t, transport in enumerate(TRANSPORTS)
        for i, layout in enumerate(LAYOUTS)
        for m, mask in enumerate([*MASKS, "video"])
        for n, count in enumerate(tokens)
        if world_size <= 2 or (t + m + n) % len(LAYOUTS) == i
    ]


@pytest.mark.parametrize(
    ("world_size", "tokens"),
    [
        (2, (45,)),
        pytest.param(3, (48,), marks=pytest.mark.slow),
        pytest.param(4, (45,), marks=pytest.mark.slow),
        pytest.param(6, (45,), marks=pytest.mark.slow),
        pytest.param(8, (5, 45), marks=pytest.mark.slow),
    ],
)
def test_a_transport_equals_dense_attention_for_every_mask_and_layout(
    world_size: int, tokens: tuple[int, ...]
) -> None:
    """Rows of 45 tokens need padding, rows of 5 leave ranks empty, and K/V heads are fewer or more
    than 3 ranks.

    float64, sums of at most 64 terms.
    """
    cases = all_cases(world_size, tokens)
    compare(run_ranks(on_ranks, world_size, cases), cases, 1e-12)


def test_four_ranks_of_one_layout_each_equal_dense_attention() -> None:
    pairs = [
        ("p2p", "zigzag"),
        ("kv_exchange", "zigzag"),
        ("all_gather", "balanced"),
        ("a2a", "zigzag"),
    ]
    cases = [Case(*pair, mask) for pair in pairs for mask in ("packed", "holes")]
    cases += [Case(*pair, "windows", sinks=True, cap=1.5) for pair in pairs]
    cases += [
        Case("p2p", "contiguous", "causal", window=window) for window in (5, 16)
    ]  # the ring stops early
    compare(run_ranks(on_ranks, 4, cases), cases, 1e-12)


LIMITS = st.sampled_from([0, 1, 2, 4, 7, 12, 20, 35, 60, 99])
DRAWN = st.builds(
    Case,
    *map(st.just, ("", "", "")),
    st.integers(2, 70),
    seed=st.integers(0, 2**31),
    window=LIMITS,
    chunk=LIMITS,
    sinks=st.booleans(),
    cap=st.sampled_from([0.0, 1.5]),
    pack=st.tuples(
        *(
            st.tuples(st.just(name), st.integers(*ends))
            for name, *ends in (("documents", 0, 6), ("depth", 1, 5))
        ),
        *(st.tuples(st.just(name), st.booleans()) for name in ("images", "padding")),
    ),
)
"""Packs of trees with images and padding, or of only padding, down to two tokens. Most ranks then
have only padding. Windows and chunks range from one token to more than the row.
"""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(drawn=DRAWN, groups=st.sampled_from([1, 2, 0]))
def test_all_that_a_mask_holds_is_exact_together_with_sinks_and_a_cap(
    world_size: int, drawn: Case, groups: int
) -> None:
    heads = 4 if world_size % 3 else 6
    drawn = replace(drawn, heads=(heads, groups or heads))
    cases = [
        replace(
            drawn,
            transport=name,
            layout=layout,
            hierarchy=HIERARCHIES[world_size] if "+" in name else (),
        )
        for name in TRANSPORTS
        for layout in LAYOUTS
    ]
    compare(run_ranks(on_ranks, world_size, cases), cases, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # fp32: counted (`reference.rounding`), about 1e-5; bf16: three roundings to 2^-9, the
    # accumulation is fp32
    [(torch.float32, None), (torch.bfloat16, 3e-2)],
    ids=["fp32", "bf16"],
)
def test_lower_precisions_accumulate_over_ranks_in_fp32(
    dtype: torch.dtype, tolerance: float | None
) -> None:
    cases = [replace(case, dtype=dtype) for case in all_cases(4, (48,))]
    if dtype == torch.bfloat16:  # the reference sees the same rounded inputs
        cases = [case for case in cases if case.mask != "one-token documents"]
    compare(run_ranks(on_ranks, 4, cases), cases, tolerance)


class CountingKernel(MathKernel):
    """A kernel that counts the pairs that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.pairs = 0, 0

    def forward(self, qkv: QKV, allowed: Allowed, scale: float) -> tuple[Tensor, Tensor]:
        queries, keys = len(qkv[0]), len(qkv[1])
        self.calls += 1
        pairs = queries * keys if allowed.bias is None else int((allowed.bias == 0).sum())
        self.pairs += queries * (queries + 1) // 2 if allowed.causal else pairs
        assert queries and keys, "an empty tile"
        return super().forward(qkv, allowed, scale)


def counted(rank: int, world_size: int, case: Case) -> tuple[int, int, int, tuple[int, int]]:
    """Return pairs computed, pairs allowed, bytes sent, and rows that the exchange sends and
    receives.
    """
    cp = grid(cp=world_size).cp
    kernel = CountingKernel()
    batch = shard_batch(batch_of(case), cp, LAYOUTS[case.layout])
    transport = TRANSPORTS[case.transport].build(cp, kernel, case.hierarchy)
    cp.traffic.clear()
    attend(batch, transport, qkv_and_gradient(case, batch.num_tokens * world_size), case)
    plan = batch.plan.within(case.reach)
    exchange = exchange_of(plan)
    rows = (sum(exchange.out_splits), sum(exchange.in_splits)) if exchange else (0, 0)
    return kernel.pairs, plan.table_of_row.area, cp.traffic.total(), rows


@pytest.mark.parametrize("transport", ["p2p", "all_gather", "kv_exchange"])
@pytest.mark.parametrize(
    ("mask", "recompute"), [("causal", "none"), ("packed", "full"), ("holes", "full")]
)
def test_work_is_the_allowed_area_and_bytes_are_the_formula(
    transport: str, mask: str, recompute: str
) -> None:
    """Each allowed pair is computed once, and forward moves (cp-1)/cp of K and V once without
    expanding grouped heads. This also holds if the rest of a block is recomputed.
    """
    results = run_ranks(
        counted, 4, Case(transport, "zigzag", mask, 64, heads=(4, 2), recompute=recompute)
    )
    assert all(pairs == area for pairs, area, *_ in results)
    row = 2 * 2 * DIM * 8  # bytes of K and V per token: two groups, float64
    for _, _, total, (sent, received) in results:
        # ring: K/V go around in forward and backward, then their gradients (3 hops each); gather:
        # two gathers of 3 blocks and one scatter; exchange: needed rows are sent twice, gradients
        # of received rows once
        hops = {
            "p2p": (3 + 3 + 3) * 16,
            "all_gather": (3 + 3 + 3) * 16,
            "kv_exchange": 2 * sent + received,
        }
        assert total == hops[transport] * row


@pytest.mark.parametrize(
    ("layout", "window", "rows", "hops"),
    [
        # the 4 tokens before each rank's first one; K/V make one step, and their gradient one step
        # back
        ("contiguous", 5, [(4, 0), (4, 4), (4, 4), (0, 4)], 1 + 1 + 1),
        # 16 tokens before each rank's first one: still one step; a longer window would need two
        ("contiguous", 17, [(16, 0), (16, 16), (16, 16), (0, 16)], 1 + 1 + 1),
        # eight stretches of 8 tokens; the fourth and the fifth are on one rank, so the ring makes a
        # full round
        ("zigzag", 5, [(4, 4), (8, 8), (8, 8), (4, 4)], 3 + 3 + 3),
    ],
)
def test_a_window_sends_its_halo_and_ends_the_ring(
    layout: str, window: int, rows: list[tuple[int, int]], hops: int
) -> None:
    row = 2 * 2 * DIM * 8
    for transport in ("p2p", "kv_exchange"):
        results = run_ranks(
            counted, 4, Case(transport, layout, "causal", 64, heads=(4, 2), window=window)
        )
        assert [found for *_, found in results] == rows and all(
            pairs == area for pairs, area, *_ in results
        )
        for (_, _, total, _), (sent, received) in zip(results, rows, strict=True):
            assert total == row * (hops * 16 if transport == "p2p" else 2 * sent + received)


class PreparedKernel(MathKernel):
    """A kernel that fails for tables that were not prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: set[tuple[int, Heads]] = set()

    def prepare(self, table: TileTable, heads: Heads) -> None:
        self.prepared.add((id(table), heads))

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        assert (id(table), Heads(qkv[0].shape[1], *qkv[1].shape[1:])) in self.prepared
        super().attend(partial, qkv, table, scale)


def prepared(rank: int, world_size: int, cases: list[Case]) -> list[int]:
    """Return the number of tables that each transport has prepared and used."""
    cp, found = grid(cp=world_size).cp, []
    for case in cases:
        kernel, batch = PreparedKernel(), shard_batch(batch_of(case), cp, LAYOUTS[case.layout])
        transport = TRANSPORTS[case.transport].build(cp, kernel, case.hierarchy)
        transport.prepare(batch.plan, Heads(*case.heads, DIM))
        attend(batch, transport, qkv_and_gradient(case, batch.num_tokens * world_size))
        found.append(len(kernel.prepared))
    return found


def test_every_table_is_prepared_before_its_first_layer() -> None:
    """a2a with fewer K/V heads than ranks."""
    names = ["p2p", "all_gather", "kv_exchange", "a2a", "a2a+p2p"]
    cases = [Case(name, "zigzag", "packed", 64, heads=(8, 2), hierarchy=(2, 2)) for name in names]
    for found in run_ranks(prepared, 4, cases):
        assert found == [4, 2, 2, 1, 2]


@pytest.mark.parametrize(
    ("heads", "recompute"), [((8, 4), "none"), ((8, 2), "none"), ((8, 2), "full")], ids=str
)
def test_heads_for_sequence_sends_each_rank_its_heads_and_no_more(
    heads: tuple[int, int], recompute: str
) -> None:
    """Forward sends q, k, v to the rank of the head and the output back; backward sends the
    gradients the same ways. A recomputed block sends q, k and v again, and its output if the rest
    of the block needs it.
    """
    results = run_ranks(
        counted, 4, Case("a2a", "zigzag", "packed", 64, heads=heads, recompute=recompute)
    )
    pairs = sum(found[0] for found in results)
    assert pairs == sum(found[1] for found in results) * 4, (
        "each rank sees all pairs, for a fourth of the heads"
    )
    # 16 tokens: two query heads, one key head and one value head go to each of 3 ranks, and two
    # output heads return
    one_way = 16 * 3 * (2 + 1 + 1)
    back = 16 * 3 * 2
    again = one_way * (recompute == "full")
    assert {total for _, _, total, _ in results} == {(2 * (one_way + back) + again) * DIM * 8}


def test_documents_on_one_rank_cost_no_bytes_and_no_message() -> None:
    """In a pack of four documents of one rank's size each, no rank needs keys of another rank."""
    results = run_ranks(quiet, 4)
    assert results == [(0, True)] * 4


def quiet(rank: int, world_size: int) -> tuple[int, bool]:
    cp = grid(cp=world_size).cp
    row = random_batch(np.random.default_rng(0), 64, documents=1)
    row = replace(row, leave=np.repeat(np.arange(16, 65, 16), 16).astype(np.int32))
    batch = shard_batch(row, cp, LAYOUTS["contiguous"])
    cp.traffic.clear()
    attend(batch, KVExchange(cp, MathKernel()), qkv_and_gradient(Case("", "", ""), 64))
    return cp.traffic.total(), exchange_of(batch.plan) is None


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_tensors_whose_last_dim_is_not_dense_are_read_right(kernel: str) -> None:
    case = Case("p2p", "contiguous", "causal", 48, kernel)
    batch = shard_batch(batch_of(case), single_axis("cp"), LAYOUTS["contiguous"])
    tensors = qkv_and_gradient(case, 48)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert turned[0].stride(-1) != 1
    transport = select_transport("p2p", kernel, single_axis("cp"), torch.device("cpu"))
    q, k, v = (x.detach().requires_grad_() for x in turned[:3])
    out = transport.attend(q, k, v, batch.plan, DIM**-0.5)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), turned[3])]
    for one, other in zip(found, attend(batch, transport, tensors), strict=True):
        assert (one - other).abs().max() <= 1e-12


def empty_but_equal_hierarchy(rank: int, world_size: int) -> None:
    select_transport("a2a+p2p", "auto", grid(cp=world_size).cp, torch.device("cpu"), (3, 2))


def test_transports_are_chosen_from_a_table_and_one_rank_needs_none() -> None:
    cpu = torch.device("cpu")
    assert isinstance(select_transport("p2p", "auto", single_axis("cp"), cpu), LocalAttention)
    with pytest.raises(
        ValueError, match="transport a2b is unknown; choose p2p, all_gather, a2a, a2a"
    ):
        select_transport("a2b", "auto", single_axis("cp"), cpu)
    two = Axis("cp", 2, 0, (0, 1), group=object())  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="attention kernel dense supports only one process, .* 2 ranks"
    ):
        select_transport("p2p", "dense", two, cpu)
    with pytest.raises(RankError, match="two sizes whose product is 4, got 3 2"):
        run_ranks(empty_but_equal_hierarchy, 4)


class WatchingKernel(MathKernel):
    """A kernel that records the number of messages in flight on an axis during each call."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts: list[Pending] = []
        self.messages: tuple[list[int], list[int]] = ([], [])

    def start_shift(self, x: Tensor, axis: Axis, by: int = 1) -> Pending:
        self.shifts.append(collectives.start_shift(x, axis, by))
        return self.shifts[-1]

    def under_way(self) -> int:
        return sum(bool(shift._works) for shift in self.shifts)

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        self.messages[0].append(self.under_way())
        super().attend(partial, qkv, table, scale)

    def attend_backward(
        self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV
    ) -> None:
        self.messages[1].append(self.under_way())
        super().attend_backward(saved, kv, table, scale, grads)


def watched(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Return the messages in flight in each step of a ring, forward and backward."""
    cp = grid(cp=world_size).cp
    kernel = WatchingKernel()
    plan = shard_batch(
        random_batch(np.random.default_rng(0), 64, documents=1), cp, LAYOUTS["zigzag"]
    ).plan
    leaves = [torch.ones(64 // world_size, 2, 8, requires_grad=True) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "start_shift", kernel.start_shift)
        RingAttention(cp, kernel).attend(*leaves, plan, 1.0).sum().backward()
    return kernel.messages


def test_a_rings_messages_are_under_way_while_a_step_is_computed() -> None:
    """Keys are in flight during all steps except the last. Gradients start after the second step
    and are in flight during the third and fourth.
    """
    assert run_ranks(watched, 4) == [([1, 1, 1, 0], [1, 1, 2, 1])] * 4
