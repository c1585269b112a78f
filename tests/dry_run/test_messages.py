"""Test the bytes of messages by hand, and against the counters of real steps on CPU ranks."""

from __future__ import annotations

import pytest

from bench.steps import Subject, sent_bytes
from megacp.dry_run.messages import StageMessages, step_messages
from megacp.dry_run.packs import PackSample
from megacp.dry_run.report import describe
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.training.data.mock import MockRules
from tests.ranks import run_ranks

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, SHARDED = "expert_model_parallel_size", "data_parallel_sharding_strategy"
CHUNKS, AGAIN = "num_virtual_stages_per_pipeline_rank", "recompute_granularity"
SMALL: dict[str, Value] = {
    "vocab_size": 512,
    "seq_length": 256,
    "num_layers": 4,
    "global_batch_size": 8,
    "dtype": "float32",
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "moe_planned_imbalance": 1.0,
}
EXPERTS: dict[str, Value] = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}
SHARED_EXPERT: dict[str, Value] = {**EXPERTS, "moe_shared_expert_intermediate_size": 32}
STATES: dict[str, Value] = {
    "linear_attention_freq": "2",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FULL: dict[str, Value] = {AGAIN: "full"}
NEEDED: dict[str, Value] = {CP: 2, "cp_comm_type": "kv_exchange", "cp_layout": "balanced"}
BOTH: dict[str, Value] = {
    CP: 4,
    "cp_comm_type": "a2a+p2p",
    "hierarchical_context_parallel_sizes": (2, 2),
}
ALL = {SHARDED: "optim_grads_params"}


def of(values: dict[str, Value]) -> RunConfig:
    return with_values(RunConfig(), {**SMALL, **values})


def planned(world: int, values: dict[str, Value]) -> list[StageMessages]:
    """Return the messages of a step whose packs have one causal document each."""
    config = of(values)
    assert check(config, world) == []
    return step_messages(config, world, PackSample())


# bytes of half a residual stream
STREAM = 256 * 64 * 4 // 2
# bytes of K and V of half a row: 2 x tokens x query groups x head dimension x bytes per element
KEYS = 2 * 128 * 4 * 8 * 4


def test_messages_of_tensor_parallel_ranks_by_hand() -> None:
    """A block sends 4 times in forward and 4 in backward, and gathers two inputs again."""
    assert planned(2, {TP: 2})[0].tp == 8 * (4 * 10 + 4) * STREAM
    assert planned(2, {TP: 2, **FULL})[0].tp == 8 * (4 * 14 + 4) * STREAM
    assert planned(2, {TP: 2, **EXPERTS})[0].tp == 8 * (4 * 5 + 4) * STREAM, "experts are not split"
    first, last = planned(4, {TP: 2, PP: 2})
    assert first.tp == last.tp == 8 * (2 * 10 + 2) * STREAM


def test_messages_of_context_parallel_ranks_by_hand() -> None:
    """K and V go to one other rank in forward and in backward, and their gradients return."""
    assert planned(2, {CP: 2})[0].cp == 8 * 4 * 3 * KEYS
    queries = 128 * 8 * 8 * 4
    swap = (KEYS + 2 * queries) / 2
    heads: dict[str, Value] = {CP: 2, "cp_comm_type": "a2a"}
    assert planned(2, heads)[0].cp == 8 * 4 * 2 * swap
    assert planned(2, {**heads, **FULL})[0].cp == 8 * 4 * 3 * swap
    assert planned(4, BOTH)[0].cp == 8 * 4 * (2 * swap / 2 + 3 * KEYS / 2)


def test_messages_of_stages_and_of_a_table_at_both_ends_by_hand() -> None:
    hidden, table = 256 * 64 * 4, 512 * 64 * 4
    first, last = planned(2, {PP: 2})
    assert first.pp == last.pp == 8 * hidden + table
    assert [one.pp for one in planned(2, {PP: 2, CHUNKS: 2})] == [8 * 3 * hidden + table] * 2
    untied = {PP: 2, "untie_embeddings_and_output_weights": True}
    assert [one.pp for one in planned(2, untied)] == [8 * hidden] * 2


def test_messages_of_full_sharding_by_hand() -> None:
    """Each of four microbatches gathers blocks twice and the other parameters once."""
    block = 64 * (8 + 2 * 4) * 8 + 8 * 8 * 64 + 3 * 64 * 128 + 2 * 64
    table = 512 * 64
    gathered = 4 * (2 * 4 * block + (table + 64))
    summed = 4 * (4 * block + table + 64)
    assert planned(2, ALL)[0].dp == (gathered + summed) * 4 / 2


def test_a_dry_run_shows_the_axes_that_send_anything() -> None:
    text = describe(of({TP: 2, PP: 2}), 8)
    head, *stages = (
        text.split("Messages of one rank in a step")[1].split("\n\n")[0].splitlines()[1:]
    )
    assert head.split() == ["stage", "tp", "dp", "pp", "total"] and len(stages) == 2
    assert "Messages" not in describe(of({}), 1) and "not counted" not in text
    states = describe(of({TP: 2, CP: 2, **STATES, "lora_rank": 4}), 4)
    assert "\n  not counted: linear attention states (cp), LoRA products (tp)\n" in states


def sent(rank: int, world_size: int, config: RunConfig) -> tuple[int, dict[str, int]]:
    """Return a rank's stage and the bytes sent by its axes in a step on causal documents."""
    subject = Subject(
        rank,
        world_size,
        config,
        MockRules(config.model.vocab_size, config.data.seq_length, "causal"),
    )
    subject.measure()
    return subject.grid.pp.rank, sent_bytes(subject.grid)


# counters for each column of a dry run
AXES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "dp": ("dp_cp", "edp"),
    "pp": ("pp", "embedding"),
}
CASES: dict[str, tuple[int, dict[str, Value]]] = {
    "tp 2": (2, {TP: 2}),
    "tp 2, full": (2, {TP: 2, **FULL}),
    "tp 2, whole stream": (2, {TP: 2, "sequence_parallel": False}),
    "tp 2, tiles": (2, {TP: 2, "mlp_chunk_tokens": 64}),
    "tp 2, tiles, full": (2, {TP: 2, "mlp_chunk_tokens": 64, **FULL}),
    "tp 2, states": (2, {TP: 2, **STATES}),
    "tp 2, ep 2": (2, {TP: 2, **EXPERTS, EP: 2}),
    "tp 2, shared expert": (2, {TP: 2, **SHARED_EXPERT}),
    "tp 2, shared expert, tiles": (2, {TP: 2, **SHARED_EXPERT, "mlp_chunk_tokens": 64}),
    "tp 2, shared expert, tiles, full": (
        2,
        {TP: 2, **SHARED_EXPERT, "mlp_chunk_tokens": 64, **FULL},
    ),
    "tp 2, cp 2": (4, {TP: 2, CP: 2}),
    "tp 2, pp 2": (4, {TP: 2, PP: 2}),
    "cp 2, p2p": (2, {CP: 2}),
    "cp 4, p2p, full": (4, {CP: 4, **FULL}),
    "cp 2, all_gather": (2, {CP: 2, "cp_comm_type": "all_gather"}),
    "cp 2, a2a, full": (2, {CP: 2, "cp_comm_type": "a2a", **FULL}),
    "cp 4, a2a, copied keys": (4, {CP: 4, "cp_comm_type": "a2a", "num_query_groups": 2}),
    "cp 4, a2a+p2p": (4, BOTH),
    "pp 2, dp 2": (4, {PP: 2}),
    "pp 2, two chunks": (2, {PP: 2, CHUNKS: 2}),
    "pp 2, all sharded": (4, {PP: 2, **ALL}),
    "dp 2": (2, {}),
    "dp 2, gradients sharded": (2, {SHARDED: "optim_grads"}),
    "dp 2, all sharded": (2, ALL),
    "dp 2, all sharded, untied": (2, {**ALL, "untie_embeddings_and_output_weights": True}),
    "dp 4, all sharded, two copies": (4, {**ALL, "num_distributed_optimizer_instances": 2}),
    "dp 2, pairs": (2, {"lora_rank": 4}),
    "dp 4, ep 2, full": (4, {**EXPERTS, EP: 2, **FULL}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_real_step_sends_what_the_dry_run_says(name: str) -> None:
    """Bytes over cp and pp are exact.

    Over tp, the loss sends up to 16 more bytes per token and stage. Over dp, shards have padding.
    Over ep, the load of a new router is almost even.
    """
    world, values = CASES[name]
    stages = planned(world, values)
    for stage, counted in run_ranks(sent, world, of(values)):
        found = {axis: sum(counted.get(part, 0) for part in parts) for axis, parts in AXES.items()}
        wanted = vars(stages[stage])
        assert (found["cp"], found["pp"]) == (wanted["cp"], wanted["pp"])
        assert 0 <= found["tp"] - wanted["tp"] <= 16 * 8 * 256
        assert found["dp"] == pytest.approx(wanted["dp"], rel=2e-3)
        assert found["ep"] == pytest.approx(wanted["ep"], rel=2e-2)


@pytest.mark.slow
def test_ranks_send_no_more_needed_keys_than_the_dry_run_says() -> None:
    """Rank 0 has the first and last of four slices, and needs both of rank 1, which needs one."""
    (_, first), (_, second) = run_ranks(sent, 2, of(NEEDED))
    # twice the keys that the other rank needs, and the gradients of the received keys
    assert [first["cp"], second["cp"]] == [
        8 * 4 * KEYS * (2 * 0.5 + 1),
        8 * 4 * KEYS * (2 * 1 + 0.5),
    ]
    assert planned(2, NEEDED)[0].cp == 8 * 4 * KEYS * 3


def test_one_step_of_one_pack_is_described_in_the_singular_without_gpus() -> None:
    once: dict[str, Value] = {"train_iters": 1, "global_batch_size": 1}
    config = with_values(RunConfig(), {**SMALL, **once})
    text = " ".join(describe(config, 1).split())
    assert "the whole run 1 step, 256 tokens" in text
    assert "1 per rank, 1 pack each" in text
    assert "GPU" not in text and "unknown" not in text
    twice = with_values(config, {"train_iters": 2, "global_batch_size": 2, "micro_batch_size": 2})
    text = " ".join(describe(twice, 1).split())
    assert "the whole run 2 steps, 1.02 k tokens" in text
    assert "1 per rank, 2 packs each" in text
