"""The memory terms: against the tensors a real block keeps, and by the axis that must shrink each of them."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from megacp.core.backends.native import NativeBackend
from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.distributed.grid import GridShape, build_grid
from megacp.core.models import costs, recompute
from megacp.core.models.block import Block, BlockInputs
from megacp.core.ops.mask import Metadata
from megacp.core.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies
from megacp.plan import activations, memory
from megacp.plan.memory import stage_parameters

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
BASE = {"vocab_size": 4096, "seq_length": 1024, "num_layers": 8, "global_batch_size": 32}


def config_of(**values) -> RunConfig:
    return with_values(RunConfig(), {**BASE, **values})


def stage(config: RunConfig, world: int, index: int = 0) -> memory.RankMemory:
    layers = 8 // config.parallel.pipeline_model_parallel_size
    return memory.stage_memory(config, index, [range(index * layers, (index + 1) * layers)], world)


@contextmanager
def kept_storages(found: dict[int, int]):
    """Collect the bytes of every storage that autograd saves, by address, behind a recomputation's own hooks."""

    def collect(x):
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    pack = recompute.Recomputation._pack
    through = mock.patch.object(recompute.Recomputation, "_pack", lambda self, x: collect(pack(self, x)))
    with torch.autograd.graph.saved_tensors_hooks(collect, lambda x: x), through:
        yield


@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"qk_layernorm": "head"},
        {"qk_layernorm": "all_heads", "no_rope_freq": "1"},
        {"norm_position": "after", "no_rope_freq": "1"},
        {"norm_position": "after", "mlp_chunk_tokens": 20, "hidden_dropout": 0.1},
        {"num_query_groups": 2, "kv_channels": 48},
        {"hidden_dropout": 0.1},
        {"mlp_chunk_tokens": 20},
        {"freeze": "text"},
        {"lora_rank": 4, "norm_position": "after"},
        {"lora_rank": 4, "lora_targets": "k,up,down"},
        {"lora_rank": 4, "lora_targets": "k,output,down", "lora_dropout": 0.1},
        {"lora_rank": 4, "lora_targets": "all", "lora_dropout": 0.1, "recompute_granularity": "selective"},
        {"lora_rank": 4, "lora_targets": "output,gate", "mlp_chunk_tokens": 20},
    ],
)
def test_activations_equal_what_a_real_block_keeps(granularity: str, dtype: str, values: dict) -> None:
    """Would catch an estimate that drifts from the code: a tensor more or less per layer shows at once."""
    tokens = 64
    config = config_of(**values, dtype=dtype, seq_length=tokens)
    backend = NativeBackend(build_grid(GridShape(), 0), config)
    block = Block(0, config.model, backend, granularity)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))
    zeros, places = np.zeros(tokens, np.int32), np.arange(tokens)
    plan = AttentionPlan(places[None], Metadata(zeros, zeros, zeros, places), 0)
    frequencies = inverse_frequencies(config.model.head_dim, 1e4, RotaryScaling())
    rotary = cos_sin(torch.arange(tokens), frequencies, backend.dtype)
    shared = [*block.parameters(), *rotary]
    found: dict[int, torch.UntypedStorage] = {}
    with kept_storages(found):
        x = torch.zeros(tokens, config.model.hidden_size, dtype=backend.dtype, requires_grad=True)
        out = block(x, BlockInputs(plan, rotary, *[torch.arange(tokens)] * 2, 1))
    for tensor in shared:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    assert sum(storage.nbytes() for storage in found.values()) == activations.layer_activations(config, granularity)


def test_weights_and_gradients_are_the_parameters_of_the_stage() -> None:
    """Would catch gradients in the model's dtype instead of fp32."""
    terms = stage(config_of(dtype="bfloat16"), 1)
    count = costs.model_parameters(config_of().model)
    assert (terms.weights, terms.gradients, terms.optimizer) == (2 * count, 4 * count, 12 * count)
    assert stage(config_of(), 1).optimizer == 8 * count
    assert stage(config_of(dtype="float64"), 1).gradients == 8 * count


def test_a_tied_embedding_stands_on_both_ends_of_a_pipeline() -> None:
    """Would catch the last stage planned without its copy of the table."""
    config = config_of(**{PP: 2})
    table = 4096 * 256
    layers = 4 * costs.layer_parameters(config.model)
    ends = [stage_parameters(config, [range(index * 4, index * 4 + 4)]) for index in (0, 1)]
    assert ends == [layers + table, layers + table + 256]
    one = config_of(untie_embeddings_and_output_weights=True)
    assert stage_parameters(one, [range(8)]) == 2 * layers + 2 * table + 256


def test_activations_fall_with_cp_and_optimizer_state_with_dp_x_cp() -> None:
    """Would catch an estimate that knows tp and pp only, and refuses long rows on many cp ranks."""
    one, cp4 = stage(config_of(), 1), stage(config_of(**{CP: 4}), 4)
    table = memory.head_gradient(config_of())
    assert cp4.activations * 4 == one.activations and (cp4.head - table) * 4 == one.head - table
    assert (cp4.weights, cp4.gradients) == (one.weights, one.gradients)
    dp2_cp4 = stage(config_of(**{CP: 4}), 8)
    assert one.optimizer == pytest.approx(4 * cp4.optimizer, rel=1e-4) == pytest.approx(8 * dp2_cp4.optimizer, rel=1e-4)
    assert dp2_cp4.activations == cp4.activations


def test_activations_fall_with_tp_wholly_only_under_sequence_parallelism() -> None:
    """Would catch norms' activations counted as sharded without sequence parallelism."""
    one, tp4 = stage(config_of(), 4), stage(config_of(**{TP: 4}), 4)
    assert tp4.activations * 4 == one.activations
    apart = stage(config_of(**{TP: 4, "sequence_parallel": False}), 4)
    residual = 8 * 1024 * (4 * 256 + 2) * 4
    assert apart.activations == (one.activations - residual) // 4 + residual


def test_recomputation_trades_activations_in_order() -> None:
    """Would catch granularities that save nothing, and the working copy of the block being recomputed forgotten."""
    none, selective, full = (
        stage(config_of(recompute_granularity=name), 1).activations for name in ("none", "selective", "full")
    )
    assert none > selective > full
    works = [activations.block_work(config_of(recompute_granularity=name)) for name in ("none", "full")]
    kept = [activations.layer_activations(config_of(), name) for name in ("none", "full")]
    assert works[1] - works[0] == kept[0] - kept[1]


@pytest.mark.parametrize(
    ("stages", "chunks", "batch", "expected"),
    [
        (4, 1, 32, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        (1, 1, 32, [1]),
        (2, 2, 32, [5, 3]),
        (4, 2, 32, [11, 9, 7, 5]),
        (4, 2, 4, [8, 8, 7, 5]),
    ],
)
def test_in_flight_activations_are_the_schedules(stages: int, chunks: int, batch: int, expected: list[int]) -> None:
    """Would catch a first stage planned with one microbatch, or more microbatches than a step has."""
    from megacp.core.pipeline_parallel.schedules import Kind, schedule, training_schedule_name

    config = config_of(
        **{PP: stages, "num_virtual_stages_per_pipeline_rank": chunks, "global_batch_size": batch, "num_layers": 16}
    )
    assert [activations.in_flight(config, index, stages) for index in range(stages)] == expected
    for index in range(stages):
        held = peak = 0
        for action in schedule(training_schedule_name(chunks), index, stages, batch, chunks):
            held += (action.kind == Kind.FORWARD) - (action.kind == Kind.BACKWARD)
            peak = max(peak, held)
        assert peak == expected[index]


def test_gathering_keys_costs_the_whole_row_and_a_ring_two_parts() -> None:
    """Would catch a transport whose buffers are not planned."""
    flash = {CP: 8, "attention_kernel": "flash"}
    ring, gathered = (activations.attention_work(config_of(**flash, cp_comm_type=c)) for c in ("p2p", "all_gather"))
    part = 2 * 128 * 256 * (4 + 4)
    assert (ring, gathered) == (2 * part + 128 * 256 * 4, 8 * part + 128 * 256 * 4)


def test_heads_for_sequence_keeps_one_part_and_replicated_key_heads() -> None:
    """Eight ranks over two K/V heads keep each of them four times; the output is kept on both sides of the swap."""
    flash = {CP: 8, "attention_kernel": "flash", "num_query_groups": 2}
    ring, swapped = (config_of(**flash, cp_comm_type=c) for c in ("p2p", "a2a"))
    keys, queries = 128 * 2 * 32, 128 * 256
    assert activations.layer_activations(swapped, "none") - activations.layer_activations(ring, "none") == 4 * (
        2 * keys * 3 + queries
    )
    assert activations.attention_work(swapped) == 4 * 2 * keys * (4 + 4) + queries * 4 + queries * (4 + 4)
    both = config_of(**{**flash, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 4)})
    assert activations.layer_activations(both, "none") - activations.layer_activations(ring, "none") == 4 * queries
    assert activations.attention_work(both) == 2 * 2 * keys * (4 + 4) + queries * 4 + queries * (4 + 4)


def test_the_plain_kernel_costs_a_block_of_scores_and_never_a_square() -> None:
    """Would catch an estimate that fits a GPU on which the run then does not."""
    extra = [
        activations.attention_work(config_of(attention_kernel="math", seq_length=tokens))
        - activations.attention_work(config_of(attention_kernel="flash", seq_length=tokens))
        for tokens in (512, 4096, 8192)
    ]
    heads = config_of().model.num_attention_heads
    assert extra == [3 * heads * min(1024, tokens) * tokens * 4 for tokens in (512, 4096, 8192)]


def test_auto_is_planned_as_the_kernel_that_a_gpu_takes() -> None:
    """Would catch scores planned for a kernel that makes none, or none for float64, where they are made."""
    for dtype, kernel in (("bfloat16", "flex"), ("float32", "flex"), ("float64", "math")):
        found = [activations.attention_work(config_of(attention_kernel=name, dtype=dtype)) for name in ("auto", kernel)]
        assert found[0] == found[1]
    hidden = config_of().model.hidden_size
    for values, again in (({}, 0), ({CP: 2}, 1), ({CP: 2, "cp_comm_type": "a2a"}, 0)):
        flex, flash = (config_of(attention_kernel=name, **values) for name in ("flex", "flash"))
        work = activations.attention_work(flex) - activations.attention_work(flash)
        assert work == again * 2 * 512 * hidden * (4 + 4), "only a part among several is computed again"


def test_offloaded_blocks_leave_two_of_them_on_the_device() -> None:
    """Would catch bytes that are planned on both sides or on neither, and microbatches in flight forgotten."""
    layer = activations.layer_activations(config_of(), "none")
    for asked, count in ((0.5, 4), (3.0, 3), (1.0, 1), (0.99, 8)):
        terms = stage(config_of(activation_offload=asked), 1)
        assert terms.activations == max(8 - count, 2) * layer and terms.host == count * layer
    received = 1024 * 256 * 4
    first, last = (stage(config_of(**{PP: 2, "activation_offload": 0.5}), 2, index) for index in (0, 1))
    assert (first.host, first.activations) == (2 * 2 * layer, 2 * 2 * layer)
    assert (last.host, last.activations) == (2 * layer - received, 2 * layer + received)


@pytest.mark.parametrize(
    ("asked", "chunks", "expected"),
    [
        (0.5, [range(3)], [2]),
        (0.1, [range(30)], [3]),
        (3.0, [range(0, 4), range(8, 12)], [2, 1]),
        (5.0, [range(3)], [3]),
        (0.0, [range(3), range(4, 6)], [0, 0]),
    ],
)
def test_chunks_of_a_stage_share_its_offloaded_blocks(asked: float, chunks: list[range], expected: list[int]) -> None:
    """Would catch a part that rounding makes one block more, and a chunk that offloads them all."""
    assert costs.offloaded_blocks(config_of(activation_offload=asked), chunks) == expected


def test_a_tile_of_the_mlp_costs_as_many_tokens_on_any_tp() -> None:
    """Would catch a tile that grows with tp, which shares its columns and gathers its rows."""
    one, tp4 = (activations.tile_work(config_of(**{TP: tp, "mlp_chunk_tokens": 64})) for tp in (1, 4))
    assert one == (64 * 256 + 3 * 64 * config_of().model.ffn_hidden_size) * 4 + 64 * 4 == 4 * tp4
    assert activations.tile_work(config_of(mlp_chunk_tokens=5000)) == 16 * one
    plain, tiled = (stage(config_of(mlp_chunk_tokens=tile), 1) for tile in (0, 64))
    assert tiled.activations < plain.activations / 1.5


def test_strategies_keep_their_share_of_sixteen_bytes_a_parameter() -> None:
    """Would catch a strategy that shares over dp x cp where instances hold copies, or a master weight planned twice."""
    count = costs.model_parameters(config_of().model)
    for instances in (1, 2):
        ranks = 8 // instances
        flags = {"dtype": "bfloat16", CP: 2, "num_distributed_optimizer_instances": instances}
        found = {}
        for strategy in ("optim", "optim_grads", "optim_grads_params"):
            terms = stage(config_of(**flags, data_parallel_sharding_strategy=strategy), 8)
            found[strategy] = [round(ranks * x / count) for x in (terms.weights, terms.gradients, terms.optimizer)]
            assert (terms.gathered > 0) == (strategy == "optim_grads_params") == (terms.saved > 0)
        assert found == {
            "optim": [2 * ranks, 4 * ranks, 12],
            "optim_grads": [2 * ranks, 4, 12],
            "optim_grads_params": [4, 4, 8],
        }


def test_two_blocks_are_whole_at_once_and_two_chunks_of_a_pipeline() -> None:
    """Would catch a plan in which all of a stage is gathered, or none."""
    flags = {"data_parallel_sharding_strategy": "optim_grads_params", "untie_embeddings_and_output_weights": True}
    block, table = costs.layer_parameters(config_of().model), 4096 * 256
    terms = stage(config_of(**flags), 2)
    assert (terms.gathered, terms.gathered_head) == (4 * 2 * block, 4 * (table + 256))
    virtual = config_of(**flags, **{PP: 2, "num_virtual_stages_per_pipeline_rank": 2})
    first = memory.stage_memory(virtual, 0, [range(0, 2), range(4, 6)], 4)
    assert first.gathered == first.gathered_head == 4 * (4 * block + table)


def test_blocks_on_the_host_free_nothing_for_weight_gradients_that_wait() -> None:
    """Would catch a plan that takes activations away which were never on the device. Four layers on the last stage."""
    layers, stages = range(4, 8), {PP: 2, "num_layers": 8, "global_batch_size": 4}
    for offload, on_device in ((0.0, 4), (4.0, 2)):
        plain, waiting = (
            config_of(**stages, activation_offload=offload, pipeline_schedule=name) for name in ("1f1b", "zero_bubble")
        )
        found = [memory.stage_memory(config, 1, [layers], 2).activations for config in (plain, waiting)]
        one, kept = activations.layer_deferred(waiting), activations.layer_activations(waiting, "none")
        assert found[1] - found[0] == 4 * one + max(0, 3 * one - (on_device - 1) * kept)
        assert (found[1] - found[0] > 4 * one) == (on_device == 2)
