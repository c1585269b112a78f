"""The training loop end to end: resuming is bitwise equal, any grid resumes any other grid, and bad
input ends the run before anything is written.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacp.plan import command
from megacp.prepare import command as preprocess
from megacp.train import main
from megacp.training.loop.stopping import StopSignal
from tests.training.runs import TINY, grid_flags, losses, run


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(1, {}), (2, {"cp": 2}), pytest.param(4, {"tp": 2, "pp": 2}, marks=pytest.mark.slow)],
    ids=["one process", "cp2", "tp2 pp2"],
)
@pytest.mark.slow
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, world_size: int, sizes: dict[str, int]
) -> None:
    flags = [*TINY, *grid_flags(**sizes)]
    run(world_size, [*flags, "--save", str(tmp_path / "whole")])
    halved = [*flags, "--save", str(tmp_path / "halved")]
    run(world_size, [*halved, "--lr-decay-iters", "4", "--train-iters", "2"])
    assert sorted(losses(tmp_path / "halved")) == [1, 2]
    run(world_size, [*halved, "--load", str(tmp_path / "halved")])
    assert losses(tmp_path / "halved") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_any_grid_resumes_the_checkpoint_of_another_with_the_same_losses(tmp_path: Path) -> None:
    run(1, [*TINY, "--save", str(tmp_path / "whole")])
    first = [
        *TINY,
        "--save",
        str(tmp_path / "moved"),
        "--lr-decay-iters",
        "4",
        "--train-iters",
        "2",
    ]
    run(4, [*first, *grid_flags(pp=2), "--num-virtual-stages-per-pipeline-rank", "2"])
    run(
        4,
        [
            *TINY,
            *grid_flags(tp=2, cp=2),
            "--save",
            str(tmp_path / "moved"),
            "--load",
            str(tmp_path / "moved"),
        ],
    )
    best = str(tmp_path / "best.yaml")
    for ranks, more in ((4, ["--lr-decay-iters", "4", "--train-iters", "2"]), (2, [])):
        flags = [*TINY, "--save", str(tmp_path / "planned"), "--auto-resume", *more]
        plan = ["--gpu", "here", "--world-size", str(ranks), "--output", best, "--overwrite"]
        assert command.main([*plan, *flags]) == 0
        run(ranks, [*flags, "--config", best])
    for name in ("moved", "planned"):  # float64; only the order of sums differs
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)


@pytest.mark.slow
def test_validation_leaves_training_as_it_was_and_does_not_depend_on_the_grid(
    tmp_path: Path, packed_dataset: Path
) -> None:
    data = ["--data-path", str(packed_dataset), "--valid-data-path", str(packed_dataset)]
    base = [text for text in TINY if text not in ("--vocab-size", "61")] + data
    run(1, [*base, "--save", str(tmp_path / "plain")])
    validated = ["--eval-interval", "2", "--eval-iters", "2"]
    run(1, [*base, *validated, "--save", str(tmp_path / "one")])
    run(2, [*base, *validated, "--save", str(tmp_path / "two")])
    assert losses(tmp_path / "one") == losses(tmp_path / "plain")
    values = []
    for name in ("one", "two"):
        rows = [
            json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
        ]
        values.append([row["loss"] for row in rows if row["kind"] == "valid"])
    assert len(values[0]) == 2
    assert values[1] == pytest.approx(values[0], rel=1e-10)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load", "nowhere"], "--load nowhere"),
        (["--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size"),
        (["--seq-lenght", "64"], "did you mean --seq-length"),
        (["--data-path", "nowhere"], "--data-path nowhere"),
        (["--global-batch-size", "3", "--micro-batch-size", "2"], "--global-batch-size 3"),
    ],
)
def test_bad_input_ends_with_one_message_and_status_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*TINY, "--save", str(tmp_path / "out"), *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_dataset_of_another_vocabulary_or_row_length_is_refused_with_both_numbers(
    packed_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--dry-run"]):
        assert main([*TINY, "--data-path", str(packed_dataset), "--seq-length", "128", *more]) == 2
        message = capsys.readouterr().err
        assert "257" in message and "--vocab-size 61" in message
        assert "rows of 64 tokens" in message and "--seq-length is 128" in message


@pytest.mark.slow
def test_another_seed_or_dataset_than_the_checkpoints_is_refused(
    tmp_path: Path, packed_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "--vocab-size", "257"]
    run(1, [*words, "--save", str(tmp_path), "--train-iters", "2"])
    load = ["--load", str(tmp_path)]
    assert main([*words, *load, "--seed", "7"]) == 2
    assert "--seed 1234" in capsys.readouterr().err
    assert main([*words, *load, "--data-path", str(packed_dataset)]) == 2
    assert "a different dataset" in capsys.readouterr().err


@pytest.mark.slow
def test_a_truncated_checkpoint_names_its_file_and_the_one_before_it_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run(1, [*TINY, "--save", str(tmp_path), "--save-interval", "2"])
    newest = tmp_path / "step_0000004"
    payload = next(newest.glob("*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-100])
    run(1, [*TINY, "--load", str(tmp_path), "--save", str(tmp_path / "again")])
    assert payload.name in caplog.text
    assert "after step 2" in capsys.readouterr().out
    assert main([*TINY, "--load", str(newest)]) == 2
    assert payload.name in capsys.readouterr().err


@pytest.mark.slow
def test_another_model_of_the_same_shapes_is_refused_and_other_changes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(1, [*TINY, "--save", str(tmp_path), "--lr-decay-iters", "4", "--train-iters", "2"])
    load = [*TINY, "--load", str(tmp_path), "--log-file", str(tmp_path / "other.jsonl")]
    assert (
        main(
            [*load, "--num-attention-heads", "8", "--num-query-groups", "4", "--rotary-base", "500"]
        )
        == 2
    )
    message = capsys.readouterr().err
    assert (
        " --num-attention-heads 4, but this run has 8" in message
        and " --rotary-base 10000.0, but this run has 500.0" in message
    )
    run(1, [*load, "--weight-decay", "0.2", "--lr-decay-iters", "4"])
    said = capsys.readouterr().out
    assert (
        "changed since the checkpoint: --weight-decay 0.2 (was 0.1)" in said
        and "--train-iters" not in said
    )


@pytest.mark.slow
def test_another_length_is_told_where_the_learning_rate_decays_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(1, [*TINY, "--save", str(tmp_path), "--train-iters", "2"])
    load = [
        "--load",
        str(tmp_path),
        "--train-iters",
        "3",
        "--log-file",
        str(tmp_path / "resumed.jsonl"),
    ]
    run(1, [*TINY, *load])
    assert "changed since the checkpoint: --train-iters 3 (was 2)" in capsys.readouterr().out
    run(1, [*TINY, *load, "--lr-decay-style", "constant"])
    assert "--train-iters" not in capsys.readouterr().out


@pytest.mark.slow
def test_another_dtype_is_one_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(1, [*TINY, "--save", str(tmp_path), "--train-iters", "2"])
    for more in ([], ["--finetune"]):
        assert main([*TINY, "--load", str(tmp_path), "--dtype", "float32", *more]) == 2
        error = capsys.readouterr().err
        assert (
            "step_0000002 has --dtype float64, but this run has float32" in error
            and error.count("float64") == 1
        )


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_writes_no_second_copy(tmp_path: Path) -> None:
    run(1, [*TINY, "--save", str(tmp_path)])
    run(1, [*TINY, "--save", str(tmp_path), "--load", str(tmp_path)])
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_0000004"]


@pytest.mark.slow
def test_validation_counts_only_tokens_with_a_weight(tmp_path: Path, packed_dataset: Path) -> None:
    records = [
        {"text": "seven times eight is fifty-six, of course it is", "weight": weight}
        for weight in (1.0, 0.0)
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, count in (("both", 2), ("one", 1)):
        lines = (tmp_path / "text.jsonl").read_text().splitlines(keepends=True)[:count]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        build = [
            "build",
            "--input",
            str(tmp_path / f"{name}.jsonl"),
            "--output",
            str(tmp_path / name),
        ]
        flags = ["--tokenizer", "byte", "--seq-length", "64", "--workers", "1"]
        assert preprocess.main([*build, *flags]) == 0
    found = []
    for name in ("both", "one"):
        data = [
            "--data-path",
            str(packed_dataset),
            "--valid-data-path",
            str(tmp_path / name),
            "--eval-interval",
            "4",
        ]
        flags = [text for text in TINY if text not in ("--vocab-size", "61")] + data
        run(1, [*flags, "--global-batch-size", "1", "--save", str(tmp_path / f"out_{name}")])
        rows = [
            json.loads(line)
            for line in (tmp_path / f"out_{name}" / "log.jsonl").read_text().splitlines()
        ]
        found += [row["loss"] for row in rows if row["kind"] == "valid"]
    assert len(found) == 2 and found[0] == pytest.approx(found[1], rel=1e-12)


def test_ctrl_c_stops_in_order_and_a_later_second_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGINT)
    of_starter = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        stop = StopSignal()
        assert not stop.received
        signal.raise_signal(number)
        assert stop.received
        stop.release()
    stop = StopSignal()
    try:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        later = time.monotonic() + 3.0
        monkeypatch.setattr("megacp.training.loop.stopping.time.monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        stop.release()
        signal.signal(signal.SIGHUP, of_starter)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_ranks_of_nproc_stop_on_sigterm_save_and_the_run_goes_on_on_another_grid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, "--save", str(tmp_path), "--lr-decay-iters", "100000"]
    endless = [*flags, *grid_flags(tp=2), "--train-iters", "100000", "--exit-duration", "5"]
    command = [sys.executable, "-m", "megacp.train", "--nproc", "2", *endless]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "log.jsonl").exists() or len(losses(tmp_path)) < 3:
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        output, _ = first.communicate(timeout=60)
    finally:
        first.kill()
        first.communicate()
    assert first.returncode == 3 and output.splitlines()[-1].startswith(
        "stopped on request after step"
    )
    done = max(losses(tmp_path))
    assert main([*flags, "--load", str(tmp_path), "--train-iters", str(done + 2)]) == 0
    assert f"after step {done}" in capsys.readouterr().out
    assert sorted(losses(tmp_path)) == list(range(1, done + 3))


@pytest.mark.slow
def test_a_log_file_of_dev_null_is_none_and_stays_a_device(tmp_path: Path) -> None:
    run(1, [*TINY, "--log-file", os.devnull, "--save", str(tmp_path)])
    assert Path(os.devnull).is_char_device() and not (tmp_path / "log.jsonl").exists()


def test_what_this_machine_alone_cannot_read_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--load", str(tmp_path / ("a" * 300))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error") and "File name too long" in error and "Traceback" not in error


@pytest.mark.slow
def test_a_closed_standard_output_ends_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megacp.train", *TINY, "--save", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]
