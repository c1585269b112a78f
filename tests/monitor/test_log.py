"""The log: one line and one JSON object a step, nothing lost or doubled by a resume."""

from __future__ import annotations

import builtins
import json
import math
import sys
import types
from pathlib import Path

import pytest

from megacp.monitor.log import LogTargets, RunLog, StepRecord, duration, step_line
from megacp.monitor.sinks import JsonlSink, truncate_after


def record(step: int, **changes) -> StepRecord:
    values = {
        "step": step,
        "loss": 1 / 3,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "tokens_per_second": 12345.6,
        "mfu": 0.423,
        "peak_memory": 3 << 29,
        "data_wait": 0.0012,
        "seconds": 0.25,
        "consumed_samples": 8 * step,
        "epoch": 0.125,
        "seconds_left": 3723.4,
    }
    return StepRecord(**{**values, **changes})


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(path: Path, steps: range, resume_step: int = 0) -> None:
    log = RunLog(LogTargets(jsonl=path), total_steps=10, resume_step=resume_step)
    for step in steps:
        log.step(record(step))
    log.close()


def test_a_step_is_one_line_with_every_figure(capsys) -> None:
    """Would catch a figure of the issue that is left out of the line."""
    RunLog(LogTargets(console=True), total_steps=100).step(record(7))
    assert capsys.readouterr().out == (
        "step   7/100  epoch 0.12  loss 0.3333  grad norm 0.500  lr 3.00e-04  0.25 s  12,346 tokens/s  MFU 42.3%  "
        "1.50 GiB  data wait 1.2 ms  left 1:02:03\n"
    )


def test_other_ranks_say_nothing_and_write_nothing(capsys, tmp_path, monkeypatch) -> None:
    """Would catch eight copies of every line."""
    monkeypatch.chdir(tmp_path)
    log = RunLog(LogTargets(), total_steps=1)
    log.step(record(1))
    log.validation(1, 2.0)
    log.close()
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_the_console_keeps_its_interval_and_shows_the_last_step_while_the_file_gets_all(tmp_path, capsys) -> None:
    """Would catch a JSONL file thinned by --log-interval, and a run that ends without a line."""
    log = RunLog(LogTargets(console=True, jsonl=tmp_path / "log.jsonl", log_interval=4), total_steps=10)
    for step in range(1, 11):
        log.step(record(step))
    log.close()
    shown = [line.split("/")[0].split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["4", "8", "10"]
    assert [row["step"] for row in rows(tmp_path / "log.jsonl")] == list(range(1, 11))


def test_json_keeps_every_digit_and_has_no_nan(tmp_path) -> None:
    """Would catch rounding, by which a resumed run looks bitwise equal when it is not, and files no parser reads."""
    path = tmp_path / "deep" / "log.jsonl"
    log = RunLog(LogTargets(jsonl=path), total_steps=2)
    log.step(record(1))
    log.step(record(2, loss=math.nan, grad_norm=math.inf, mfu=None))
    log.validation(2, 1.25)
    log.close()
    text = path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second, valid = rows(path)
    assert (first["kind"], first["loss"], first["consumed_samples"]) == ("train", 1 / 3, 8)
    assert math.isnan(float(second["loss"])) and float(second["grad_norm"]) == math.inf and second["mfu"] is None
    assert valid == {"kind": "valid", "step": 2, "loss": 1.25}


def test_a_resumed_run_leaves_each_step_once(tmp_path) -> None:
    """Would catch steps done after the last checkpoint standing twice in the file."""
    path = tmp_path / "log.jsonl"
    run(path, range(1, 8))
    run(path, range(5, 11), resume_step=4)
    assert [row["step"] for row in rows(path)] == list(range(1, 11))
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_line_cut_by_a_crash_goes_with_the_resume(tmp_path) -> None:
    """Would catch a new line glued to half an old one."""
    path = tmp_path / "log.jsonl"
    run(path, range(1, 4))
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 3, "lo')
    truncate_after(path, 3)
    assert [row["step"] for row in rows(path)] == [1, 2, 3]
    path.write_text('{"step": 1}\n{"step": 2}')
    truncate_after(path, 3)
    assert path.read_text() == '{"step": 1}\n'


def test_a_resume_without_the_old_file_begins_a_new_one(tmp_path) -> None:
    """Would catch a crash when only the checkpoint was copied to another machine."""
    run(tmp_path / "log.jsonl", range(5, 6), resume_step=4)
    assert [row["step"] for row in rows(tmp_path / "log.jsonl")] == [5]


def test_a_fresh_run_moves_the_old_log_aside(tmp_path) -> None:
    """Would catch a second experiment that deletes the first one's log or mixes with it."""
    path = tmp_path / "log.jsonl"
    for steps in (range(1, 2), range(1, 3), range(1, 4)):
        run(path, steps)
    counts = {p.name: len(rows(p)) for p in tmp_path.iterdir()}
    assert counts == {"log.1.jsonl": 1, "log.2.jsonl": 2, "log.jsonl": 3}


def test_every_line_is_in_the_file_at_once(tmp_path) -> None:
    """Would catch a buffer that dies with a killed run."""
    sink = JsonlSink(tmp_path / "log.jsonl")
    sink.write("train", 1, {"loss": 2.0})
    assert len(rows(tmp_path / "log.jsonl")) == 1
    sink.close()


def test_tensorboard_gets_the_same_figures(tmp_path) -> None:
    """Would catch a figure that TensorBoard does not show, or None written as a number."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(LogTargets(tensorboard_dir=str(tmp_path)), total_steps=2)
    log.step(record(1, mfu=None))
    log.step(record(2, loss=0.25))
    log.validation(2, 1.5)
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")][1] == (2, 0.25)
    assert [e.step for e in events.Scalars("train/mfu")] == [2]
    assert [(e.step, e.value) for e in events.Scalars("valid/loss")] == [(2, 1.5)]


def test_a_note_stands_on_the_console_and_in_every_file(tmp_path, capsys) -> None:
    """Would catch a skipped step of which only a lost console told."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(LogTargets(True, tmp_path / "log.jsonl", str(tmp_path / "events")), total_steps=2)
    log.note(2, "skipped; packs 3, 4")
    log.close()
    assert capsys.readouterr().out == "step 2: skipped; packs 3, 4\n"
    assert rows(tmp_path / "log.jsonl") == [{"kind": "note", "step": 2, "text": "skipped; packs 3, 4"}]
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (event,) = events.Tensors("note/text_summary")
    assert event.step == 2 and event.tensor_proto.string_val == [b"skipped; packs 3, 4"]


def test_wandb_gets_the_same_figures(monkeypatch) -> None:
    """Would catch figures logged under another step; a stand-in takes the calls, the network is not needed."""
    calls: list = []
    made = types.SimpleNamespace(
        log=lambda figures, step: calls.append((step, figures)), finish=lambda: calls.append("finished")
    )
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda project, config: calls.append((project, config)) or made
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    log = RunLog(LogTargets(wandb_project="mine"), total_steps=1, settings={"lr": 1.0})
    log.step(record(1, mfu=None))
    log.note(1, "skipped")
    log.close()
    opened, (step, figures), note, end = calls
    assert opened == ("mine", {"lr": 1.0}) and end == "finished"
    assert step == 1 and figures["train/loss"] == 1 / 3 and "train/mfu" not in figures
    assert note == (1, {"note": "skipped"})


@pytest.mark.parametrize(
    ("targets", "package"),
    [
        (LogTargets(tensorboard_dir="events"), "torch.utils.tensorboard"),
        (LogTargets(wandb_project="mine"), "wandb"),
    ],
)
def test_a_missing_package_names_flag_and_extra(targets: LogTargets, package: str, monkeypatch) -> None:
    """Would catch a bare ImportError after the model was built."""
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"--(tensorboard-dir|wandb-project) needs the package .*extra `log`"):
        RunLog(targets, total_steps=1)
