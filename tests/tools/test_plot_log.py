"""The curves of a log: losses by kind, notes and other figures passed over, lines of another file refused."""

from pathlib import Path

import pytest

from megacp.core.monitor.log import LogTargets, RunLog
from megacp.verify.plot import main, read_curves


def write(path: Path) -> None:
    log = RunLog(LogTargets(jsonl=path), total_steps=2)
    log.note(1, "all ranks skipped the update")
    log.figures("attention", 1, "attention", {"measured": 1.0})
    log.validation(1, 2.5)
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 1, "loss": 3.0}\n{"kind": "train", "step": 2, "loss": "nan"}\n')


@pytest.mark.slow
def test_a_log_with_notes_has_its_curves(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl")
    curves = read_curves(tmp_path / "log.jsonl")
    assert list(curves["train"]) == [1, 2] and curves["train"][1] == 3.0 and curves["valid"] == {1: 2.5}
    assert main(["--log", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "loss.png"), "--mark", "2"]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "named"),
    [("{", "log.jsonl:1"), ("3", "log.jsonl:1"), ("{}", "log.jsonl:1"), ("", "no training step"), (None, "log.jsonl")],
)
def test_another_file_is_named(text: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    assert main(["--log", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "loss.png")]) == 2
    assert named in capsys.readouterr().err
