"""Ranks that were not started alike, miss each other or do not see one directory: one message on each, no step."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.faults.processes import Ended, ends, environment, free_port, launch, run_all
from tests.training.runs import TINY

HOST = socket.gethostname()
QUICK = [*TINY, "--distributed-timeout-minutes", "1"]
IMPATIENT = [*TINY, "--distributed-timeout-minutes", "0.25"]


def refused(ended: Ended) -> str:
    """The one message of a rank that was refused."""
    assert ended.status == 2, ended
    assert "Traceback" not in ended.err and "step 1/" not in ended.out
    _, *messages = re.split(r"^error(?: on rank \d+)?: ", ended.err, flags=re.MULTILINE)
    assert len(messages) == 1, ended.err
    return messages[0].strip()


@pytest.mark.slow
def test_a_rank_with_another_learning_rate_is_refused_on_every_rank_with_both_values() -> None:
    messages = {refused(ended) for ended in run_all([QUICK, [*QUICK, "--lr", "0.02"]])}
    assert messages == {
        "the 2 ranks of this run were not started alike; give all of them the same flags and software:\n"
        f"  - --lr: 0.02 on rank 1 (host {HOST}); 0.01 on rank 0 (host {HOST})"
    }


SILENT = [
    *(
        "--seed",
        "5",
        "--hidden-dropout",
        "0.2",
        "--weight-decay",
        "0.2",
        "--clip-grad",
        "0.5",
        "--rotary-base",
        "20000",
    ),
    *("--attention-mask", "causal", "--global-batch-size", "8", "--save", "elsewhere", "--dtype", "float32"),
    *("--eval-iters", "2", "--save-interval", "3", "--distributed-timeout-minutes", "5", "--lr-warmup-iters", "1"),
]
"""Flags that ranks could have differed in without an end that says so."""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("other", "odd"),
    [
        (SILENT, 0),
        (SILENT, 1),
        (["--num-attention-heads", "8"], 1),
        (["--num-layers", "2", "--train-iters", "6"], 0),
        (["--tensor-model-parallel-size", "2"], 1),
        (["--pipeline-model-parallel-size", "2"], 0),
        (["--context-parallel-size", "2"], 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_any_other_flag_on_one_rank_is_refused(tmp_path: Path, other: list[str], odd: int) -> None:
    flags = [QUICK, QUICK]
    flags[odd] = [*QUICK, *other]
    first, second = (refused(ended) for ended in run_all(flags, [tmp_path, tmp_path]))
    assert first == second
    assert all(f"  - {flag}: " in first for flag in other if flag.startswith("--"))
    assert f"on rank {odd} (host {HOST})" in first


@pytest.mark.faults
@pytest.mark.parametrize("wrong", [["--data-path", "/nowhere"], ["--lr", "much"], ["--lerning-rate", "1"]])
def test_what_only_one_rank_cannot_do_ends_all_of_them_with_its_reason(wrong: list[str]) -> None:
    first, second = (refused(ended) for ended in run_all([QUICK, [*QUICK, *wrong]]))
    assert first == second
    assert f"rank 1 (host {HOST}): " in first and wrong[0].strip("-") in first


@pytest.mark.faults
def test_what_no_rank_can_do_is_told_without_ranks() -> None:
    messages = {refused(ended) for ended in run_all([[*QUICK, "--data-path", "/nowhere"]] * 2)}
    assert messages == {"this configuration cannot run:\n  - --data-path /nowhere: holds no manifest.json"}


@pytest.mark.faults
def test_a_save_directory_that_is_not_shared_is_refused_before_the_first_step(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    (message,) = {refused(ended) for ended in run_all([[*QUICK, "--save", "out"]] * 2, folders)}
    assert message.startswith(f"rank 1: --save out is not one directory for all machines: the lock of host {HOST}")


def by_hand(ranks: list[int], size: int, **changed: str | None) -> list[Ended]:
    port = free_port()
    return ends([launch(IMPATIENT, environment(rank, size, port, **changed)) for rank in ranks])


@pytest.mark.faults
def test_a_rank_that_never_comes_is_named_by_all_others() -> None:
    flags = [*IMPATIENT, "--global-batch-size", "6"]
    port = free_port()
    for ended in ends([launch(flags, environment(rank, 3, port)) for rank in (0, 1)]):
        message = refused(ended)
        assert "waited 15 s for the 3 ranks of this run to start: no word from rank 2; start every rank" in message


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "one"}, "RANK=one"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE=(not set)"),
        ({"RANK": None}, "RANK=(not set)"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR=,"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    ],
    ids=str,
)
@pytest.mark.faults
def test_garbage_in_the_launchers_variables_is_one_message(changed: dict[str, str | None], told: str) -> None:
    (ended,) = by_hand([1], 2, **changed)
    assert told in refused(ended)


@pytest.mark.faults
def test_a_port_that_is_taken_is_one_message() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        flags = [*QUICK, "--distributed-timeout-minutes", "0.1"]
        (ended,) = ends([launch(flags, environment(0, 2, port))])
    assert f"MASTER_PORT={port}" in refused(ended)


@pytest.mark.faults
def test_local_ranks_behind_the_first_are_silent() -> None:
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    for rank, flags in enumerate((QUICK, [*QUICK, "--lr", "0.02"])):
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        processes.append(launch(flags, environment(rank, 2, port, **local)))
    first, second = ends(processes)
    assert "--lr" in refused(first)
    assert (second.status, second.err) == (2, "")
