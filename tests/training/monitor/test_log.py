"""The log: one line and one JSON object per step. A target that cannot be written ends no run."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megacp.training.monitor.console import Console
from megacp.training.monitor.log import LogTargets, RunLog, StepRecord, duration, step_line
from megacp.verify.plot import read_curves


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


def test_a_step_is_one_line_with_every_figure_on_rank_0_alone(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for targets in (LogTargets(console=True), LogTargets()):
        log = RunLog(targets, total_steps=100)
        log.step(record(7))
        log.close()
    assert capsys.readouterr().out == (
        "step   7/100  epoch 0.12  loss 0.3333  grad norm 0.500  lr 3.00e-04  0.25 s  12,346 tokens/s  MFU 42.3%  "
        "1.5 GiB  data wait 1.2 ms  left 1:02:03\n"
    )
    assert list(tmp_path.iterdir()) == []
    assert [duration(s) for s in (0.4, 59.6, 3599, 3600, 90_061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "1d 1h",
    ]
    assert "  data wait 20.6 s  " in step_line(record(7, data_wait=20.6), 100)
    large = record(
        100_000,
        tokens_per_second=1.2e7,
        peak_memory=75 << 30,
        seconds=12.34,
        seconds_left=1e6,
        epoch=12.34,
    )
    assert len(step_line(large, 100_000)) <= 155


def test_terms_beside_the_loss_stand_beside_it_in_the_line_and_in_the_file(tmp_path) -> None:
    routed = record(7, experts={"balance_loss": 0.01, "dropped": 0})
    assert "loss 0.3333  balance loss 0.01  dropped 0  grad norm" in step_line(routed, 100)
    log = RunLog(LogTargets(jsonl=tmp_path / "log.jsonl"), total_steps=10)
    log.step(routed)
    log.close()
    (row,) = rows(tmp_path / "log.jsonl")
    assert (row["loss"], row["balance_loss"], row["dropped"]) == (
        1 / 3,
        0.01,
        0,
    ) and "experts" not in row


def test_the_console_keeps_its_interval_and_shows_the_last_step_while_the_file_gets_all(
    tmp_path, capsys
) -> None:
    log = RunLog(
        LogTargets(console=True, jsonl=tmp_path / "log.jsonl", log_interval=4), total_steps=10
    )
    for step in range(1, 11):
        log.step(record(step))
        assert len(rows(tmp_path / "log.jsonl")) == step, "in the file at once"
    log.close()
    shown = [line.split("/")[0].split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["4", "8", "10"]
    assert [row["step"] for row in rows(tmp_path / "log.jsonl")] == list(range(1, 11))


def test_json_keeps_every_digit_and_has_no_nan(tmp_path) -> None:
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
    assert (
        math.isnan(float(second["loss"]))
        and float(second["grad_norm"]) == math.inf
        and second["mfu"] is None
    )
    assert valid == {"kind": "valid", "step": 2, "loss": 1.25}


def test_a_run_that_goes_on_appends_and_a_reader_takes_each_step_once(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    run(path, range(1, 8))
    before = path.read_bytes()
    run(path, range(5, 11), resume_step=4)
    assert path.read_bytes().startswith(before) and [p.name for p in tmp_path.iterdir()] == [
        "log.jsonl"
    ]
    assert rows(path)[7] == {"kind": "run", "step": 4}
    assert list(read_curves(path)["train"]) == list(range(1, 11))
    run(path, range(1, 3))
    assert list(read_curves(path)["train"]) == [1, 2]


def events_of(folder: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_every_place_gets_the_same_figures_and_notes(
    package: str, tmp_path, monkeypatch, capsys
) -> None:
    """A fake module has the API that W&B and Trackio share, so no network is needed."""
    pytest.importorskip("tensorboard")
    calls: list = []
    made = types.SimpleNamespace(
        log=lambda figures, step: calls.append((step, figures)),
        finish=lambda: calls.append("finished"),
    )
    stand_in = types.ModuleType(package)
    stand_in.init = lambda project, config: calls.append((project, config)) or made
    monkeypatch.setitem(sys.modules, package, stand_in)
    path, events_folder = tmp_path / "log.jsonl", str(tmp_path / "events")
    log = RunLog(
        LogTargets(True, path, events_folder, **{f"{package}_project": "mine"}),
        2,
        settings={"lr": 1.0},
    )
    log.step(record(1, mfu=None))
    log.step(record(2, loss=0.25))
    log.note(2, "skipped; packs 3, 4")
    log.close()
    assert capsys.readouterr().out.endswith("step 2: skipped; packs 3, 4\n")
    assert rows(path)[-1] == {"kind": "note", "step": 2, "text": "skipped; packs 3, 4"}
    events = events_of(tmp_path / "events")
    assert [(e.step, e.value) for e in events.Scalars("train/loss")][1] == (2, 0.25)
    assert [e.step for e in events.Scalars("train/mfu")] == [2]
    (event,) = events.Tensors("note/text_summary")
    assert event.step == 2 and event.tensor_proto.string_val == [b"skipped; packs 3, 4"]
    opened, (step, figures), _, note, end = calls
    assert opened == ("mine", {"lr": 1.0}) and end == "finished"
    assert step == 1 and figures["train/loss"] == 1 / 3 and "train/mfu" not in figures
    assert note == (2, {"note": "skipped; packs 3, 4"})


@pytest.mark.parametrize(
    ("values", "package", "flag"),
    [
        ({"tensorboard_dir": "events"}, "torch.utils.tensorboard", "--tensorboard-dir"),
        ({"wandb_project": "mine"}, "wandb", "--wandb-project .*log"),
        ({"trackio_project": "mine"}, "trackio", "--trackio-project .*install trackio"),
        ({"jsonl": Path("link")}, "", "link"),
        ({"jsonl": Path("pipe")}, "", "pipe"),
    ],
)
def test_a_place_that_cannot_be_opened_is_named(
    values, package: str, flag: str, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("mine")
    os.mkfifo("pipe")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=flag):
        RunLog(LogTargets(**values), total_steps=1)
    assert not Path("mine").exists()


class Stream:
    """Standard output that accepts nothing while it is full."""

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


def test_a_console_that_is_full_ends_nothing_is_told_once_and_tried_again(
    tmp_path, monkeypatch, capsys
) -> None:
    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    log = RunLog(LogTargets(console=True, jsonl=tmp_path / "log.jsonl"), total_steps=9)
    for step in range(1, 8):
        stream.full = step in (2, 3, 6)
        log.step(record(step))
    log.close()
    assert [int(line.split("/")[0].split()[1]) for line in stream.text.splitlines()] == [1, 4, 5, 7]
    assert len(capsys.readouterr().err.splitlines()) == 2
    found = rows(tmp_path / "log.jsonl")
    assert [row["step"] for row in found if row["kind"] == "train"] == list(range(1, 8))
    assert [row["step"] for row in found if row["kind"] == "note"] == [2, 6]


def test_a_log_file_that_is_full_holds_whole_lines_and_goes_on_when_there_is_room(
    tmp_path, monkeypatch, capsys
) -> None:
    real, room = os.write, {"left": 10**9}

    def write(descriptor: int, data: bytes) -> int:
        if not room["left"]:
            raise OSError(28, "No space left on device")
        done = real(descriptor, data[: room["left"]])
        room["left"] -= done
        return done

    monkeypatch.setattr("megacp.training.monitor.log.os.write", write)
    log = RunLog(LogTargets(console=True, jsonl=tmp_path / "log.jsonl"), total_steps=9)
    for step in range(1, 8):
        room["left"] = {3: 40, 4: 0, 5: 0}.get(step, 10**9)
        log.step(record(step))
    log.close()
    assert [row["step"] for row in rows(tmp_path / "log.jsonl")] == [1, 2, 6, 7]
    said = capsys.readouterr().out.splitlines()
    assert [number for number, line in enumerate(said) if "cannot be written" in line] == [
        2
    ] and len(said) == 8


def test_a_guest_that_raises_is_told_once_in_the_other_places(
    tmp_path, monkeypatch, capsys
) -> None:
    def log_figures(figures: object, step: int) -> None:
        raise RuntimeError("the network is gone")

    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda project, config: types.SimpleNamespace(
        log=log_figures, finish=log_figures
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    log = RunLog(LogTargets(True, tmp_path / "log.jsonl", wandb_project="mine"), total_steps=9)
    for step in (1, 2):
        log.step(record(step))
    log.close()
    assert (
        capsys.readouterr().out.count(
            "--wandb-project mine cannot be written (RuntimeError: the network"
        )
        == 1
    )
    assert [row["kind"] for row in rows(tmp_path / "log.jsonl")] == ["note", "train", "train"]


_LONG = "print('x' * (1 << 20))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "from megacp.training.monitor.console import ends_with_its_reader\nwith "
        f"ends_with_its_reader():\n    {_LONG}",
        "from megacp.train import program\nimport sys\nsys.argv[1:] = ['--help']\nprogram()",
    ],
    ids=["report", "help of the training"],
)
def test_a_program_that_only_prints_ends_in_silence_with_its_reader(body: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", body], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.wait(60) == -signal.SIGPIPE
    assert child.stderr.read() == b""
    child.stderr.close()


def test_a_signal_is_what_it_was_after_the_print(capfd: pytest.CaptureFixture[str]) -> None:
    from megacp.training.monitor.console import ends_with_its_reader

    before = signal.getsignal(signal.SIGPIPE)
    with ends_with_its_reader():
        print("told")
    assert signal.getsignal(signal.SIGPIPE) == before and capfd.readouterr().out == "told\n"


def test_a_terminal_that_is_lost_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, lost = io.StringIO(), []
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(lost.append)
    stream.close()
    console.say("nobody reads it")
    console.say("nor this")
    console.close()
    assert len(lost) == 1
    monkeypatch.setattr(sys, "stdout", None)  # `>&-`
    console.say("nobody reads it")
