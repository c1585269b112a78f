"""The vocabulary table, tied to its head, against one table and one softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.core.models.init import initialise
from megacp.core.tensor_parallel.chunked_loss import Target, cross_entropy
from megacp.core.tensor_parallel.embedding import TableSpec, VocabularyTable
from megacp.core.tensor_parallel.linear import LinearOptions
from tests.ranks import grid, run_ranks
from tests.reference.sharding import Pieces, assemble, fill, pieces_of

TOKENS, WIDTH = 8, 6

CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of a few dozen terms


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Table, tokens, labels (both ends of the vocabulary appear) and weights, some of them 0 on label 0."""
    g = torch.Generator().manual_seed(vocab)
    tokens, labels = (torch.randint(0, vocab, (TOKENS,), generator=g) for _ in range(2))
    tokens[0], tokens[1], labels[2], labels[3] = 0, vocab - 1, vocab - 1, 0
    weights = torch.rand(TOKENS, generator=g, dtype=torch.float64)
    weights[3:5], labels[4] = 0.0, 0
    return randn(vocab, WIDTH, seed=vocab), tokens, labels, weights


def make_table(vocab: int, multiple: int, options: LinearOptions) -> VocabularyTable:
    return VocabularyTable(TableSpec("embedding.weight", vocab, WIDTH, 0.02), multiple, options)


def on_ranks(
    rank: int, world_size: int, vocab: int, multiple: int, parallel: bool
) -> tuple[Tensor, Tensor, Pieces, int]:
    """The loss, logits seen by this rank, gradient of the tied table, and its number of true rows."""
    tp = grid(tp=world_size).tp
    options = LinearOptions(tp, parallel and tp.size > 1, torch.float64, torch.device("cpu"))
    table = make_table(vocab, multiple, options)
    weight, tokens, labels, weights = problem(vocab)
    fill(table, {"embedding.weight": weight})
    hidden = table(tokens)
    assert len(hidden) == TOKENS // (tp.size if options.sequence_parallel else 1)
    logits = table.logits(torch.tanh(hidden))
    target = Target(labels, weights, 1.0)
    loss = table.loss(torch.tanh(hidden), target, lambda x, y, first, scale: cross_entropy(x, y, first, tp, scale), 3)
    loss.backward()
    assert table.weight.grad is not None
    assert (table.weight.grad[table.true_rows :] == 0).all(), "padded rows get no gradient"
    assert table.weight.shape[0] % multiple == 0
    return loss.detach(), logits.detach(), pieces_of(table, {table.weight: table.weight.grad}), table.true_rows


def one_process(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    weight, tokens, labels, weights = problem(vocab)
    weight.requires_grad_()
    logits = torch.tanh(weight[tokens]) @ weight.t()
    loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    loss.backward()
    assert weight.grad is not None
    return loss.detach(), logits.detach(), weight.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("vocab", "multiple", "true_rows_at_tp4"),
    # not divisible by tp; one row on the last rank; whole ranks without any true row
    [(13, 1, [4, 4, 4, 1]), (13, 4, [4, 4, 4, 1]), (9, 8, [8, 1, 0, 0]), (16, 4, [4, 4, 4, 4])],
)
def test_a_tied_table_and_its_loss_equal_one_process(
    world_size: int, parallel: bool, vocab: int, multiple: int, true_rows_at_tp4: list[int]
) -> None:
    arguments = (vocab, multiple, parallel)
    results = [on_ranks(0, 1, *arguments)] if world_size == 1 else run_ranks(on_ranks, world_size, *arguments)
    loss, logits, gradient = one_process(vocab)
    for found, *_ in results:
        torch.testing.assert_close(found, loss, **CLOSE)
    torch.testing.assert_close(torch.cat([seen for _, seen, *_ in results], 1), logits, **CLOSE)
    found_gradient = assemble(pieces for *_, pieces, _ in results)["embedding.weight"]
    torch.testing.assert_close(torch.from_numpy(found_gradient), gradient, **CLOSE)
    if world_size == 4:
        assert [rows for *_, rows in results] == true_rows_at_tp4


def initial_rows(rank: int, world_size: int, vocab: int) -> Pieces:
    options = LinearOptions(grid(tp=world_size).tp, False, torch.float64, torch.device("cpu"))
    table = make_table(vocab, 8, options)
    initialise(table.parameters(), 5)
    assert (table.weight[table.true_rows :] == 0).all()
    return pieces_of(table, {table.weight: table.weight})


@pytest.mark.parametrize("vocab", [9, 64, 101, 128])
def test_initial_rows_do_not_depend_on_tp_and_padding_is_zero(vocab: int) -> None:
    whole = initial_rows(0, 1, vocab)["embedding.weight", (0, 0)][1]
    for world_size in (2, 4):
        found = assemble(run_ranks(initial_rows, world_size, vocab))["embedding.weight"]
        assert np.array_equal(found, whole)
    assert abs(whole.std() - 0.02) < 0.003 and len(np.unique(whole)) == whole.size
