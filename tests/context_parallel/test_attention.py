"""Every transport under every layout and mask equals dense attention on one process, forward and backward."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from megacp.batch import PackedBatch
from megacp.context_parallel.attention import TRANSPORTS, core_attention, select_transport
from megacp.context_parallel.layout import LAYOUTS
from megacp.context_parallel.local import LocalAttention
from megacp.context_parallel.shard import LocalBatch, shard_batch
from megacp.distributed.grid import Axis, single_axis
from megacp.ops import attention as kernels
from megacp.ops.mask import allowed
from megacp.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies, rotate
from tests.ranks import grid, run_ranks
from tests.reference import attention as reference
from tests.reference.packs import metadata, random_batch

HEADS, GROUPS, DIM = 4, 2, 8

MASKS = {
    "causal": {"documents": 1},
    "packed": {"documents": 5},
    "branches and spans": {"documents": 3, "branches": True, "images": True},
    "holes": {"documents": 4, "branches": True, "images": True, "padding": True},
}
DISTRIBUTED = sorted(TRANSPORTS)


def batch_of(mask: str, tokens: int) -> PackedBatch:
    return random_batch(np.random.default_rng(len(mask) + tokens), tokens, **MASKS[mask])


def qkv_and_gradient(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, DIM) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def attend(batch: LocalBatch, transport: object, tensors: list[Tensor], rotary: bool) -> list[Tensor]:
    """This rank's rows of out, dq, dk, dv; q and k are rotated by the positions that came with the tokens."""
    index = torch.from_numpy(batch.plan.local)
    q, k, v, dout = (x[index].clone() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if rotary:
        angles = cos_sin(batch.position_ids, inverse_frequencies(DIM, 100.0, RotaryScaling()), q.dtype)
        q, k = rotate(q, *angles), rotate(k, *angles)
    out = core_attention(q, k, v, transport=transport, plan=batch.plan, scale=DIM**-0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_ranks(rank: int, world_size: int, cases: list[tuple[str, str, str, str, int, bool, torch.dtype]]) -> list:
    cp = grid(cp=world_size).cp
    results = []
    for transport, layout_name, mask, kernel, tokens, rotary, dtype in cases:
        layout = LAYOUTS[layout_name]
        batch = shard_batch(batch_of(mask, tokens), cp, layout, multiple=layout.multiple(world_size, 1))
        chosen = select_transport(transport, kernel, cp, torch.device("cpu"))
        total = batch.num_tokens * world_size
        results.append((batch.plan.local, attend(batch, chosen, qkv_and_gradient(total, dtype), rotary)))
    return results


@functools.cache
def dense(mask: str, tokens: int, padded: int, rotary: bool) -> list[Tensor]:
    """out, dq, dk, dv by autograd through an explicit mask; independent of plans, layouts and kernels."""
    batch = batch_of(mask, tokens).with_padding_to(padded)
    *inputs, dout = qkv_and_gradient(padded)
    leaves = [x.requires_grad_() for x in inputs]
    q, k, v = leaves
    if rotary:
        angle = torch.from_numpy(batch.position_ids)[:, None] * 100.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * turn)
            .transpose(-1, -2)
            .flatten(-2)
            for x in (q, k)
        )
    out = reference.attention(q, k, v, allowed(metadata(batch), metadata(batch)), DIM**-0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def compare(results: list[list], cases: list[tuple], tolerance: float) -> None:
    for number, case in enumerate(cases):
        indices = np.concatenate([result[number][0] for result in results])
        expected = dense(case[2], case[4], len(indices), case[5])
        for name, position in (("out", 0), ("dq", 1), ("dk", 2), ("dv", 3)):
            found = torch.cat([result[number][1][position] for result in results]).double()
            error = (found - expected[position][indices]).abs().max().item()
            assert error <= tolerance * expected[position].abs().max().item(), (name, case, error)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("transport", DISTRIBUTED)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_transport_equals_dense_attention_for_every_mask(transport: str, layout: str, world_size: int) -> None:
    """Rows of 48, and of 45 tokens that must be padded; float64, sums of at most 48 terms."""
    cases = [(transport, layout, mask, "auto", n, False, torch.float64) for mask in MASKS for n in (48, 45)]
    compare(run_ranks(on_ranks, world_size, cases), cases, 1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_positions_travel_with_the_tokens_under_any_layout(world_size: int) -> None:
    """Whole-pack zigzag with rotary positions that assume per-document zigzag, or restart per rank, fails here."""
    cases = [
        (transport, layout, mask, "math", 45, True, torch.float64)
        for transport in DISTRIBUTED
        for layout in LAYOUTS
        for mask in ("packed", "branches and spans")
    ]
    compare(run_ranks(on_ranks, world_size, cases), cases, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # fp32: 2^-24 with sums of 48 terms; bf16: three roundings to 2^-9, the accumulation itself is fp32
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
    ids=["fp32", "bf16"],
)
def test_lower_precisions_accumulate_over_ranks_in_fp32(dtype: torch.dtype, tolerance: float) -> None:
    cases = [(t, "zigzag", mask, "auto", 48, False, dtype) for t in DISTRIBUTED for mask in MASKS]
    compare(run_ranks(on_ranks, 4, cases), cases, tolerance)


@pytest.mark.parametrize("name", ["auto", "math", "dense"])
def test_one_process_equals_the_naive_reference(name: str) -> None:
    cases = [
        ("p2p", layout, mask, name, n, r, torch.float64)
        for layout in LAYOUTS
        for mask in MASKS
        for n in (48, 45)
        for r in (False, True)
    ]
    compare([on_ranks(0, 1, cases)], cases, 1e-12)


class CountingKernel:
    """A kernel that counts the pairs it is asked for."""

    def __init__(self) -> None:
        self.calls, self.pairs = 0, 0
        self._kernel = kernels.MathKernel()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.pairs += len(q) * (len(q) + 1) // 2 if causal else len(q) * len(k)
        return self._kernel.forward(q, k, v, causal, scale)

    def backward(self, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        return self._kernel.backward(*arguments)  # type: ignore[arg-type]


def counted(rank: int, world_size: int, transport: str, mask: str) -> tuple[int, int, int, int]:
    cp = grid(cp=world_size).cp
    kernel, layout = CountingKernel(), LAYOUTS["zigzag"]
    batch = shard_batch(batch_of(mask, 64), cp, layout, multiple=layout.multiple(world_size, 1))
    cp.traffic.clear()
    attend(batch, TRANSPORTS[transport](cp, kernel), qkv_and_gradient(64), False)
    return kernel.calls, kernel.pairs, batch.plan.table_of_row.area, cp.traffic.total


@pytest.mark.parametrize("transport", DISTRIBUTED)
@pytest.mark.parametrize("mask", ["causal", "packed"])
def test_work_is_the_allowed_area_and_bytes_are_the_formula(transport: str, mask: str) -> None:
    """Empty tiles cost no kernel; forward moves (cp-1)/cp of K and V once, grouped heads unexpanded."""
    results = run_ranks(counted, 4, transport, mask)
    assert all(pairs == area for _, pairs, area, _ in results)
    shard = 2 * GROUPS * DIM * 16 * 8  # bytes of one rank's K and V
    # ring: K/V go round forward and backward (3 hops each), their gradients make 4 hops; gather: twice 3, and back once
    expected = {"p2p": (3 + 3 + 4) * shard, "all_gather": (3 + 3 + 3) * shard}[transport]
    assert {total for *_, total in results} == {expected}


def test_transports_are_chosen_from_a_table_and_one_rank_needs_none() -> None:
    cpu = torch.device("cpu")
    assert isinstance(select_transport("p2p", "auto", single_axis("cp"), cpu), LocalAttention)
    with pytest.raises(ValueError, match="--cp-comm-type a2b is unknown; choose p2p, all_gather"):
        select_transport("a2b", "auto", single_axis("cp"), cpu)
    two = Axis("cp", 2, 0, (0, 1), group=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--attention-kernel dense is the one-process reference, cp has 2 ranks"):
        select_transport("p2p", "dense", two, cpu)
