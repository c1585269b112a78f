"""Parameters and FLOPs, against hand-counted and published numbers."""

from __future__ import annotations

import dataclasses

import pytest

from megacp.core.config.model import ModelConfig
from megacp.core.config.run import RunConfig
from megacp.core.config.training import DataConfig
from megacp.core.models import costs

LLAMA_3_8B, QWEN3_0_6B, OLMO2_7B = (
    ModelConfig(32, 4096, 14336, 32, 8, vocab_size=128256, untie_embeddings_and_output_weights=True),
    ModelConfig(28, 1024, 3072, 16, 8, 128, vocab_size=151936, qk_layernorm="head"),
    ModelConfig(
        *(32, 4096, 11008, 32),
        vocab_size=100352,
        qk_layernorm="all_heads",
        norm_position="after",
        untie_embeddings_and_output_weights=True,
    ),
)
"""Layers, hidden size, MLP, heads, groups, width of a head."""
PUBLISHED = [(LLAMA_3_8B, 8_030_261_248), (QWEN3_0_6B, 596_049_920), (OLMO2_7B, 7_298_617_344)]


def test_known_models_have_their_published_number_of_parameters() -> None:
    assert [costs.model_parameters(model) for model, _ in PUBLISHED] == [published for _, published in PUBLISHED]


def test_a_rank_holds_its_part_of_a_layer_and_norms_whole() -> None:
    """Biases of columns are cut by tp, those of rows are not; tables are padded on each rank."""
    for model, replicated in ((QWEN3_0_6B, 2 * 1024 + 2 * 128), (OLMO2_7B, 2 * 4096)):
        assert 8 * (costs.layer_parameters(model, 8) - replicated) == costs.layer_parameters(model) - replicated
    plain = ModelConfig(num_query_groups=2)
    biased = dataclasses.replace(plain, add_qkv_bias=True, add_attention_output_bias=True, add_mlp_bias=True)
    extra = [costs.layer_parameters(biased, tp) - costs.layer_parameters(plain, tp) for tp in (1, 2)]
    columns, rows = (8 + 2 + 2) * 32 + 2 * 768, 256 + 256
    assert extra == [columns + rows, columns // 2 + rows]
    assert [costs.vocabulary_rows(plain, 1001, tp) for tp in (1, 2, 4, 16)] == [1008, 504, 256, 64]


def test_flops_of_a_tiny_layer_equal_the_count_by_hand() -> None:
    model = ModelConfig(
        num_layers=1, hidden_size=8, ffn_hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=10
    )
    layer = costs.layer_flops(model, 3, costs.causal_area(3))
    products = [(8, 8), (8, 4), (8, 4), (8, 8), (8, 16), (8, 16), (16, 8)]
    assert layer.matmul == sum(2 * 3 * a * b for a, b in products)
    assert layer.attention == 6 * 4 * (2 + 2) * 2  # pairs x heads x two products of width 2
    assert costs.model_flops(model, 3, 6).matmul == layer.matmul + 2 * 3 * 8 * 10
    assert layer.training == 3 * layer.matmul + 3.5 * layer.attention


def test_the_pipeline_is_cut_by_training_flops() -> None:
    config = RunConfig(model=LLAMA_3_8B, data=DataConfig(seq_length=64))
    layers, first, last = costs.run_stage_costs(config, 1)
    assert len(layers) == 32 and len(set(layers)) == 1
    assert last == 3 * 2 * 64 * 4096 * 128256
    assert 0 < first < layers[0] / 100


@pytest.mark.parametrize(
    ("rank", "targets", "published"), [(16, "all", 41_943_040), (8, None, 3_407_872)], ids=["all", "q and v"]
)
def test_low_rank_pairs_of_llama_3_have_the_number_that_peft_prints(
    rank: int, targets: str | None, published: int
) -> None:
    """Pairs are cut over tp on one side; frozen weights cost no gradients of their own."""
    model = dataclasses.replace(LLAMA_3_8B, lora_rank=rank, lora_targets=targets)
    config = RunConfig(model=model)
    assert costs.trained_parameters(config) == published
    assert costs.run_parameters(config) == 8_030_261_248 + published
    whole, cut = (32 * costs.pair_parameters(model, tp) for tp in (1, 8))
    assert whole == published and published / 8 < cut < published
    plain = costs.model_flops(model, 100, 5050)
    assert costs.text_flops(config, 100, 5050) == plain.passing + 6 * 100 * published
