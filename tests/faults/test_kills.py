"""Kills and flipped bits at random moments and places: intact data remains, and resuming gives the
same result.

`make test-faults FAULTS='--fault-seed 7 --fault-repeat 20'` uses other moments; each test's name has
its seed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megacp.distributed.grid import single_axis
from megacp.prepare.verify import verify
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.data.reader import PackedDataset
from tests.ranks import RankError, run_ranks
from tests.tools import test_preprocess_images
from tests.tools.in_process import preprocessed as tool
from tests.tools.test_preprocess_data import command, environment, files
from tests.tools.test_preprocess_images import arguments
from tests.training.data.datasets import IMAGE_RULES, weighted_images, write_dataset
from tests.training.runs import TINY, losses, run, train_on_rank
from tests.training.test_health import payload

corpus = test_preprocess_images.corpus
STEPS = 40
LONG = [*TINY, "--train-iters", str(STEPS), "--save-interval", "1", "--keep-last", "4"]
WORLD = single_axis("world")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Return a run of two ranks that saves after every step, and its seconds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    begin = time.monotonic()
    run(2, [*LONG, "--save", str(folder)])
    return folder, time.monotonic() - begin


def killed_later(
    rank: int, world_size: int, flags: Sequence[str], where: int, seconds: float
) -> int:
    """Train, and kill rank `where` (2: both) some seconds after the start, at any place."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    if where in (rank, 2):
        timer.start()
    try:
        return train_on_rank(rank, world_size, flags)
    finally:
        timer.cancel()  # the process continues with other tests


@pytest.mark.faults
def test_a_run_killed_at_any_moment_loses_steps_and_nothing_else(
    moments: random.Random, tmp_path: Path, undisturbed: tuple[Path, float]
) -> None:
    folder, seconds = undisturbed
    flags = [
        *LONG,
        "--save",
        str(tmp_path),
        "--auto-resume",
        *moments.choice([[], ["--async-save"]]),
    ]
    kills = 0
    for where in (0, 1, 2):
        try:
            run_ranks(killed_later, 2, flags, where, moments.uniform(0.02, 0.3) * seconds)
        except RankError as error:
            assert "exit code -9" in str(error), error
            kills += 1
    run(2, flags)
    print(
        f"{kills} kills; checkpoints left: {sorted(path.name for path in tmp_path.glob('step_*'))}"
    )
    assert losses(tmp_path) == losses(folder)
    last = f"step_{STEPS:07d}"
    assert payload(tmp_path / last) == payload(folder / last)
    assert not any(".tmp-" in path.name for path in tmp_path.iterdir())


@pytest.mark.faults
def test_a_build_killed_at_any_moment_goes_on_to_the_same_bytes(
    moments: random.Random, corpus: Path, tmp_path: Path
) -> None:
    size = [*test_preprocess_images.TINY, "--max-crops-per-pack", 30, "--unit-bytes", 1500]
    begin = time.monotonic()
    assert tool(*arguments(corpus, tmp_path / "whole", *size)).returncode == 0
    whole = time.monotonic() - begin
    build = arguments(corpus, tmp_path / "d", *size, "--workers", moments.choice([1, 2, 3]))
    kills = 0
    for _ in range(3):
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command(*build), stdout=quiet, stderr=quiet, env=environment())
        time.sleep(moments.uniform(0.2, 0.8) * whole)
        kills += process.poll() is None
        process.kill()
        process.wait(timeout=60)
    deadline = time.monotonic() + 60
    # workers of killed processes are still ending
    while (last := tool(*build)).returncode != 0 and time.monotonic() < deadline:
        assert "another build is writing" in last.stderr, last.stderr
        time.sleep(0.2)
    print(f"{kills} kills")
    assert files(tmp_path / "d") == files(tmp_path / "whole")


def flip(path: Path, moments: random.Random) -> None:
    content = bytearray(path.read_bytes())
    place = moments.randrange(len(content))
    content[place] ^= 1 << moments.randrange(8)
    path.write_bytes(content)


@pytest.mark.faults
def test_a_bit_flipped_anywhere_in_a_checkpoint_is_found_and_the_one_before_taken(
    moments: random.Random, tmp_path: Path, undisturbed: tuple[Path, float]
) -> None:
    steps = (STEPS - 1, STEPS)
    for step in steps:
        shutil.copytree(undisturbed[0] / f"step_{step:07d}", tmp_path / f"step_{step:07d}")
    newest = tmp_path / f"step_{STEPS:07d}"
    for path in sorted(newest.iterdir()):
        sound = path.read_bytes()
        flip(path, moments)
        loaded = load_checkpoint(tmp_path, WORLD)
        assert loaded.step == steps[0] and path.name in loaded.passed_over[0]
        path.write_bytes(sound)
    assert load_checkpoint(tmp_path, WORLD).step == STEPS


@pytest.mark.faults
def test_a_bit_flipped_anywhere_in_a_dataset_is_never_read_in_silence(
    moments: random.Random, tmp_path: Path
) -> None:
    numbers = np.random.default_rng(moments.randrange(1 << 30))
    write_dataset(
        tmp_path / "d",
        [weighted_images(numbers, 4), weighted_images(numbers, 3)],
        image_rules=IMAGE_RULES,
    )
    sound = everything(tmp_path / "d")
    for path in sorted(
        path for path in (tmp_path / "d").rglob("*") if path.is_file() and path.stat().st_size
    ):
        content = path.read_bytes()
        flip(path, moments)
        assert verify(tmp_path / "d") != [], path
        try:
            read = everything(tmp_path / "d")
        except ValueError as error:
            assert str(path.name) in str(error) or "manifest" in str(error), error
        else:
            assert read == sound, path
        path.write_bytes(content)
    assert verify(tmp_path / "d") == []


def everything(directory: Path) -> list[bytes]:
    """Return tokens, weights, segments and image bytes of all packs."""
    dataset = PackedDataset(directory)
    found = []
    for pack in (dataset.pack(i) for i in range(len(dataset))):
        weights = b"" if pack.weights is None else pack.weights.tobytes()
        found += [pack.tokens.tobytes(), weights, pack.segments.tobytes()]
        if pack.images is not None:
            found += [pack.images.read(int(number)) for number in pack.images.units["item"]]
    return found
