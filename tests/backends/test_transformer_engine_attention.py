"""Transformer Engine's own context parallelism, over gloo, through our backend's attention.

Its autograd functions, its order of tokens, its groups and its cumulative lengths are the real ones; cuDNN's calls are
reference math (engine_math.py). float64 throughout, so a tolerance of 1e-11 is some thousand roundings of sums of up to
ten terms of size one, and a token in a wrong place is an error of size one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megacp.core.backends.thd import Sequences, thd_sequences
from megacp.core.backends.transformer_engine import packed_attention
from megacp.core.config.model import ModelConfig
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.distributed.grid import single_axis
from megacp.core.ops.mask import Metadata, allowed
from megacp.core.ops.tile_kernels import dense_attention
from tests.backends.engine_math import emulated
from tests.backends.engine_stub import needs_engine
from tests.ranks import grid, run_ranks

HEADS, GROUPS, WIDTH = 8, 4, 8
MODEL = ModelConfig(hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS)
TOLERANCE = 1e-11

pytestmark = needs_engine


def row(lengths: tuple[int, ...], padding: int, cp: int, layout: str = "zigzag_document") -> Metadata:
    """Documents of some lengths, and what the layout wants behind them."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    document = np.append(document, np.full(padding, -1))

    def metadata(document: np.ndarray) -> Metadata:
        zeros = np.zeros(len(document), np.int64)
        return Metadata(document, zeros, zeros, np.arange(len(document)))

    chosen = LAYOUTS["contiguous" if cp == 1 else layout]
    length = chosen.padded_length(metadata(document), cp, 1)
    return metadata(np.append(document, np.full(length - len(document), -1)))


def plan_of(metadata: Metadata, cp: int, rank: int, layout: str = "zigzag_document") -> AttentionPlan:
    chosen = LAYOUTS["contiguous" if cp == 1 else layout]
    return AttentionPlan(chosen.deal(metadata, cp), metadata, rank)


def tensors(tokens: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output for a whole row."""
    generator = torch.Generator().manual_seed(5)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    return [torch.randn(tokens, n, WIDTH, generator=generator, dtype=torch.float64) for n in heads]


def reference(metadata: Metadata) -> list[torch.Tensor]:
    """out, dq, dk, dv of the whole row from one dense softmax."""
    q, k, v, dout = tensors(len(metadata))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    real = torch.from_numpy(metadata.document >= 0)
    out = dense_attention(q, k, v, torch.from_numpy(allowed(metadata, metadata)), WIDTH**-0.5)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout * real[:, None, None])]


def errors(found: list[torch.Tensor], expected: list[torch.Tensor], indices: np.ndarray) -> list[float]:
    return [(a - b[torch.from_numpy(indices)]).abs().max().item() for a, b in zip(found, expected, strict=True)]


def packed_errors(
    rank: int, world: int, comm_type: str, inner: int, lengths: tuple[int, ...], padding: int, layout: str
) -> list[float]:
    """Largest errors of out, dq, dk, dv of this rank, padding included: it must be 0 there."""
    axis = grid(cp=world).cp
    metadata = row(lengths, padding, world, layout)
    plan = plan_of(metadata, world, rank, layout)
    sequences = thd_sequences(plan)
    assert isinstance(sequences, Sequences), sequences
    whole = tensors(len(metadata))
    mine = torch.from_numpy(plan.local)
    q, k, v = (x[mine].requires_grad_() for x in whole[:3])
    with emulated():
        packed = packed_attention(MODEL, single_axis("tp"), axis, comm_type, inner, torch.device("cpu"))
        out = packed(q, k, v, plan, sequences)
        # the gradient at padding is whatever the next layer sends: nothing of it may reach a token
        out.backward(whole[3][mine])
    return errors([out.detach(), q.grad, k.grad, v.grad], reference(metadata), plan.local)


PACKS = [((32,), 0), ((24, 8, 40), 0), ((19, 5, 1, 30), 0), ((11, 20), 13)]


@pytest.mark.parametrize("lengths, padding", PACKS)
@pytest.mark.slow
def test_packed_attention_of_one_rank_is_the_dense_one(lengths: tuple[int, ...], padding: int) -> None:
    found = run_ranks(packed_errors, 1, "p2p", 1, lengths, padding, "contiguous")
    assert max(found[0]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("comm_type, inner", [("p2p", 1), ("all_gather", 1), ("a2a", 1), ("a2a+p2p", 2)])
@pytest.mark.parametrize("lengths, padding", PACKS)
def test_packed_attention_of_several_ranks_is_the_dense_one(
    comm_type: str, inner: int, ranks: int, lengths: tuple[int, ...], padding: int
) -> None:
    if inner < ranks:
        found = run_ranks(packed_errors, ranks, comm_type, inner, lengths, padding, "zigzag_document")
        assert np.max(found) < TOLERANCE
