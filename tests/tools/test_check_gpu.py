"""The check of a GPU: its dry run needs none, and on a CPU the same parts run with small sizes."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from megacp.verify import gpu_checks, gpu_report, gpu_speed
from megacp.verify.gpu_checks import Finding

main = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "check_gpu.py"))["main"]


def test_a_dry_run_names_every_part_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "run", None)
    assert main(["--dry-run"]) == 0
    text = capsys.readouterr().out
    for word in ("float64", "8192", "32768", "36864", "131072", "Transformer Engine", "2, 4 ranks"):
        assert word in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_full_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_the_report_holds_versions(tmp_path: Path) -> None:
    """Would catch a part that only a GPU machine would find broken."""
    assert main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in report["versions"]["torch"]
    assert len(report["parts"]) == 8 and all(part["results"] and not part["error"] for part in report["parts"])
    text = (tmp_path / "report.md").read_text()
    assert "tokens/s" in text and "MFU = " in text
    assert text.count("| ok |") == 8 and text.count("| skipped |") == 8


def test_what_tells_most_comes_first() -> None:
    """Would catch ranks, the only proof of several parts of keys on a GPU, that no run of seven minutes reaches."""
    names = list(gpu_report.parts(gpu_report.GpuPlan(), "cuda"))
    order = [next(i for i, name in enumerate(names) if word in name) for word in ("float64", "8192", "ranks", "32768")]
    assert order == sorted(order) and len(names) == 11


def test_a_part_that_fails_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch memory of a part that ran out of it, which then counts as that of all parts behind it."""
    done = []
    monkeypatch.setattr(gpu_report, "_clean", lambda: done.append("cleaned"))

    def fails() -> None:
        raise torch.OutOfMemoryError("too large")

    entries = gpu_report.run({"a": fails, "b": lambda: done.append("b")}, 1.0)
    assert done == ["cleaned", "b", "cleaned"] and "too large" in entries[0]["error"]


def test_ranks_that_would_begin_too_late_are_skipped() -> None:
    findings = gpu_checks.ranks_on_one_device("cpu", gpu_report.SMALL.checks, seconds=-1.0)
    assert [f.verdict for f in findings] == ["skipped"] * 4 and "seconds of this part are over" in findings[0].skipped


def test_an_opponent_that_fails_has_a_note_and_our_figure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch ten minutes of a GPU without our figure, because cuDNN takes no such mask."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("No available kernel.\nAborting execution.")

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", refuse)
    figure = gpu_speed.attention_speed("cpu", 64, (4, 2), 16, dense_up_to=64)
    assert figure.values["ms"] > 0 and figure.values["dense SDPA ms, math"] is None
    assert figure.notes == ("dense SDPA, math: RuntimeError: No available kernel.",)
    entry = {"part": "attention", "error": "", "results": [figure]}
    assert f"* {figure.notes[0]}\n" in gpu_report.markdown("cpu", {}, [entry])


@pytest.mark.slow
def test_a_part_that_fails_is_a_line_and_the_others_run() -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("out of memory")

    good = Finding("good", 0.0, 1.0, "exact")
    entries = gpu_report.run({"one": broken, "two": lambda: [good]}, minutes=1.0)
    assert "out of memory" in entries[0]["error"] and entries[1]["results"] == [good]
    text = gpu_report.markdown("cpu", {}, entries)
    assert "| one | RuntimeError: out of memory | | not finished |" in text


@pytest.mark.slow
def test_what_was_found_is_on_disk_when_the_machine_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch ten minutes of a GPU without a report."""

    def ended() -> list[Finding]:
        raise SystemExit("out of time")

    good = Finding("good", 0.0, 1.0, "exact")
    monkeypatch.setattr(gpu_report, "parts", lambda *_: {"one": lambda: [good], "two": ended})
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--output", str(tmp_path / "report")])
    (part,) = json.loads((tmp_path / "report" / "report.json").read_text())["parts"]
    assert part["part"] == "one" and "| good |" in (tmp_path / "report" / "report.md").read_text()


def test_a_loss_that_is_not_a_number_is_the_largest_difference() -> None:
    """Would catch a NaN behind a sound first step, which Python's `max` passes over."""
    assert math.isnan(gpu_checks._worst([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]))
    assert gpu_checks._worst([1.0, 1.5], [1.0, 1.0]) == 0.5


def test_parts_that_would_begin_too_late_are_left_out() -> None:
    (entry,) = gpu_report.run({"late": list}, minutes=-1.0)
    assert entry["error"].startswith("left out")


@pytest.mark.parametrize(
    "difference, verdict", [(None, "skipped"), (0.1, "FAILED"), (0.01, "ok"), (float("nan"), "FAILED")]
)
def test_a_difference_is_judged_by_what_is_allowed(difference: float | None, verdict: str) -> None:
    assert Finding("x", difference, 0.05, "").verdict == verdict
