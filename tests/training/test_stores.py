"""Whole runs on an S3 server: built, trained, saved and resumed while requests fail and connections are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.checkpoint.directory import MANIFEST_FILE, committed
from megacp.core.data.reader import PackedDataset
from megacp.core.distributed.grid import single_axis
from megacp.core.storage.url import Url
from megacp.huggingface.generation.sampler import Generator
from megacp.prepare import command as preprocess
from megacp.train import main
from tests.ranks import run_ranks
from tests.storage.s3_server import S3Server, s3_server, use
from tests.training.runs import TINY, grid_flags, losses, train_on_rank

WORLD = single_axis("world")
STORE_FLAGS = [*TINY, "--vocab-size", "257", "--lr-decay-iters", "6", "--train-iters", "6"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def data(server: S3Server, packed_dataset: Path) -> tuple[Path, Url]:
    """One dataset built twice by two workers from one object: into a folder, and into objects of a failing store."""
    root = packed_dataset.parent
    (server.bucket / "raw" / "text.jsonl").write((root / "text.jsonl").read_bytes())
    flags = [
        "--tokenizer",
        "byte",
        "--seq-length",
        "64",
        "--oversize",
        "split",
        "--workers",
        "2",
        "--unit-bytes",
        "1500",
    ]
    build = ["build", "--input", f"{server.bucket}/raw/*.jsonl", *flags]
    here, there = root / "here", server.bucket / "packs"
    server.faults.share = 0.05
    assert preprocess.main([*build, "--output", str(here)]) == 0
    assert preprocess.main([*build, "--output", str(there), "--work-dir", str(root / "work")]) == 0
    server.faults.share = 0.0
    return here, there


@pytest.fixture
def run_flags(data: tuple[Path, Url], tmp_path: Path) -> list[str]:
    """A run on the objects, each pack of which is in several blocks."""
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
    """Saved by 2 tp ranks, in the background; gone on with by 2 dp ranks, then sampled from: the same losses."""
    disk = tmp_path / "disk"
    assert main([*STORE_FLAGS, "--data-path", str(data[0]), "--save", str(disk), "--save-interval", "3"]) == 0
    save = server.bucket / "run"
    server.faults.share = 0.05
    server.faults.faults.clear()
    try:
        saved = [*run_flags, "--save", str(save), "--save-interval", "3", "--keep-last", "1"]
        train(server, 2, [*saved, *grid_flags(tp=2), "--train-iters", "3", "--async-save"])
        assert load_checkpoint(save, WORLD).step == 3
        train(server, 2, [*saved, "--auto-resume"])
    finally:
        server.faults.share = 0.0
    assert server.faults.faults["busy"] and server.faults.faults["cut"] and server.faults.faults["gone"]
    assert losses(tmp_path) == pytest.approx(losses(disk), rel=1e-9)
    assert [folder.name for folder in committed(save)] == ["step_0000006"]
    there, here = (dict(load_checkpoint(place, WORLD).whole_tensors()) for place in (save, disk))
    assert all(there[name].allclose(here[name], rtol=1e-9, atol=1e-12) for name in here) and there.keys() == here.keys()
    assert Generator(str(save)).step == 6


@pytest.mark.slow
def test_a_checkpoint_of_which_half_is_there_is_refused_by_name_and_passed_over(
    server: S3Server, run_flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    save = server.bucket / "half"
    saved = [*run_flags, "--save", str(save), "--save-interval", "3"]
    assert main(saved) == 0
    half = save / "step_0000006"
    (half / MANIFEST_FILE).unlink()
    assert main([*run_flags, "--load", str(half)]) == 2
    assert f"{half / MANIFEST_FILE} cannot be read, it is written last" in capfd.readouterr().err
    (save / "latest").unlink()
    assert main([*saved, "--auto-resume"]) == 0
    assert [folder.name for folder in committed(save)] == ["step_0000006.2", "step_0000003"]


def test_a_directory_with_a_run_and_a_missing_dataset_are_told_before_the_run(
    server: S3Server, run_flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (server.bucket / "other" / "step_0000001" / MANIFEST_FILE).write(b"{}")
    flags = [*run_flags, "--save", str(server.bucket / "other"), "--valid-data-path", str(server.bucket / "none")]
    assert main(flags) == 2
    told = capfd.readouterr().err
    assert f"--save {server.bucket}/other holds the checkpoints of a run" in told
    assert f"--valid-data-path {server.bucket}/none: holds no manifest.json" in told
