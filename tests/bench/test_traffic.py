"""The traffic formulas: equal to the byte to what ranks really send."""

from __future__ import annotations

import dataclasses

import pytest

from bench.steps import StepMeasure, measure_rank
from bench.traffic import all_reduce_bytes, context_bytes, stage_traffic, world_bytes
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.synthetic.images import MockImages
from megacp.core.data.synthetic.mock import MockRules
from tests.ranks import run_ranks

SIZES = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 64,
    "vocab_size": 512,
    "seq_length": 64,
    "global_batch_size": 4,
    "make_vocab_size_divisible_by": 64,
}
TP, CP, PP = "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"
SHARING, INSTANCES = "data_parallel_sharding_strategy", "num_distributed_optimizer_instances"
VIRTUAL, UNTIED = "num_virtual_stages_per_pipeline_rank", {"untie_embeddings_and_output_weights": True}


def measured(world_size: int, **values: object) -> list[StepMeasure]:
    """One step on every rank; packs differ in length."""
    config = with_values(RunConfig(), {**SIZES, **values})  # type: ignore[arg-type]
    rules = MockRules(config.model.vocab_size, config.data.seq_length, ragged=True, seed=3)
    return run_ranks(measure_rank, world_size, config, rules)


def assert_equal(measures: list[StepMeasure]) -> None:
    for measure in measures:
        expected = {name: count for name, count in dataclasses.asdict(measure.formula).items() if count}
        assert measure.sent == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {TP: 2},
        {TP: 2, "dtype": "bfloat16", "untie_embeddings_and_output_weights": True, "qk_layernorm": True},
        {TP: 2, "sequence_parallel": False, "qk_layernorm": True},
        {TP: 2, "dtype": "bfloat16", "qk_layernorm": True, "qk_layernorm_scope": "all_heads", "norm_position": "after"},
        {TP: 2, "cross_entropy_chunk_tokens": 7},
        {TP: 2, "sequence_parallel": False, "cross_entropy_chunk_tokens": 24},
        {TP: 2, "mlp_chunk_tokens": 24, "activation_offload": 0.5},
        {TP: 2, "sequence_parallel": False, "mlp_chunk_tokens": 24, "recompute_granularity": "selective"},
        {CP: 2},
        {CP: 2, "cp_comm_type": "all_gather", "dtype": "bfloat16", "recompute_granularity": "selective"},
        {CP: 2, "cp_comm_type": "a2a", "num_query_groups": 1, "dtype": "bfloat16"},
        {CP: 2, "cp_comm_type": "kv_exchange", "cp_layout": "balanced"},
        {"cp_comm_type": "kv_exchange", "cp_layout": "balanced", "dynamic_context_parallel": True},
        {PP: 2},
        {PP: 2, "num_virtual_stages_per_pipeline_rank": 2, "untie_embeddings_and_output_weights": True},
        {"dtype": "float64"},
    ],
    ids=lambda values: "-".join(f"{name[:4]}_{value}" for name, value in values.items()),
)
def test_the_formulas_equal_the_bytes_that_two_ranks_send(values: dict[str, object]) -> None:
    """Would catch a message sent twice, a gather that should be a slice, or a formula that forgot a term."""
    measures = measured(2, **values)
    assert_equal(measures)
    assert all(sum(dataclasses.astuple(measure.formula)) > world_bytes(2) for measure in measures)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {TP: 2, CP: 2},
        {TP: 2, PP: 2},
        {CP: 2, PP: 2},
        {CP: 4, "hidden_size": 256},
        {CP: 4, "hidden_size": 256, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)},
        {TP: 2, "cp_comm_type": "kv_exchange", "cp_layout": "balanced", "dynamic_context_parallel": True},
    ],
)
def test_the_formulas_equal_the_bytes_that_four_ranks_send(values: dict[str, object]) -> None:
    """Would catch a share over one axis that forgets another one."""
    assert_equal(measured(4, **values))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(
    ("world", "values"),
    [
        (2, {}),
        (2, {CP: 2, **UNTIED, "dtype": "bfloat16"}),
        (4, {INSTANCES: 2}),
        (4, {TP: 2, "qk_layernorm": True, "global_batch_size": 2}),
        (4, {PP: 2}),
        (4, {PP: 2, VIRTUAL: 2, "global_batch_size": 8}),
    ],
    ids=str,
)
def test_the_formulas_know_what_ranks_share_and_how_often_it_travels(
    strategy: str, world: int, values: dict[str, object]
) -> None:
    """Two and four microbatches a rank, one under tp.

    Would catch a reduce-scatter a step where each microbatch has one, a block gathered once, and copies not summed.
    """
    assert_equal(measured(world, **{SHARING: strategy, **values}))


def test_one_process_sends_nothing() -> None:
    """Would catch an axis of size 1 that still counts."""
    traffic = stage_traffic(with_values(RunConfig(), SIZES), 1, 0, [range(4)], [64, 64])
    assert sum(dataclasses.astuple(traffic)) == 0


def test_ring_traffic_of_a_rank_is_what_the_paper_says() -> None:
    """Would catch K and V counted once: 2 (cp-1) E in the model's dtype and (cp-1) E of gradients, E = 2 t groups d."""
    config = with_values(RunConfig(), {**SIZES, CP: 4})
    elements = 2 * (64 // 4) * 2 * 64
    assert context_bytes(config, [range(4)], [64]) == 4 * elements * (2 * 3 * 4 + 3 * 4)


def test_a_large_all_reduce_sends_less_than_a_small_one_per_element() -> None:
    """Would catch the two ways of an all-reduce swapped."""
    assert all_reduce_bytes(100, 4, 4) == 3 * 400
    assert all_reduce_bytes(1_000_000, 4, 4) == 6_000_000


def test_full_recomputation_is_refused() -> None:
    """Would catch a formula that silently leaves out the repeated forward messages."""
    config = with_values(RunConfig(), {**SIZES, "recompute_granularity": "full"})
    with pytest.raises(ValueError, match="full"):
        stage_traffic(config, 1, 0, [range(4)], [64])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "values"),
    [
        (2, {TP: 2, "lora_targets": "all"}),
        (2, {TP: 2, "lora_targets": "q,v,down", "sequence_parallel": False}),
        (2, {TP: 2, "dtype": "bfloat16", "qk_layernorm": True, "recompute_granularity": "selective"}),
        (2, {PP: 2, "lora_targets": "k,output"}),
        (4, {TP: 2, CP: 2, "lora_targets": "q,up,output"}),
        (4, {TP: 2, PP: 2, "lora_targets": "all"}),
        (4, {SHARING: "optim_grads", "lora_targets": "q"}),
    ],
    ids=str,
)
def test_the_formulas_know_low_rank_pairs(world: int, values: dict[str, object]) -> None:
    """Would catch gathers for weights that are frozen, and gradients that nobody below the first pair asks for."""
    assert_equal(measured(world, **{"lora_rank": 64, **values}))


def test_low_rank_pairs_beyond_the_formulas_are_refused() -> None:
    """Would catch a formula that silently leaves out their messages."""
    for values in ({"lora_targets": "down"}, {"lora_targets": "q", "mlp_chunk_tokens": 24}):
        config = with_values(RunConfig(), {**SIZES, "lora_rank": 4, **values})
        with pytest.raises(ValueError, match="formulas count low-rank pairs with one on q, k or v"):
            stage_traffic(config, 1, 0, [range(4)], [64])


SEES = {
    "vision_num_layers": 2,
    "vision_hidden_size": 128,
    "vision_ffn_hidden_size": 256,
    "vision_num_attention_heads": 4,
    "vision_head_dim": 32,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -2),
    "connector_num_attention_heads": 4,
    "connector_head_dim": 32,
    "additional_vocab_size": 128,
    "untie_embeddings_and_output_weights": True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {TP: 2},
        {TP: 2, "sequence_parallel": False, "freeze_vision": True, "recompute_granularity": "selective"},
        {TP: 2, "freeze_connector": True},
        {CP: 2},
        {CP: 2, "vision_feature_exchange": "all_gather", "freeze_text": True},
        {CP: 2, "vision_shards": "replicate"},
        {CP: 2, "freeze_vision": True, "freeze_connector": True},
        {PP: 2},
        {SHARING: "optim_grads_params"},
        {SHARING: "optim_grads_params", "freeze_vision": True, "freeze_connector": True},
        {SHARING: "optim_grads_params", "freeze_text": True, "freeze_vision": True},
    ],
    ids=lambda values: "-".join(f"{name[:9]}_{value}" for name, value in values.items()),
)
def test_the_formulas_equal_the_bytes_that_a_vision_language_model_sends(values: dict[str, object]) -> None:
    """Would catch a message of the tower counted per token, and backward messages of what is frozen."""
    config = with_values(RunConfig(), {**SIZES, **SEES, **values})  # type: ignore[arg-type]
    vocabulary = config.model.vocab_size
    images = MockImages(config.vision.patches_per_crop, config.vision.patch_dim, vocabulary)
    rules = MockRules(vocabulary, config.data.seq_length, "mixed", ragged=True, seed=3, images=images)
    measures = run_ranks(measure_rank, 2, config, rules)
    assert_equal(measures)
