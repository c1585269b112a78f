"""Timers on a clock controlled by the test, breakdowns and traces of steps, and peaks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.engine.timers import Breakdown, EventClock, Pace, Timers, WallClock, unmeasured
from megacp.training.monitor.flops import cuda_peak, gpu_peak, peak_bytes
from megacp.training.monitor.trace import Trace
from tests.ranks import run_ranks
from tests.training.runs import TINY, grid_flags, train_on_rank


class Clock(WallClock):
    """A clock that advances only when it is moved."""

    now = 0.0

    def mark(self) -> float:
        return self.now


def test_times_add_up_until_they_are_taken_also_nested_and_of_a_body_that_raises() -> None:
    clock = Clock()
    timers = Timers(clock)
    for seconds in (1.0, 2.5):
        with timers.measure("data"):
            clock.now += seconds
        clock.now += 10
    with pytest.raises(KeyError), timers.measure("step"), timers.measure("forward"):
        clock.now += 4
        raise KeyError
    assert timers.seconds("data") == 3.5 and timers.seconds("other") == 0.0
    assert timers.take() == {"data": 3.5, "step": 4.0, "forward": 4.0}
    assert timers.take() == {} and timers.seconds("data") == 0.0


class Event:
    """Replaces `torch.cuda.Event`, for a GPU whose work takes a given time."""

    now, waits = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = -1.0

    def record(self, stream: object) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.at - self.at)


def test_events_of_a_gpu_are_read_when_seconds_are_wanted_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timers = Timers(EventClock(torch.device("cuda")))
    for _ in range(2):
        with timers.measure("step"):
            Event.now += 1.5
        Event.now += 10
    assert Event.waits == 0
    assert timers.take() == {"step": 3.0} and Event.waits == 2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, peak: float | None) -> None:
    assert gpu_peak(name, "bfloat16") == peak


@pytest.mark.parametrize(("precision", "peak"), [("highest", 67e12), ("high", 494e12)])
def test_float32_is_compared_with_what_torch_may_use(
    precision: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert cuda_peak(torch.device("cuda"), "float32") == peak
    assert cuda_peak(torch.device("cuda"), "bfloat16") == 989e12


def test_the_peak_sees_an_allocation_that_is_gone() -> None:
    code = (
        "from megacp.training.monitor.flops import peak_bytes; before = peak_bytes(); "
        "x = bytearray(b'x') * (64 << 20); del x; grown = peak_bytes() - before; "
        "assert 60 << 20 < grown < 80 << 20, grown"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.gpu
def test_the_peak_on_cuda_is_the_allocators() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = peak_bytes("cuda")
    torch.empty(1 << 24, device="cuda", dtype=torch.uint8)
    assert peak_bytes("cuda") >= before and peak_bytes("cuda") >= 1 << 24


PHASES = {
    "step",
    "data",
    "plan",
    "agreement",
    "shard",
    "forward",
    "backward",
    "gradient exchange",
    "norm",
    "optimizer",
}


def ranges(path: Path) -> Counter[str]:
    """Return the named ranges of a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


@pytest.mark.slow
def test_a_trace_names_every_phase_of_its_steps_on_rank_0(tmp_path: Path) -> None:
    flags = [
        *TINY,
        *grid_flags(pp=2),
        "--train-iters",
        "5",
        "--save",
        str(tmp_path),
        "--profile",
        "2:3",
    ]
    assert run_ranks(train_on_rank, 4, flags) == [0] * 4
    (trace,) = (tmp_path / "profile").iterdir()
    found = ranges(trace)
    assert trace.name == "steps_2_3_rank_0.json" and set(found) >= PHASES | {
        "pipeline exchange",
        "parameter exchange",
    }
    assert (
        found["step"] == found["optimizer"] == 2 and found["forward"] == found["backward"] == 2 * 2
    )


@pytest.mark.slow
def test_a_trace_ends_with_the_run_and_one_that_cannot_be_written_ends_nothing(
    tmp_path: Path,
) -> None:
    base, name = [*TINY, "--profile", "3:100"], "steps_3_4_rank_0.json"
    assert run_ranks(train_on_rank, 2, [*base, "--save", str(tmp_path / "a")]) == [0, 0]
    assert [path.name for path in (tmp_path / "a" / "profile").iterdir()] == [name]
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "profile").symlink_to(folder / "nothing")
    assert run_ranks(train_on_rank, 2, [*base, "--save", str(folder)]) == [0, 0]
    told = [row["text"] for row in rows(folder, "note")]
    assert len(told) == 1 and told[0].startswith("the trace could not be written: rank 0: ")


def test_no_profiler_exists_outside_of_its_steps(tmp_path: Path) -> None:
    timers = Timers()
    trace = Trace(tmp_path, range(5, 7), 0, True, timers)
    for step in (1, 4, 7):
        trace.before(step)
        assert not trace.running and timers.annotate is None and trace._profiler is None
    assert timers.phase("forward") is unmeasured("forward") and timers.take() == {}
    other = Trace(tmp_path, range(5, 7), 1, False, timers)
    other.before(5)
    assert other.running and other._profiler is None and other.is_over(6)
    assert other.finish(6) == "" and list(tmp_path.iterdir()) == []


def _slow(rank: int, world: int, flags: Sequence[str], slow: int) -> int:
    """Train; one rank takes three tenths of a second longer in every move of a row."""
    from megacp.engine.step.step import ParallelModel

    real = ParallelModel._moved

    def moved(self: ParallelModel, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.3 * (rank == slow))
        return real(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelModel, "_moved", moved)
        return train_on_rank(rank, world, flags)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_the_slowest_rank_is_named_with_its_phase(tmp_path: Path, slow: int) -> None:
    flags = [*TINY, "--save", str(tmp_path), "--profile", "3:4"]
    assert run_ranks(_slow, 2, flags, slow) == [0, 0]
    found = rows(tmp_path, "timing")
    assert [row["step"] for row in found] == [3, 4]
    for row in found:
        assert (
            row["slowest_rank"] == slow
            and row["shard_max"] > 0.2 > row["shard_mean"] - row["shard_max"] / 2
        )
        assert row["gradient_exchange_max"] > 0


def test_a_line_says_mean_longest_and_who() -> None:
    found = Breakdown(
        {"data": [0.001, 0.003], "forward": [0.1, 0.2], "gradient exchange": [0.1, 0.0]}
    )
    assert found.line(7) == (
        "step 7: mean / longest ms: data 2 / 3 (rank 1); forward 150 / 200 (rank 1); "
        "gradient exchange 50 / 100 (rank 0); slowest in computing: rank 1, 1.34 times the mean"
    )
    assert found.figures()["forward_max"] == 0.2 and found.figures()["slowest_rank"] == 1


def test_time_left_follows_the_median_step_also_of_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"time": 100.0}
    monkeypatch.setattr("megacp.engine.timers.time.monotonic", lambda: now["time"])
    pace, left = Pace(), []
    for seconds, steps in ((60.0, 999), (2.0, 998), (2.0, 997), (30.0, 996), (2.0, 995)):
        now["time"] += seconds
        left.append(pace.left(steps))
    assert left[0] == 60.0 * 999 and left[2] == 2.0 * 997 and left[-1] == 2.0 * 995


@pytest.mark.slow
def test_step_lines_have_epoch_seconds_and_time_left_after_a_resume_too(
    tmp_path: Path, packed_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megacp.train import main
    from megacp.training.data.reader import PackedDataset

    base = [text for text in TINY if text not in ("--vocab-size", "61")]
    base += ["--data-path", str(packed_dataset), "--save", str(tmp_path), "--lr-decay-iters", "6"]
    packs = len(PackedDataset(packed_dataset))
    assert main([*base, "--train-iters", "2"]) == 0
    assert main([*base, "--train-iters", "6", "--load", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 6 and max(map(len, lines)) <= 150
    for number, (line, row) in enumerate(zip(lines, rows(tmp_path, "train"), strict=True), 1):
        assert row["epoch"] == 4 * number / packs and f"  epoch {4 * number / packs:.2f}  " in line
        assert f"  {row['seconds']:.3g} s  " in line and "  left 0:" in line
        assert row["seconds_left"] <= (6 - number) * 60
    assert rows(tmp_path, "train")[-1]["seconds_left"] == 0
