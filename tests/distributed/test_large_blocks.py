"""Large blocks: no block is reused while a tensor can be read, memory stays below the peak in use,
and results are unchanged.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from bench.steps import QUICK_SIZES, Subject
from megacp.distributed import large_blocks
from megacp.distributed.large_blocks import LARGE, LargeBlocks, empty, large_product, zeros
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.tensor_parallel.linear import product as linear_product
from megacp.training.data.mock import MockRules
from tests.ranks import run_ranks

MIB = 1 << 20


def floats(blocks: LargeBlocks, mib: int) -> torch.Tensor:
    return blocks.empty((mib * MIB // 4,), torch.float32)


@pytest.mark.parametrize(
    "hold", [lambda x: x[5:9], lambda x: x.view(-1, 2).t(), lambda x: x.detach(), lambda x: (x,)]
)
def test_a_block_is_free_only_when_the_last_view_of_its_tensor_is_gone(hold) -> None:
    blocks = LargeBlocks()
    x = floats(blocks, 4)
    address, held = x.data_ptr(), hold(x)
    del x
    other = floats(blocks, 4)
    assert other.data_ptr() != address and blocks.held == 8 * MIB
    del held
    assert floats(blocks, 4).data_ptr() == address and blocks.held == 8 * MIB


def test_what_autograd_saves_keeps_its_block_until_backward_is_done() -> None:
    blocks, x = LargeBlocks(), torch.ones(MIB, requires_grad=True)
    factor = floats(blocks, 4).fill_(3.0)
    address, y = factor.data_ptr(), (x * factor).sum()
    del factor
    assert floats(blocks, 4).data_ptr() != address
    y.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 3.0))
    del y
    assert (
        address in [x.data_ptr() for x in [floats(blocks, 4) for _ in range(2)]]
        and blocks.held == 8 * MIB
    )


def test_no_more_is_held_than_was_in_use_at_once_whatever_sizes_come() -> None:
    """This also holds for sizes an eighth too large; the smallest sufficient free block is returned
    first.
    """
    blocks = LargeBlocks()
    for mib in (64, 5, 9, 33, 64, 7):
        pair = [floats(blocks, size) for size in (mib, 6)]
        assert sum(x.nbytes for x in pair) <= blocks.held <= 70 * MIB
        del pair
    alone = [LargeBlocks() for _ in range(180)]
    for number, one in enumerate(alone):
        size = (4 * MIB) + number * (MIB // 3)
        assert one.empty((size,), torch.uint8).nbytes == size <= one.held <= size * 9 // 8
    assert len({one.held for one in alone}) <= 33
    blocks = LargeBlocks()
    del (some := [floats(blocks, mib) for mib in (64, 8, 16)])[:]
    kept = floats(blocks, 6)
    assert blocks.held == (64 + 16 + 6) * MIB and kept.nbytes == 6 * MIB and not some


def test_threads_take_and_let_go_at_once() -> None:
    blocks = LargeBlocks()

    def kept(number: int) -> bool:
        x = blocks.empty((4096 * (1 + number % 3),), torch.int64).fill_(number)
        y = x[::7]
        del x
        return bool((y == number).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(kept, range(480))) and blocks.held > 0


def test_values_dtypes_and_derivatives_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for dtypes that autocast, autograd or a compiler would change."""
    blocks = LargeBlocks()
    blocks.active = True
    monkeypatch.setattr(large_blocks, "BLOCKS", blocks)
    x, weight = (
        torch.randn(6, 5, 8, dtype=torch.float64),
        torch.nn.Parameter(torch.randn(7, 8, dtype=torch.float64)),
    )
    empty((LARGE // 8 - 1,), x), empty((LARGE // 8,), x, torch.float32)
    assert blocks.held == 0, "small tensors"
    blocks.smallest = 1
    del (used := [empty((30, 7), x).fill_(torch.nan)])[
        :
    ]  # the next tensor finds other values in its block
    assert torch.equal(zeros((30, 7), x), torch.zeros(30, 7, dtype=torch.float64)) and not used
    made = empty((2, 3, 4), x, torch.bfloat16)
    assert made.shape == (2, 3, 4) and made.dtype == torch.bfloat16 and made.is_contiguous()
    x.requires_grad_()
    assert torch.autograd.gradcheck(linear_product, (x, weight))
    with torch.no_grad():
        assert torch.equal(large_product(x, weight.t()), x @ weight.t())
        a, b = torch.randn(4, 8), torch.randn(8, 3)
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16):
                assert large_product(a.to(dtype), b).dtype == torch.bfloat16
        assert torch.equal(
            torch.compile(large_product, fullgraph=True, backend="eager")(a, b), a @ b
        )


def trained(
    rank: int, world_size: int, smallest: int, values: dict
) -> tuple[list, list[torch.Tensor], list[int]]:
    """Return losses of four steps, the final weights, and the bytes of blocks after each step."""
    config = with_values(
        RunConfig(), {**QUICK_SIZES, "dtype": "float64", "seq_length": 64, **values}
    )
    own = LargeBlocks()
    own.active, own.smallest = True, smallest
    losses, held = [], []
    with mock.patch.object(large_blocks, "BLOCKS", own):
        subject = Subject(
            rank, world_size, config, MockRules(config.model.vocab_size, 64, "mixed", seed=1)
        )
        for _ in range(4):
            losses.append(subject.measure().loss)
            held.append(own.held)
    return (
        losses,
        [p.detach().clone() for chunk in subject.model.chunks for p in chunk.parameters()],
        held,
    )


CASES = {
    "one process": (
        1,
        {"hidden_dropout": 0.1, "activation_offload": 1, "recompute_granularity": "selective"},
    ),
    "tp": (2, {"tensor_model_parallel_size": 2}),
    "a2a": (2, {"context_parallel_size": 2, "cp_comm_type": "a2a"}),
    "zero bubble": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero_bubble"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_all_its_results_in_blocks_has_the_same_bits(case: str) -> None:
    """Detects a block that is released too early anywhere in a step, and blocks that accumulate."""
    ranks, values = CASES[case]
    plain, reused = (run_ranks(trained, ranks, smallest, values) for smallest in (1 << 40, 512))
    for (losses, weights, none), (same, others, held) in zip(plain, reused, strict=True):
        assert losses == same and not any(none) and 0 < held[3] <= held[1]
        assert all(torch.equal(x, y) for x, y in zip(weights, others, strict=True))


def decayed(rank: int, world_size: int) -> float:
    """Return a state that has almost completely decayed, times one."""
    state = torch.full((8, 8), 1e-30) * 1e-10
    return (state @ torch.eye(8)).max().item()


def test_what_has_decayed_below_the_normal_numbers_is_zero_on_a_cpu_rank() -> None:
    """With denormal numbers, a product takes up to a hundred times as long."""
    assert run_ranks(decayed, 1) == [0.0]
