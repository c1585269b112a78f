"""One decision per step: spikes against a running median, steps without an update, bad images."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacp.distributed.grid import single_axis
from megacp.engine.step.decision import Decision
from megacp.engine.step.step import ParallelModel
from megacp.storage.files import sha256_of
from megacp.train import main
from megacp.training.checkpoint.commit import PendingCheckpoint, load_checkpoint
from megacp.training.checkpoint.directory import committed
from megacp.training.loop.denominator import agree_on_step
from megacp.training.loop.health import Health, StepNumbers
from megacp.training.start.status import FAILED
from megacp.verify.parity import ParitySetup, microbatches, prepare
from tests.faults.sick_run import train_sick
from tests.prepare.media.pictures import TINY as TINY_RULES
from tests.prepare.packs.builds import run as build
from tests.ranks import RankError, grid, preload, run_ranks
from tests.training.data.datasets import damage
from tests.training.faulty_rank import FAULTS
from tests.training.runs import TINY, losses, run, train_on_rank
from tests.training.test_vision_dataset import config_for, flags_of, image_part

WORLD = single_axis("world")
TWELVE = [*TINY, "--train-iters", "12", "--lr-decay-iters", "12"]


def notes(folder: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["text"]) for row in rows if row["kind"] == "note"]


def fed(health: Health, count: int, loss: float = 2.0, norm: float = 1.0) -> Health:
    for step in range(1, count + 1):
        assert health.check(StepNumbers(step, loss, norm)) == Decision()
    return health


def test_a_jump_over_the_median_is_told() -> None:
    health = fed(Health(), 8)
    found = ("the loss 3407 is 1.7e+03 times the median 2 of 8 updates",)
    assert health.check(StepNumbers(9, 3407.0, 1.0)) == Decision(findings=found)
    found = ("the gradient norm 11 is 11 times the median 1 of 9 updates",)
    assert health.check(StepNumbers(10, 2.0, 11.0)) == Decision(findings=found)
    assert health.check(StepNumbers(11, 5.9, 9.9)) == Decision()
    told = [
        bool(health.check(StepNumbers(12 + i, loss, 1.0)).findings)
        for i, loss in enumerate([9000, 11e3, 100])
    ]
    assert told == [False, True, False], "the next one is told where it is far above the last"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_no_update_from_the_first_step_on_and_no_level(
    wrong: float,
) -> None:
    for numbers in (StepNumbers(1, wrong, 1.0), StepNumbers(1, 2.0, wrong)):
        health = Health()
        decision = health.check(numbers)
        assert (decision.update, decision.finite, decision.end) == (False, False, "")
        assert health.state()["losses"] == health.state()["grad_norms"] == []


def test_skipped_steps_end_a_run_only_in_a_row() -> None:
    nan, good = StepNumbers(5, math.nan, 1.0), StepNumbers(6, 2.0, 1.0)
    health = Health()
    ends = [bool(health.check(step).end) for step in (nan, nan, good, *[nan] * 10)]
    assert ends == [False] * 12 + [True]


def test_a_step_without_a_weighted_token_is_no_update() -> None:
    decision = Health().check(StepNumbers(1, 0.0, 0.0, weight=0.0))
    assert not decision.update and decision.findings == ("no token of the step has a loss weight",)


def test_a_level_is_learned_from_eight_updates_and_forgets() -> None:
    health = fed(Health(), 7)
    assert health.check(StepNumbers(8, 100.0, 1.0)) == Decision()
    assert health.check(StepNumbers(9, 100.0, 1.0)).findings
    health = fed(Health(), 64)
    warned = [
        bool(health.check(StepNumbers(65 + i, 20.0 if i else 999.0, 1.0)).findings)
        for i in range(64)
    ]
    assert warned == [True] + [False] * 63, "a level is told once"
    assert health.check(StepNumbers(129, 70.0, 1.0)).findings, "the median has moved"


def test_a_state_survives_json_and_decides_alike() -> None:
    one = Health()
    numbers = [
        StepNumbers(i, 2 + math.sin(i) / 3, 1 + math.cos(7 * i) / 2, 1.0, 3, i % 2)
        for i in range(1, 30)
    ]
    numbers[20] = StepNumbers(21, math.nan, 1.0)
    for place, step in enumerate(numbers):
        other = Health(json.loads(json.dumps(one.state())))
        assert other.state() == one.state()
        assert one.check(step) == other.check(step), place
        assert one.state() == other.state()


def test_bad_images_are_a_share_of_documents_with_images_however_few_a_step_has() -> None:
    health = Health()
    assert health.check(StepNumbers(1, 2.0, 1.0, 1.0, image_documents=1, left_out=1)) == Decision()
    for step in range(2, 18):
        assert (
            health.check(StepNumbers(step, 2.0, 1.0, 1.0, image_documents=1, left_out=0))
            == Decision()
        )
    ends = [health.check(StepNumbers(step, 2.0, 1.0, 1.0, 2, 2)).end for step in range(18, 26)]
    assert not any(ends[:7])
    assert ends[7].startswith("16 of the last 17 documents")


@pytest.mark.slow
def test_a_spike_of_one_rank_is_told_with_the_packs_of_the_step(tmp_path: Path) -> None:
    flags = [*TWELVE, "--save", str(tmp_path), "--clip-grad", "0"]
    assert run_ranks(train_sick, 2, flags, "spike", 0, [10]) == [0, 0]
    step, text = notes(tmp_path)[0]
    assert (
        step == 10 and text.startswith("the loss ") and " of 9 updates; the gradient norm " in text
    )
    assert "all ranks skipped the update" not in text and "the step had packs " in text


def _refused(rank: int, world: int, setup: ParitySetup) -> bool:
    """Return whether a refused step leaves weights, moments and the next step unchanged."""
    mine = grid(**({"tp": 2, "pp": 2} if world == 4 else {"dp": world}))
    model, twin = ParallelModel(setup.config, mine), ParallelModel(setup.config, mine)
    same = True
    for step in range(1, 4):
        batches = microbatches(setup.config, setup.rules, step, model.rows, None)
        denominator = agree_on_step(batches, mine, replica=model.rows.data_rank.index).denominator
        if step == 2:
            refused = model.train(
                batches, step, denominator, 0, lambda loss, norm: Decision(False, findings=("no",))
            )
            same &= (
                not refused.decision.update
                and refused.grad_norm > 0
                and model.optimizer.updates == 1
            )
            continue
        for each in (model, twin):
            each.train(batches, step, denominator, 0)
    state = [model.optimizer.state_slices(), twin.optimizer.state_slices()]
    pairs = [(model.parameters.parameters_held(), twin.parameters.parameters_held())]
    pairs += [(state[0][kind], state[1][kind]) for kind in state[0]]
    return same and all(
        torch.equal(a.values, b.values) for one, two in pairs for a, b in zip(one, two, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_refused_update_changes_nothing(world: int) -> None:
    from megacp.engine.config.run import RunConfig, with_values

    values = {"global_batch_size": 4, "dtype": "float64"}
    if world == 4:
        values |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = with_values(RunConfig(), values)
    setup = prepare(config, frozenset(values), model="tiny_llm", world_size=world)
    assert all(run_ranks(_refused, world, setup))


def broken_images(folder: Path, text: bool, count: int = 12) -> Path:
    """Build a dataset with images that cannot be decoded, with or without text documents."""
    records: list[dict[str, Any]] = []
    for i in range(count):
        records.append(
            {
                "content": [{"type": "text", "text": "look "}, image_part(16, 12, i)],
                "branches": ["it"],
            }
        )
        records += [{"text": f"nothing but text {i}"}] if text else []
    source = folder / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    build([source], folder / "packed", image_rules=TINY_RULES, seq_length=512, cp_degrees=(1, 2))
    for path in (folder / "packed").glob("shard_*/images.bin"):
        stored = path.read_bytes()
        for place in range(len(stored)):
            if stored[place : place + 4] == b"IDAT":
                damage(path, place + 6, b"\xff" * 8)
    return folder / "packed"


def _train(data: Path, folder: Path, **values: Any) -> int:
    limits = {"on_bad_image": "skip", "train_iters": 4, "save": str(folder), **values}
    return main(flags_of(config_for(data, **limits), folder))


@pytest.mark.slow
def test_a_run_all_of_whose_images_are_broken_ends(tmp_path: Path) -> None:
    for name, text in (("mixed", True), ("images", False)):
        (tmp_path / name).mkdir()
        data = broken_images(tmp_path / name, text)
        assert _train(data, tmp_path / name / "out") == FAILED
        step, told = notes(tmp_path / name / "out")[-1]
        assert (
            step == 2
            and "documents with images were dropped because an image could not be decoded" in told
        )
        assert committed(tmp_path / name / "out") == []


@pytest.mark.slow
def test_a_step_that_learns_from_no_token_is_named_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = broken_images(tmp_path, text=False)
    monkeypatch.setattr("megacp.training.loop.health.MOST_LEFT_OUT", 1.0)
    assert _train(data, tmp_path / "out") == FAILED
    told = notes(tmp_path / "out")
    named = [
        step
        for step, text in told
        if text.startswith(
            "no token of the step has a loss weight, after documents with bad images"
        )
    ]
    assert named == [1, 2, 3, 4] and "none of the 4 steps made an update" in told[-1][1]
    assert all(math.isnan(float(loss)) for loss in losses(tmp_path / "out").values())


def _on_ranks(rank: int, world: int, flags: Sequence[str]) -> int:
    return train_sick(rank, world, flags, "spike", -1, [])


@pytest.mark.slow
def test_bad_images_end_all_ranks_alike(tmp_path: Path) -> None:
    data = broken_images(tmp_path, text=True)
    config = config_for(data, on_bad_image="skip", train_iters=4, context_parallel_size=2)
    flags = flags_of(config, tmp_path / "out")
    assert run_ranks(_on_ranks, 4, flags) == [FAILED] * 4
    assert " of the last " in notes(tmp_path / "out")[-1][1]


ROOT = Path(__file__).resolve().parents[2]
SIX = [*TINY, "--train-iters", "6", "--save-interval", "2"]


def payload(folder: Path) -> dict[str, str]:
    """Return the hashes of weights, optimizer state and their index."""
    return {path.name: sha256_of(path)[1] for path in folder.iterdir() if path.name[0] in "._"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train six steps on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(2, [*SIX, "--save", str(folder)])
    return folder


def _finish_saves_before(step: int) -> None:
    """Wait for background saves of earlier steps, so that the result does not depend on the disk."""
    real = PendingCheckpoint.writing.fget  # type: ignore[attr-defined]

    def writing(self: PendingCheckpoint) -> bool:
        if self.step < step and self._background:
            self._outcome.exception()
        return real(self)

    PendingCheckpoint.writing = property(writing)  # type: ignore[method-assign, assignment]


def _faulty(
    rank: int, world_size: int, flags: Sequence[str], fault: str, where: int, step: int
) -> int:
    _finish_saves_before(step)
    if rank == where:
        FAULTS[fault](step)
    return train_on_rank(rank, world_size, flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saving",
    [
        pytest.param([], id="at once"),
        pytest.param(["--async-save"], id="in the background", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("fault", "where", "left"),
    [
        ("kill in step", 1, ["2"]),
        ("kill in writing", 1, ["2"]),
        ("kill before rename", 0, ["2"]),
        ("kill before latest", 0, ["2", "4"]),
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    tmp_path: Path, undisturbed: Path, fault: str, where: int, left: list[str], saving: list[str]
) -> None:
    flags = [*SIX, "--save", str(tmp_path), "--auto-resume", *saving]
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(_faulty, 2, flags, fault, where, 4)
    assert sorted(path.name[-1] for path in committed(tmp_path)) == left
    assert load_checkpoint(tmp_path, WORLD).step == 2
    run(2, flags)
    assert losses(tmp_path) == losses(undisturbed)
    assert payload(tmp_path / "step_0000006") == payload(undisturbed / "step_0000006")
    assert not any(".tmp-" in path.name for path in tmp_path.iterdir())


def torchrun(
    *arguments: str, restarts: int = 0, timeout: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run `faulty_rank` on two ranks of a real torchrun."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command = [
        *launcher,
        "--max-restarts",
        str(restarts),
        "-m",
        "tests.training.faulty_rank",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, pytest.param(1, marks=pytest.mark.faults)])
def test_a_run_that_torchrun_restarts_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, undisturbed: Path, where: int
) -> None:
    flags = [*SIX, "--save", str(tmp_path), "--auto-resume"]
    done = torchrun("kill in step", str(where), "4", *flags, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "this run starts from step 0, from scratch" in done.stdout
    assert f"resumed from {tmp_path / 'step_0000002'} after step 2" in done.stdout
    assert losses(tmp_path) == losses(undisturbed)
    assert payload(tmp_path / "step_0000006") == payload(undisturbed / "step_0000006")


BUSY = """
import threading, torch
from megacp import train

def busy() -> None:
    while True:
        torch.ones(8) + 1

def stop() -> None:
    for _ in range(4):
        threading.Thread(target=busy, daemon=True).start()

train.launch.stop = stop
train.program()
"""


@pytest.mark.slow
def test_threads_of_libraries_that_still_run_do_not_turn_a_good_end_into_an_abort(
    tmp_path: Path,
) -> None:
    """Threads like gloo's: one that returns from C++ while the interpreter ends calls
    std::terminate.
    """
    command = [sys.executable, "-c", BUSY, *TINY, "--train-iters", "2", "--save", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200.0)
    assert done.returncode == 0, done.stderr
    assert "finished after step 2" in done.stdout


def _rank(environment: dict[str, str], arguments: Sequence[str], words: Path) -> None:
    """Run `faulty_rank` as the program of this process, with stderr in a file."""
    os.environ.update(environment)
    os.dup2(os.open(words, os.O_CREAT | os.O_WRONLY), 2)
    sys.argv = ["faulty_rank", *arguments]
    runpy.run_module("tests.training.faulty_rank", run_name="__main__")


@contextlib.contextmanager
def without_torchrun(folder: Path, *arguments: str) -> Iterator[list[Any]]:
    """Start the processes of two ranks, forked with their modules imported.

    `folder/words RANK` has the output of a rank. The store is in this process, like torchrun's in
    its agent. torchrun would wait 30 s for a stopped rank before killing it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    shared |= {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    preload()
    context, processes = multiprocessing.get_context("forkserver"), []
    for rank in ("0", "1"):
        given = ({**shared, "RANK": rank, "LOCAL_RANK": rank}, arguments, folder / f"words {rank}")
        processes.append(context.Process(target=_rank, args=given))
        processes[-1].start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_stopped_rank_ends_the_others_after_the_timeout_and_is_named(
    tmp_path: Path, where: int
) -> None:
    flags = [*SIX, "--save", str(tmp_path / "out"), "--distributed-timeout-minutes", "0.1"]
    with without_torchrun(tmp_path, "stop in step", str(where), "3", *flags) as processes:
        processes[1 - where].join(60)
        assert processes[where].is_alive() and processes[1 - where].exitcode == 1
    message = (tmp_path / f"words {1 - where}").read_text()
    assert f"rank {1 - where} failed in step 3: RuntimeError" in message
    assert f"no message from rank {where} in step 3: stopped, dead, or still computing" in message
    assert load_checkpoint(tmp_path / "out", WORLD).step == 2


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_with_its_reason(tmp_path: Path) -> None:
    with without_torchrun(
        tmp_path, "raise in step", "1", "3", *SIX, "--save", str(tmp_path / "out")
    ) as processes:
        for rank, process in enumerate(processes):
            process.join(60)
            assert process.exitcode == 1
            said = (tmp_path / f"words {rank}").read_text()
            assert (
                "rank 1 failed in step 3: ValueError: something of this rank alone is wrong" in said
            )
    assert load_checkpoint(tmp_path / "out", WORLD).step == 2


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.faults), 1])
def test_a_run_that_stops_by_the_clock_is_not_restarted(tmp_path: Path, restarts: int) -> None:
    flags = [
        *TINY,
        "--train-iters",
        "100000",
        "--exit-duration",
        "0.01",
        "--save",
        str(tmp_path),
        "--auto-resume",
    ]
    done = torchrun("none", "0", "0", *flags, restarts=restarts)
    assert done.stdout.count("stopped after --exit-duration after step") == 1
    assert (done.returncode == 0) == (restarts == 1)
    assert restarts == 1 or "exitcode  : 3" in done.stderr


@pytest.mark.slow
def test_a_rank_that_is_lost_at_the_start_is_named_and_no_refusal(
    tmp_path: Path, undisturbed: Path
) -> None:
    """The status is 1, which means that a restart may help; status 2 means that it does not help."""
    flags = [*SIX, "--load", str(undisturbed / "step_0000002"), "--save", str(tmp_path / "out")]
    with without_torchrun(tmp_path, "kill in reading", "1", "0", *flags) as processes:
        processes[0].join(60)
        assert processes[0].exitcode == 1
    said = (tmp_path / "words 0").read_text()
    assert "rank 0 failed in the start: " in said and "\nrank 1 of this machine ended" in said
