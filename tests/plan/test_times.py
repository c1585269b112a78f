"""Step times computed by hand: shared work, savings of frozen parts, kernels and links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megacp.attention.ops.mask import Metadata
from megacp.dry_run.memory import shared_parts, stage_parameters
from megacp.dry_run.packs import PackSample, sample_of
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.models import costs
from megacp.plan.hardware import Hardware
from megacp.plan.times import StepTime, step_time

CP, SHARDED = "context_parallel_size", "data_parallel_sharding_strategy"
SMALL = {
    "vocab_size": 4096,
    "seq_length": 1024,
    "num_layers": 4,
    "global_batch_size": 8,
    "dtype": "bfloat16",
}
FREE = Hardware(
    1.0, 1e30, dict.fromkeys(("fused", "flex"), (1e30, 1e30)), 1e30, 1e30, 1e30, 1e30, 0, 1e12, ""
)
LINKS = replace(FREE, inside=1e9, outside=1e8, overlap=0.0)
EXPERTS = {"num_experts": 16, "moe_ffn_hidden_size": 64, "moe_router_topk": 2}
PAIRS = {"lora_rank": 4, "lora_targets": "all"}
SEEING = {"vision_num_layers": 2, "vision_planned_crops": 4, "additional_vocab_size": 128}


def timed(
    here: Hardware, world: int = 1, sample: PackSample | None = None, **values: object
) -> StepTime:
    return step_time(
        with_values(RunConfig(), {**SMALL, **values}), world, here, sample or PackSample()
    )


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_experts_are_summed_and_stepped_by_the_ranks_that_hold_the_same(ep: int) -> None:
    """The ranks with the same experts share their optimizer step.

    If only one rank has an expert, nothing is sent for it.
    """
    config = with_values(RunConfig(), {**SMALL, **EXPERTS, "expert_model_parallel_size": ep})
    (others, _, ranks, _), (experts, _, alike, _) = shared_parts(config, [range(4)], 8)
    assert (ranks, alike, experts * ep) == (8, 8 // ep, 4 * 16 * 3 * 64 * 256)
    sent = (others * 7 / 8 + experts * (alike - 1) / alike) * (2 + 4) / 1e9
    assert timed(LINKS, 8, **EXPERTS, expert_model_parallel_size=ep).dp == pytest.approx(sent)


def test_frozen_weights_do_not_travel_and_pass_gradients_of_their_input_alone() -> None:
    config = with_values(RunConfig(), {**SMALL, **PAIRS})
    trained = stage_parameters(config, [range(4)], trained=True)
    assert timed(LINKS, 8, **PAIRS).dp == pytest.approx(trained * (2 + 4) * 7 / 8 / 1e9)
    tokens, areas = 8 * 1024, [0] * 4
    flops = sum(costs.block_flops(config, tokens, area, layer) for layer, area in enumerate(areas))
    flops += costs.head_flops(config.model, tokens).passing
    assert timed(replace(FREE, products=1e12), **PAIRS).compute == pytest.approx(flops / 1e12)


def test_sums_of_sharded_gradients_leave_in_each_microbatch() -> None:
    parameters = stage_parameters(with_values(RunConfig(), SMALL), [range(4)])
    once, often = (timed(LINKS, 2, **{SHARDED: name}).dp for name in ("optim", "optim_grads"))
    assert once == pytest.approx(parameters * (2 + 4) / 2 / 1e9)
    assert often == pytest.approx(parameters * (2 + 4 * 4) / 2 / 1e9)


@pytest.mark.parametrize(("frozen", "again"), [(None, True), ("vision", False)])
def test_a_tower_that_is_frozen_runs_forward_once(frozen: str | None, again: bool) -> None:
    here, values = (
        replace(FREE, products=1e12),
        {**SEEING, "freeze": frozen, "recompute_granularity": "full"},
    )
    config = with_values(RunConfig(), {**SMALL, **values})
    with_tower, without = timed(here, **values), timed(here, recompute_granularity="full")
    seen = 8 * costs.vision_flops(config, *costs.planned_images(config)) / 1e12
    # rows of the table for image tokens do not belong to the head
    assert with_tower.compute - without.compute == pytest.approx(seen)
    assert (with_tower.again > 1.001 * without.again) == again


def test_rows_with_spans_or_branches_take_the_kernel_of_any_mask() -> None:
    here = replace(FREE, attention={"fused": (1e12, 1e12), "flex": (5e11, 2.5e11)})
    document = np.repeat([0, 1], 512)
    packed = Metadata.of_documents(document)
    rows = [
        packed,
        Metadata.of_documents(document, span=np.arange(1024) // 16 % 2),
        Metadata.of_documents(document),
    ]
    rows[2] = Metadata.of_documents(
        document, branch=np.where(np.arange(1024) % 512 < 256, 0, 1 + np.arange(1024) // 128 % 2)
    )
    config = with_values(RunConfig(), SMALL)
    assert [sample_of(config, [row]).causal for row in rows] == [1, 0, 0]
    assert sample_of(config, rows[:2]).causal == 0.5
    causal, other = (
        timed(here, sample=sample).compute
        for sample in (PackSample(), sample_of(config, [rows[1]]))
    )
    area = sample_of(config, [rows[1]]).area
    assert other / causal == pytest.approx(area * (2 + 2.5 * 4) / (1 + 2.5))
    assert timed(here, attention_kernel="flex").compute / causal == pytest.approx(
        (2 + 2.5 * 4) / (1 + 2.5)
    )


def test_blocks_on_the_host_are_those_of_their_kinds() -> None:
    """There is one dense block, and three have experts."""
    slow = replace(FREE, host=1e9, overlap=0.0)
    dense, mixed, alike = (
        timed(slow, activation_offload=0.99, **values).offload
        for values in ({}, {**EXPERTS, "moe_layer_freq": "[0,1,1,1]"}, EXPERTS)
    )
    assert mixed == pytest.approx(dense / 4 + alike * 3 / 4)


def test_what_goes_to_all_others_leaves_a_machine_by_each_adapter() -> None:
    assert [
        LINKS.exchange(*of) / 1e8 for of in ((8, 1), (16, 1), (16, 4), (2, 8))
    ] == pytest.approx([10, 15 / 8, 15 / 14, 1])
    rows = {
        name: timed(LINKS, 16, **{CP: 16, "cp_comm_type": name}).cp
        for name in ("all_gather", "kv_exchange")
    }
    config = with_values(RunConfig(), SMALL)
    # keys and values of 64 tokens from each other rank
    keys = 2 * 64 * config.model.query_groups * config.model.head_dim * 2 * 15
    assert rows["all_gather"] == pytest.approx(3 * 8 * 4 * keys / 8e8)
    assert rows["kv_exchange"] == pytest.approx(3 * 8 * 4 * keys / (1e8 * 15 / 8))
