"""The vocabulary table, as embedding and as head with a chunked loss, compared with a dense table
on one process.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megacp.distributed.collectives import all_gather
from megacp.distributed.grid import Axis, single_axis
from megacp.engine.layers import table as layers
from megacp.engine.models.init import initialise, unsharded
from megacp.engine.tensor_parallel import vocabulary
from megacp.engine.tensor_parallel.parameters import LinearOptions
from megacp.engine.tensor_parallel.vocabulary import (
    TableSpec,
    Target,
    VocabularyTable,
    cross_entropy,
)
from tests.ranks import grid, run_ranks
from tests.reference.head_loss import head_gradients, head_loss, peak_bytes_of
from tests.reference.sharding import Pieces, assemble, fill, pieces_of

TOKENS, WIDTH, DENOMINATOR = 12, 6, 3.5
CHUNKS = [0, 1, 5, 6, 12, 100]
"""Chunk sizes: all tokens; one; a number that does not divide them; one that does; all; more than
all.
"""
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of a few dozen terms
ALONE = single_axis("tp")


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, table, labels and float32 weights.

    Labels include both ends of the vocabulary, label 0 with weight 0, and image tokens with ids
    beyond the table and weight 0.
    """
    g = torch.Generator().manual_seed(vocab)
    labels, weights = (
        torch.randint(0, vocab, (TOKENS,), generator=g),
        torch.rand(TOKENS, generator=g),
    )
    labels[:5] = torch.tensor([0, vocab - 1, 0, vocab, vocab + 7])
    weights[2:6] = 0.0
    return randn(TOKENS, WIDTH, seed=vocab), randn(vocab, WIDTH, seed=vocab + 1), labels, weights


def made(
    vocab: int,
    multiple: int = 1,
    tp: Axis = ALONE,
    parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    width: int = WIDTH,
    **options: Any,
) -> VocabularyTable:
    shared = LinearOptions(tp, parallel and tp.size > 1, dtype, torch.device("cpu"), **options)
    return VocabularyTable(
        TableSpec(layers.Tensor("head.weight", (vocab, width), "rows", std=0.02)), multiple, shared
    )


def tied(
    rank: int, world_size: int, vocab: int, multiple: int, parallel: bool
) -> tuple[Tensor, dict[int, tuple[Tensor, Pieces]], int]:
    """Return this rank's logits, for each chunk size the loss and -2.5 times its gradient, and the
    true rows.
    """
    table = made(vocab, multiple, grid(tp=world_size).tp, parallel)
    _, weight, labels, weights = problem(vocab)
    fill(table, {"head.weight": weight})
    found = {}
    for chunk in CHUNKS:
        table.zero_grad()
        hidden = torch.tanh(table(labels % vocab))
        assert len(hidden) == TOKENS // (world_size if parallel else 1)
        loss = table.loss(hidden, Target(labels, weights, DENOMINATOR), chunk)
        (loss * -2.5).backward()
        assert table.weight.grad is not None
        assert (table.weight.grad[table.true_rows :] == 0).all(), "padded rows get no gradient"
        found[chunk] = loss.detach(), pieces_of(table, {table.weight: table.weight.grad})
    losses = [loss for loss, _ in found.values()]
    assert max(losses) - min(losses) < 1e-14, "losses are summed once, over all tokens"
    assert table.weight.shape[0] % multiple == 0
    empty = table.loss(hidden[:0].detach(), Target(labels[:0], weights[:0], 1.0), 0)
    assert empty == 0 and not torch.autograd.grad(empty, table.weight)[0].any()
    return table.logits(hidden).detach(), found, table.true_rows


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("vocab", "multiple", "true_rows_at_tp4"),
    # not divisible by tp; one row on the last rank; whole ranks without any true row
    [(13, 1, [4, 4, 4, 1]), (13, 4, [4, 4, 4, 1]), (9, 8, [8, 1, 0, 0]), (16, 4, [4, 4, 4, 4])],
)
def test_a_tied_table_and_its_loss_in_any_chunks_equal_one_process(
    world_size: int, parallel: bool, vocab: int, multiple: int, true_rows_at_tp4: list[int]
) -> None:
    results = run_ranks(tied, world_size, vocab, multiple, parallel)
    _, weight, labels, weights = problem(vocab)
    hidden = torch.tanh(weight.requires_grad_()[labels % vocab])
    loss = head_loss(hidden, weight, labels, weights, DENOMINATOR)
    loss.backward()
    assert weight.grad is not None
    seen = torch.cat([logits for logits, *_ in results], 1)
    torch.testing.assert_close(seen, (hidden @ weight.t()).detach(), **CLOSE)
    for chunk in CHUNKS:
        for _, found, _ in results:
            torch.testing.assert_close(found[chunk][0], loss.detach(), **CLOSE)
        gradient = assemble(found[chunk][1] for _, found, _ in results)["head.weight"]
        torch.testing.assert_close(torch.from_numpy(gradient), -2.5 * weight.grad, **CLOSE)
    if world_size == 4:
        assert [rows for *_, rows in results] == true_rows_at_tp4


def initial_rows(rank: int, world_size: int, vocab: int) -> Pieces:
    table = made(vocab, 8, grid(tp=world_size).tp)
    initialise(map(unsharded, table.parameters()), table.weight.dtype, 5)
    assert (table.weight[table.true_rows :] == 0).all()
    return pieces_of(table, {table.weight: table.weight})


@pytest.mark.parametrize("vocab", [9, 101])
def test_initial_rows_do_not_depend_on_tp_and_padding_is_zero(vocab: int) -> None:
    whole = initial_rows(0, 1, vocab)["head.weight", (0, 0)][1]
    for world_size in (2, 4):
        found = assemble(run_ranks(initial_rows, world_size, vocab))["head.weight"]
        assert np.array_equal(found, whole)
    assert abs(whole.std() - 0.02) < 0.005 and len(np.unique(whole)) == whole.size


@pytest.mark.parametrize("chunk", [0, 3])
def test_a_frozen_table_passes_the_gradient_and_a_frozen_input_none(chunk: int) -> None:
    x, weight, labels, weights = problem(13)
    _, dx, d_table = head_gradients(x, weight, labels, weights, DENOMINATOR)
    for trained, leaf in ((False, True), (True, False)):
        table = made(13, 4, trained=trained)
        fill(table, {"head.weight": weight})
        entry = x.clone().requires_grad_(leaf)
        (table.loss(entry, Target(labels, weights, DENOMINATOR), chunk) * -2.5).backward()
        assert (entry.grad is None, table.weight.grad is None) == (not leaf, not trained)
        found, expected = (entry.grad, dx) if leaf else (table.weight.grad[:13], d_table)
        torch.testing.assert_close(found, -2.5 * expected, **CLOSE)


def held(table: VocabularyTable, tokens: int, chunk: int) -> int:
    """Return the peak memory in bytes of a loss and its backward, without the inputs."""
    vocab, width = table.weight.shape
    torch.nn.init.normal_(table.weight, std=0.02)
    x = torch.zeros(tokens, width, dtype=table.weight.dtype).requires_grad_()
    target = Target(torch.arange(tokens) % vocab, torch.ones(tokens), DENOMINATOR)
    table.zero_grad()

    def work() -> Any:
        loss = table.loss(x, target, chunk)
        if torch.is_grad_enabled():
            loss.backward()
        return loss

    return peak_bytes_of(work)


def test_what_nobody_asks_for_is_never_made() -> None:
    sizes: dict[str, Any] = {"dtype": torch.float32, "vocab": 2048, "width": 512}
    trained, frozen, x = made(**sizes), made(**sizes, trained=False), 1024 * 512 * 4
    with torch.no_grad():
        assert held(trained, 1024, 32) < 2**18 + 2**16
    assert x + 2**18 < held(frozen, 1024, 32) < x + 2**18 + 2**16
    assert x + 2**18 + 2**22 < held(trained, 1024, 32) < x + 2**18 + 2**22 + 2**16
    assert held(trained, 1024, 0) > 2**23


def test_gradients_of_halves_are_summed_over_chunks_in_float32() -> None:
    """A sum of equal parts in bfloat16 stops at 256 of them, because the next one is rounded away.

    This test has 512.
    """
    table, x = (
        made(8, dtype=torch.bfloat16, width=4),
        torch.ones(512, 4, dtype=torch.bfloat16).requires_grad_(),
    )
    torch.nn.init.zeros_(table.weight)
    table.loss(x, Target(torch.zeros(512, dtype=torch.int64), torch.ones(512), 1.0), 1).backward()
    assert table.weight.grad is not None and table.weight.grad.dtype == torch.bfloat16
    expected = torch.full((8, 4), 512 / 8)  # uniform softmax, minus 1 at label 0
    expected[0] -= 512
    torch.testing.assert_close(table.weight.grad.float(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("chunk", [0, 40])
def test_halves_narrowed_in_place_are_those_of_a_copy(chunk: int) -> None:
    """There are more elements than one block narrows; chunks add less rounding than a bfloat16
    product.
    """
    table, g = made(1100, dtype=torch.bfloat16, width=4096), torch.Generator().manual_seed(1)
    torch.nn.init.normal_(table.weight, std=0.02, generator=g)
    x = torch.randn(64, 4096, generator=g).bfloat16()
    labels = torch.randint(0, 1100, (64,), generator=g)
    table.loss(x, Target(labels, torch.ones(64), DENOMINATOR), chunk).backward()
    logits = (x.double() @ table.weight.detach().double().t()).requires_grad_()
    (torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / DENOMINATOR).backward()
    expected = logits.grad.t() @ x.double()
    assert table.weight.grad is not None
    # logits and their gradient are rounded to 2^-9 each, the result once more
    assert (table.weight.grad.double() - expected).norm() / expected.norm() < 2**-7


def extreme_losses(
    rank: int, world_size: int, dtype: torch.dtype, compiled: bool
) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of logits whose exponentials overflow, with columns sharded over tp.

    `compiled` uses CUDA's passes, but uncompiled.
    """
    tp = grid(tp=world_size).tp
    mine = (randn(8, 16, seed=3) * 300).to(dtype).chunk(world_size, 1)[rank].contiguous()
    scale = torch.ones(8, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    with mock.patch.object(vocabulary, "is_compiled", lambda x: compiled):
        losses = cross_entropy(mine, torch.arange(8) * 2, rank * 16 // world_size, tp, scale)
    assert mine.dtype == dtype
    return losses, all_gather(mine.t().contiguous(), tp).t()


@pytest.mark.parametrize("compiled", [False, True], ids=["on a CPU", "on CUDA"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_large_logits_do_not_overflow_and_half_precision_is_computed_in_fp32(
    dtype: torch.dtype, compiled: bool
) -> None:
    logits = (randn(8, 16, seed=3) * 300).to(dtype).double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(8) * 2, reduction="none")
    expected.sum().backward()
    assert logits.grad is not None
    # The rounded logits are the input here: losses have fp32's 2^-24 of values near 600, and
    # gradients their own rounding error.
    loss_tolerance = 1e-12 if dtype == torch.float64 else 2e-4
    gradient_tolerance = {torch.float64: 1e-12, torch.float32: 2e-4, torch.bfloat16: 2**-8}[dtype]
    for losses, gradient in run_ranks(extreme_losses, 2, dtype, compiled):
        assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (losses.double() - expected.detach()).abs().max() < loss_tolerance
        assert (gradient.double() - logits.grad).abs().max() < gradient_tolerance
