"""Background saves, stops by the clock, automatic restarts, fine-tuning, one run per directory."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.distributed.grid import single_axis
from megacp.engine.data_parallel.boxes import TensorBox
from megacp.engine.models.language import OutputHead
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.step.step import ParallelModel, StepResult
from megacp.storage.files import sha256_of
from megacp.train import main
from megacp.training.checkpoint import commit
from megacp.training.checkpoint.commit import SaveError, load_checkpoint
from megacp.training.loop.saving import DONE, SAVE_FAILED, WRITING
from megacp.training.loop.stopping import StopSignal
from megacp.training.monitor.log import RunLog
from megacp.training.start.status import STOPPED
from tests.ranks import run_ranks
from tests.training.checkpoint.saves import save_checkpoint
from tests.training.runs import TINY, grid_flags, losses, run, train_on_rank

WORLD = single_axis("world")


def payload(folder: Path) -> dict[str, str]:
    """Return the hashes of the checkpoint, except for the config, which has flags of saving."""
    paths = [path for path in folder.iterdir() if path.name not in ("config.yaml", "manifest.json")]
    return {path.name: sha256_of(path)[1] for path in paths}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "sizes"), [(1, {}), (2, {"tp": 2})], ids=["one process", "tp2"]
)
def test_checkpoints_in_the_background_are_bytewise_those_at_once(
    tmp_path: Path, world_size: int, sizes: dict[str, int]
) -> None:
    flags = [*TINY, *grid_flags(**sizes), "--save-interval", "1", "--keep-last", "3"]
    run(world_size, [*flags, "--save", str(tmp_path / "at_once")])
    run(world_size, [*flags, "--save", str(tmp_path / "background"), "--async-save"])
    assert steps(tmp_path / "background") == ["step_0000002", "step_0000003", "step_0000004"]
    assert losses(tmp_path / "background") == losses(tmp_path / "at_once")
    for name in steps(tmp_path / "at_once"):
        assert payload(tmp_path / "background" / name) == payload(tmp_path / "at_once" / name)


def _with_writer(rank: int, world_size: int, flags: Sequence[str], broken: int, slow: bool) -> str:
    """Train with a slow writer, so that two of the 12 steps end meanwhile. The writer of rank
    `broken` fails. Return the error.
    """
    real, folder_of_run = commit.write_boxes, Path(flags[flags.index("--save") + 1])

    def write(folder: Path, *rest: Any) -> Any:
        deadline, awaited = (
            time.monotonic() + 20.0,
            min(12, len(losses(folder_of_run)) + 2) if slow else 0,
        )
        while slow and len(losses(folder_of_run)) < awaited and time.monotonic() < deadline:
            time.sleep(0.01)
        if rank == broken:
            raise OSError(28, "No space left on device")
        return real(folder, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "write_boxes", write)
        try:
            train_on_rank(rank, world_size, flags)
            return "finished"
        except SaveError as error:
            return str(error)


@pytest.mark.slow
def test_training_goes_on_during_a_slow_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        *TINY,
        "--train-iters",
        "12",
        "--save",
        str(tmp_path),
        "--save-interval",
        "4",
        "--async-save",
    ]
    assert _with_writer(0, 1, flags, -1, True) == "finished"
    lines = capsys.readouterr().out.splitlines()
    begun = lines.index("saving step 4 in the background")
    ended = next(i for i, line in enumerate(lines) if line.startswith("saved after step 4:"))
    assert sum(line.startswith("step ") for line in lines[begun:ended]) >= 2
    assert (
        lines.index("saving step 8 in the background") > ended
    )  # a second save waits for the first
    assert steps(tmp_path) == ["step_0000004", "step_0000008", "step_0000012"]


@pytest.mark.slow
def test_a_failed_write_ends_the_run_on_all_ranks_at_the_next_step(tmp_path: Path) -> None:
    flags = [
        *TINY,
        "--train-iters",
        "40",
        "--save",
        str(tmp_path),
        "--save-interval",
        "5",
        "--async-save",
    ]
    first, second = run_ranks(_with_writer, 2, flags, 1, False)
    assert first == second
    assert "checkpoint of step 5" in first and "rank 1: No space left on device" in first
    assert max(losses(tmp_path)) in (5, 6) and steps(tmp_path) == []


def test_what_ranks_tell_of_their_files_is_ordered() -> None:
    assert DONE < WRITING < SAVE_FAILED


def _clock_of_one_rank(rank: int, world_size: int, flags: Sequence[str]) -> int:
    """Train; only the time of rank 1 is over, at its third look at the clock."""
    looks = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            StopSignal, "reason", property(lambda self: 2 if next(looks) > 2 and rank == 1 else 0)
        )
        return train_on_rank(rank, world_size, flags)


@pytest.mark.slow
def test_exit_duration_stops_all_ranks_at_one_step_and_saves(tmp_path: Path) -> None:
    flags = [*TINY, "--train-iters", "100000", "--exit-duration", "60", "--save", str(tmp_path)]
    assert run_ranks(_clock_of_one_rank, 2, flags) == [STOPPED] * 2
    last = max(losses(tmp_path))
    assert steps(tmp_path) == [f"step_{last:07d}"]


@pytest.mark.slow
def test_auto_resume_starts_loudly_from_scratch_only_where_nothing_ever_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, "--save", str(tmp_path / "out"), "--auto-resume", "--save-interval", "2"]
    run(1, [*flags, "--lr-decay-iters", "4", "--train-iters", "2"])
    assert "this run starts from step 0, from scratch" in capsys.readouterr().out
    run(1, flags)
    assert "step_0000002 after step 2" in capsys.readouterr().out
    assert sorted(losses(tmp_path / "out")) == [1, 2, 3, 4]
    for step in steps(tmp_path / "out"):
        next((tmp_path / "out" / step).glob("*.safetensors")).write_bytes(b"")
    assert main(flags) == 2
    message = capsys.readouterr().err
    assert (
        "no checkpoint is complete" in message
        and "step_0000002" in message
        and "step_0000004" in message
    )
    for step in steps(tmp_path / "out"):
        (tmp_path / "out" / step / "manifest.json").unlink()
    assert main(flags) == 2  # also when no manifest is left
    (tmp_path / "empty").mkdir()
    assert main([*TINY, "--load", str(tmp_path / "empty")]) == 2
    assert "no committed checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_auto_resume_of_a_finetuning_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(1, [*TINY, "--save", str(tmp_path / "base"), "--train-iters", "2"])
    tune = [
        *TINY,
        "--load",
        str(tmp_path / "base"),
        "--finetune",
        "--save",
        str(tmp_path / "tuned"),
        "--auto-resume",
    ]
    run(1, [*tune, "--train-iters", "2", "--lr-decay-iters", "4"])
    assert "starts from --load" in capsys.readouterr().out
    run(1, tune)
    assert f"resumed from {tmp_path / 'tuned' / 'step_0000002'}" in capsys.readouterr().out
    run(
        1,
        [*TINY, "--load", str(tmp_path / "base"), "--finetune", "--save", str(tmp_path / "whole")],
    )
    assert losses(tmp_path / "tuned") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_finetuning_takes_weights_alone_and_any_seed_and_dataset(
    tmp_path: Path, packed_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [text for text in TINY if text not in ("--vocab-size", "61")] + ["--vocab-size", "257"]
    run(1, [*base, "--save", str(tmp_path / "base")])
    loaded = load_checkpoint(tmp_path / "base", WORLD)
    weights = dict(loaded.whole_tensors())
    boxes = [TensorBox(f"model.{n}", tuple(t.shape), (0,) * t.dim(), t) for n, t in weights.items()]
    save_checkpoint(
        tmp_path / "bare", 0, boxes, extra={}, config_yaml=loaded.config_yaml, world=WORLD
    )
    other = ["--data-path", str(packed_dataset), "--seed", "7"]
    for name in ("base", "bare"):
        tune = [
            *base,
            *other,
            "--load",
            str(tmp_path / name),
            "--finetune",
            "--save",
            str(tmp_path / f"of_{name}"),
        ]
        run(1, tune)
        assert "this run starts at step 0 with a new optimizer" in capsys.readouterr().out
    assert losses(tmp_path / "of_base") == losses(tmp_path / "of_bare")
    assert sorted(losses(tmp_path / "of_base")) == [1, 2, 3, 4]
    assert main([*base, "--load", str(tmp_path / "bare")]) == 2
    assert "add --finetune to start from the weights" in capsys.readouterr().err
    assert (
        main(
            [*base, *other, "--load", str(tmp_path / "base"), "--finetune", "--rotary-base", "500"]
        )
        == 2
    )
    assert "--rotary-base" in capsys.readouterr().err


def test_finetuning_a_run_with_pairs_takes_its_pairs(tmp_path: Path) -> None:
    step = [*TINY, "--train-iters", "1", "--lr-warmup-iters", "0", "--lr-decay-iters", "9"]
    run(1, [*step, "--lora-rank", "3", "--save", str(tmp_path / "a")])
    run(
        1,
        [
            *step,
            "--load",
            str(tmp_path / "a"),
            "--finetune",
            "--lr",
            "0",
            "--save",
            str(tmp_path / "b"),
        ],
    )
    before, after = (dict(load_checkpoint(tmp_path / name, WORLD).whole_tensors()) for name in "ab")
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    assert all(tensor.any() for name, tensor in before.items() if "lora_B" in name), (
        "the first run moved them"
    )


@pytest.mark.slow
def test_finetuning_in_bfloat16_makes_its_masters_of_the_weights(tmp_path: Path) -> None:
    """Also under another sharding strategy."""
    base = [text if text != "float64" else "bfloat16" for text in TINY]
    run(1, [*base, "--save", str(tmp_path / "base")])
    flags = [
        *base,
        "--load",
        str(tmp_path / "base"),
        "--finetune",
        "--lr",
        "0",
        "--train-iters",
        "2",
    ]
    run(
        2,
        [
            *flags,
            "--save",
            str(tmp_path / "still"),
            "--data-parallel-sharding-strategy",
            "optim_grads_params",
        ],
    )
    before = dict(load_checkpoint(tmp_path / "base", WORLD).whole_tensors())
    after = load_checkpoint(tmp_path / "still", WORLD)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.whole_tensors())
    masters = dict(after.whole_tensors("optimizer.master"))
    assert set(masters) == set(before)
    assert all(torch.equal(masters[name].bfloat16(), tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_a_run_in_a_directory_in_use_is_refused_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, "--train-iters", "100000", "--save", str(tmp_path)]
    first = subprocess.Popen(
        [sys.executable, "-m", "megacp.train", *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while (
            not (tmp_path / "log.jsonl").exists()
            or (tmp_path / "log.jsonl").read_text().count("\n") < 2
        ):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        (tmp_path / "step_0000009.tmp-0123abcd").mkdir()  # as if the first were saving
        assert main(flags) == 2
        refusal = capsys.readouterr().err
        assert (
            f"--save {tmp_path} is in use by host" in refusal and f"process {first.pid}" in refusal
        )
        assert (tmp_path / "step_0000009.tmp-0123abcd").exists()
        first.send_signal(signal.SIGUSR1)
        output, _ = first.communicate(timeout=60)
    finally:
        first.kill()
        first.communicate()
    done = sorted(losses(tmp_path))
    assert done == list(range(1, len(done) + 1))
    assert first.returncode == STOPPED and "stopped on request" in output
    third = [
        *TINY,
        "--auto-resume",
        "--exit-duration",
        "0.0001",
        "--train-iters",
        "100000",
        "--save",
        str(tmp_path),
    ]
    assert main(third) == STOPPED
    said = capsys.readouterr().out
    assert "removed" in said and "step_0000009.tmp-0123abcd, left by a crash" in said


def _skipping(rank: int, world_size: int, flags: Sequence[str], where: str) -> list[str]:
    """Train; in step 2 the loss, or only a gradient, of rank 1's first row is not finite. Return the
    messages about it.
    """
    real_loss, real_train = OutputHead.forward, ParallelModel.train
    now = {"step": 0, "microbatch": 0}
    said: list[str] = []

    def loss(*arguments: Any) -> torch.Tensor:
        value = real_loss(*arguments)
        now["microbatch"] += 1
        if (rank, now["step"], now["microbatch"]) != (1, 2, 1):
            return value
        if where == "loss":
            return value * float("nan")
        value.register_hook(lambda gradient: gradient * float("inf"))
        return value

    def train(
        self: ParallelModel, batches: Sequence[PackedBatch], step: int, *rest: Any
    ) -> StepResult:
        now.update(step=step, microbatch=0)
        if rank == 1 and step == 2:
            folder = self.config.checkpoint.save or ""
            Path(folder, "ids.json").write_text(json.dumps([batch.pack_ids for batch in batches]))
        return real_train(self, batches, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputHead, "forward", loss)
        patch.setattr(ParallelModel, "train", train)
        patch.setattr(RunLog, "say", lambda self, text: said.append(text))
        train_on_rank(rank, world_size, flags)
    return [line for line in said if "skipped" in line]


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_by_all_and_its_packs_are_named(
    tmp_path: Path, where: str
) -> None:
    flags = [*TINY, "--save", str(tmp_path), "--train-iters", "3"]
    first, second = run_ranks(_skipping, 2, flags, where)
    assert first == second
    (line,) = first
    assert line.startswith("step 2: ") and "all ranks skipped the update" in line
    ids = json.loads((tmp_path / "ids.json").read_text())
    assert len(ids) == 2
    if where == "loss":
        assert f"the loss of pack {ids[0][0]} was not finite, on rank 1" in line
    else:
        assert "all losses were finite, but a gradient was not; the step had packs " in line
        named = {int(text) for text in line.split("packs ")[1].split(", ")}
        assert len(named) == 4 and named >= {number for of_batch in ids for number in of_batch}
    _, note, logged, _ = [
        json.loads(row) for row in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert note == {"kind": "note", "step": 2, "text": line.removeprefix("step 2: ")}
    assert logged["loss"] == "nan" if where == "loss" else isinstance(logged["loss"], float)
    assert load_checkpoint(tmp_path, WORLD).extra["updates"] == 2
