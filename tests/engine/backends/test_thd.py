"""Rows in Transformer Engine's packed form: either its token order equals ours, or a reason is
given.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.mask import Metadata, Reach
from megacp.attention.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies
from megacp.distributed.grid import Axis, single_axis
from megacp.engine.backends import thd
from megacp.engine.backends.mlp import TiledMLP
from megacp.engine.backends.native import NativeBackend
from megacp.engine.backends.thd import PackedAttention, Sequences, thd_sequences
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.training import RECOMPUTE_MODES
from megacp.engine.models.block import Block, BlockInputs
from megacp.engine.tensor_parallel import linear
from tests.engine.backends.engine_math import thd_get_partitioned_indices
from tests.engine.backends.engine_stub import claimed_cuda, engine, needs_engine
from tests.ranks import grid


def padded_row(
    document: list[int], cp: int, layout: str, span: int = 0, branch: int = 0
) -> Metadata:
    def metadata(documents: np.ndarray) -> Metadata:
        n = len(documents)
        return Metadata.of_documents(documents, branch * (np.arange(n) * 3 // n), span)

    row = np.array(document)
    missing = LAYOUTS[layout].padded_length(metadata(row), cp, 1) - len(row)
    return metadata(np.append(row, np.full(missing, -1)))


def plan_of(metadata: Metadata, cp: int, layout: str, rank: int = 0) -> AttentionPlan:
    return AttentionPlan(LAYOUTS[layout].deal(metadata, cp), metadata, rank)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(0, 9),
    st.sampled_from([2, 3, 4, 8]),
)
def test_zigzag_in_each_document_is_transformer_engines_order(
    lengths: list[int], padding: int, cp: int
) -> None:
    document = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    metadata = padded_row(document, cp, "zigzag_document")
    plan = plan_of(metadata, cp, "zigzag_document")
    sequences = thd_sequences(plan)
    assert isinstance(sequences, Sequences)
    for rank in range(1, cp):
        other = thd_sequences(plan_of(metadata, cp, "zigzag_document", rank))
        assert (
            isinstance(other, Sequences)
            and other.cu_padded.tolist() == sequences.cu_padded.tolist()
        )
    places = torch.from_numpy(sequences.cu_padded)
    token = np.concatenate(
        [
            np.append(np.flatnonzero(metadata.document == i), -np.ones(p - n))
            for i, (n, p) in enumerate(zip(sequences.true, sequences.padded, strict=True))
        ]
    ).astype(int)
    for rank in range(cp):
        wanted = token[thd_get_partitioned_indices(places, len(metadata), cp, rank).numpy()]
        held = np.where(metadata.document[plan.indices[rank]] >= 0, plan.indices[rank], -1)
        np.testing.assert_array_equal(held, wanted)


@needs_engine
@pytest.mark.parametrize("world", [2, 4])
def test_its_own_function_deals_a_row_as_our_layout_does(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with Transformer Engine's data loader function, which only asks torch.distributed for
    size and rank.
    """
    document = [i for i, n in enumerate((16, 8, 32)) for _ in range(n)]
    metadata = padded_row(document, world, "zigzag_document")
    row = torch.arange(len(metadata))
    monkeypatch.setattr(dist, "get_world_size", lambda group: world)
    for rank in range(world):
        plan = plan_of(metadata, world, "zigzag_document", rank)
        sequences = thd_sequences(plan)
        assert isinstance(sequences, Sequences) and np.array_equal(sequences.true, sequences.padded)
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        with engine():
            from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
                get_batch_on_this_cp_rank,
            )

            theirs, _, _ = get_batch_on_this_cp_rank(
                torch.from_numpy(sequences.cu_padded), row, row, row
            )
        assert theirs.tolist() == plan.local.tolist()


def test_lengths_are_true_and_padded_and_the_rest_is_a_sequence_without_tokens() -> None:
    plan = plan_of(
        padded_row([0] * 5 + [1] * 8 + [-1] * 11, 2, "zigzag_document"), 2, "zigzag_document"
    )
    sequences = thd_sequences(plan)
    assert isinstance(sequences, Sequences)
    assert sequences.cu_lengths.tolist() == [0, 5, 13, 13]
    assert sequences.cu_padded.tolist() == [0, 8, 16, 24]
    assert sequences.cu_lengths.dtype == sequences.cu_padded.dtype == np.int32
    assert sequences.padded.max() == 8 and not np.array_equal(sequences.true, sequences.padded)


def test_one_rank_takes_a_row_as_it_stands() -> None:
    plan = plan_of(padded_row([-1, 0, 0, 0, -1, 1, 1], 1, "contiguous"), 1, "contiguous")
    sequences = thd_sequences(plan)
    assert isinstance(sequences, Sequences)
    assert sequences.true.tolist() == [0, 3, 2] and sequences.padded.tolist() == [1, 4, 2]


@pytest.mark.parametrize("padding", [0, 6])
def test_zigzag_over_the_row_serves_one_document(padding: int) -> None:
    plan = plan_of(padded_row([0] * 26 + [-1] * padding, 4, "zigzag"), 4, "zigzag")
    sequences = thd_sequences(plan)
    assert (
        isinstance(sequences, Sequences)
        and sequences.true.tolist() == [26]
        and sequences.padded.tolist() == [32]
    )


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
def test_another_order_is_refused_with_the_flag_to_change(layout: str) -> None:
    plan = plan_of(padded_row([0] * 10 + [1] * 22, 2, layout), 2, layout)
    reason = thd_sequences(plan)
    assert isinstance(reason, str) and "--cp-layout zigzag_document" in reason


@pytest.mark.parametrize(
    "span, branch, word", [(1, 0, "image spans"), (0, 1, "branches"), (1, 1, "spans and branches")]
)
def test_other_masks_than_causal_documents_are_named(span: int, branch: int, word: str) -> None:
    plan = plan_of(padded_row([0] * 16, 2, "zigzag_document", span, branch), 2, "zigzag_document")
    reason = thd_sequences(plan)
    assert isinstance(reason, str) and word in reason


def test_padding_with_a_span_hands_over_the_row_all_the_same() -> None:
    metadata = padded_row([0] * 8, 2, "zigzag_document")
    metadata = Metadata.of_row(
        np.append(metadata.leave, [0] * 4), np.append(metadata.span, [0] * 4)
    )
    assert isinstance(thd_sequences(plan_of(metadata, 2, "zigzag_document")), Sequences)


def test_chunks_are_named_and_windows_where_the_ring_has_none() -> None:
    plan = plan_of(padded_row([0] * 16, 2, "zigzag_document"), 2, "zigzag_document")
    assert "chunks" in str(thd_sequences(plan.within(Reach(chunk=4))))
    axis = dataclasses.replace(single_axis("cp"), size=2, global_ranks=(0, 1))
    attention = SimpleNamespace(set_context_parallel_group=lambda **options: None)
    for comm_type, windows in (("p2p", False), ("a2a", True), ("all_gather", True)):
        with claimed_cuda():
            packed = PackedAttention(attention, 1.0, axis, comm_type, 1, torch.device("cpu"))
        found = packed.sequences(plan.within(Reach(window=4)))
        assert isinstance(found, Sequences) == windows and (
            windows or "no sliding window with p2p" in found
        )
        assert isinstance(packed.sequences(plan), Sequences)


@pytest.mark.parametrize(
    ("inner", "name", "heads_over"), [(1, "p2p", 1), (2, "a2a+p2p", 2), (4, "a2a", 1)], ids=str
)
def test_a_single_group_or_groups_of_one_have_a_word_of_their_own(
    inner: int, name: str, heads_over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    axis = dataclasses.replace(single_axis("cp"), size=4, global_ranks=(0, 1, 2, 3))

    def split(axis: Axis, inner: int) -> tuple[SimpleNamespace, SimpleNamespace]:
        sizes = (inner, axis.size // inner)
        inside, between = (SimpleNamespace(group=object() if size > 1 else None) for size in sizes)
        return inside, between

    monkeypatch.setattr(thd, "split_axis", split)
    asked: dict[str, Any] = {}
    attention = SimpleNamespace(set_context_parallel_group=lambda **options: asked.update(options))
    with claimed_cuda():
        packed = PackedAttention(attention, 1.0, axis, "a2a+p2p", inner, torch.device("cpu"))
    assert asked["cp_comm_type"] == packed.cp["cp_comm_type"] == name
    assert packed.cp["cp_size_a2a"] == heads_over


def test_a_row_of_padding_is_no_row_for_it() -> None:
    assert (
        thd_sequences(plan_of(padded_row([-1] * 8, 2, "zigzag"), 2, "zigzag"))
        == "the row contains only padding"
    )


HIDDEN, FFN = 16, 24


def block_of(tile: int, recompute: str = "none", **values: Any) -> Block:
    """Return a block whose weights do not depend on the tile size."""
    sizes = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": 2,
        "dtype": "float64",
    }
    config = with_values(
        RunConfig(), {**sizes, "add_mlp_bias": True, "mlp_chunk_tokens": tile, **values}
    )
    block = Block(0, config.model, NativeBackend(grid(), config), RECOMPUTE_MODES[recompute])
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return block


def run(block: Block, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output of the MLP or of the block, and the gradients of the input and all
    parameters.
    """
    places, zeros = np.arange(tokens), np.zeros(tokens, np.int32)
    plan = AttentionPlan(places[None], Metadata.of_documents(zeros), 0)
    rotary = cos_sin(
        torch.arange(tokens), inverse_frequencies(HIDDEN // 2, 1e4, RotaryScaling()), torch.float64
    )
    x = torch.randn(
        tokens, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).requires_grad_()
    out = block(x, BlockInputs(plan, (rotary, rotary), *[torch.arange(tokens)] * 2, 1))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, list(torch.autograd.grad((out * weights).sum(), [x, *block.parameters()]))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("tile", [1, 5, 12, 100])
def test_any_tile_gives_the_gradients_of_the_whole_row(
    tile: int, dropout: float, recompute: str
) -> None:
    """Tolerance 1e-12: sums in a different order."""
    expected_out, expected = run(block_of(0, hidden_dropout=dropout), 12)
    out, found = run(block_of(tile, recompute, hidden_dropout=dropout), 12)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def mlp_of(tile: int, **values: Any) -> torch.nn.Module:
    return block_of(tile, **values).mlp


def test_a_rank_without_tokens_has_one_empty_tile() -> None:
    mlp = mlp_of(4)
    calls: list[int] = []
    mlp.mlp.gate_up.register_forward_hook(lambda module, inputs, out: calls.append(len(out)))
    x = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = mlp(x, None)
    gradients = torch.autograd.grad(out.sum(), [x, *mlp.parameters()])
    assert calls == [0, 0] and out.shape == x.shape
    assert all(not gradient.any() for gradient in gradients)


def test_a_frozen_mlp_passes_the_gradient_of_its_input() -> None:
    found = []
    for tile in (0, 5):
        mlp = mlp_of(tile).requires_grad_(False)
        x = (
            torch.linspace(-1, 1, 12 * HIDDEN, dtype=torch.float64)
            .view(12, HIDDEN)
            .requires_grad_()
        )
        mlp(x, lambda function, *inputs: function(*inputs)).square().sum().backward()
        assert all(parameter.grad is None for parameter in mlp.parameters())
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_without_a_graph_the_tiles_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = products(monkeypatch)
    with torch.no_grad():
        mlp_of(5)(torch.zeros(12, HIDDEN, dtype=torch.float64), None)
    assert calls == {(5, 2 * FFN): 2, (2, 2 * FFN): 1, (5, HIDDEN): 2, (2, HIDDEN): 1}


def products(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Count the products of linears by the shape of their result."""
    counts: Counter[tuple[int, int]] = Counter()
    whole = linear.product

    def counted(*inputs: Any) -> torch.Tensor:
        y = whole(*inputs)
        counts[tuple(y.shape)] += 1
        return y

    monkeypatch.setattr(linear, "product", counted)
    return counts


@pytest.mark.parametrize(
    "recompute, dropout, times", [("none", 0.0, 2), ("full", 0.0, 2), ("full", 0.2, 3)]
)
def test_a_tile_is_computed_twice_and_its_last_product_once(
    monkeypatch: pytest.MonkeyPatch, recompute: str, dropout: float, times: int
) -> None:
    block = block_of(4, recompute, hidden_dropout=dropout)
    counts = products(monkeypatch)
    run(block, 12)
    assert counts[4, 2 * FFN] == 3 * times
    assert counts[4, HIDDEN] == 3 * (times - 1)


def test_weight_gradients_of_halves_are_summed_in_float32() -> None:
    mlp = TiledMLP(_Scale(), 1, contextlib.nullcontext)
    x = torch.full((1024, 1), 1.0, dtype=torch.bfloat16)
    out = mlp(x, None)
    out.backward(torch.ones_like(out))
    assert mlp.mlp.weight.grad.item() == 1024


class _Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, save: Any) -> torch.Tensor:
        return x * self.weight
