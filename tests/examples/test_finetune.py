"""The cells of a notebook, run as they stand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CELLS = Path(__file__).resolve().parents[2] / "examples" / "finetune.py"


@pytest.mark.slow
def test_the_cells_build_train_on_two_ranks_and_get_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(CELLS), str(tmp_path)])
    answers = runpy.run_path(str(CELLS))["ANSWERS"]
    said = capsys.readouterr().out
    assert "cp 2" in said and "finished after step" in said
    assert said.endswith("".join(f"{question} {answer}\n" for question, answer in answers.items()))
