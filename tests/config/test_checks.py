"""What a configuration cannot be: one table of (values, world, the flag that the message names)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacp.core.config.checks import check, require
from megacp.core.config.run import RunConfig, fields, flag, with_values

GOOD = with_values(RunConfig(), {"vocab_size": 64})
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
ZB, V, STRATEGY = "pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "data_parallel_sharding_strategy"
DYNAMIC = {"dynamic_context_parallel": True, "cp_comm_type": "kv_exchange", "cp_layout": "balanced"}
SIZES = "hierarchical_context_parallel_sizes"
SEES = {
    "vision_num_layers": 3,
    "vision_hidden_size": 24,
    "vision_ffn_hidden_size": 36,
    "vision_num_attention_heads": 6,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -2),
    "additional_vocab_size": 8,
    "untie_embeddings_and_output_weights": True,
}
"""A tiny tower of crops of 16 pixels, which fits."""

CONTRADICTIONS: list[tuple[dict, int, str]] = [
    ({"num_distributed_optimizer_instances": 4, "global_batch_size": 12}, 6, "--num-distributed-optimizer-instances 4"),
    ({STRATEGY: "optim_grads", "gradient_accumulation_fusion": True}, 1, "--gradient-accumulation-fusion"),
    ({"lora_rank": 4, "gradient_accumulation_fusion": True}, 1, "--gradient-accumulation-fusion"),
    ({PP: 2, ZB: "zero_bubble", STRATEGY: "optim_grads"}, 2, "--pipeline-schedule zero_bubble"),
    ({PP: 2, ZB: "zero_bubble", "lora_rank": 4}, 2, "--lora-rank 4"),
    ({PP: 2, ZB: "zero_bubble", "mlp_chunk_tokens": 64}, 2, "--mlp-chunk-tokens 64"),
    ({TP: 2, PP: 2, CP: 2}, 12, "8 or 16"),
    ({TP: 4}, 2, "a world of 2 ranks"),
    ({"world_size": 8}, 1, "--world-size 8"),
    ({TP: 3, "ffn_hidden_size": 768, "seq_length": 513}, 3, "--num-attention-heads 8"),
    ({TP: 4, "num_query_groups": 2}, 4, "--num-query-groups 2"),
    ({"num_query_groups": 3}, 1, "--num-query-groups 3"),
    ({"hidden_size": 250}, 1, "--hidden-size 250"),
    ({"kv_channels": 33}, 1, "--kv-channels"),
    ({TP: 2, "ffn_hidden_size": 767}, 2, "766 or 768"),
    ({PP: 4, V: 2}, 4, "--num-layers 4"),
    ({V: 2}, 1, flag(V)),
    ({"micro_batch_size": 3}, 1, "6 or 9"),
    ({"micro_batch_size": 2}, 6, "--global-batch-size 8"),
    ({CP: 2, TP: 2, "seq_length": 500}, 4, "496 or 504"),
    ({CP: 2, "seq_length": 501, "cp_layout": "contiguous"}, 2, "--seq-length 501"),
    ({"vocab_size": 0}, 1, "--vocab-size 0"),
    ({"additional_vocab_size": 128}, 1, "--untie-embeddings-and-output-weights"),
    ({"no_rope_freq": "0"}, 1, "--no-rope-freq 0"),
    ({"no_rope_freq": "[0,2]"}, 1, "--no-rope-freq [0,2]"),
    ({"lr": 0.1, "min_lr": 0.2}, 1, "--min-lr 0.2"),
    ({"lr_warmup_iters": 101}, 1, "--train-iters 100"),
    ({"lr_warmup_iters": 51, "lr_decay_iters": 50}, 1, "--lr-decay-iters 50"),
    ({"lr_wsd_decay_iters": 5}, 1, "--lr-wsd-decay-iters 5"),
    ({"lr_decay_style": "WSD"}, 1, "--lr-wsd-decay-iters"),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 10}, 1, "--lr-wsd-decay-iters 95"),
    ({"profile": "12:10"}, 1, "--profile 12:10"),
    ({"profile": "101:102"}, 1, "--profile 101:102"),
    ({"eval_interval": 2}, 1, "--valid-data-path"),
    ({"valid_data_path": "x", "dry_run": True}, 1, "--data-path"),
    ({"save_interval": 5}, 1, "--save-interval"),
    ({"auto_resume": True}, 1, "--auto-resume"),
    ({"finetune": True}, 1, "--finetune"),
    ({"load": "a", "load_hf": "b", "dry_run": True}, 1, "--load-hf b"),
    ({"vision_from_hf": "none"}, 1, "--load-hf"),
    ({"lora_alpha": 16.0}, 1, "--lora-rank"),
    ({"lora_rank": 4, "lora_targets": "v,up", "lora_dropout": 0.1, "mlp_chunk_tokens": 64}, 1, "--lora-dropout 0.1"),
    ({"lora_rank": 4, "lora_targets": "q,query,all"}, 1, "--lora-targets q,query,all"),
    ({"lora_rank": 65, "num_query_groups": 2, "lora_targets": "all"}, 1, "--lora-rank 65"),
    ({"lora_rank": 4, "vision_from_hf": "none", "load_hf": "a", "dry_run": True}, 1, "--vision-from-hf none"),
    ({CP: 2, "attention_kernel": "dense"}, 2, "--attention-kernel dense"),
    ({"seq_length": 16384, "attention_kernel": "dense"}, 1, "--attention-kernel dense"),
    ({**DYNAMIC, "attention_kernel": "dense"}, 2, "--attention-kernel dense"),
    ({"attention_kernel": "dense", "cp_comm_type": "auto"}, 1, "--cp-comm-type auto"),
    ({"dynamic_context_parallel": True}, 2, "--dynamic-context-parallel"),
    ({CP: 16, "cp_comm_type": "a2a"}, 16, "--num-attention-heads"),
    ({CP: 8, TP: 2, "cp_comm_type": "a2a"}, 16, "tp 2"),
    ({CP: 4, "cp_comm_type": "a2a+p2p"}, 4, flag(SIZES)),
    ({CP: 4, "cp_comm_type": "a2a+p2p", SIZES: (2, 4)}, 4, flag(SIZES)),
    ({CP: 16, "cp_comm_type": "a2a+p2p", SIZES: (16, 1)}, 16, "--num-attention-heads"),
    ({CP: 4, SIZES: (2, 2)}, 4, flag(SIZES)),
    (SEES | {TP: 2, "vision_ffn_hidden_size": 33}, 2, "--vision-ffn-hidden-size 33"),
    (SEES | {TP: 4}, 4, "--vision-num-attention-heads 6"),
    (SEES | {"vision_num_attention_heads": 5}, 1, "--vision-hidden-size 24"),
    (SEES | {TP: 2, "connector_ffn_hidden_size": 33}, 2, "--connector-ffn-hidden-size 33"),
    (SEES | {"vision_image_size": 18}, 1, "--vision-image-size 18"),
    (SEES | {"vision_feature_layers": (-1, -4)}, 1, "--vision-feature-layers -1 -4"),
    (SEES | {"vision_feature_layers": (1, 0)}, 1, "--vision-feature-layers 1 0"),
    (SEES | {"additional_vocab_size": 0}, 1, "--additional-vocab-size"),
    (SEES | {"freeze": "vision,connector,text"}, 1, "--freeze vision,connector,text"),
    (SEES | {"freeze": "tower"}, 1, "--freeze tower"),
    # one field by itself
    ({"exit_duration": 0.0}, 1, "--exit-duration"),
    ({"cp_layout": "spiral"}, 1, "--cp-layout"),
    ({SIZES: (0, 2)}, 1, flag(SIZES)),
    ({"hidden_dropout": 1.0}, 1, "--hidden-dropout"),
    ({"lr": float("nan")}, 1, "--lr"),
    ({"save": "", "save_interval": 5}, 1, "--save"),
    ({"data_path": "", "vocab_size": 0}, 1, "--data-path"),
    ({"seed": -1}, 1, "--seed"),
]


@pytest.mark.parametrize(("values", "world", "named"), CONTRADICTIONS)
def test_a_contradiction_is_told_once_by_its_flag(values: dict, world: int, named: str) -> None:
    (reason,) = check(with_values(GOOD, values), world)
    assert named in reason


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ValueError) as error:
        require(with_values(GOOD, {TP: 3, "num_query_groups": 5, "min_lr": 5.0, "save_interval": 1}), 4)
    named = ("a world of 4", "--num-attention-heads 8", "--num-query-groups 5", "--min-lr 5", "--save-interval")
    assert [name for name in named if name not in str(error.value)] == []
    assert check(GOOD, 0) == ["the world size is 0, it must be at least 1"]


def test_every_number_has_a_range_and_is_named_beyond_it() -> None:
    kinds = (int, float, int | Literal["auto"], int | None, float | None, tuple[int, int], tuple[int, int] | None)
    assert [name for name, info in fields().items() if (info.hint in kinds) != (info.range is not None)] == []
    for name in (name for name, info in fields().items() if info.range):
        reasons = check(with_values(GOOD, {name: -1}), 1)
        assert [reason for reason in reasons if reason.startswith(f"{flag(name)}: got -1, it must be")] == reasons


@given(st.data())
def test_layouts_built_to_fit_are_accepted(data: st.DataObject) -> None:
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


def test_a_directory_with_the_checkpoints_of_another_run_is_only_gone_on_with(tmp_path: Path) -> None:
    step, save = tmp_path / "step_0000002", {"save": str(tmp_path)}
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    (reason,) = check(with_values(GOOD, save), 1)
    assert reason.startswith(f"--save {tmp_path} holds the checkpoints of a run") and "--load" in reason
    for more in ({"load": str(tmp_path)}, {"load": str(step)}, {"dry_run": True}, {"auto_resume": True}):
        assert check(with_values(GOOD, {**save, **more}), 1) == []
    assert len(check(with_values(GOOD, {**save, "load": str(tmp_path), "finetune": True}), 1)) == 1


def test_paths_are_looked_at_except_in_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    (tmp_path / "file").write_text("")
    data, file, missing = (str(tmp_path / name) for name in ("data", "file", "missing"))
    good = {"data_path": data, "vocab_size": 0, "save": str(tmp_path / "new"), "load": data}
    assert check(with_values(GOOD, good), 1) == []
    (reason,) = check(with_values(GOOD, {**good, "eval_interval": 10}), 1)
    assert reason == "--eval-interval 10 needs --valid-data-path"
    values = {
        "data_path": missing,
        "valid_data_path": str(tmp_path),
        "load": missing,
        "save": file,
        "tensorboard_dir": file,
        "log_file": str(tmp_path),
    }
    reasons = check(with_values(GOOD, values), 1)
    assert [reason.split()[0] for reason in reasons] == [flag(name) for name in values]
    assert check(with_values(GOOD, {**values, "dry_run": True}), 1) == []
    blends = {"data_path": ("1", "no_a", "0", "no_b", "2", "no_c"), "valid_data_path": ("1", "v", "x", "w")}
    reasons = check(with_values(GOOD, blends), 1)
    assert [reason.split(":")[0] for reason in reasons if "no_" in reason] == [
        f"--data-path no_{name}" for name in "ac"
    ]
    assert any(reason.startswith("--valid-data-path 1 v x w: it takes one folder") for reason in reasons)
    monkeypatch.setattr("megacp.core.config.checks.os.access", lambda path, mode: False)
    (reason,) = check(with_values(GOOD, {"save": str(tmp_path / "a" / "b")}), 1)
    assert reason.startswith("--save ")
