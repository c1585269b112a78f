"""The curves of a log: losses by kind, notes and other figures passed over, lines of another file refused."""

from pathlib import Path

import pytest

from megacp.core.monitor.log import LogTargets, RunLog
from megacp.verify.plot import main, read_curves


def write(path: Path) -> None:
    log = RunLog(LogTargets(jsonl=path), total_steps=2)
    log.note(1, "all ranks skipped the update")
    log.figures("attention", 1, "attention", {"measured": 1.0})
    log.figures("timing", 1, "timing", {"data_mean": 1.0})
    log.figures("blend", 1, "blend", {"a": 1.0})
    log.validation(1, 2.5)
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 1, "loss": 3.0}\n{"kind": "train", "step": 2, "loss": "nan"}\n')


@pytest.mark.slow
def test_a_log_with_notes_has_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a run with one skipped step whose curve cannot be drawn."""
    write(tmp_path / "log.jsonl")
    curves = read_curves(tmp_path / "log.jsonl")
    assert curves["train"][0] == [1, 2] and curves["train"][1][0] == 3.0 and curves["valid"] == ([1], [2.5])
    assert main(["--log", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"kind": "else", "step": 1, "loss": 1.0}'])
def test_a_line_of_another_file_is_named(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "log.jsonl")
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(line + "\n")
    assert main(["--log", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "loss.png")]) == 2
    assert "log.jsonl:8 is no line of a training log" in capsys.readouterr().err


def test_a_log_without_a_training_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text("")
    assert main(["--log", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "loss.png")]) == 2
    assert "holds no training step" in capsys.readouterr().err
