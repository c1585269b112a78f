"""Test the memory terms of a rank: saved tensors of a real block, and the effect of each axis."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.mask import Metadata
from megacp.attention.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies
from megacp.distributed.grid import build_grid, single_axis
from megacp.distributed.shape import GridShape
from megacp.dry_run import in_flight, memory
from megacp.dry_run.measured import block_memory, head_memory
from megacp.dry_run.memory import stage_parameters
from megacp.engine.backends.native import NativeBackend
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.expert_parallel.route import Routes
from megacp.engine.models import costs, recompute
from megacp.engine.models.block import Block, BlockInputs
from megacp.engine.models.costs import loss_chunk_tokens
from megacp.engine.pipeline_parallel.schedules import schedule
from megacp.plan.picture import moments
from megacp.plan.search import fullest_stage
from tests.reference.schedule_simulator import simulate
from tests.reference.training import BALANCE, GEMMA, GPT_OSS, MAMBA2, QWEN3_5, SIGMOID

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
CHUNKS, LOSS_CHUNK = "num_virtual_stages_per_pipeline_rank", "cross_entropy_chunk_tokens"
SHARED = {"moe_shared_expert_intermediate_size": 96, "moe_shared_expert_gate": True}
BASE = {"vocab_size": 4096, "seq_length": 1024, "num_layers": 8, "global_batch_size": 32}
LONG = {
    "vocab_size": 152_064,
    "hidden_size": 4096,
    "seq_length": 131_072,
    CP: 8,
    "dtype": "bfloat16",
}


def config_of(**values) -> RunConfig:
    return with_values(RunConfig(), {**BASE, **values})


def stage(config: RunConfig, world: int, index: int = 0) -> memory.RankMemory:
    layers = 8 // config.parallel.pipeline_model_parallel_size
    return memory.stage_memory(config, index, [range(index * layers, (index + 1) * layers)], world)


@contextmanager
def kept_storages(found: dict[int, int]):
    """Collect every storage that autograd or a recomputation saves, by address."""

    def collect(x):
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    through = mock.patch.object(recompute, "HELD", (collect, lambda x: x))
    with torch.autograd.graph.saved_tensors_hooks(collect, lambda x: x), through:
        yield


# no head is narrower than 16, because FlexAttention pads such heads
@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "float32"},
        {"dtype": "float64", "attention_kernel": "math"},
        {},
        {"qk_layernorm": "head"},
        {"qk_layernorm": "all_heads", "no_rope_freq": "1"},
        {"norm_position": "after", "no_rope_freq": "1"},
        {"norm_position": "after", "mlp_chunk_tokens": 20, "hidden_dropout": 0.1},
        {**GEMMA, "kv_channels": 16},
        {**GEMMA, "kv_channels": 16, "mlp_chunk_tokens": 20},
        QWEN3_5,
        MAMBA2,
        {**QWEN3_5, "linear_attention_freq": None, "kv_channels": 16},
        {"num_query_groups": 2, "kv_channels": 48, "hidden_dropout": 0.1},
        {"mlp_chunk_tokens": 20},
        {"num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 40},
        {
            "num_experts": 8,
            "moe_router_pre_softmax": True,
            "norm_position": "after",
            "freeze": "text",
        },
        {"num_experts": 8, **SHARED},
        GPT_OSS,
        {"num_experts": 8, **SHARED, "freeze": "text"},
        {"num_experts": 8, "moe_router_pre_softmax": True, **BALANCE},
        {
            "num_experts": 8,
            "moe_router_pre_softmax": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_bias": True,
        },
        {"num_experts": 8, "ffn_hidden_size": 48, **SIGMOID, **BALANCE},
        {"freeze": "text"},
        {"num_experts": 8, "lora_rank": 4, "lora_targets": "up"},
        {"num_experts": 8, "mlp_chunk_tokens": 20},
        {"num_experts": 8, "lora_rank": 4, "lora_targets": "down"},
        {"lora_rank": 4, "norm_position": "after"},
        {"lora_rank": 4, "lora_targets": "k,up,down"},
        {"lora_rank": 4, "lora_targets": "k,output,down", "lora_dropout": 0.1},
        {"lora_rank": 4, "lora_targets": "all", "lora_dropout": 0.1},
        {"lora_rank": 4, "lora_targets": "output,gate", "mlp_chunk_tokens": 20},
        {
            "num_experts": 8,
            **SHARED,
            "lora_rank": 4,
            "lora_targets": "experts.gate,experts.up:2:4,v",
        },
        {
            "num_experts": 8,
            **SHARED,
            "lora_rank": 4,
            "lora_targets": "experts.gate+up,attention.q+v:2:4",
        },
        {"num_experts": 8, **SHARED, "lora_rank": 4, "lora_targets": "shared.down,attention.q:6:6"},
    ],
)
def test_activations_equal_what_a_real_block_keeps(granularity: str, values: dict) -> None:
    """The measured bytes equal the bytes of the saved tensors, and a single tensor more would show.

    If any layer has a recurrent state, the first one does.
    """
    tokens = 128  # a full block of the GPU kernel, which pads smaller ones
    config = config_of(
        **{"dtype": "bfloat16", **values}, seq_length=tokens, recompute_granularity=granularity
    )
    backend = NativeBackend(build_grid(GridShape(), 0), config)
    block = Block(0, config.model, backend, config.training.recompute_mode)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))
    zeros, places = np.zeros(tokens, np.int32), np.arange(tokens)
    plan = AttentionPlan(places[None], Metadata.of_documents(zeros), 0)
    frequencies = inverse_frequencies(config.model.head_dim, 1e4, RotaryScaling())
    rotary = cos_sin(torch.arange(tokens), frequencies, backend.dtype)
    shared = [*block.parameters(), *rotary]
    found: dict[int, torch.UntypedStorage] = {}
    with kept_storages(found):
        x = torch.zeros(tokens, config.model.hidden_size, dtype=backend.dtype, requires_grad=True)
        routes = Routes.of(plan, single_axis("one"), x.device, tokens)
        out = block(x, BlockInputs(plan, (rotary, rotary), *[torch.arange(tokens)] * 2, 1, routes))
    for kept in (vars(route) for route in routes.by_layer.values()):
        found |= {
            x.data_ptr(): x.untyped_storage() for x in kept.values() if isinstance(x, torch.Tensor)
        }
    for tensor in shared:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    beyond = block_memory(config, 0).kept - sum(storage.nbytes() for storage in found.values())
    # row counts, and the tensors that load-balancing losses save
    assert 0 <= beyond <= (2048 if config.model.num_experts else 0)


def test_weights_gradients_and_moments_are_those_of_the_parameters() -> None:
    """Gradient sums are fp32 under bfloat16; a tied table counts on both ends of a pipeline."""
    terms = stage(config_of(dtype="bfloat16"), 1)
    count = costs.model_parameters(config_of().model)
    assert (terms.weights, terms.gradients, terms.optimizer) == (2 * count, 4 * count, 12 * count)
    assert stage(config_of(), 1).optimizer == 8 * count
    assert stage(config_of(dtype="float64"), 1).gradients == 8 * count
    config, table = config_of(**{PP: 2}), 4096 * 256
    layers = 4 * costs.layer_parameters(config.model)
    ends = [stage_parameters(config, [range(index * 4, index * 4 + 4)]) for index in (0, 1)]
    assert ends == [layers + table, layers + table + 256]
    one = config_of(untie_embeddings_and_output_weights=True)
    assert stage_parameters(one, [range(8)]) == 2 * layers + 2 * table + 256


def test_a_rank_holds_its_experts_and_a_part_of_their_state() -> None:
    """tp ranks also have different experts; ranks with equal experts share their state."""
    config = config_of(
        num_experts=16,
        moe_layer_freq="2",
        tensor_model_parallel_size=2,
        expert_model_parallel_size=4,
    )
    experts = 4 * 16 * 3 * 256 * 768
    terms, dense = stage(config, 16), stage_parameters(config, [range(8)]) - experts // 4
    assert (terms.weights, terms.gradients) == (4 * (dense + experts // 4),) * 2
    assert terms.optimizer == 8 * (dense // 8 + experts // 16)
    assert dense == stage_parameters(config_of(**{TP: 2}), [range(8)]) - 4 * (
        3 * 256 * 768 // 2 - 16 * 256
    )


def test_each_axis_shrinks_its_terms() -> None:
    """Activations shrink with cp, and optimizer state with dp x cp.

    With tp, all activations shrink only under sequence parallelism.
    """
    one, cp4, dp2_cp4 = (
        stage(config_of(), 1),
        stage(config_of(**{CP: 4}), 4),
        stage(config_of(**{CP: 4}), 8),
    )
    table = memory.head_gradient(config_of())
    assert cp4.activations * 4 == one.activations and (cp4.head - table) * 4 == one.head - table
    assert (cp4.weights, cp4.gradients) == (one.weights, one.gradients)
    assert (
        one.optimizer
        == pytest.approx(4 * cp4.optimizer, rel=1e-4)
        == pytest.approx(8 * dp2_cp4.optimizer, rel=1e-4)
    )
    assert dp2_cp4.activations == cp4.activations
    assert stage(config_of(**{TP: 4}), 4).activations * 4 == one.activations
    apart = stage(config_of(**{TP: 4, "sequence_parallel": False}), 4)
    residual = 8 * 1024 * (4 * 256 + 2) * 4
    assert apart.activations == (one.activations - residual) // 4 + residual
    none, selective, full = (
        block_memory(config_of(recompute_granularity=name), 0)
        for name in ("none", "selective", "full")
    )
    assert none.kept > selective.kept > full.kept
    # recomputation restores the missing activations, so the peak is at least as high
    assert full.backward >= none.backward


@pytest.mark.parametrize(
    ("stages", "chunks", "batch"),
    [(4, 1, 32), (4, 1, 2), (1, 1, 32), (2, 2, 32), (4, 2, 32), (4, 2, 4), (3, 2, 4)],
)
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_a_stage_holds_what_it_does_when_all_run_their_lists(
    name: str, stages: int, chunks: int, batch: int
) -> None:
    """With 4 microbatches on 3 stages, fewer are in flight than the warm-up would allow."""
    config = config_of(
        **{PP: stages, CHUNKS: chunks, "global_batch_size": batch}, pipeline_schedule=name
    )
    held = [in_flight.most_held(config, index, stages) for index in range(stages)]
    run = simulate(
        [schedule(name, index, stages, batch, chunks) for index in range(stages)], chunks
    )
    assert [one.in_flight for one in held] == list(run.peak_in_flight)
    assert [one.deferred or 0 for one in held] == list(run.peak_put_off)
    # chunks alternate after groups of microbatches, one per stage
    assert held[0].rows == min(batch, stages if chunks == 1 else 2 * stages)
    assert (held[0].deferred is None) == (name == "1f1b" or chunks == 1)


@pytest.mark.parametrize(
    "values",
    [
        {PP: 4},
        {PP: 2, CHUNKS: 2, "activation_offload": 0.5},
        {PP: 4, "pipeline_schedule": "zero_bubble"},
        {
            CP: 4,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "recompute_granularity": "full",
        },
    ],
)
def test_a_step_moment_by_moment_comes_to_what_is_planned_for_a_rank(values: dict) -> None:
    config, totals = config_of(**values), []
    for index, layers in enumerate(costs.stage_layers(config, 4)):
        steps, planned = moments(config, index, 4), memory.stage_memory(config, index, layers, 4)
        totals.append(planned.total)
        assert max(moment.total for moment in steps) == planned.total
        assert all(sum(moment.parts.values()) == moment.total for moment in steps)
        assert [moment.name for moment in steps[-2:]] == ["optimizer", "checkpoint"]
        in_flight = max(moment.parts["activations"] for moment in steps)
        assert in_flight == planned.activations >= steps[0].parts["activations"] > 0
    assert fullest_stage(config, 4)[1].total == max(totals)


FFN = config_of().model.ffn_hidden_size
# elements of K (or V) and of Q on one of eight ranks with two K/V heads
KEYS, QUERIES = 128 * 2 * 32, 128 * 256


@pytest.mark.parametrize(
    ("values", "kept", "blocks"),
    [
        # a ring has the current block and the block in transfer
        ({"cp_comm_type": "p2p"}, 0, 2),
        ({"cp_comm_type": "all_gather"}, 0, 8),
        # eight ranks have four copies of each of two K/V heads; the output is saved before and after
        # the exchange
        ({"cp_comm_type": "a2a"}, 4 * (2 * KEYS * 3 + QUERIES), 4),
        (
            {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 4)},
            4 * QUERIES,
            2,
        ),
    ],
)
def test_a_transport_costs_its_buffers(values: dict, kept: int, blocks: int) -> None:
    """In float32, K/V, their gradients and the sums have the same width."""
    base = {CP: 8, "num_query_groups": 2}
    ring, config = config_of(**base, cp_comm_type="p2p"), config_of(**base, **values)
    found, beside = block_memory(config, 0), block_memory(ring, 0)
    assert found.kept - beside.kept == kept
    # at its peak, attention's backward has these blocks of K/V, their gradients, and the gradient of
    # queries
    assert found.backward - found.kept >= blocks * 2 * KEYS * 4 + QUERIES * 4


def test_auto_is_measured_as_the_kernel_that_a_gpu_takes() -> None:
    for dtype, kernel in (("bfloat16", "flex"), ("float32", "flex"), ("float64", "math")):
        values = {"dtype": dtype, "seq_length": 256}
        found = block_memory(config_of(**values), 0)
        assert found == block_memory(config_of(**values, attention_kernel=kernel), 0)


def test_offloaded_blocks_leave_two_of_them_on_the_device() -> None:
    layer = block_memory(config_of(), 0).kept
    for asked, count in ((0.5, 4), (3.0, 3), (1.0, 1), (0.99, 8)):
        terms = stage(config_of(activation_offload=asked), 1)
        assert terms.activations == max(8 - count, 2) * layer and terms.host == count * layer
    received = 1024 * 256 * 4
    first, last = (
        stage(config_of(**{PP: 2, "activation_offload": 0.5}), 2, index) for index in (0, 1)
    )
    assert (first.host, first.activations) == (2 * 2 * layer, 2 * 2 * layer)
    assert (last.host, last.activations) == (2 * layer - received, 2 * layer + received)
    for share, chunks, expected in (
        (0.5, [range(3)], [2]),
        (0.1, [range(30)], [3]),
        (3.0, [range(0, 4), range(8, 12)], [2, 1]),
        (5.0, [range(3)], [3]),
    ):
        assert costs.offloaded_blocks(config_of(activation_offload=share), chunks) == expected


def test_a_block_that_is_made_again_keeps_its_input_and_what_attention_gave() -> None:
    """It also keeps the log-sum-exp of each of eight heads, which is fp32 in any model."""
    full = block_memory(config_of(recompute_granularity="full", dtype="bfloat16"), 0)
    assert full.kept == 1024 * ((256 + 256) * 2 + 8 * 4)


def test_experts_are_measured_on_ranks_that_their_groups_do_not_fill_alone() -> None:
    """The ep degree need not divide the tp degree: 3 with 2 and 4, and 6 with 4."""
    experts = {
        "num_experts": 12,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "num_attention_heads": 8,
    }
    for tp, ep in ((2, 3), (4, 3), (4, 6)):
        found = block_memory(config_of(expert_model_parallel_size=ep, **{TP: tp}, **experts), 0)
        dense = block_memory(config_of(**{TP: tp}, **experts), 0)
        assert found.kept > dense.kept > 0  # rows of the busiest rank, and their sources


def test_tiles_of_experts_keep_no_hidden_layer() -> None:
    """Tiling frees gate, up and the activation's output, for three experts per token."""
    experts = {"num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 64}
    plain, tiled = (
        block_memory(config_of(mlp_chunk_tokens=tile, **experts), 0) for tile in (0, 64)
    )
    assert plain.kept - tiled.kept == 3 * 1024 * 3 * 64 * 4


def test_tiles_of_the_mlp_keep_nothing_of_their_hidden_layer() -> None:
    plain, tiled = (block_memory(config_of(mlp_chunk_tokens=tile), 0) for tile in (0, 64))
    # gate, up, the activation's output, the norm's output, and the norm's scale of each token
    assert plain.kept - tiled.kept == 1024 * (3 * config_of().model.ffn_hidden_size + 256 + 1) * 4


@pytest.mark.parametrize("instances", [1, 2])
def test_strategies_keep_their_share_of_sixteen_bytes_a_parameter(instances: int) -> None:
    count, ranks = costs.model_parameters(config_of().model), 8 // instances
    flags = {"dtype": "bfloat16", CP: 2, "num_distributed_optimizer_instances": instances}
    expected = {
        "optim": [2 * ranks, 4 * ranks, 12],
        "optim_grads": [2 * ranks, 4, 12],
        "optim_grads_params": [4, 4, 8],
    }
    for strategy, bytes_each in expected.items():
        terms = stage(config_of(**flags, data_parallel_sharding_strategy=strategy), 8)
        assert [
            round(ranks * x / count) for x in (terms.weights, terms.gradients, terms.optimizer)
        ] == bytes_each
        assert (terms.gathered > 0) == (strategy == "optim_grads_params") == (terms.saved > 0)


def test_two_blocks_are_whole_at_once_and_two_chunks_of_a_pipeline() -> None:
    flags = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "untie_embeddings_and_output_weights": True,
    }
    block, table = costs.layer_parameters(config_of().model), 4096 * 256
    terms = stage(config_of(**flags), 2)
    assert (terms.gathered, terms.gathered_head) == (4 * 2 * block, 4 * (table + 256))
    virtual = config_of(**flags, **{PP: 2, CHUNKS: 2})
    first = memory.stage_memory(virtual, 0, [range(0, 2), range(4, 6)], 4)
    assert first.gathered == first.gathered_head == 4 * (4 * block + table)


def test_the_heads_gradient_is_gone_before_the_largest_block_where_that_is_not_the_last() -> None:
    """On 8 ranks: the table's gradient in bfloat16, its fp32 copy, and this rank's part.

    The first layers of the longer model have recurrent states.
    """
    flags = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "untie_embeddings_and_output_weights": True,
    }
    table, tokens = (
        4096 * 256 + 256,
        {"seq_length": 64, "dtype": "bfloat16", "recompute_granularity": "full"},
    )
    short = config_of(**flags, **tokens)
    # this rank's part of the sum, and the gradient of the last block's output; one gathered block
    # fewer than later
    before = (
        2 * 4096 * 256 + table // 8 * 4 + 2 * 64 * 256 - 2 * costs.layer_parameters(short.model)
    )
    assert stage(short, 8).table == 4 * table + max(before, block_memory(short, 7).work)
    states = {**QWEN3_5, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    longer = config_of(**{**states, **flags, **tokens, "seq_length": 4096})
    first, last = (block_memory(longer, layer) for layer in (0, 7))
    long, heads = stage(longer, 8), 4 * (4097 * longer.model.hidden_size)
    assert last.work < first.work
    # the last block has freed its activations when an earlier block with a state runs backward
    assert long.block == first.work - last.kept
    assert long.table == heads + last.work
    assert long.peaks["backward"] < long.peaks["table"] - last.work + first.work


def test_weight_gradients_that_wait_free_nothing_of_blocks_on_the_host() -> None:
    for offload, on_device in ((0.0, 4), (4.0, 2)):
        stages = {PP: 2, "global_batch_size": 4, "activation_offload": offload}
        plain, waiting = (
            config_of(**stages, pipeline_schedule=name) for name in ("1f1b", "zero_bubble")
        )
        found = [stage(config, 2, 1).activations for config in (plain, waiting)]
        one, kept = block_memory(waiting, 0, defers=True).left, block_memory(waiting, 0).kept
        # per token: inputs and output gradients of the matrix products in attention and MLP
        columns = (256 + 3 * 256) + (256 + 256) + (256 + 2 * FFN) + (FFN + 256)
        assert one == 1024 * columns * 4
        assert found[1] - found[0] == 4 * one + max(0, 3 * one - (on_device - 1) * kept)
        assert (found[1] - found[0] > 4 * one) == (on_device == 2)


def test_the_loss_takes_all_tokens_where_their_logits_are_small_and_else_a_power_of_two() -> None:
    """131,072 tokens on 8 ranks, 152 k rows: all logits need 5 GiB, a chunk needs at most 1 GiB."""
    chosen = {
        n: loss_chunk_tokens(config_of(seq_length=n, vocab_size=16_384))
        for n in (4096, 8192, 8193, 12288)
    }
    assert chosen == {4096: 0, 8192: 0, 8193: 8192, 12288: 8192}
    assert [loss_chunk_tokens(config_of(**LONG, **{TP: tp})) for tp in (1, 8)] == [1024, 8192]
    assert loss_chunk_tokens(config_of(vocab_size=2**30)) == 1
    assert [loss_chunk_tokens(config_of(**{LOSS_CHUNK: n})) for n in (0, 7)] == [0, 7]
    chunks, whole = (config_of(**LONG, **chosen) for chosen in ({}, {LOSS_CHUNK: 0}))
    beside = [
        head_memory(config).forward - memory.head_gradient(config) for config in (chunks, whole)
    ]
    assert beside[0] < 2**30 < beside[1] / 5


def test_the_tables_gradient_counts_on_the_last_stage_wide_where_chunks_add_to_it() -> None:
    config, table = config_of(**{**LONG, PP: 2, "num_layers": 2}), 152_064 * 4096
    first, last = (memory.stage_memory(config, i, [range(i, i + 1)], 16) for i in (0, 1))
    assert first.head == 0
    assert last.head == max(head_memory(config).forward, head_memory(config).backward) > 4 * table
    for values, size in (({LOSS_CHUNK: 0}, 2), ({LOSS_CHUNK: 16_384}, 2), ({"freeze": "text"}, 0)):
        assert memory.head_gradient(config_of(**LONG, **values)) == size * table
    # autograd keeps the gradient of a tied table until the end of backward
    pair = (
        config_of(**LONG, untie_embeddings_and_output_weights=untied) for untied in (False, True)
    )
    blocks = [memory.stage_memory(config, 0, [range(1)], 8).block for config in pair]
    assert blocks[0] - blocks[1] == 4 * table
