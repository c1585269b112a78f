"""The check of a GPU: its dry run needs none, and on a CPU the same parts run with small sizes."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from megacp.verify import gpu_report
from megacp.verify.gpu_report import Finding

main = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "check_gpu.py"))["main"]


def test_a_dry_run_names_every_part_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "run", None)
    assert main(["--dry-run"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("float64", "8192", "32768", "Transformer Engine", "2, 4 ranks"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_full_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_the_report_holds_versions(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(report["parts"]) == 7 and all(part["results"] and not part["error"] for part in report["parts"])
    text = (tmp_path / "report.md").read_text()
    assert "tokens/s" in text and text.count("| ok |") == 6 and text.count("| skipped |") == 9


def test_a_part_that_fails_or_comes_too_late_is_a_line_and_what_was_found_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[Finding]:
        raise torch.OutOfMemoryError("too large")

    def ended() -> list[Finding]:
        raise SystemExit("the machine ends the command")

    good = Finding("good", 0.0, 1.0, "exact")
    monkeypatch.setattr(gpu_report, "parts", lambda device: {"one": broken, "two": lambda: [good], "three": ended})
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--output", str(tmp_path)])
    assert len(json.loads((tmp_path / "report.json").read_text())["parts"]) == 2
    text = (tmp_path / "report.md").read_text()
    assert "| one | OutOfMemoryError: too large | | not finished |" in text and "| good | 0.00e+00 |" in text
    assert main(["--device", "cpu", "--output", str(tmp_path), "--minutes", "-1"]) == 1
    assert (tmp_path / "report.md").read_text().count("left out") == 3


@pytest.mark.parametrize(
    ("difference", "verdict"), [(None, "skipped"), (0.1, "FAILED"), (0.01, "ok"), (math.nan, "FAILED")]
)
def test_a_difference_is_judged_by_what_is_allowed(difference: float | None, verdict: str) -> None:
    assert Finding("x", difference, 0.05, "").verdict == verdict
    assert math.isnan(gpu_report.largest([1.0, math.nan, 1.0])), "Python's max passes over a NaN"
