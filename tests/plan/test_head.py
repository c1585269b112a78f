"""The head's memory: the plan beside what the allocator counts, and what the flag `auto` chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.distributed.grid import single_axis
from megacp.core.models.build import build_chunks
from megacp.core.models.costs import loss_chunk_tokens
from megacp.core.tensor_parallel.chunked_loss import Target
from megacp.plan import memory
from tests.ranks import grid, run_ranks
from tests.reference.allocations import peak_bytes_of

TP, CP, CHUNK = "tensor_model_parallel_size", "context_parallel_size", "cross_entropy_chunk_tokens"
SIZES = {"num_layers": 1, "hidden_size": 192, "ffn_hidden_size": 128, "num_attention_heads": 2, "vocab_size": 16_384}
LONG = {"vocab_size": 152_064, "hidden_size": 4096, "seq_length": 131_072, CP: 8, "dtype": "bfloat16"}


def config_of(**values: Any) -> RunConfig:
    return with_values(RunConfig(), {**SIZES, "seq_length": 4096, **values})


def measured(rank: int, world: int, values: dict[str, Any]) -> tuple[int, int]:
    """Most bytes of norm, loss and their backward with the hidden states that go in, and the planned ones."""
    here = grid(tp=world)
    config = config_of(**{"seq_length": 2048, "vocab_size": 4096, TP: world, **values})
    (chunk,) = build_chunks(config, here)
    rules = MockRules(config.model.vocab_size, config.data.seq_length)
    batch = shard_batch(mock_batch([0], rules).with_padding_to(2048), single_axis("cp"), LAYOUTS["contiguous"])
    tokens = 2048 // (world if config.parallel.sequence_parallel else 1)
    hidden = torch.randn(tokens, 192).to(next(chunk.parameters()).dtype).requires_grad_()
    peak = peak_bytes_of(lambda: chunk.head(hidden, Target(batch.labels, batch.loss_weights, 7.0)).backward())
    assert hidden.grad is not None
    return peak + hidden.nbytes, memory.head_work(config) + memory.head_gradient(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("values", [{}, {"sequence_parallel": False}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.slow
def test_the_measured_peak_of_the_head_is_the_planned_one(world: int, values: dict[str, Any], dtype: str) -> None:
    """Would catch logits of two chunks at once, a wide copy of the table's gradient beside it, or a copy of all hidden
    states that the plan does not know. Five percent are for numbers a token, norms and messages.
    """
    values = {**values, "dtype": dtype, CHUNK: 512}
    for peak, planned in [measured(0, 1, values)] if world == 1 else run_ranks(measured, world, values):
        assert peak == pytest.approx(planned, rel=0.05)


def test_the_head_of_a_long_row_fits_into_one_gibibyte() -> None:
    """131,072 tokens on 8 ranks, 152 k rows, hidden 4096: whole logits would take 14 GiB and more."""
    config = config_of(**LONG)
    assert loss_chunk_tokens(config) == 512
    assert memory.head_work(config) < 2**30 < memory.head_work(config_of(**LONG, **{CHUNK: 0})) / 14


def test_auto_takes_all_tokens_where_they_are_small_and_else_a_power_of_two() -> None:
    """Would catch a choice that a rank's memory does not follow; 4096 x 16384 float32 logits are half the bound."""
    chosen = {tokens: loss_chunk_tokens(config_of(seq_length=tokens)) for tokens in (4096, 8192, 8193, 12288)}
    assert chosen == {4096: 0, 8192: 0, 8193: 8192, 12288: 8192}
    assert loss_chunk_tokens(config_of(**LONG, **{TP: 8})) == 4096
    assert loss_chunk_tokens(config_of(vocab_size=2**30)) == 1
    assert [loss_chunk_tokens(config_of(**{CHUNK: n})) for n in (0, 7)] == [0, 7]


def test_the_tables_gradient_counts_on_the_last_stage_alone_wide_where_chunks_add_to_it() -> None:
    """Would catch 2.3 GiB of an 8B model that no term holds."""
    config = config_of(**LONG, pipeline_model_parallel_size=2, num_layers=2)
    first, last = (memory.stage_memory(config, i, [range(i, i + 1)], 16) for i in (0, 1))
    assert first.head == 0
    assert last.head == memory.head_work(config) + 4 * 152_064 * 4096
    for values, size in (({CHUNK: 0}, 2), ({CHUNK: 16_384}, 2), ({"freeze": "text"}, 0)):
        assert memory.head_gradient(config_of(**LONG, **values)) == size * 152_064 * 4096


def test_a_tied_tables_gradient_waits_for_the_embeddings() -> None:
    """Would catch it gone with the loss, where autograd holds it until all of backward is done."""
    tied, apart = (config_of(**LONG, untie_embeddings_and_output_weights=untied) for untied in (False, True))
    blocks = [memory.stage_memory(config, 0, [range(1)], 8).block for config in (tied, apart)]
    assert blocks[0] - blocks[1] == 4 * 152_064 * 4096
