"""Runs on a blend and on an S3 server: logs, resuming, and early errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from megacp.distributed.grid import single_axis
from megacp.engine.config.run import RunConfig, with_values
from megacp.huggingface.generation.sampler import Generator
from megacp.prepare import command as preprocess
from megacp.storage.url import Url
from megacp.train import main
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.checkpoint.directory import committed
from megacp.training.data.blend import PackBlend
from megacp.training.data.reader import PackedDataset
from megacp.training.loop.sources import open_sources
from tests.ranks import run_ranks
from tests.storage.s3_server import S3Server, s3_server, use
from tests.training.data.datasets import random_packs, write_dataset
from tests.training.runs import TINY, grid_flags, losses, run, train_on_rank

SIZES = {"captions": 9, "pointing": 4, "text": 30}
FLAGS = [*TINY, "--vocab-size", "100", "--seq-length", "32"]


def blend_flags(
    folder: Path, flag: str = "--data-path", weights: tuple[str, ...] = ("0.6", "0.3", "0.1")
) -> list[str]:
    """Return the flags of a blend of three datasets, which are built if missing."""
    for number, (name, count) in enumerate(SIZES.items()):
        if not (folder / name).exists():
            write_dataset(folder / name, [random_packs(np.random.default_rng(number), count)])
    return [
        flag,
        *(
            text
            for pair in zip(weights, map(str, map(folder.joinpath, SIZES)), strict=True)
            for text in pair
        ),
    ]


def lines(folder: Path, kind: str) -> list[dict]:
    """Return the lines of one kind in a run's log."""
    return [
        row
        for row in map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        if row["kind"] == kind
    ]


def test_a_run_tells_the_shares_and_epochs_of_its_datasets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(1, [*FLAGS, *blend_flags(tmp_path), "--save", str(out), "--train-iters", "5"])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("blend: ")]
    assert told[:3] == [
        "blend: captions provides 60.0000% of the samples; 9 packs, numbers 0 to 8",
        "blend: pointing provides 30.0000% of the samples; 4 packs, numbers 9 to 12",
        "blend: text provides 10.0000% of the samples; 30 packs, numbers 13 to 42",
    ]
    # pointing's 4 packs are exhausted after 12 samples, the 9 packs of captions after 16
    assert told[3:] == [
        "blend: after 12 samples captions 58.33%, epoch 0.78, pointing 33.33%, epoch 1.00, text 8.33%, epoch 0.03",
        "blend: after 16 samples captions 56.25%, epoch 1.00, pointing 31.25%, epoch 1.25, text 12.50%, epoch 0.07",
        "blend: after 20 samples captions 60.00%, epoch 1.33, pointing 30.00%, epoch 1.50, text 10.00%, epoch 0.07",
    ]
    rows = lines(out, "blend")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["captions/share"] == 0.6 and rows[-1]["text/epoch"] == 2 / 30


@pytest.mark.slow
def test_a_resumed_blend_repeats_the_uninterrupted_one_and_dp_changes_nothing(
    tmp_path: Path,
) -> None:
    flags = [
        *FLAGS,
        *blend_flags(tmp_path),
        *blend_flags(tmp_path, "--valid-data-path", ("1", "0", "1")),
    ]
    flags += ["--eval-interval", "2", "--eval-iters", "3", "--lr-decay-iters", "5"]
    run(1, [*flags, "--save", str(tmp_path / "whole"), "--train-iters", "5"])
    halved = [*flags, "--save", str(tmp_path / "halved")]
    run(1, [*halved, "--train-iters", "3"])
    run(2, [*halved, *grid_flags(), "--train-iters", "5", "--load", str(tmp_path / "halved")])
    assert losses(tmp_path / "halved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)
    for kind in ("blend", "valid"):
        whole, moved = lines(tmp_path / "whole", kind), lines(tmp_path / "halved", kind)
        assert moved[-1].pop("kind") == whole[-1].pop("kind") == kind
        assert moved[-1] == pytest.approx(whole[-1], rel=1e-10)


@pytest.mark.slow
def test_other_weights_than_the_checkpoints_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(1, [*FLAGS, *blend_flags(tmp_path), "--save", str(tmp_path / "out"), "--train-iters", "2"])
    load = ["--load", str(tmp_path / "out")]
    assert main([*FLAGS, *blend_flags(tmp_path, weights=("0.5", "0.4", "0.1")), *load]) == 2
    assert (
        "was trained on different datasets or weights than --data-path 0.5 "
        in capsys.readouterr().err
    )


def test_what_is_wrong_with_the_datasets_of_a_blend_is_told_before_the_run(tmp_path: Path) -> None:
    words = tuple(blend_flags(tmp_path)[1:])
    base = {"vocab_size": 0, "seq_length": 32, "data_path": words}
    config, sources = open_sources(with_values(RunConfig(), base))
    assert isinstance(sources.train, PackBlend) and config.model.vocab_size == 100
    assert [flag for flag, _ in sources.datasets] == ["--data-path"] * 3
    one = with_values(RunConfig(), {**base, "data_path": (*words[:2], "0", words[3])})
    assert not isinstance(open_sources(one)[1].train, PackBlend)
    with pytest.raises(ValueError) as error:
        open_sources(with_values(RunConfig(), {**base, "seq_length": 16}))
    assert [
        line.split(" was ")[0].split("/")[-1] for line in str(error.value).splitlines()
    ] == list(SIZES)
    (tmp_path / "captions/manifest.json").unlink()
    shutil.rmtree(tmp_path / "pointing")
    write_dataset(
        tmp_path / "pointing", [random_packs(np.random.default_rng(1), 4)], pad_multiple=4
    )
    with pytest.raises(ValueError, match="--data-path .*captions: .*manifest.json: no such file"):
        open_sources(with_values(RunConfig(), base))
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(
        ValueError, match=r"--data-path .*preprocess_data.py build --input .*chats\.jsonl"
    ):
        open_sources(with_values(RunConfig(), {**base, "data_path": str(tmp_path / "chats.jsonl")}))
    with pytest.raises(
        ValueError,
        match=r"--data-path: .*text was built with another --pad-multiple than .* \(1, not",
    ):
        open_sources(with_values(RunConfig(), {**base, "data_path": words[2:]}))


def test_a_dry_run_reads_all_datasets_of_a_blend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLAGS, *blend_flags(tmp_path), "--dry-run", "--world-size", "2"]) == 0
    assert main([*FLAGS, *blend_flags(tmp_path), "--dry-run", "--seq-length", "16"]) == 2
    assert capsys.readouterr().err.count("was packed for rows of 32 tokens") == 3


WORLD = single_axis("world")
STORE_FLAGS = [*TINY, "--vocab-size", "257", "--lr-decay-iters", "6", "--train-iters", "6"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def data(server: S3Server, packed_dataset: Path) -> tuple[Path, Url]:
    """Build a dataset by two workers from an object of an unreliable store: in a folder, and copied
    into objects.
    """
    root = packed_dataset.parent
    (server.bucket / "raw" / "text.jsonl").write((root / "text.jsonl").read_bytes())
    flags = (
        "--tokenizer byte --seq-length 64 --oversize split --workers 2 --unit-bytes 1500".split()
    )
    build = ["build", "--input", f"{server.bucket}/raw/*.jsonl", *flags]
    here, there = root / "here", server.bucket / "packs"
    server.faults.share = 0.05
    assert preprocess.main([*build, "--output", str(here)]) == 0
    server.faults.share = 0.0
    for path in here.rglob("*"):
        if path.is_file():
            (there / path.relative_to(here).as_posix()).write(path.read_bytes())
    return here, there


@pytest.fixture
def run_flags(data: tuple[Path, Url], tmp_path: Path) -> list[str]:
    """Train on the objects; each pack is in several blocks."""
    return [*STORE_FLAGS, "--data-path", str(data[1]), "--log-file", str(tmp_path / "log.jsonl")]


def _on_rank(rank: int, world_size: int, environment: dict[str, str], flags: Sequence[str]) -> int:
    use(environment)
    return train_on_rank(rank, world_size, flags)


def train(server: S3Server, world_size: int, flags: Sequence[str]) -> None:
    assert run_ranks(_on_rank, world_size, server.environment, flags) == [0] * world_size


@pytest.mark.slow
def test_a_build_into_a_failing_store_has_the_files_of_a_disk(data: tuple[Path, Url]) -> None:
    here, there = data
    sizes = {name: size for name, size in there.sizes_below().items() if name.startswith("shard_")}
    assert len({name.split("/")[0] for name in sizes}) > 2
    assert {name: (here / name).read_bytes() for name in sizes} == {
        name: (there / name).content(1 << 20) for name in sizes
    }
    assert PackedDataset(here).manifest.num_packs == PackedDataset(there).manifest.num_packs


@pytest.mark.slow
def test_a_run_on_a_failing_store_is_that_on_a_disk_on_any_grid(
    server: S3Server, data: tuple[Path, Url], run_flags: list[str], tmp_path: Path
) -> None:
    """Save on 2 tp ranks in the background, resume on 2 dp ranks, then generate: the same losses."""
    disk = tmp_path / "disk"
    assert (
        main(
            [*STORE_FLAGS, "--data-path", str(data[0]), "--save", str(disk), "--save-interval", "3"]
        )
        == 0
    )
    save = server.bucket / "run"
    server.faults.share = 0.1
    server.faults.faults.clear()
    try:
        saved = [*run_flags, "--save", str(save), "--save-interval", "3", "--keep-last", "1"]
        train(server, 2, [*saved, *grid_flags(tp=2), "--train-iters", "3", "--async-save"])
        assert load_checkpoint(save, WORLD).step == 3
        train(server, 2, [*saved, "--auto-resume"])
    finally:
        server.faults.share = 0.0
    assert (
        server.faults.faults["busy"]
        and server.faults.faults["cut"]
        and server.faults.faults["gone"]
    )
    assert losses(tmp_path) == pytest.approx(losses(disk), rel=1e-9)
    assert [folder.name for folder in committed(save)] == ["step_0000006"]
    there, here = (dict(load_checkpoint(place, WORLD).whole_tensors()) for place in (save, disk))
    assert (
        all(there[name].allclose(here[name], rtol=1e-9, atol=1e-12) for name in here)
        and there.keys() == here.keys()
    )
    assert Generator(str(save)).step == 6
