"""`--verify-data`: every byte of the datasets against their manifests before the first step, on every machine.

Key property: the ranks of a machine share its files. All ranks meet after each few GiB, and all refuse with what one of
them found. Rejected: one share for each rank of the run, which leaves copies on other machines unread. Rejected: one
meeting at the end, where the first rank would wait for the slowest disk longer than a collective may take.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from megacp.core.data.manifest import FileEntry, ShardEntry
from megacp.core.data.verify import damaged_file
from megacp.core.distributed.collectives import gather_objects
from megacp.core.distributed.grid import Axis
from megacp.core.storage.place import Place
from megacp.core.storage.wording import listed
from megacp.core.training.sources import Sources

_BYTES_BETWEEN_MEETINGS = 4 << 30
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOLD = 20


def require_sound(sources: Sources, world: Axis, between: int = _BYTES_BETWEEN_MEETINGS) -> None:
    """Return when all files of the run's datasets have the size and sha256 of their manifests, on every machine.

    A collective over `world`. Raises one ValueError, alike on all ranks, naming the damaged files and who found them.
    """
    machine = f"{platform.node()} {_BOOT.read_text() if _BOOT.exists() else ''}"
    machines = gather_objects(machine, world)
    neighbours = [rank for rank, name in enumerate(machines) if name == machine]
    mine = _share(sources, neighbours.index(world.rank), len(neighbours))
    reasons: list[str] = []
    while True:
        found, more = _check(mine, between)
        told = gather_objects(([f"{reason} (rank {world.rank} on {platform.node()})" for reason in found], more), world)
        reasons += [reason for rank_reasons, _ in told for reason in rank_reasons]
        if not any(goes_on for _, goes_on in told):
            break
    if reasons:
        raise ValueError("--verify-data found damaged files:\n" + listed(reasons, _TOLD, "\n"))


def _share(sources: Sources, index: int, count: int) -> Iterator[tuple[Place, ShardEntry, FileEntry]]:
    """The files that rank `index` of the `count` on a machine reads: dealt out in turn, the largest first."""
    every = [
        (dataset.directory, entry, file)
        for _, dataset in sources.datasets
        for entry in dataset.manifest.shards
        for file in entry.files
    ]
    every.sort(key=lambda one: -one[2].size)  # stable: the same on all ranks
    return iter(every[index::count])


def _check(files: Iterator[tuple[Place, ShardEntry, FileEntry]], limit: int) -> tuple[list[str], bool]:
    """What is wrong with the next files of together at least `limit` bytes; whether there may be more."""
    reasons, read = [], 0
    for directory, entry, file in files:
        if (reason := damaged_file(directory, entry, file)) is not None:
            reasons.append(reason)
        read += file.size
        if read >= limit:
            return reasons, True
    return reasons, False
