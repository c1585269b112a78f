"""The parity tool: says the same where it is the same, and finds mistakes that are put into a rank."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.core.config.cli import parse
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.mock import MockRules
from megacp.core.distributed import spawn
from megacp.core.models.costs import run_parameters
from megacp.core.optim import sharded
from megacp.core.optim.adamw import FlatAdamW, SliceRule
from megacp.prepare import command as preprocess
from megacp.verify import command as tool
from megacp.verify.parity import TOLERANCES, Box, StepTrace, compare, largest_difference, train_rank
from megacp.verify.parity_config import MAX_PARAMETERS, ParityRequest, ParitySetup, prepare

ROOT = Path(__file__).resolve().parents[2]
TP, CP, PP = "--tensor-model-parallel-size", "--context-parallel-size", "--pipeline-model-parallel-size"
SMALL = ["--num-layers", "2", "--steps", "2", "--seq-length", "32", "--timeout", "120"]

DYNAMIC = ["--dynamic-context-parallel", "--cp-comm-type", "kv_exchange", "--cp-layout", "balanced"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([TP, "2", "--mask", "mixed", "--model", "tiny_biased"], id="tp2"),
        pytest.param(["--nproc", "2", "--mask", "causal", "--micro-batch-size", "2"], marks=SLOW, id="dp2"),
        pytest.param(["--nproc", "4", CP, "2", "--mask", "mixed", *DYNAMIC], marks=SLOW, id="dynamic dp2_cp2"),
        pytest.param(["--nproc", "4", PP, "2", "--mask", "image", *DYNAMIC], marks=SLOW, id="dynamic dp2"),
        pytest.param([TP, "2", CP, "2", PP, "2", "--mask", "branches", "--model", "tiny_llama"], marks=SLOW, id="8"),
    ],
)
@pytest.mark.slow
def test_grids_are_the_same_as_one_process(flags: list[str], capsys: pytest.CaptureFixture) -> None:
    """Would catch any layout that trains another model, and a tool that cries wolf.

    Every mask and what the golden gradients and the vision parity of tests/training leave out: rows of several packs
    and degrees that change from row to row.
    """
    assert tool.main([*SMALL, *flags]) == 0
    assert "THE SAME: within 1e-10 (float64" in capsys.readouterr().out


def lost_norm_gradient(rank: int, world_size: int, *args: Any) -> list[StepTrace]:
    """A rank that forgets to sum the gradients of norms over tp."""
    from megacp.core.data_parallel import shards

    right = shards.all_reduce
    shards.all_reduce = lambda x, axis: x  # type: ignore[assignment]
    try:
        return train_rank(rank, world_size, *args)
    finally:
        shards.all_reduce = right


def half_mask(rank: int, world_size: int, *args: Any) -> list[StepTrace]:
    """A rank that leaves out every second block of the mask."""

    from megacp.core.ops import tile_kernels as kernel

    right = kernel.table_calls
    kernel.table_calls = lambda table, heads: right(table, heads)[::2]
    try:
        return train_rank(rank, world_size, *args)
    finally:
        kernel.table_calls = right


def raises_on_rank_one(rank: int, world_size: int, *args: Any) -> list[StepTrace]:
    if rank == 1:
        raise ArithmeticError("the second rank is broken")
    return train_rank(rank, world_size, *args)


def hangs_on_rank_one(rank: int, world_size: int, *args: Any) -> list[StepTrace]:
    if rank == 1:
        time.sleep(600)
    return train_rank(rank, world_size, *args)


def dies_on_rank_one(rank: int, world_size: int, *args: Any) -> list[StepTrace]:
    if rank == 1:
        os._exit(7)
    return train_rank(rank, world_size, *args)


def with_fault(monkeypatch: pytest.MonkeyPatch, faulty: Callable[..., Any]) -> None:
    """The tool's grid (not its one process) runs `faulty` instead of `train_rank`."""

    def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> list[Any]:
        return spawn.run_ranks(faulty if world_size > 1 else function, world_size, *args, timeout=timeout)

    monkeypatch.setattr(tool, "run_ranks", run_ranks)


@pytest.mark.parametrize(
    ("faulty", "flags", "named"),
    [(lost_norm_gradient, [TP, "2"], "norm.weight"), (half_mask, [CP, "2"], "layers.")],
    ids=["lost_norm_gradient", "half_mask"],
)
@pytest.mark.slow
def test_a_fault_in_the_ranks_is_found_and_a_parameter_named(
    faulty: Callable[..., Any],
    flags: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Would catch a tool that always says yes."""
    with_fault(monkeypatch, faulty)
    assert tool.main([*SMALL, *flags, "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: beyond 1e-10" in out
    (line,) = [line for line in out.splitlines() if line.strip().startswith("step 1: the gradient of")]
    assert named in line


@pytest.mark.parametrize(
    ("faulty", "timeout", "message"),
    [
        pytest.param(raises_on_rank_one, "60", "rank 1 failed:\nTraceback (most recent call last)", id="raises"),
        pytest.param(
            dies_on_rank_one,
            "60",
            "rank 1 failed:\nthe process died with exit code 7",
            marks=pytest.mark.slow,
            id="dies",
        ),
        pytest.param(hangs_on_rank_one, "6", "rank 1 did not finish within 6 s", marks=pytest.mark.slow, id="hangs"),
    ],
)
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_tool_with_its_own_words(
    faulty: Callable[..., Any],
    timeout: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Would catch a parent that waits for ever, or hides the traceback of the rank that began it."""
    with_fault(monkeypatch, faulty)
    assert tool.main([*SMALL, TP, "2", "--timeout", timeout]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [TP, "3", "--num-attention-heads", "8"],
            "--num-attention-heads 8 is no multiple of --tensor-model-parallel-size 3",
        ),
        (["--nproc", "3", TP, "2"], "a world of 3 ranks is no multiple of"),
        (["--hidden-sise", "32"], "did you mean --hidden-size?"),
        (["--num-layers", "4", "--hidden-size", "1024", "--vocab-size", "50000"], "--model tiny_llm"),
        (["--config", "/no/such/file.yaml"], "--config /no/such/file.yaml: cannot be read"),
        (["--data-path", "/no/such/folder"], "--data-path /no/such/folder: it holds no manifest.json; leave it out"),
    ],
)
def test_contradictions_are_refused_before_a_process_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    """Would catch a contradiction that comes back as eight tracebacks."""
    assert tool.main(flags) == 2
    assert message in capsys.readouterr().err


def test_a_config_of_a_user_keeps_its_layout_and_tells_what_was_made_smaller(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Would catch a check that tests another layout than the file's, and silent changes."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 96\nvocab_size: 0\n"
        "context_parallel_size: 2\ncp_layout: contiguous\ndtype: bfloat16\nseq_length: 2048\nglobal_batch_size: 64\n"
        "data_path: /data/on/the/cluster\nsave: /checkpoints\nsave_interval: 100\nlr_warmup_iters: 50\n"
    )
    assert tool.main(["--config", str(path), "--steps", "1", "--seq-length", "64"]) == 0
    out = capsys.readouterr().out
    assert "cp 2" in out and "contiguous" in out
    for note in (
        "not those of --data-path /data/on/the/cluster",
        "--dtype float64 instead of bfloat16",
        "--global-batch-size 2 instead of 64",
        "--vocab-size 211",
    ):
        assert note in out
    assert "--seq-length" not in out


def test_the_one_process_is_dense_and_plain_and_the_grid_is_not_touched() -> None:
    """Would catch a reference that shares the code path under test."""
    values = {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "recompute_granularity": "full"}
    values["num_virtual_stages_per_pipeline_rank"] = 2
    options = {"activation_offload": 0.5, "mlp_chunk_tokens": 100}
    setup = prepare(with_values(RunConfig(), values | options), ParityRequest(frozenset(), mask="mixed"))
    assert setup.world_size == 4
    assert {name: getattr(setup.config.parallel, name) for name in values if name != "recompute_granularity"} == {
        name: value for name, value in values.items() if name != "recompute_granularity"
    }
    assert setup.reference.training.attention_kernel == "dense"
    assert setup.reference.training.recompute_granularity == "none"
    assert {name: getattr(setup.reference.training, name) for name in options} == dict.fromkeys(options, 0)
    assert setup.reference.model_ranks == setup.reference.parallel.num_virtual_stages_per_pipeline_rank == 1
    assert setup.reference.model == setup.config.model


def test_a_huge_model_is_made_small_and_refused_only_where_flags_keep_it_huge() -> None:
    """Would catch a check that fills the memory of the machine, also by its vision tower, and one nobody can run."""
    huge = with_values(
        RunConfig(), {"hidden_size": 8192, "num_layers": 80, "vocab_size": 128_000, "activation_offload": 40.0}
    )
    for sizes in ({"hidden_size", "num_layers"}, {"hidden_size", "num_layers", "vocab_size", "ffn_hidden_size"}):
        with pytest.raises(ValueError, match=f"at most {MAX_PARAMETERS / 1e6:.1f} M"):
            prepare(huge, ParityRequest(frozenset(sizes), has_config=True))
    assert prepare(huge, ParityRequest(frozenset(), has_config=True, model="tiny_llm")).config.model.num_layers == 4
    small = prepare(huge, ParityRequest(frozenset(), has_config=True))
    assert small.config.model.hidden_size == 64 and "--hidden-size 64 instead of 8192" in small.notes
    assert small.config.training.activation_offload == small.config.model.num_layers


@pytest.mark.parametrize("model", [None, "tiny_llm"])
def test_the_8b_example_is_checked_with_a_small_tower_of_its_own_shape_and_mixed_masks(model: str | None) -> None:
    """Would catch a size check that counts text alone, and a vision model that is checked without an image."""
    config = parse(["--config", str(ROOT / "examples" / "molmo2_8b.yaml")])
    setup = prepare(config, ParityRequest(frozenset(), has_config=True, model=model))
    assert run_parameters(setup.config) < MAX_PARAMETERS < run_parameters(config)
    vision = setup.config.vision
    assert (vision.vision_num_layers, vision.vision_hidden_size, vision.vision_feature_layers) == (3, 32, (-1, -2))
    assert setup.rules is not None and setup.rules.images is not None and setup.rules.mask == "mixed"
    heads = (32, 8) if model is None else (8, 4)
    assert (setup.config.model.num_attention_heads, setup.config.model.query_groups) == heads


def test_every_example_is_taken_and_what_only_a_gpu_runs_is_replaced(capsys: pytest.CaptureFixture) -> None:
    """Would catch a config that trains and is refused here, or that ends in a rank's traceback."""
    values = {"attention_kernel": "flex", "transformer_impl": "transformer_engine", "fp8": "delayed"}
    values |= {
        "async_save": True,
        "auto_resume": True,
        "finetune": True,
        "save": "/a",
        "load": "/b",
        "exit_duration": 5,
    }
    for name in ("small.yaml", "molmo2_8b.yaml"):
        config = with_values(parse(["--config", str(ROOT / "examples" / name)]), values)
        setup = prepare(config, ParityRequest(frozenset(), has_config=True))
        notes = "\n".join(setup.notes)
        assert "--fp8 off instead of delayed" in notes
        assert "--attention-kernel auto instead of flex" in notes
        assert "--transformer-impl native instead of transformer_engine" in notes
        assert setup.config.checkpoint == RunConfig().checkpoint


@pytest.mark.slow
def test_auto_is_resolved_as_a_run_does_and_told(capsys: pytest.CaptureFixture) -> None:
    """Would catch a config of a run with auto that cannot be checked."""
    auto = ["--cp-comm-type", "auto", "--cp-layout", "auto"]
    assert tool.main([*SMALL, CP, "2", *auto]) == 0
    assert "context parallelism: " in capsys.readouterr().out


def build_text(folder: Path) -> None:
    records = folder / "records.jsonl"
    lines = [json.dumps({"text": "words and words " * (1 + number % 5)}) for number in range(60)]
    records.write_text("\n".join(lines))
    build = ["build", "--input", str(records), "--output", str(folder / "data"), "--tokenizer", "byte"]
    assert preprocess.main([*build, "--seq-length", "96", "--workers", "1"]) == 0


@pytest.mark.slow
def test_stored_packs_are_taken_when_they_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Would catch a check on random packs while the run's own packs lie there."""
    build_text(tmp_path)
    data = ["--data-path", str(tmp_path / "data"), "--seq-length", "96"]
    assert tool.main(["--num-layers", "2", "--steps", "1", CP, "2", *data]) == 0
    assert f"packs of {tmp_path / 'data'}, mask packed" in capsys.readouterr().out
    assert tool.main([*data, "--mask", "mixed"]) == 2
    assert "--mask mixed draws random packs; leave it out" in capsys.readouterr().err


def one_rank_traces() -> list[StepTrace]:
    config = with_values(RunConfig(), {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "vocab_size": 31})
    config = with_values(config, {"num_attention_heads": 2, "seq_length": 16, "global_batch_size": 2})
    return train_rank(0, 1, config, MockRules(31, 16, ragged=True), 1)


def schedule_of_a_run(folder: Path, flags: list[str]) -> ParitySetup:
    """A tiny model with a tower under a config whose first update is 1e-7."""
    path = folder / "run.yaml"
    path.write_text("lr: 2.0e-5\nlr_warmup_iters: 200\ntrain_iters: 10000\nvision_lr_multiplier: 0.5\n")
    own, rest = tool._arguments(["--config", str(path), "--model", "tiny_vlm", "--seq-length", "32", *flags])
    return tool._setup(own, rest)


def no_update(self: FlatAdamW, gradients: Any, lr: float, scale: float = 1.0) -> None:
    """An optimizer that forgets to update."""


UPDATE_FAULTS = {
    "no update": (FlatAdamW, "update", no_update),
    "wrong decay": (sharded, "SliceRule", lambda decayed, multiplier: SliceRule(not decayed, multiplier)),
    "no multiplier": (sharded, "SliceRule", lambda decayed, multiplier: SliceRule(decayed)),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("fault", UPDATE_FAULTS)
def test_a_fault_of_the_update_is_found_whatever_the_schedule_and_the_precision(
    fault: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a comparison of parameters beside which an update during the warm-up is less than rounding."""
    setup = schedule_of_a_run(tmp_path, ["--dtype", dtype])
    assert any(note.startswith("--lr-warmup-iters 0 instead of 200") for note in setup.notes)
    right = train_rank(0, 1, setup.reference, setup.rules, 1)
    assert not compare(right, [right])[0].beyond(TOLERANCES[dtype])
    monkeypatch.setattr(*UPDATE_FAULTS[fault])
    wrong = train_rank(0, 1, setup.config, setup.rules, 1)
    assert "the update of" in "".join(compare(right, [wrong])[0].beyond(TOLERANCES[dtype]))


def test_a_schedule_given_by_flags_is_kept_and_its_missing_update_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a check of a first update of 1e-7 that takes none for the same."""
    setup = schedule_of_a_run(tmp_path, ["--dtype", "float32", "--lr", "2e-5", "--lr-warmup-iters", "200"])
    assert (setup.config.training.lr, setup.config.training.lr_warmup_iters) == (2e-5, 200)
    right = train_rank(0, 1, setup.reference, setup.rules, 1)
    monkeypatch.setattr(*UPDATE_FAULTS["no update"])
    wrong = train_rank(0, 1, setup.config, setup.rules, 1)
    assert "the update of" in "".join(compare(right, [wrong])[0].beyond(TOLERANCES["float32"]))


def test_a_flag_whose_name_begins_with_no_is_kept_beside_a_named_model() -> None:
    """Would catch --no-rope-freq read as the opposite of a flag that does not exist, and lost without a word."""
    own, rest = tool._arguments(["--model", "tiny_smollm3", "--no-rope-freq", "4", "--no-sequence-parallel"])
    config = tool._setup(own, rest).config
    assert (config.model.no_rope_freq, config.parallel.sequence_parallel) == ("4", False)


def test_a_changed_missing_or_unknown_element_is_a_difference() -> None:
    """Would catch a comparison that looks only at what both sides have."""
    (trace,) = one_rank_traces()
    same = compare([trace], [[trace]])[0]
    assert same.gradient.value == same.parameter.value == same.loss_difference == 0.0
    boxes = list(trace.parameters)
    scale = max(float(np.abs(box.values).max()) for box in boxes if box.name == boxes[0].name)
    changed = boxes[0].values.copy()
    changed.reshape(-1)[-1] += 1e-3 * scale
    full = {box.name: box.values for box in boxes}
    wrong = Box(boxes[0].name, boxes[0].global_shape, boxes[0].offsets, changed)
    found = largest_difference(full, [[wrong, *boxes[1:]]])
    assert found.name == boxes[0].name and found.value == pytest.approx(1e-3, rel=1e-3)
    missing = largest_difference(full, [boxes[1:]])
    assert missing.value == math.inf and "elements on no rank" in missing.name
    unknown = Box("layers.9.extra", (1,), (0,), np.zeros(1))
    assert largest_difference(full, [[*boxes, unknown]]).value == math.inf
    lost = Box(boxes[0].name, boxes[0].global_shape, boxes[0].offsets, np.full_like(changed, np.nan))
    assert largest_difference(full, [[lost, *boxes[1:]]]).value == math.inf


def test_a_named_model_grows_heads_and_layers_for_a_layout_that_is_larger_than_it() -> None:
    layout = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 3, "context_parallel_size": 2}
    setup = prepare(
        with_values(RunConfig(), {**layout, "num_virtual_stages_per_pipeline_rank": 2}), ParityRequest(frozenset())
    )
    model = setup.config.model
    assert (model.query_groups, model.num_attention_heads, model.num_layers) == (8, 16, 6)
    assert any(note.startswith("--adam-eps") for note in setup.notes)
