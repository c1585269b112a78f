"""Every contradiction is refused with its numbers and its flag, all at once, and nothing that works is refused."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacp.core.config.checks.check import SECTIONS, check, require
from megacp.core.config.run import RunConfig, fields, flag, with_values

GOOD = with_values(RunConfig(), {"vocab_size": 64})

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
WAITING = "pipeline_schedule"
V = "num_virtual_stages_per_pipeline_rank"
DYNAMIC = {"dynamic_context_parallel": True, "cp_comm_type": "kv_exchange", "cp_layout": "balanced"}
SIZES = "hierarchical_context_parallel_sizes"

SEES = {
    "vision_num_layers": 3,
    "vision_hidden_size": 24,
    "vision_ffn_hidden_size": 36,
    "vision_num_attention_heads": 6,
    "vision_head_dim": 4,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -2),
    "connector_num_attention_heads": 6,
    "connector_head_dim": 4,
    "additional_vocab_size": 8,
    "untie_embeddings_and_output_weights": True,
}
"""A tiny tower of crops of 16 pixels, which fits."""

CONTRADICTIONS = [
    (
        {"num_distributed_optimizer_instances": 4, "global_batch_size": 12},
        6,
        ["--num-distributed-optimizer-instances 4", "size 6", "2 or 6"],
    ),
    ({"num_distributed_optimizer_instances": 2, TP: 2}, 4, ["instances 2 leaves one rank", "dp 2 x cp 1"]),
    (
        {"data_parallel_sharding_strategy": "optim_grads", "gradient_accumulation_fusion": True},
        1,
        ["--gradient-accumulation-fusion", "--data-parallel-sharding-strategy optim_grads"],
    ),
    ({"async_tensor_parallel": True}, 1, ["--async-tensor-parallel", "--tensor-model-parallel-size above 1"]),
    ({WAITING: "zero_bubble"}, 1, ["--pipeline-schedule zero_bubble needs --pipeline-model-parallel-size above 1"]),
    (
        {PP: 2, WAITING: "zero_bubble", "data_parallel_sharding_strategy": "optim_grads"},
        2,
        ["--pipeline-schedule zero_bubble", "--data-parallel-sharding-strategy optim_grads keeps none"],
    ),
    ({PP: 2, WAITING: "zero_bubble", "lora_rank": 4}, 2, ["--pipeline-schedule zero_bubble with --lora-rank 4"]),
    ({PP: 2, WAITING: "zero_bubble", "mlp_chunk_tokens": 64}, 2, ["zero_bubble with --mlp-chunk-tokens 64"]),
    ({"eval_interval": 2}, 1, ["--eval-interval 2", "--valid-data-path"]),
    ({"valid_data_path": "x", "dry_run": True}, 1, ["--valid-data-path x needs --data-path"]),
    ({"additional_vocab_size": 128}, 1, ["--additional-vocab-size 128", "--untie-embeddings-and-output-weights"]),
    ({TP: 2, PP: 2, CP: 2}, 12, ["12 ranks", "tp 2 x pp 2 x cp 2 = 8", "8 or 16 ranks"]),
    ({TP: 4}, 2, ["a world of 2 ranks", "start 4 ranks"]),
    ({"world_size": 8}, 1, ["--world-size 8", "--dry-run"]),
    ({TP: 3, "ffn_hidden_size": 768, "seq_length": 513}, 3, ["--num-attention-heads 8", "parallel-size 3"]),
    ({TP: 4, "num_query_groups": 2}, 4, ["--num-query-groups 2", "--tensor-model-parallel-size 4"]),
    ({"num_query_groups": 3}, 1, ["--num-attention-heads 8", "--num-query-groups 3"]),
    ({"hidden_size": 250}, 1, ["--hidden-size 250", "--num-attention-heads 8", "--kv-channels"]),
    ({"kv_channels": 33}, 1, ["a head is 33 wide", "--kv-channels"]),
    ({"hidden_size": 8 * 31}, 1, ["a head is 31 wide", "--hidden-size"]),
    ({TP: 2, "ffn_hidden_size": 767}, 2, ["--ffn-hidden-size 767", "766 or 768"]),
    ({"vocab_size": 0}, 1, ["--vocab-size 0", "--data-path"]),
    ({"rope_scaling_factor": 8.0}, 1, ["--rope-scaling-factor 8", "--rope-scaling linear"]),
    ({"beta_slow": 2.0}, 1, ["--beta-slow 2 acts only with --rope-scaling yarn"]),
    ({"beta_fast": 2.0, "mscale": 1.0}, 1, ["--beta-fast 2, --mscale 1 act only with --rope-scaling yarn"]),
    ({"rope_scaling": "yarn", "beta_slow": 40.0}, 1, ["--beta-slow 40 is above --beta-fast 32"]),
    ({"rope_scaling": "yarn", "mscale": 1.0}, 1, ["--mscale 1.0 and --mscale-all-dim None act only together"]),
    ({"no_rope_freq": "0"}, 1, ["--no-rope-freq 0: expected N above 0 or a pattern of 0 and 1 like [0,0,0,1]"]),
    ({"no_rope_freq": "[0,2]"}, 1, ["--no-rope-freq [0,2]: expected"]),
    ({"qk_layernorm_scope": "all_heads"}, 1, ["--qk-layernorm-scope all_heads acts only with --qk-layernorm"]),
    ({"rope_scaling": "llama3", "rope_low_freq_factor": 4.0}, 1, ["--rope-low-freq-factor 4", "factor 4"]),
    ({PP: 4, V: 2}, 4, ["--num-layers 4", "8 stages", f"{flag(PP)} 4", f"{flag(V)} 2"]),
    ({V: 2}, 1, [f"{flag(V)} 2", "--pipeline-model-parallel-size above 1"]),
    ({"micro_batch_size": 3}, 1, ["--global-batch-size 8", "--micro-batch-size 3 x dp 1 = 3", "6 or 9"]),
    ({"micro_batch_size": 2}, 6, ["--global-batch-size 8", "x dp 6 = 12", "use 12"]),
    ({CP: 2, TP: 2, "seq_length": 500}, 4, ["--seq-length 500", "= 8", "496 or 504", "zigzag", f"{flag(CP)} 2"]),
    ({CP: 2, "seq_length": 501, "cp_layout": "contiguous"}, 2, ["--seq-length 501", "= 2", "500 or 502"]),
    ({TP: 2, "seq_length": 511}, 2, ["--seq-length 511", "--sequence-parallel", "510 or 512"]),
    ({"seq_length": 2**30, "micro_batch_size": 2}, 1, ["2147483648 tokens", "--seq-length x --micro-batch-size"]),
    ({"lr": 0.1, "min_lr": 0.2}, 1, ["--min-lr 0.2", "--lr 0.1"]),
    ({"lr_warmup_iters": 101}, 1, ["--lr-warmup-iters 101", "--train-iters 100"]),
    ({"lr_warmup_iters": 51, "lr_decay_iters": 50}, 1, ["--lr-warmup-iters 51", "--lr-decay-iters 50"]),
    ({"lr_wsd_decay_iters": 5}, 1, ["--lr-wsd-decay-iters 5", "--lr-decay-style WSD"]),
    ({"lr_decay_style": "WSD"}, 1, ["needs --lr-wsd-decay-iters"]),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 10},
        1,
        ["--lr-wsd-decay-iters 95", "--lr-warmup-iters 10", "step 100", "at most 90"],
    ),
    ({"activation_offload": 1.5}, 1, ["--activation-offload 1.5", "use 1 or 2"]),
    ({"activation_offload": 5.0}, 1, ["--activation-offload 5", "--num-layers 4", "at most 4"]),
    (
        {"activation_offload": 3.0, PP: 2},
        2,
        ["--activation-offload 3", "2 stages are 6", "at most 2"],
    ),
    ({"save_interval": 5}, 1, ["--save-interval 5", "--save,"]),
    ({"keep_last": 2, "async_save": True}, 1, ["--keep-last 2, --async-save needs --save,"]),
    ({"auto_resume": True}, 1, ["--auto-resume needs --save,"]),
    ({"finetune": True}, 1, ["--finetune needs --load"]),
    ({"load": "a", "load_hf": "b", "dry_run": True}, 1, ["--load a and --load-hf b are two starts"]),
    ({"ignore_field": "a,b"}, 1, ["--ignore-field a,b acts only with --load-hf"]),
    ({"lora_alpha": 16.0, "lora_targets": "q"}, 1, ["--lora-alpha 16.0, --lora-targets q act only with --lora-rank"]),
    ({"lora_dropout": 0.1}, 1, ["--lora-dropout 0.1 acts only with --lora-rank"]),
    (
        {"lora_rank": 4, "lora_targets": "v,up", "lora_dropout": 0.1, "mlp_chunk_tokens": 64},
        1,
        ["--lora-dropout 0.1 on up with --mlp-chunk-tokens 64: a tile does not know"],
    ),
    ({"lora_rank": 4, "lora_targets": "q,query,all"}, 1, ["--lora-targets q,query,all: query, all is none of q, k, v"]),
    ({"lora_rank": 4, "lora_targets": "q,q"}, 1, ["--lora-targets q,q: names some linears, each once"]),
    ({"lora_rank": 4, "lora_targets": ","}, 1, ["--lora-targets ,: names some linears"]),
    (
        {"lora_rank": 65, "num_query_groups": 2, "lora_targets": "all"},
        1,
        ["--lora-rank 65 is above the smaller width of k (64), v (64): "],
    ),
    ({"lora_rank": 4, "gradient_accumulation_fusion": True}, 1, ["--gradient-accumulation-fusion with --lora-rank 4"]),
    (
        SEES | {"lora_rank": 4, "freeze_text": True, "connector_lr_multiplier": 0.5},
        1,
        ["--freeze-text, --connector-lr-multiplier 0.5 with --lora-rank 4: pairs alone are trained"],
    ),
    (
        {"lora_rank": 4, "vision_from_hf": "none", "load_hf": "a", "dry_run": True},
        1,
        ["--vision-from-hf none with --lora"],
    ),
    ({"vision_from_hf": "none"}, 1, ["--vision-from-hf none acts only with --load-hf"]),
    (
        {"vision_shards": "replicate", "vision_feature_exchange": "all_gather"},
        1,
        ["--vision-shards replicate sends no features", "--vision-feature-exchange all_gather"],
    ),
    ({"exit_duration": 0.0}, 1, ["--exit-duration: got 0.0, it must be above 0"]),
    ({CP: 2, "attention_kernel": "dense"}, 2, ["--attention-kernel dense", "--context-parallel-size 2"]),
    ({"seq_length": 16384, "attention_kernel": "dense"}, 1, ["--attention-kernel dense", "16384", "8192"]),
    ({"cp_layout": "spiral"}, 1, ["--cp-layout: got 'spiral'", "zigzag, zigzag_document, contiguous, balanced, auto"]),
    ({CP: 16, "cp_comm_type": "a2a"}, 16, ["--context-parallel-size 16: 8 heads"]),
    ({CP: 8, TP: 2, "cp_comm_type": "a2a"}, 16, ["4 heads", "--num-attention-heads 8 / tp 2"]),
    ({CP: 4, "cp_comm_type": "a2a+p2p"}, 4, ["--hierarchical-context-parallel-sizes A B", "A x B = 4"]),
    ({CP: 4, "cp_comm_type": "a2a+p2p", SIZES: (2, 4)}, 4, [f"{flag(SIZES)} 2 4 make 8", "-size is 4"]),
    ({CP: 16, "cp_comm_type": "a2a+p2p", SIZES: (16, 1)}, 16, [f"{flag(SIZES)} 16 1", "8 heads"]),
    ({CP: 4, SIZES: (2, 2)}, 4, [f"{flag(SIZES)} 2 2", "--cp-comm-type a2a+p2p", "has p2p"]),
    ({SIZES: (0, 2)}, 1, [f"{flag(SIZES)}: got 0 2, each must be at least 1"]),
    ({CP: 4, "cp_exchange_stages": 2}, 4, ["--cp-exchange-stages 2", "--cp-comm-type kv_exchange"]),
    ({CP: 4, "cp_exchange_stages": 4, "cp_comm_type": "kv_exchange"}, 4, ["--cp-exchange-stages 4", "at most 3"]),
    ({**DYNAMIC, "attention_kernel": "dense"}, 2, ["--attention-kernel dense"]),
    ({**DYNAMIC, CP: 4, "seq_length": 2**30}, 8, ["2147483648 tokens in a row"]),
    ({"dynamic_context_parallel": True}, 2, ["--dynamic-context-parallel", "has zigzag and p2p"]),
    ({"attention_kernel": "dense", "cp_comm_type": "auto"}, 1, ["--attention-kernel dense", "--cp-comm-type auto"]),
    (
        SEES | {TP: 3, "num_attention_heads": 9, "kv_channels": 4, "seq_length": 513, "vision_num_attention_heads": 16},
        3,
        ["--vision-num-attention-heads 16", f"{flag(TP)} 3"],
    ),
    (SEES | {TP: 2, "vision_num_query_groups": 1}, 2, ["--vision-num-query-groups 1", f"{flag(TP)} 2"]),
    (SEES | {"vision_num_query_groups": 4}, 1, ["--vision-num-attention-heads 6", "--vision-num-query-groups 4"]),
    (SEES | {TP: 2, "vision_ffn_hidden_size": 33}, 2, ["--vision-ffn-hidden-size 33", f"{flag(TP)} 2"]),
    (SEES | {TP: 4, "vision_num_attention_heads": 8}, 4, ["--connector-num-attention-heads 6", f"{flag(TP)} 4"]),
    (SEES | {TP: 2, "connector_num_query_groups": 1}, 2, ["--connector-num-query-groups 1", f"{flag(TP)} 2"]),
    (SEES | {"connector_num_query_groups": 5}, 1, ["--connector-num-attention-heads 6", "-num-query-groups 5"]),
    (SEES | {TP: 2, "connector_ffn_hidden_size": 33}, 2, ["--connector-ffn-hidden-size 33", f"{flag(TP)} 2"]),
    (SEES | {"vision_image_size": 18}, 1, ["--vision-image-size 18", "--vision-patch-size 4"]),
    (SEES | {"vision_feature_layers": (-1, -4)}, 1, ["--vision-feature-layers -1 -4", "3 layers", "-3 to 2"]),
    (SEES | {"vision_feature_layers": (1, 0)}, 1, ["1 0", "the last 1", "--vision-num-layers 2", "layers -1 -2"]),
    (SEES | {"additional_vocab_size": 0}, 1, ["--vision-num-layers 3", "--additional-vocab-size"]),
    (SEES | {"freeze_vision": True, "freeze_connector": True, "freeze_text": True}, 1, ["nothing to train"]),
    ({"freeze_text": True, "vision_lr_multiplier": 0.5}, 1, ["--freeze-text, --vision-lr-multiplier 0.5 act only"]),
    ({"freeze_vision": True}, 1, ["--freeze-vision acts only with --vision-num-layers"]),
    (
        SEES | {"freeze_connector": True, "connector_lr_multiplier": 2.0},
        1,
        ["--connector-lr-multiplier 2 with", "rate"],
    ),
    ({"loss_spike_factor": 0.5}, 1, ["--loss-spike-factor 0.5: every ordinary step", "above 1, or 0"]),
    (
        {"spike_action": "skip", "loss_spike_factor": 0.0, "grad_norm_spike_factor": 0.0},
        1,
        ["--spike-action skip needs --loss-spike-factor"],
    ),
    ({"profile": "12:10"}, 1, ["--profile 12:10: expected START:STOP"]),
    ({"profile": "10"}, 1, ["--profile 10: expected START:STOP"]),
    ({"profile": "101:102"}, 1, ["--profile 101:102 begins after --train-iters 100"]),
    ({"profile": "1:2", "profile_ranks": "0,2"}, 2, ["--profile-ranks 0,2: rank 2 is not among 2 ranks, 0 to 1"]),
    ({"profile": "1:2", "profile_ranks": "first"}, 1, ["--profile-ranks first: expected numbers of ranks"]),
    ({"hidden_dropout": 1.0}, 1, ["--hidden-dropout: got 1.0", "at least 0 and below 1"]),
    ({"lr": float("nan")}, 1, ["--lr: got nan"]),
    ({"lr": float("inf")}, 1, ["--lr: got inf"]),
    ({"save": "", "save_interval": 5}, 1, ["--save: an empty string"]),
    ({"load": "", "finetune": True}, 1, ["--load: an empty string"]),
    ({"data_path": "", "vocab_size": 0}, 1, ["--data-path: an empty string"]),
    ({"valid_data_path": "", "eval_interval": 5}, 1, ["--valid-data-path: an empty string"]),
    ({"profile": ""}, 1, ["--profile: an empty string"]),
    ({"profile": "1:2", "profile_ranks": ""}, 1, ["--profile-ranks: an empty string"]),
    ({"seed": -1}, 1, ["--seed: got -1"]),
]


@pytest.mark.parametrize(("values", "world", "words"), CONTRADICTIONS)
def test_a_contradiction_is_told_once_with_numbers_and_flag(values: dict, world: int, words: list[str]) -> None:
    """Would catch a rule that is missing, says too little, or drags others along."""
    (reason,) = check(with_values(GOOD, values), world)
    assert [word for word in words if word not in reason] == []


def _yields(section: Callable) -> set[tuple[str, int]]:
    """File and line of every `yield` in a section's module."""
    module = inspect.getmodule(section)
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    return {(module.__name__, node.lineno) for node in nodes if isinstance(node, ast.Yield)}


def _fired(section: Callable, config: RunConfig, world: int) -> Iterator[tuple[str, int]]:
    """The `yield` behind every reason of a section, through `yield from` down to the function that has it."""
    running = section(config, world)
    for _ in running:
        inner = running
        while inner.gi_yieldfrom is not None:
            inner = inner.gi_yieldfrom
        yield inner.gi_frame.f_globals["__name__"], inner.gi_frame.f_lineno


def test_every_reason_has_a_contradiction_above() -> None:
    """Would catch a reason that is never told. What looks at files has tests of its own below."""
    fired = {
        place
        for values, world, _ in CONTRADICTIONS
        if not any(fields()[name].problem(value) for name, value in values.items())
        for section in SECTIONS
        for place in _fired(section, with_values(GOOD, values), world)
    }
    told = {place for section in SECTIONS for place in _yields(section)}
    silent = {name.removeprefix("megacp.core.config.checks.") for name, _ in told - fired}
    assert silent <= {"multiples", "checkpoint"}, told - fired


@pytest.mark.parametrize(("values", "world", "words"), CONTRADICTIONS)
def test_a_number_out_of_range_is_in_no_reason_but_its_own(values: dict, world: int, words: list[str]) -> None:
    """Would catch a section that says something about a number that is already refused."""
    numbers = [name for name, info in fields().items() if info.range]
    before = check(with_values(GOOD, values), world)
    for name in numbers:
        wrong = (2**40, -(2**40)) if isinstance(fields()[name].unknown, tuple) else -1
        reasons = check(with_values(GOOD, values | {name: wrong}), world)
        more = [reason for reason in reasons if reason not in before]
        assert [r for r in more if flag(name) in r.split() and not r.startswith(f"{flag(name)}: got")] == []
        assert "nan" not in " ".join(more).replace(",", " ").split()


def test_all_reasons_are_told_at_once() -> None:
    """Would catch a check that stops at the first reason."""
    values = {TP: 3, "num_query_groups": 5, "lr": -1.0, "min_lr": 5.0, "save_interval": 1, "micro_batch_size": 0}
    with pytest.raises(ValueError) as error:
        require(with_values(GOOD, values), 4)
    lines = str(error.value).splitlines()
    assert lines[0] == f"this configuration cannot run, for {len(lines) - 1} reasons:"
    starts = [
        "--micro-batch-size: got 0",
        "--lr: got -1",
        "a world of 4",
        "--num-attention-heads 8",
        "--num-query-groups 5",
    ]
    assert [s for s in starts if not any(line.startswith(f"  - {s}") for line in lines)] == []
    assert not any("--min-lr" in line for line in lines), "lr is out of range, comparing with it says nothing"


@pytest.mark.parametrize("name", sorted(name for name, info in fields().items() if info.range))
def test_a_number_out_of_range_is_named(name: str) -> None:
    """Would catch a number without a lower bound: nothing here may be negative."""
    reasons = check(with_values(GOOD, {name: -1}), 1)
    assert [reason for reason in reasons if reason.startswith(f"{flag(name)}: got -1, it must be")] == reasons


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("num_layers", 4096),
        ("vision_num_layers", 4096),
        ("global_batch_size", 1_000_000),
        ("world_size", 1_000_000),
        *((name, 1_000_000) for name in (TP, PP, CP)),
    ],
)
def test_a_count_that_would_fill_the_memory_is_refused_with_its_most(name: str, most: int) -> None:
    """Would catch a list of as many layers, ranks or packs before the message."""
    for value in (most + 1, 2**40):
        reasons = check(with_values(GOOD, {name: value, "dry_run": True}), 1)
        assert any(f"{flag(name)}: got {value}, it must be" in text and f"at most {most}" in text for text in reasons)
    assert fields()[name].problem(most) is None


def test_every_number_has_a_range_and_every_range_a_number() -> None:
    """Would catch a new field without a range."""
    kinds = (int, float, int | Literal["auto"], int | None, float | None, tuple[int, int], tuple[int, int] | None)
    assert [name for name, info in fields().items() if (info.hint in kinds) != (info.range is not None)] == []


def test_paths_that_do_not_exist_are_refused_except_in_a_dry_run(tmp_path) -> None:
    """Would catch a run that starts for minutes before it looks for its data."""
    (tmp_path / "file").write_text("")
    file, missing = str(tmp_path / "file"), str(tmp_path / "missing")
    values = {
        "data_path": missing,
        "valid_data_path": str(tmp_path),
        "load": file,
        "save": file,
        "tensorboard_dir": file,
        "log_file": str(tmp_path),
    }
    reasons = check(with_values(GOOD, values), 1)
    assert reasons == [
        f"--data-path {missing}: does not exist",
        f"--valid-data-path {tmp_path}: holds no manifest.json; build it with tools/preprocess_data.py build",
        f"--load {file}: is not a directory",
        f"--save {file}: is a file, a directory is needed",
        f"--tensorboard-dir {file}: is a file, a directory is needed",
        f"--log-file {tmp_path}: is a directory, a file is needed",
    ]
    assert check(with_values(GOOD, {**values, "dry_run": True}), 1) == []


def test_good_paths_are_accepted_and_validation_needs_data(tmp_path) -> None:
    """Would catch a refusal of a finished dataset, and a validation loss without packs."""
    (tmp_path / "manifest.json").write_text("{}")
    values = {"data_path": str(tmp_path), "vocab_size": 0, "save": str(tmp_path / "new"), "load": str(tmp_path)}
    assert check(with_values(GOOD, values), 1) == []
    (reason,) = check(with_values(GOOD, {**values, "eval_interval": 10}), 1)
    assert reason == "--eval-interval 10 needs --valid-data-path"


def test_the_size_of_the_world_must_be_positive() -> None:
    """Would catch a division by zero for --world-size 0."""
    assert check(GOOD, 0) == ["the world size is 0, it must be at least 1"]


@given(st.data())
def test_layouts_built_to_fit_are_accepted(data: st.DataObject) -> None:
    """Would catch a rule that refuses what works."""
    draw = data.draw
    tp, pp, cp, dp = (draw(st.sampled_from([1, 2, 4, 8])) for _ in range(4))
    virtual = draw(st.integers(1, 3)) if pp > 1 else 1
    micro, groups = draw(st.integers(1, 3)), tp * draw(st.sampled_from([1, 2, 3]))
    values = {
        TP: tp,
        PP: pp,
        CP: cp,
        V: virtual,
        "num_layers": pp * virtual + draw(st.integers(0, 5)),
        "num_query_groups": groups,
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "kv_channels": 2 * draw(st.integers(1, 40)),
        "hidden_size": draw(st.integers(1, 1000)),
        "ffn_hidden_size": tp * draw(st.integers(1, 300)),
        "seq_length": 2 * cp * tp * draw(st.integers(1, 100)),
        "micro_batch_size": micro,
        "global_batch_size": micro * dp * draw(st.integers(1, 9)),
        "sequence_parallel": draw(st.booleans()),
        "cp_layout": draw(st.sampled_from(["zigzag", "contiguous"])),
    }
    assert check(with_values(GOOD, values), tp * pp * cp * dp) == []


@given(st.fixed_dictionaries({name: st.integers(-3, 40) for name in (TP, PP, CP, V, "num_layers", "hidden_size")}))
def test_no_sizes_make_the_checks_themselves_fail(values: dict[str, int]) -> None:
    """Would catch a ZeroDivisionError where a reason belongs."""
    more = {"num_attention_heads": values[TP], "num_query_groups": values[CP], "micro_batch_size": values[V]}
    for world in (0, 1, 8):
        assert all(isinstance(reason, str) for reason in check(with_values(GOOD, {**values, **more}), world))


def test_a_directory_with_the_checkpoints_of_another_run_is_only_gone_on_with(tmp_path) -> None:
    """Would catch two runs mixed in one directory, and one whose --keep-last deletes the other's checkpoints."""
    step = tmp_path / "step_0000002"
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    (reason,) = check(with_values(GOOD, {"save": str(tmp_path)}), 1)
    assert reason.startswith(f"--save {tmp_path} holds the checkpoints of a run") and "--load" in reason
    for load in (tmp_path, step):
        assert check(with_values(GOOD, {"save": str(tmp_path), "load": str(load)}), 1) == []
    assert check(with_values(GOOD, {"save": str(tmp_path), "dry_run": True}), 1) == []
    assert check(with_values(GOOD, {"save": str(tmp_path), "auto_resume": True}), 1) == []
    assert len(check(with_values(GOOD, {"save": str(tmp_path), "load": str(tmp_path), "finetune": True}), 1)) == 1


def test_validation_packs_without_training_packs_are_refused(tmp_path) -> None:
    """Would catch a validation dataset that is silently ignored."""
    (tmp_path / "manifest.json").write_text("{}")
    (reason,) = check(with_values(GOOD, {"valid_data_path": str(tmp_path), "data_path": None}), 1)
    assert "--valid-data-path" in reason and "--data-path" in reason


def test_traces_never_lie_in_the_folder_of_the_null_device(tmp_path) -> None:
    """Would catch a trace that is written into /dev/profile, and a folder that nobody has looked at."""
    null = {"log_file": os.devnull, "profile": "1:2"}
    save, other = str(tmp_path / "save"), str(tmp_path / "other")
    assert with_values(GOOD, {**null, "save": save}).profile_path == Path(save, "profile")
    for values in (null, {**null, "save": "s3://bucket/run"}):
        assert with_values(GOOD, values).profile_path == Path("profile")
    assert with_values(GOOD, {**null, "save": save, "profile_dir": other}).profile_path == Path(other)
    logged = {"profile": "1:2", "log_file": str(tmp_path / "log.jsonl")}
    assert with_values(GOOD, logged).profile_path == tmp_path / "profile"
    (tmp_path / "profile").write_text("")
    reasons = check(with_values(GOOD, logged), 1)
    assert reasons == [f"--profile-dir {tmp_path / 'profile'}: is a file, a directory is needed"]


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch) -> None:
    """Would catch a run that trains first and finds out when it saves."""
    monkeypatch.setattr("megacp.core.config.checks.checkpoint.os.access", lambda path, mode: False)
    reasons = check(with_values(GOOD, {"save": str(tmp_path / "a" / "b")}), 1)
    assert reasons == [f"--save {tmp_path / 'a' / 'b'}: cannot be written, {tmp_path} does not allow it"]
