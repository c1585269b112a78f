"""What vision costs: parameters against transformers' own model, FLOPs by hand, activations against autograd."""

from __future__ import annotations

import importlib

import pytest
import torch

from megacp.core.config.run import RunConfig, with_values
from megacp.core.models import costs
from megacp.core.models.build import build_chunks, stage_layers
from megacp.plan import activations
from megacp.plan.memory import stage_memory, stage_parameters
from megacp.plan.report import describe
from tests.plan.test_memory import kept_storages
from tests.ranks import grid
from tests.reference.training import config_of
from tests.reference.vision import TINY

MOLMO2_4B = {"vision_num_layers": 25, "hidden_size": 2560, "ffn_hidden_size": 9728, "additional_vocab_size": 128}
MOLMO2_4B |= {"vocab_size": 151_936, "untie_embeddings_and_output_weights": True, "seq_length": 16_384}
PP = "pipeline_model_parallel_size"


def config(**values: object) -> RunConfig:
    return with_values(RunConfig(), {**MOLMO2_4B, **values})  # type: ignore[arg-type]


def test_molmo2_has_the_parameters_that_transformers_builds() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    modeling = importlib.import_module("transformers.models.molmo2.modeling_molmo2")
    theirs = transformers.Molmo2Config(adapter_config={"text_hidden_size": 2560, "intermediate_size": 9728})
    with torch.device("meta"):
        modules = modeling.Molmo2VisionModel(theirs.vision_config), modeling.Molmo2Adapter(theirs.adapter_config)
    counts = [sum(p.numel() for p in module.parameters()) for module in modules]
    assert [costs.tower_parameters(config()), costs.connector_parameters(config())] == counts


def test_a_rank_holds_as_many_parameters_as_are_planned() -> None:
    """Two ranks hold twice what is replicated."""
    one, two = (config_of(TINY, {"tp": tp}) for tp in (1, 2))
    (chunk,) = build_chunks(one, grid())
    assert sum(p.numel() for p in chunk.parameters()) == stage_parameters(one, [range(4)]) > costs.run_parameters(one)
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
    """Gradients pass through a frozen connector to a trained tower, and stop where all before it is frozen."""
    tower, pooled = costs.crop_flops(config()), costs.pooled_flops(config())
    for names, expected in {
        "vision": tower.forward + pooled.training,
        "connector": tower.training + 2 * pooled.matmul + 3.5 * pooled.attention,
        "vision,connector": tower.forward + pooled.forward,
    }.items():
        assert costs.vision_flops(config(freeze=names), 1, 1) == pytest.approx(expected, rel=1e-12)


def test_the_first_stage_gets_fewer_layers_for_its_tower() -> None:
    """A frozen tower weighs less than a trained one."""
    sizes = {"num_layers": 36, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128, PP: 4}
    counts = [
        len(stage_layers(config(**sizes, **extra), 4)[0][0])
        for extra in ({"vision_num_layers": 0}, {"freeze": "vision"}, {})
    ]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == 3
    fewer = config(**sizes, vision_planned_crops=1)
    assert len(stage_layers(fewer, 4)[0][0]) > counts[2]
    report = describe(fewer, 4, stage_layers(fewer, 4))
    assert "embedding + vision" in report and "planned for 1 crops a pack" in report and "vision FLOPs" in report


def test_replicated_images_of_a_dynamic_row_are_those_of_all_its_packs() -> None:
    """Each rank encodes the images of dp packs whole; dealt ones are divided by cp."""
    dynamic = {"dynamic_context_parallel": True, "cp_comm_type": "kv_exchange", "cp_layout": "balanced"}
    row = {"context_parallel_size": 2, "vision_planned_crops": 8}
    replicated = {"vision_shards": "replicate"}
    plain, all_packs = (config(**row, **replicated, **values) for values in ({}, dynamic))
    kept = [activations.vision_activations(one, 4, 4, 8) for one in (plain, all_packs)]
    assert kept[1] == 4 * kept[0]
    dealt = [activations.vision_activations(config(**row, **values), 4, 4, 8) for values in ({}, dynamic)]
    assert dealt[0] == dealt[1] == kept[0] / 2
    embedding = 2 * plain.data.seq_length * plain.model.hidden_size
    firsts = [costs.run_stage_costs(one, 8)[1] - embedding for one in (config(**row, **dynamic), plain, all_packs)]
    assert [first / firsts[0] for first in firsts] == pytest.approx([1, 2, 8])
    assert costs.run_stage_costs(all_packs, 8)[0] == costs.run_stage_costs(plain, 8)[0]


@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])  # LayerNorm on the CPU keeps bfloat16 statistics
def test_a_block_keeps_what_is_planned(granularity: str, dtype: str) -> None:
    """Every storage that autograd holds from a block's forward to its backward, and nothing else."""
    values = {**TINY, "dtype": dtype, "recompute_granularity": granularity}
    (chunk,) = build_chunks(config_of(values, {}), grid())
    block, patches = chunk.vision.tower.blocks[1], 3 * 16
    found: dict[int, torch.UntypedStorage] = {}
    with kept_storages(found):
        x = torch.zeros(patches, 24, dtype=block.down.weight.dtype, requires_grad=True)
        out = block(x)
    for parameter in block.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    elements, wide = activations.block_activations(config_of(values, {}), granularity)
    assert out.requires_grad
    assert sum(storage.nbytes() for storage in found.values()) == patches * (elements + wide) * x.element_size()


def test_memory_counts_vision_on_the_first_stage_and_frozen_parts_once() -> None:
    sizes = {"num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128, PP: 2, "vocab_size": 1024}
    plain, frozen, text = (config(**sizes, **one) for one in ({}, {"freeze": "vision"}, {"vision_num_layers": 0}))
    first = [stage_memory(c, 0, [range(2)], 2) for c in (plain, frozen, text)]
    last = [range(plain.model.num_layers - 2, plain.model.num_layers)]
    assert len({stage_memory(c, 1, last, 2).total for c in (plain, frozen, text)}) == 1
    tower = costs.tower_parameters(plain)
    assert first[0].weights - first[2].weights == 4 * (tower + costs.connector_parameters(plain))
    assert (first[0].gradients - first[1].gradients, first[0].optimizer - first[1].optimizer) == (4 * tower, 8 * tower)
    held = 2 * activations.vision_activations(plain, 4, 4, 4)
    assert first[0].activations - first[2].activations == held > first[1].activations - first[2].activations > 0
