"""Parameters, FLOPs and activations of text and vision models.

They are compared with numbers counted by hand and with transformers' own model.
"""

from __future__ import annotations

import dataclasses
import importlib
import re

import numpy as np
import pytest
import torch

from megacp.dry_run.measured import vision_memory
from megacp.dry_run.memory import PHASES, stage_memory, stage_parameters
from megacp.dry_run.report import describe
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.training import DataConfig
from megacp.engine.layers.moe import exchange_bytes
from megacp.engine.layers.stack import layers_of
from megacp.engine.models import costs
from megacp.engine.models.build import build_chunks
from megacp.engine.models.costs import stage_layers
from megacp.engine.rows.vision import PatchGrids
from megacp.storage.wording import human_bytes, human_count
from tests.dry_run.test_memory import kept_storages
from tests.ranks import grid
from tests.reference.training import config_of
from tests.reference.vision import TINY

LLAMA_3_8B, QWEN3_0_6B, OLMO2_7B = (
    ModelConfig(
        32, 4096, 14336, 32, 8, vocab_size=128256, untie_embeddings_and_output_weights=True
    ),
    ModelConfig(28, 1024, 3072, 16, 8, 128, vocab_size=151936, qk_layernorm="head"),
    ModelConfig(
        *(32, 4096, 11008, 32),
        vocab_size=100352,
        qk_layernorm="all_heads",
        norm_position="after",
        untie_embeddings_and_output_weights=True,
    ),
)
"""The positional values are layers, hidden size, MLP size, heads, groups and head width."""
PUBLISHED = [(LLAMA_3_8B, 8_030_261_248), (QWEN3_0_6B, 596_049_920), (OLMO2_7B, 7_298_617_344)]


def test_known_models_have_their_published_number_of_parameters() -> None:
    assert [costs.model_parameters(model) for model, _ in PUBLISHED] == [
        published for _, published in PUBLISHED
    ]


def test_a_rank_holds_its_part_of_a_layer_and_norms_whole() -> None:
    """Biases of column-parallel linears are sharded over tp, but biases of row-parallel ones are
    not.

    Tables are padded on each rank.
    """
    for model, replicated in ((QWEN3_0_6B, 2 * 1024 + 2 * 128), (OLMO2_7B, 2 * 4096)):
        assert (
            8 * (costs.layer_parameters(model, 8) - replicated)
            == costs.layer_parameters(model) - replicated
        )
    plain = ModelConfig(num_query_groups=2)
    biased = dataclasses.replace(
        plain, add_qkv_bias=True, add_attention_output_bias=True, add_mlp_bias=True
    )
    extra = [
        costs.layer_parameters(biased, tp) - costs.layer_parameters(plain, tp) for tp in (1, 2)
    ]
    columns, rows = (8 + 2 + 2) * 32 + 2 * 768, 256 + 256
    assert extra == [columns + rows, columns // 2 + rows]
    assert [costs.vocabulary_rows(plain, 1001, tp) for tp in (1, 2, 4, 16)] == [1008, 504, 256, 64]


def test_flops_of_a_tiny_layer_equal_the_count_by_hand() -> None:
    model = ModelConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=10,
    )
    assert [costs.causal_area(5, window) for window in (0, 1, 2, 5, 9)] == [15, 5, 9, 15, 15]
    layer = layers_of(model)[0].flops(model, 3, costs.causal_area(3))
    products = [(8, 8), (8, 4), (8, 4), (8, 8), (8, 16), (8, 16), (16, 8)]
    assert layer.matmul == sum(2 * 3 * a * b for a, b in products)
    assert layer.attention == 6 * 4 * (2 + 2) * 2  # pairs x heads x two products of width 2
    assert costs.model_flops(model, 3, 6).matmul == layer.matmul + 2 * 3 * 8 * 10
    assert layer.training == 3 * layer.matmul + 3.5 * layer.attention
    assert layer.published.training == 3 * (layer.matmul + layer.attention)


def test_the_pipeline_is_cut_by_training_flops() -> None:
    config = RunConfig(model=LLAMA_3_8B, data=DataConfig(seq_length=64))
    layers, first, last = costs.run_stage_costs(config, 1)
    assert len(layers) == 32 and len(set(layers)) == 1
    assert last == 3 * 2 * 64 * 4096 * 128256
    assert 0 < first < layers[0] / 100


@pytest.mark.parametrize(
    ("rank", "targets", "published"),
    [(16, "all", 41_943_040), (8, None, 3_407_872)],
    ids=["all", "q and v"],
)
def test_low_rank_pairs_of_llama_3_have_the_number_that_peft_prints(
    rank: int, targets: str | None, published: int
) -> None:
    """Pairs are sharded over tp on one side, and frozen weights need no weight gradients."""
    model = dataclasses.replace(LLAMA_3_8B, lora_rank=rank, lora_targets=targets)
    config = RunConfig(model=model)
    assert costs.trained_parameters(config) == published
    assert costs.run_parameters(config) == 8_030_261_248 + published
    whole, cut = (32 * costs.pair_parameters(model, tp) for tp in (1, 8))
    assert whole == published and published / 8 < cut < published
    plain = costs.model_flops(model, 100, 5050)
    assert costs.text_flops(config, 100, 5050) == plain.published.passing + 6 * 100 * published


MOLMO2_4B = {
    "vision_num_layers": 25,
    "hidden_size": 2560,
    "ffn_hidden_size": 9728,
    "additional_vocab_size": 128,
}
MOLMO2_4B |= {
    "vocab_size": 151_936,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 16_384,
}
PP = "pipeline_model_parallel_size"


def config(**values: object) -> RunConfig:
    return with_values(RunConfig(), {**MOLMO2_4B, **values})  # type: ignore[arg-type]


def test_molmo2_has_the_parameters_that_transformers_builds() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra: test)"
    )
    modeling = importlib.import_module("transformers.models.molmo2.modeling_molmo2")
    theirs = transformers.Molmo2Config(
        adapter_config={"text_hidden_size": 2560, "intermediate_size": 9728}
    )
    with torch.device("meta"):
        modules = (
            modeling.Molmo2VisionModel(theirs.vision_config),
            modeling.Molmo2Adapter(theirs.adapter_config),
        )
    counts = [sum(p.numel() for p in module.parameters()) for module in modules]
    assert [costs.tower_parameters(config()), costs.connector_parameters(config())] == counts


def test_a_rank_holds_as_many_parameters_as_are_planned() -> None:
    """The sum over two ranks counts replicated parameters twice."""
    one, two = (config_of(TINY, {"tp": tp}) for tp in (1, 2))
    (chunk,) = build_chunks(one, grid())
    assert (
        sum(p.numel() for p in chunk.parameters())
        == stage_parameters(one, [range(4)])
        > costs.run_parameters(one)
    )
    v = one.vision
    twice = v.vision_hidden_size * (6 * v.vision_num_layers + 48 + 1 + 16)
    assert 2 * costs.tower_parameters(two, 2) - costs.tower_parameters(one) == twice


def test_flops_of_a_tiny_tower_equal_the_count_by_hand() -> None:
    tiny = config_of(TINY, {})
    products = [(24, 24)] * 4 + [(24, 36), (36, 24)]
    tower = costs.crop_flops(tiny)
    assert tower.matmul == 16 * 2 * (3 * sum(a * b for a, b in products) + 48 * 24)
    assert tower.attention == 3 * 16 * 16 * 4 * (6 + 6) * 2
    pooled = costs.pooled_flops(tiny, window=9)
    per_token = [(48, 24), (24, 24), (24, 40), (24, 40), (40, 32)]
    assert pooled.matmul == 2 * (sum(a * b for a, b in per_token) + 9 * 2 * 48 * 24)
    assert pooled.attention == 9 * 4 * (6 + 6) * 2
    assert costs.vision_flops(tiny, 3, 5, 9) == 3 * tower.training + 5 * pooled.training


def test_frozen_towers_cost_what_is_left_of_their_work() -> None:
    """Gradients pass through a frozen connector to a trained tower.

    They stop if everything before the connector is frozen.
    """
    tower, pooled = costs.crop_flops(config()), costs.pooled_flops(config())
    for names, expected in {
        "vision": tower.forward + pooled.training,
        "connector": tower.training + 2 * pooled.matmul + 3.5 * pooled.attention,
        "vision,connector": tower.forward + pooled.forward,
    }.items():
        assert costs.vision_flops(config(freeze=names), 1, 1) == pytest.approx(expected, rel=1e-12)


def test_the_first_stage_gets_fewer_layers_for_its_tower() -> None:
    """A frozen tower costs less than a trained one."""
    sizes = {
        "num_layers": 36,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        PP: 4,
    }
    counts = [
        len(stage_layers(config(**sizes, **extra), 4)[0][0])
        for extra in ({"vision_num_layers": 0}, {"freeze": "vision"}, {})
    ]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == 3
    fewer = config(**sizes, vision_planned_crops=1)
    assert len(stage_layers(fewer, 4)[0][0]) > counts[2]
    report = describe(fewer, 4)
    assert (
        "embedding + vision" in report
        and "planned for 1 crops per pack" in report
        and "vision FLOPs" in report
    )


def seen(run: RunConfig, world_size: int) -> int:
    """Return the bytes that the images of a microbatch keep on a rank of the first stage."""
    blind = with_values(run, {"vision_num_layers": 0})
    chunks = stage_layers(run, world_size)[0]
    return (
        stage_memory(run, 0, chunks, world_size).activations
        - stage_memory(blind, 0, chunks, world_size).activations
    )


def test_replicated_images_of_a_dynamic_row_are_those_of_all_its_packs() -> None:
    """If images are replicated, each rank encodes all images of dp packs; sharding divides them by
    cp.
    """
    dynamic = {
        "dynamic_context_parallel": True,
        "cp_comm_type": "kv_exchange",
        "cp_layout": "balanced",
    }
    row = {"context_parallel_size": 2, "vision_planned_crops": 8}
    replicated = {"vision_shards": "replicate"}
    plain, all_packs = (config(**row, **replicated, **values) for values in ({}, dynamic))
    kept = [seen(one, 8) for one in (plain, all_packs)]
    assert kept[1] == pytest.approx(4 * kept[0], rel=1e-3)
    dealt = [seen(config(**row, **values), 8) for values in ({}, dynamic)]
    assert dealt[0] == dealt[1] == pytest.approx(kept[0] / 2, rel=1e-3)
    embedding = 2 * plain.data.seq_length * plain.model.hidden_size
    firsts = [
        costs.run_stage_costs(one, 8)[1] - embedding
        for one in (config(**row, **dynamic), plain, all_packs)
    ]
    assert [first / firsts[0] for first in firsts] == pytest.approx([1, 2, 8])
    assert costs.run_stage_costs(all_packs, 8)[0] == costs.run_stage_costs(plain, 8)[0]


@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["molmo2", "qwen3_5"])
def test_tower_and_connector_keep_what_is_planned(granularity: str, family: str) -> None:
    """The plan is compared with all storages that autograd keeps between the images' forward and
    backward.
    """
    # GPU kernels pad narrow heads, and log-sum-exps of fewer than 32 patches
    sizes = {"vision_hidden_size": 64, "vision_num_attention_heads": 4, "vision_image_size": 32}
    values = {
        **TINY,
        **sizes,
        "recompute_granularity": granularity,
        "vision_family": family,
        "dtype": "float32",
    }
    run = config_of(values, {})
    (chunk,) = build_chunks(run, grid())
    crops, pooled = (512, 128) if family == "qwen3_5" else (2, 32)
    patches = torch.zeros(crops, run.vision.crop_patches, run.vision.patch_dim)
    pooling = torch.arange(pooled * 4).view(pooled, 4)
    grids = PatchGrids(np.array([[1, pooled]])) if family == "qwen3_5" else None
    found: dict[int, torch.UntypedStorage] = {}
    with kept_storages(found):
        out = chunk.vision(patches, pooling, grids)
    assert out.requires_grad
    for given in (*chunk.vision.parameters(), patches, pooling):
        found.pop(given.untyped_storage().data_ptr(), None)
    beyond = vision_memory(run, crops, pooled).kept - sum(
        storage.nbytes() for storage in found.values()
    )
    # Attention on a GPU keeps 8 bytes of dropout state twice per block, although dropout is 0.
    # embedding_bag keeps some integers for the four taps of each patch; their number depends on the
    # device.
    assert 0 <= beyond <= (3 * 8 * 4 * crops if family == "qwen3_5" else 3 * 2 * 8)


def test_memory_counts_vision_on_the_first_stage_and_frozen_parts_once() -> None:
    sizes = {
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        PP: 2,
        "vocab_size": 1024,
    }
    plain, frozen, text = (
        config(**sizes, **one) for one in ({}, {"freeze": "vision"}, {"vision_num_layers": 0})
    )
    first = [stage_memory(c, 0, [range(2)], 2) for c in (plain, frozen, text)]
    last = [range(plain.model.num_layers - 2, plain.model.num_layers)]
    assert len({stage_memory(c, 1, last, 2).total for c in (plain, frozen, text)}) == 1
    tower = costs.tower_parameters(plain)
    assert first[0].weights - first[2].weights == 4 * (tower + costs.connector_parameters(plain))
    assert (first[0].gradients - first[1].gradients, first[0].optimizer - first[1].optimizer) == (
        4 * tower,
        8 * tower,
    )
    # two microbatches are in flight
    held = 2 * vision_memory(plain, *costs.planned_images(plain)).kept
    assert (
        first[0].activations - first[2].activations
        == held
        > first[1].activations - first[2].activations
        > 0
    )


SMALL = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "vocab_size": 4096,
}


def small(**values) -> RunConfig:
    return with_values(RunConfig(), {**SMALL, **values})


def test_eight_ranks_are_shown_in_full() -> None:
    """tp varies fastest, pp slowest."""
    text = describe(small(), 8)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in [
        "Dry run: 8 ranks = pp 2 x dp 1 x cp 2 x tp 2",
        "tp 2 1 0 1",
        "cp 2 2 0 2",
        "dp 1 4 0",
        "pp 2 4 0 4",
        "0 0-2 embedding 1,803,776 2",
        "1 3 norm, head 951,040 1",
        "packs 8 of 512 tokens = 4.10 k tokens",
    ]:
        assert line in lines, text
    assert "..." not in text


def test_the_busiest_rank_of_experts_is_planned_for() -> None:
    """Each of 128 tokens has two experts.

    The plan uses 1.25 times the mean number of rows (at worst 4 times) and divides stages by this
    load.
    """
    asked = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "sequence_parallel": True,
    }
    asked |= {"moe_layer_freq": "[0,0,1,1]", "expert_model_parallel_size": 4, "dtype": "bfloat16"}
    planned, even = (small(**asked, moe_planned_imbalance=load) for load in (1.25, 1.0))
    text = describe(planned, 8)
    assert (
        re.search(r": 256 \(.*\) even, 320 \(.*\) planned, 1,024 \(.*\) in the worst case", text)
        and "within a machine" in text
    )
    hidden, rows_away = planned.model.hidden_size, 192
    assert exchange_bytes(planned) == 8 * 2 * 3 + rows_away * (4 * 2 * hidden + 2 * 4)
    blocks = [costs.run_stage_costs(config, 8)[0] for config in (planned, even)]
    more = [one - other for one, other in zip(*blocks, strict=True)]
    assert more == pytest.approx([0, 0, *[0.25 * 6 * 512 * 2 * 3 * hidden * 64] * 2])
    alone = small(**{**asked, "expert_model_parallel_size": 1})
    assert costs.run_stage_costs(alone, 8) == costs.run_stage_costs(
        small(**asked, moe_planned_imbalance=1.0), 8
    )
    assert "256 (" in describe(alone, 8) and "planned, " not in describe(alone, 8)


def test_the_bubble_is_that_of_the_schedule_where_groups_are_short() -> None:
    """One microbatch passes through 2 stages of 2 chunks.

    Only one chunk runs at a time, so a stage is idle for as long as it works.
    """
    one = small(num_virtual_stages_per_pipeline_rank=2, global_batch_size=1)
    assert re.search(r"pipeline bubble +100.0% of the ideal time", describe(one, 8))


def test_columns_stand_where_a_run_asks_for_them() -> None:
    """The column of host memory follows the total, and gathered parameters appear with full
    sharding.

    The total is that of the largest phase.
    """
    plain, moved = (describe(small(activation_offload=asked), 8) for asked in (0.0, 0.5))
    shared = describe(
        small(context_parallel_size=1, data_parallel_sharding_strategy="optim_grads_params"), 8
    )
    assert "host" not in plain and "gathered" not in plain and "gathered" in shared
    (head,) = [
        line.split()
        for line in moved.splitlines()
        if line.startswith("  stage") and "optimizer" in line
    ]
    assert head[-2:] == ["total", "host"]
    for text in (plain, shared):
        table, phases = text.split("Memory of one rank")[1].split("\n\n")[:2]
        head, *rows = [line for line in table.splitlines() if line.startswith("  ")]
        number, *peaks = re.findall(r"stage (\d)|([\d.]+ [KM]iB)", phases)
        total = rows[int(number[0])].rstrip().rsplit("  ", 1)[1]
        assert total in [peak for _, peak in peaks]
        assert {word.split()[0] for word in phases.split(": ")[1].split(", ")} == {*PHASES} - {
            "vision"
        }
    assert "--vocab-size is 0" in describe(small(vocab_size=0), 8)


def test_numbers_read_well() -> None:
    counts = {
        0: "0 B",
        999: "999 B",
        1000: "0.98 KiB",
        1536: "1.50 KiB",
        10240: "10.0 KiB",
        5 << 40: "5.00 TiB",
    }
    assert {count: human_bytes(count) for count in counts} == counts
    shown = {
        (7_241_732_096, ""): "7.24 G",
        (12, ""): "12",
        (999.6, ""): "1.00 k",
        (1e15, "FLOP"): "1.00 PFLOP",
    }
    assert {(count, unit): human_count(count, unit) for count, unit in shown} == shown
