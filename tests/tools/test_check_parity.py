"""The checks of parity and of a GPU: their findings, and a dry run without a GPU."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from megacp.attention.ops import flex
from megacp.engine.backends import select
from megacp.engine.backends.select import backend_problems
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.optim import sharded
from megacp.engine.optim.rules import AdamW, Group
from megacp.train import main as train
from megacp.training.data.mock import MockRules
from megacp.verify import command as tool
from megacp.verify import gpu_report, spawn
from megacp.verify.gpu_report import Finding
from megacp.verify.parity import Box, StepTrace, compare, largest_difference, train_rank

ROOT = Path(__file__).resolve().parents[2]
TP, CP, PP = (
    "--tensor-model-parallel-size",
    "--context-parallel-size",
    "--pipeline-model-parallel-size",
)
SMALL = ["--num-layers", "2", "--steps", "2", "--seq-length", "32", "--timeout", "120"]
EXPERTS = [
    "--model",
    "tiny_moe",
    "--expert-model-parallel-size",
    "2",
    "--moe-aux-loss-coeff",
    "0.3",
]
DYNAMIC = ["--dynamic-context-parallel", "--cp-comm-type", "kv_exchange", "--cp-layout", "balanced"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [TP, "2", "--mask", "mixed", "--model", "tiny_biased"],
        ["--nproc", "2", "--mask", "causal", "--micro-batch-size", "2"],
        ["--nproc", "4", CP, "2", "--mask", "mixed", *DYNAMIC, *EXPERTS],
        ["--nproc", "4", PP, "2", "--mask", "image", *DYNAMIC],
        [TP, "2", CP, "2", PP, "2", "--mask", "branches", "--model", "tiny_llama"],
        [CP, "2", "--cp-comm-type", "auto", "--cp-layout", "auto"],
        [
            CP,
            "2",
            "--mask",
            "tree",
            "--model",
            "tiny_gemma3",
            "--window-size",
            "7",
            "--window-attn-skip-freq",
            "2",
        ],
    ],
    ids=" ".join,
)
def test_grids_are_the_same_as_one_process(flags: list[str], capsys: pytest.CaptureFixture) -> None:
    """Every mask, and cases that the golden gradients omit: rows of several packs, and changing
    degrees.
    """
    assert tool.main([*SMALL, *flags]) == 0
    out = capsys.readouterr().out
    assert "THE SAME: within 1e-10 (float64" in out and ("context parallelism: " in out) == (
        "auto" in flags
    )


def lost_norm_gradient(rank: int, world_size: int, *args: Any) -> list[StepTrace]:
    """Fault: a rank does not sum the gradients of norms over tp."""
    from megacp.engine.data_parallel import shards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "all_reduce", lambda x, axis: x)
        return train_rank(rank, world_size, *args)


def raises(rank: int, world_size: int, *args: Any) -> None:
    if rank == 1:
        raise ArithmeticError("the second rank is broken")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faulty", "flags", "status", "words"),
    [
        (
            lost_norm_gradient,
            [TP, "2", "--steps", "1"],
            1,
            ["DIFFERENT", "step 1: the gradient of", "norm.weight"],
        ),
        (raises, [TP, "2"], 3, ["rank 1 failed:\nTraceback (most recent call last)"]),
    ],
)
def test_a_fault_in_the_ranks_is_found_and_told(
    faulty: Callable[..., Any],
    flags: list[str],
    status: int,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """A tool that always succeeds would pass other tests, and so would a parent that waits forever
    or hides the first traceback.
    """

    def run_ranks(
        function: Callable[..., Any], world_size: int, *args: Any, timeout: float
    ) -> list[Any]:
        return spawn.run_ranks(
            faulty if world_size > 1 else function, world_size, *args, timeout=timeout
        )

    monkeypatch.setattr(tool, "run_ranks", run_ranks)
    assert tool.main([*SMALL, *flags]) == status
    said = capsys.readouterr()
    assert all(word in said.out + said.err for word in words)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([TP, "3", "--num-attention-heads", "8"], "--num-attention-heads 8"),
        (["--nproc", "3", TP, "2"], "a world of 3 ranks"),
        (["--hidden-sise", "32"], "did you mean --hidden-size?"),
        (
            ["--num-layers", "4", "--hidden-size", "1024", "--vocab-size", "50000"],
            "--model tiny_llm",
        ),
        (["--config", "/no/such/file.yaml"], "--config /no/such/file.yaml"),
        (["--data-path", "/no/such/folder"], "--data-path /no/such/folder"),
        (
            ["--data-path", "/no/such/folder", "--mask", "mixed"],
            "--data-path cannot be combined with --mask mixed",
        ),
    ],
)
def test_contradictions_are_refused_before_a_process_starts(
    flags: list[str], named: str, capsys: pytest.CaptureFixture
) -> None:
    assert tool.main(flags) == 2
    assert named in capsys.readouterr().err


def test_a_config_of_a_user_keeps_its_layout_and_tells_what_was_made_smaller(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 96\nvocab_size: 0\n"
        "context_parallel_size: 2\ncp_layout: contiguous\ndtype: bfloat16\nseq_length: 2048\nglobal_batch_size: 64\n"
        "data_path: /data/on/the/cluster\nsave: /checkpoints\nsave_interval: 100\nlr_warmup_iters: 50\n"
    )
    assert tool.main(["--config", str(path), "--steps", "1", "--seq-length", "64"]) == 0
    out = capsys.readouterr().out
    for text in (
        *(
            "cp 2",
            "contiguous",
            "not those of --data-path /data/on/the/cluster",
            "--vocab-size 211",
        ),
        *("--dtype float64 instead of bfloat16", "--global-batch-size 2 instead of 64"),
    ):
        assert text in out
    assert "--seq-length" not in out


@pytest.mark.slow
def test_stored_packs_are_taken_when_they_are_named(
    packed_dataset: Path, capsys: pytest.CaptureFixture
) -> None:
    data = ["--data-path", str(packed_dataset), "--seq-length", "64"]
    assert tool.main(["--num-layers", "2", "--steps", "1", CP, "2", *data]) == 0
    assert f"packs of {packed_dataset}" in capsys.readouterr().out


def test_a_fault_of_the_update_is_found_whatever_the_schedule(tmp_path: Path) -> None:
    """During the warm-up, an update is smaller than the rounding of the parameters."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "lr: 2.0e-5\nlr_warmup_iters: 200\ntrain_iters: 10000\nvision_lr_multiplier: 0.5\n"
    )
    own, rest = tool._arguments(
        ["--config", str(path), "--model", "tiny_vlm", "--seq-length", "32", "--lr", "2e-5"]
    )
    setup = tool.setup_of(own, rest)
    assert "--lr-warmup-iters 0 instead of 200" in setup.notes
    right = train_rank(0, 1, setup.reference, setup.rules, 1)
    assert not compare(right, [right])[0].beyond()

    for fault in (
        (AdamW, "update", lambda *_: None),
        (sharded, "Group", lambda decay, multiplier: Group(0.1 - decay, multiplier)),
        (sharded, "Group", lambda decay, multiplier: Group(decay, 1.0)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*fault)
            wrong = train_rank(0, 1, setup.config, setup.rules, 1)
        assert "update of" in "".join(compare(right, [wrong])[0].beyond())


def test_a_changed_missing_or_unknown_element_is_a_difference() -> None:
    sizes = {
        "num_layers": 1,
        "hidden_size": 16,
        "ffn_hidden_size": 16,
        "vocab_size": 31,
        "num_attention_heads": 2,
    }
    config = with_values(RunConfig(), {**sizes, "seq_length": 16, "global_batch_size": 2})
    (trace,) = train_rank(0, 1, config, MockRules(31, 16, ragged=True), 1)
    assert set(compare([trace], [[trace]])[0].differences.values()) == {0.0}
    first, *rest = trace.parameters
    full = {box.name: box.values for box in trace.parameters}
    changed = first.values.copy()
    changed.reshape(-1)[-1] += 1e-3 * float(np.abs(first.values).max())

    def difference(values: np.ndarray) -> tuple[str, float]:
        return largest_difference(
            full, [[Box(first.name, first.global_shape, first.offsets, values), *rest]]
        )

    assert difference(changed) == (first.name, pytest.approx(1e-3, rel=1e-3))
    assert difference(np.full_like(changed, np.nan))[1] == math.inf
    name, missing = largest_difference(full, [rest])
    assert missing == math.inf and "elements on no rank" in name
    unknown = Box("layers.9.extra", (1,), (0,), np.zeros(1))
    assert largest_difference(full, [[*trace.parameters, unknown]])[1] == math.inf


main = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "check_gpu.py"))["main"]


def test_a_dry_run_names_every_part_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "run_part", None)
    assert main(["--dry-run"]) == 0
    text = capsys.readouterr().out
    assert all(
        word in text for word in ("float64", "8192", "32768", "Transformer Engine", "2, 4 ranks")
    )


def test_a_torch_that_cannot_compile_the_backward_of_attention_is_refused_on_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch 2.12 and 2.11 use different names for the fallback."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    monkeypatch.setattr(select, "compiler_problem", flex.compiler_problem.__wrapped__)
    assert backend_problems(RunConfig(), "cuda") == [], "a compiler that was given what 2.12 has"
    call = torch._dynamo.variables.higher_order_ops.FlexAttentionBackwardHighOrderVariable
    monkeypatch.setattr(call, "_call_function", call._call_function_fallback)
    (problem,) = backend_problems(RunConfig(), "cuda")
    assert (
        "2.12" in problem
        and "torch 2.11.0" in problem
        and backend_problems(RunConfig(), "cpu") == []
    )
    monkeypatch.setattr(flex, "compiler_problem", lambda: problem)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main([]) == 2 and capsys.readouterr().err == f"error: {problem}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_full_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_the_first_part_is_a_run_that_is_saved_and_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "SAVED", 1)
    monkeypatch.setattr(gpu_report, "STEPS", 2)
    monkeypatch.setattr(gpu_report.subprocess, "run", lambda command, **_: train(command[3:]))
    finding, figure = next(iter(gpu_report.parts("cpu").values()))()
    assert finding.verdict == "ok" and figure.values["tokens_per_second"] > 0
    assert "after step 1" in capsys.readouterr().out


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_the_report_holds_versions(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(report["parts"]) == 8 and all(
        part["results"] and not part["error"] for part in report["parts"]
    )
    text = (tmp_path / "report.md").read_text()
    assert "tokens/s" in text and text.count("| ok |") == 7 and text.count("| skipped |") == 9


def test_a_part_that_fails_or_comes_too_late_is_a_line_and_what_was_found_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[Finding]:
        raise torch.OutOfMemoryError("too large")

    def ended() -> list[Finding]:
        raise SystemExit("the machine ends the command")

    good = Finding("good", 0.0, 1.0, "exact")
    monkeypatch.setattr(
        gpu_report, "parts", lambda device: {"one": broken, "two": lambda: [good], "three": ended}
    )
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--output", str(tmp_path)])
    assert len(json.loads((tmp_path / "report.json").read_text())["parts"]) == 2
    text = (tmp_path / "report.md").read_text()
    assert (
        "| one | OutOfMemoryError: too large | | not finished |" in text
        and "| good | 0.00e+00 |" in text
    )
    assert (
        main(["--device", "cpu", "--output", str(tmp_path), "--minutes", "-1", "--overwrite"]) == 1
    )
    assert (tmp_path / "report.md").read_text().count("skipped: the limit of") == 3


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [(None, "skipped"), (0.1, "FAILED"), (0.01, "ok"), (math.nan, "FAILED")],
)
def test_a_difference_is_judged_by_what_is_allowed(difference: float | None, verdict: str) -> None:
    assert Finding("x", difference, 0.05, "").verdict == verdict
    assert math.isnan(gpu_report.largest([1.0, math.nan, 1.0])), "Python's max passes over a NaN"
