"""Packs from object storage beside the same packs on a disk: MiB of bins a second, in the first epoch and later.

    python tools/bench_store.py data/train s3://packs/train [--block-mib 8 16 64] [--json FILE]

Both hold one dataset. The loader collates every pack once an epoch, in its random order. The disk is read without its
pages in memory, then with them; the store's first epoch counts the opening, later ones read the cache of the run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

from bench.report import Goal, Part, benchmark_parser, run_parts, timed
from megacp.core.data.data_cache import DataCache
from megacp.core.data.loader import DataRank, LoaderOptions, PackedLoader
from megacp.core.data.reader import PackedDataset
from megacp.core.planner.report import table

BLOCK, LEAST = 64.0, 0.8
"""The blocks whose first epoch has a goal, and that goal as a share of the cold disk."""


def forget(folder: Path) -> None:
    """Ask the system to drop its pages of all files."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def epoch(packs: PackedDataset, threads: int) -> None:
    """Read and collate every pack once."""
    options = LoaderOptions(global_batch_size=1, prefetch=2 * threads, num_threads=threads)
    with PackedLoader(packs, options, DataRank(), 0) as loader:
        for _ in range(len(packs)):
            loader.next_step()


def reading(folder: Path, url: str, block_mib: Sequence[float], threads: int, cache_gib: float) -> Part:
    """Two epochs of the disk, then two of the store with blocks of each size."""
    with tempfile.TemporaryDirectory() as tables:
        bins = sum(path.stat().st_size for path in folder.rglob("*.bin")) / 2**20

        def speeds(place: str, cache: DataCache | None) -> tuple[float, float]:
            packs, opening = timed(lambda: PackedDataset(place, cache))
            if cache is None:
                forget(folder)
            first, later = (timed(lambda: epoch(packs, threads))[1].wall for _ in range(2))
            return bins / (opening.wall + first), bins / later

        found = {"disk": speeds(str(folder), None)}
        for size in block_mib:
            found[f"blocks of {size:g} MiB"] = speeds(url, DataCache(f"{tables}/{size}", cache_gib, size))
    rows = [["packs through the loader", "first epoch, MiB/s", "over the disk", "later", "over the disk"]]
    for name, pair in found.items():
        ratios = [speed / disk for speed, disk in zip(pair, found["disk"], strict=True)]
        rows.append([name, f"{pair[0]:.0f}", f"{ratios[0]:.2f}", f"{pair[1]:.0f}", f"{ratios[1]:.2f}"])
    name = f"blocks of {BLOCK:g} MiB"
    goals = [Goal(f"first epoch, {name}", found[name][0] / found["disk"][0], LEAST, ">=")] if name in found else []
    return Part({"mebibytes": bins, "first_and_later": found}, goals, table(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Read by both ways; the exit status."""
    parser = benchmark_parser("Read a packed dataset from a store and from a disk.", ["reading"])
    parser.add_argument("folder", type=Path, help="a dataset on this machine")
    parser.add_argument("url", help="the same dataset in a store")
    parser.add_argument("--block-mib", type=float, nargs="+", default=[8.0, 16.0, BLOCK], metavar="MIB")
    parser.add_argument("--threads", type=int, default=2, help="threads of the loader (2)")
    parser.add_argument("--cache-gib", type=float, default=4.0, metavar="GIB", help="size of the cache (4)")
    given = parser.parse_args(argv)
    if PackedDataset(given.folder).manifest != PackedDataset(given.url).manifest:
        parser.error(f"{given.folder} and {given.url} are not the same dataset")
    sizes = given.block_mib[:1] if given.quick else given.block_mib
    return run_parts(
        {"reading": lambda: reading(given.folder, given.url, sizes, given.threads, given.cache_gib)}, given
    )


if __name__ == "__main__":
    sys.exit(main())
