"""The log: one line and one JSON object a step, nothing lost or doubled by a resume."""

from __future__ import annotations

import builtins
import json
import math
import os
import sys
import types
from pathlib import Path

import pytest

from megacp.core.monitor.log import LogTargets, RunLog, StepRecord, duration, step_line
from megacp.core.monitor.sinks import JsonlSink, RunPlaces, truncate_after


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
    targets = LogTargets(jsonl=path, places=RunPlaces(str(path.parent), str(path.parent) if resume_step else None))
    log = RunLog(targets, total_steps=10, resume_step=resume_step)
    for step in steps:
        log.step(record(step))
    log.close()


def test_a_step_is_one_line_with_every_figure(capsys) -> None:
    """Would catch a figure of the issue that is left out of the line."""
    RunLog(LogTargets(console=True), total_steps=100).step(record(7))
    assert capsys.readouterr().out == (
        "step   7/100  epoch 0.12  loss 0.3333  grad norm 0.500  lr 3.00e-04  0.25 s  12,346 tokens/s  MFU 42.3%  "
        "1.5 GiB  data wait 1.2 ms  left 1:02:03\n"
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


def test_a_resumed_run_moves_the_log_of_another_run_aside(tmp_path) -> None:
    """Would catch lines of another run that are cut off, and a file that mixes two runs."""
    path, said = tmp_path / "shared.jsonl", list[str]()
    for save, resumed, step in ((None, None, 0), (None, "/runs/a", 2)):
        sink = JsonlSink(path, step, said.append, RunPlaces(save, resumed))
        for number in range(step + 1, 6):
            sink.write("train", number, {"loss": 1.0})
        sink.close()
    assert [row["step"] for row in rows(tmp_path / "shared.1.jsonl")] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows(path)] == [3, 4, 5]
    assert said == [f"{path} is not known as the log of /runs/a: it is now {tmp_path / 'shared.1.jsonl'}"]


def test_a_log_outside_of_its_checkpoints_says_whose_it_is(tmp_path) -> None:
    """Would catch a run whose --log-file is moved aside, or doubles steps, at each of its own resumes."""
    path = tmp_path / "shared.jsonl"
    for save, resumed, step in (("s3://a", None, 0), ("s3://a", "s3://a", 2), ("s3://b", "s3://a", 3)):
        sink = JsonlSink(path, step, places=RunPlaces(save, resumed))
        sink.write("train", step + 1, {"loss": 1.0})
        sink.close()
    found = [(row["kind"], row["step"], row.get("save")) for row in rows(path)]
    assert found == [
        ("run", 0, "s3://a"),
        ("train", 1, None),
        ("train", 3, None),
        ("run", 3, "s3://b"),
        ("train", 4, None),
    ]
    JsonlSink(path, 2, places=RunPlaces("s3://a", "s3://a")).close()
    assert [row["step"] for row in rows(tmp_path / "shared.1.jsonl")] == [0, 1, 3, 3, 4]


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


def test_time_left_is_read_at_a_glance() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3599, 3600, 90_061)] == ["0:00", "1:00", "59:59", "1:00:00", "1d 1h"]


def test_a_long_run_on_many_devices_has_a_line_of_readable_length() -> None:
    line = step_line(
        record(100_000, tokens_per_second=1.2e7, peak_memory=75 << 30, seconds=12.34, seconds_left=1e6, epoch=12.34),
        100_000,
    )
    assert len(line) <= 155, line


class Stream:
    """Standard output that takes nothing while it is full."""

    def __init__(self) -> None:
        self.full = False
        self.text = ""

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        self.text += text
        return len(text)

    def flush(self) -> None:
        self.write("")

    def fileno(self) -> int:
        raise ValueError("no descriptor")


def test_a_console_that_is_full_ends_nothing_is_told_once_and_tried_again(tmp_path, monkeypatch, capsys) -> None:
    """Would catch a traceback before the first save because somebody's `head` has read enough."""
    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    log = RunLog(LogTargets(console=True, jsonl=tmp_path / "log.jsonl"), total_steps=9)
    for step in range(1, 8):
        stream.full = step in (2, 3, 6)
        log.step(record(step))
    log.close()
    assert [int(line.split("/")[0].split()[1]) for line in stream.text.splitlines()] == [1, 4, 5, 7]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "standard output cannot be written (No space left on device): the run goes on, its lines are in " + x
        for x in ["the log file"] * 2
    ]
    found = rows(tmp_path / "log.jsonl")
    assert [row["step"] for row in found if row["kind"] == "train"] == list(range(1, 8))
    assert [row["step"] for row in found if row["kind"] == "note"] == [2, 6]


def test_a_log_file_that_is_full_holds_whole_lines_and_goes_on_when_there_is_room(
    tmp_path, monkeypatch, capsys
) -> None:
    """Would catch half a line, after which no reader takes the file, and a run that ends for its log."""
    real, room = os.write, {"left": 10**9}

    def write(descriptor: int, data: bytes) -> int:
        if not room["left"]:
            raise OSError(28, "No space left on device")
        done = real(descriptor, data[: room["left"]])
        room["left"] -= done
        return done

    monkeypatch.setattr("megacp.core.monitor.sinks.os.write", write)
    log = RunLog(LogTargets(console=True, jsonl=tmp_path / "log.jsonl"), total_steps=9)
    for step in range(1, 8):
        room["left"] = {3: 40, 4: 0, 5: 0}.get(step, 10**9)
        log.step(record(step))
    log.close()
    assert [row["step"] for row in rows(tmp_path / "log.jsonl")] == [1, 2, 6, 7]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 8
    assert [line for line in said if "cannot be written (No space left on device): the run goes on" in line] == [
        said[2]
    ]


def test_a_guest_that_raises_is_left_behind_and_told(tmp_path, monkeypatch, capsys) -> None:
    calls: list[int] = []

    def log_figures(figures: object, step: int) -> None:
        calls.append(step)
        raise RuntimeError("the network is gone")

    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda project, config: types.SimpleNamespace(log=log_figures, finish=lambda: calls.append(-1))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    log = RunLog(LogTargets(True, tmp_path / "log.jsonl", wandb_project="mine"), total_steps=9)
    for step in (1, 2):
        log.step(record(step))
    log.close()
    assert calls == [1]
    text = (
        "--wandb-project mine cannot be written (RuntimeError: the network is gone): the run goes on without its lines"
    )
    assert capsys.readouterr().out.count(text) == 1
    assert [row.get("text") for row in rows(tmp_path / "log.jsonl")] == [text, None, None]


DAMAGES = {
    "a flipped bit": b'{"kind": "train", "step\xb3: 2, "loss": 1.0}\n',
    "a null step": b'{"kind": "train", "step": null, "loss": 1.0}\n',
    "a step in words": b'{"kind": "train", "step": "2"}\n',
    "no object": b"[2]\n",
    "deep JSON": b"[" * 100_000 + b"\n",
    "a huge number": b'{"step": ' + b"9" * 5000 + b"}\n",
    "not UTF-8": b'{"kind": "note", "step": 2, "text": "\xff\xfe"}\n',
    "no JSON number": b'{"kind": "train", "step": 2, "loss": NaN}\n',
    "zeros of a lost block": b"\0" * 4096 + b"\n",
    "a line without end": b"x" * (3 << 20) + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_log_stays_under_another_name_and_a_new_one_goes_on(tmp_path, damage: bytes, capsys) -> None:
    """Would catch one flipped bit of a log that keeps a run from going on, or sound lines that are lost with it."""
    path = tmp_path / "log.jsonl"
    run(path, range(1, 5))
    lines = path.read_bytes().splitlines(keepends=True)
    whole = b"".join([lines[0], damage, *lines[1:]])
    path.write_bytes(whole)
    targets = LogTargets(console=True, jsonl=path, places=RunPlaces(resumed=str(tmp_path)))
    log = RunLog(targets, total_steps=10, resume_step=3)
    log.step(record(4))
    log.close()
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4]
    assert (tmp_path / "log.1.jsonl").read_bytes() == whole
    said = capsys.readouterr().out.splitlines()[0]
    assert f"{path} holds lines that no run writes: it is now {tmp_path / 'log.1.jsonl'}" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.1.jsonl", "log.jsonl"]


@pytest.mark.parametrize("resume_step", [0, 2])
def test_nothing_is_written_through_a_planted_link(tmp_path, resume_step: int) -> None:
    """Would catch a log or its temporary file that overwrites a file of mine through somebody's link."""
    mine, folder = tmp_path / "mine.txt", tmp_path / "out"
    mine.write_text("precious\n")
    folder.mkdir()
    run(folder / "log.jsonl", range(1, 4))
    (folder / "log.jsonl.new").symlink_to(mine)
    run(folder / "log.jsonl", range(resume_step + 1, 5), resume_step)
    assert [row["step"] for row in rows(folder / "log.jsonl")] == [1, 2, 3, 4]
    (folder / "log.jsonl").unlink()
    for target in (mine, tmp_path / "not yet there"):
        (folder / "log.jsonl").symlink_to(target)
        with pytest.raises(ValueError, match="is a link, which is not written through: remove it"):
            run(folder / "log.jsonl", range(1, 2), resume_step)
        (folder / "log.jsonl").unlink()
    assert mine.read_text() == "precious\n" and not (tmp_path / "not yet there").exists()


def test_a_pipe_under_the_logs_name_is_refused_and_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="a named pipe"):
        run(tmp_path / "log.jsonl", range(1, 2))
