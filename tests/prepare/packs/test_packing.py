"""Compare packing with slow reference implementations, and test the oversize rules."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.prepare.packs.packing import Packing, best_fit_decreasing, cut_oversize, two_budgets
from megacp.prepare.packs.workers import WorkerFailed, run_tasks
from tests.prepare.packs.builds import files, run, write_records
from tests.reference import packing as reference
from tests.tools.in_process import preprocessed as tool

LENGTHS = st.integers(1, 300).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=60))
)


def check_each_once(result: Packing, count: int) -> None:
    assert sorted(result.items.tolist()) == list(range(count))
    assert (
        result.starts[0] == 0 and result.starts[-1] == count and (np.diff(result.starts) > 0).all()
    )
    for p in range(len(result)):
        assert (np.diff(result.pack(p)) > 0).all()


def sums(result: Packing, amounts: Sequence[int] | np.ndarray) -> list[int]:
    """Return the sum of a per-item amount in each pack."""
    return [int(np.asarray(amounts)[result.pack(p)].sum()) for p in range(len(result))]


@settings(max_examples=300, deadline=None)
@given(LENGTHS)
def test_best_fit_in_bulk_fills_packs_exactly_as_one_item_at_a_time(
    case: tuple[int, list[int]],
) -> None:
    # a bulk step must not skip a better fit that it created
    capacity, lengths = case
    result = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    check_each_once(result, len(lengths))
    mine = sorted(sums(result, lengths))
    twin = sorted(
        sum(lengths[i] for i in pack) for pack in reference.best_fit_decreasing(lengths, capacity)
    )
    assert mine == twin
    assert all(total <= capacity for total in mine)


def test_packs_of_equal_free_space_are_filled_in_their_order() -> None:
    for lengths, packs in (([6, 6, 3, 3], [[0, 2], [1, 3]]), ([6, 6, 6, 3], [[0], [1], [2, 3]])):
        result = best_fit_decreasing(np.array(lengths), 10)
        assert [result.pack(p).tolist() for p in range(len(result))] == packs


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=40),
    st.integers(1, 45),
)
def test_two_budgets_keeps_the_fewest_packs_of_the_three_orders(
    items: list[tuple[int, int]], window: int
) -> None:
    # the packer must respect both budgets and the windows, and keep the best order
    tokens, crops = [t for t, _ in items], [c for _, c in items]
    result = two_budgets(np.array(tokens, np.int64), np.array(crops, np.int64), 40, 9, window)
    check_each_once(result, len(items))
    expected = []
    for begin in range(0, len(items), window):
        here = list(range(begin, min(begin + window, len(items))))
        orders = [
            here,
            sorted(here, key=lambda i: -max(tokens[i] / 40, crops[i] / 9)),
            sorted(here, key=lambda i: -tokens[i]),
        ]
        tried = [reference.first_fit(tokens, crops, 40, 9, order) for order in orders]
        expected += [sorted(pack) for pack in min(tried, key=len)]
    assert [result.pack(p).tolist() for p in range(len(result))] == expected


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), max_size=30), st.integers(1, 64))
def test_split_pieces_join_to_the_documents_and_fit(lengths: list[int], longest: int) -> None:
    pieces = cut_oversize(np.array(lengths, np.int64), longest, truncate=False)
    sizes = pieces[:, 2] - pieces[:, 1]
    assert ((0 < sizes) & (sizes <= longest)).all()
    covered: list[tuple[int, int]] = []
    for document, start, stop in pieces.tolist():
        covered += [(document, token) for token in range(start, stop)]
    assert covered == [
        (document, token) for document, length in enumerate(lengths) for token in range(length)
    ]


def test_each_oversize_rule_does_what_its_name_says() -> None:
    lengths = np.array([3, 11, 8, 20])
    truncated = cut_oversize(lengths, 8, truncate=True)
    assert truncated[:, 2].tolist() == [3, 8, 8, 8] and not truncated[:, 1].any()
    for longest, sizes in ((8, [3, 8, 3, 8, 8, 8, 4]), (20, [3, 11, 8, 20])):
        assert (
            np.diff(cut_oversize(lengths, longest, truncate=False)[:, 1:])[:, 0].tolist() == sizes
        )


def mixed_documents(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, crops) of a mixture of documents.

    Half are images of 2 to 9 crops with branches, 40 % are videos of 8 to 128 frames, and the
    remainder is text.
    """
    kind, crops, frames = rng.random(count), rng.integers(2, 10, count), rng.integers(8, 129, count)
    tokens = 100 + crops * 110 + rng.integers(1, 9, count) * 60
    text = np.clip(rng.lognormal(6, 1, count), 10, 8192).astype(np.int64)
    video, plain = kind >= 0.5, kind >= 0.9
    tokens = np.where(plain, text, np.where(video, frames * 88 + 100, tokens))
    return tokens, np.where(plain, 0, np.where(video, frames, crops))


@pytest.mark.parametrize("capacity", [(16_384, 128), (36_864, 256), (36_864, 384), (16_384, 160)])
@pytest.mark.parametrize("count", [1_000, 4_000])
def test_two_budgets_need_at_most_5_percent_more_packs_than_the_lower_bound(
    capacity: tuple[int, int], count: int
) -> None:
    for seed in range(2):
        tokens, crops = mixed_documents(np.random.default_rng(seed), count)
        fits = (tokens <= capacity[0]) & (crops <= capacity[1])
        tokens, crops = tokens[fits], crops[fits]
        result = two_budgets(tokens, crops, *capacity)
        check_each_once(result, len(tokens))
        assert max(sums(result, tokens)) <= capacity[0] and max(sums(result, crops)) <= capacity[1]
        # a lower bound: the number of packs that each budget needs
        bound = max(-(-int(tokens.sum()) // capacity[0]), -(-int(crops.sum()) // capacity[1]))
        assert len(result) <= 1.05 * bound, (len(result), bound)


ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"


def on_full_disk(largest_file: int, *args: Any) -> subprocess.CompletedProcess[str]:
    """Run the tool with a limit of `largest_file` bytes per file, which acts like a full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    command = [sys.executable, str(TOOL), *map(os.fspath, map(str, args))]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=limit,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def build_args(path: Path, output: Path, *more: Any) -> list[Any]:
    return [
        "build",
        "--input",
        path,
        "--output",
        output,
        "--tokenizer",
        "byte",
        "--seq-length",
        512,
        *more,
    ]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("largest", [100, 1500, 9000])
def test_a_disk_that_is_full_at_any_write_is_one_message_with_path_and_bytes(
    tmp_path: Path, workers: int, largest: int
) -> None:
    """Let writes of the journal, tables and tokens fail; some sizes used to print a traceback."""
    corpus = tmp_path / "a.jsonl"
    write_records(corpus, 300)
    full = on_full_disk(
        largest, *build_args(corpus, tmp_path / "d", "--unit-bytes", 12000, "--workers", workers)
    )
    assert full.returncode == 2 and full.stderr.count("\n") == 1, full.stderr
    assert full.stderr.startswith(f"error: --output {tmp_path}/d: File too large"), full.stderr
    assert (
        "bytes are free on this disk" in full.stderr and "run the same command again" in full.stderr
    )
    if workers == 1:  # otherwise a worker may be killed while it writes
        assert not list(tmp_path.glob("d/.shard_*"))
    again = build_args(corpus, tmp_path / "d", "--unit-bytes", 12000, "--workers", 1)
    assert tool(*again).returncode == 0
    whole = build_args(corpus, tmp_path / "whole", "--unit-bytes", 12000, "--workers", 1)
    assert tool(*whole).returncode == 0 and files(tmp_path / "d") == files(tmp_path / "whole")


def test_each_kind_of_wrong_input_is_named_as_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    inputs = [tmp_path / name for name in ("folder", "pipe", "none.jsonl")]
    with pytest.raises(ValueError) as error:
        run(inputs, tmp_path / "d")
    for part in (
        "folder is a directory without a supported file",
        "pipe is a named pipe",
        "no such file: ",
    ):
        assert f"--input: {tmp_path}/{part}" in str(error.value) or part in str(error.value)
    assert "no such file: " + str(tmp_path / "none.jsonl") in str(error.value)
    assert str(error.value).count("no such file") == 1


def _start(settings: str) -> Any:
    def handle(task: int) -> int:
        if task == 2 and settings == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == 2 and settings == "exits":
            os._exit(0)
        if task == 2 and settings == "raises":
            raise KeyError("surprise")
        return task * task

    return handle


def _start_asking(settings: str) -> Any:
    return lambda task: settings in sys.modules


def test_workers_do_not_import_torch() -> None:
    assert list(run_tasks(_start_asking, "torch", [1, 2], 2)) == [False, False]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", "a worker was killed or ended .*while working on 2"),
        ("exits", "a worker was killed or ended .*while working on 2"),
        ("raises", "(?s)failed while working on 2.*KeyError: 'surprise'"),
    ],
)
def test_a_worker_that_dies_ends_the_job_with_its_place(how: str, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        list(run_tasks(_start, how, list(range(6)), 2))
