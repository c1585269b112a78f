"""One build as several processes that know nothing of each other: `--units 3/16` builds every sixteenth unit.

A part has a journal and a lock of its own, and the shards it makes are those of one run. `finish` joins the journals,
so the result has the same bytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.core.storage.wording import listed
from megacp.prepare.build.journal import PARTS_DIRECTORY, BusyError, Journal, locked

_SECONDS_AT_THE_DOOR = 60.0
"""How long a part waits for others that begin at the same moment."""
_TOLD = 20


@dataclass(frozen=True)
class BuildPart:
    """Part `index` of `count`, 0 <= index < count: the units whose number leaves the remainder `index`."""

    index: int
    count: int

    @staticmethod
    def parse(text: str) -> BuildPart:
        """`3/16`; ValueError."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None or not int(match[1]) < int(match[2]):
            raise ValueError(f"--units {text}: expected I/N with 0 <= I < N, as in 0/16 and 15/16")
        return BuildPart(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, unit: int) -> bool:
        """Whether a unit is of this part."""
        return unit % self.count == self.index

    @property
    def journal(self) -> str:
        """Name of its journal in the directory of the build."""
        return f"{PARTS_DIRECTORY}/{self.index}-of-{self.count}.jsonl"

    @property
    def lock(self) -> str:
        """Name of its lock there."""
        return f"{PARTS_DIRECTORY}/{self.index}-of-{self.count}.lock"


@contextmanager
def entered(
    directory: Path, part: BuildPart, decisive: dict[str, Any], stored: Mapping[str, int] | None
) -> Iterator[Journal]:
    """The journal of a part, with all that is finished of it; ValueError as `Journal` and `locked`, or another N.

    The directory's own lock is taken for a moment, so a build of all units keeps every part out.
    """
    with ExitStack() as held:
        with ExitStack() as door:
            _wait_at(door, directory)
            whole = Journal(directory, decisive, stored=stored)
            if others := _counts(directory) - {part.count}:
                raise ValueError(
                    f"{directory} was begun with --units I/{min(others)}, this is part {part}: go on with the same N, "
                    "or build what is missing without --units"
                )
            (directory / PARTS_DIRECTORY).mkdir(exist_ok=True)
            try:
                held.enter_context(locked(directory, part.lock))
            except BusyError as error:
                raise BusyError(f"{directory}: part {part} is being built by another process") from error
            journal = Journal(directory, decisive, part.journal, stored)
        known = {unit: result for unit, result in whole.results.items() if part.holds(unit)}
        journal.results = {**known, **journal.results}
        yield journal


def join_parts(directory: Path, decisive: dict[str, Any], whole: Journal, stored: Mapping[str, int] | None) -> None:
    """Enter what the parts have finished into the journal of a build that holds the directory.

    BusyError: a part is being built.
    """
    for path in sorted((directory / PARTS_DIRECTORY).glob("*-of-*.jsonl")):
        name = path.relative_to(directory).with_suffix("")
        try:
            with locked(directory, f"{name}.lock"):
                results = Journal(directory, decisive, f"{name}.jsonl", stored).results
        except BusyError as error:
            raise BusyError(
                f"{directory}: part {name.name.replace('-of-', '/')} is being built: wait for it"
            ) from error
        for unit, result in results.items():
            whole.results.setdefault(unit, result)


def missing_units(missing: Sequence[int], directory: Path) -> str:
    """Which units are not there, and which parts of those that have begun here build them."""
    again = "build them without --units"
    if counts := _counts(directory):
        count = min(counts)
        parts = [f"{index}/{count}" for index in sorted({unit % count for unit in missing})]
        again = f"build them with --units {listed(parts, _TOLD)}"
    what = "unit" if len(missing) == 1 else "units"
    return f"{directory} lacks {len(missing)} {what}, {listed(missing, _TOLD)}: {again}"


def _counts(directory: Path) -> set[int]:
    """N of the parts that have begun in a directory."""
    names = [path.stem.partition("-of-")[2] for path in (directory / PARTS_DIRECTORY).glob("*-of-*.jsonl")]
    return {int(name) for name in names if name.isdecimal()}


def _wait_at(door: ExitStack, directory: Path) -> None:
    """Hold a directory's own lock; BusyError when others do not let it go in time."""
    deadline = time.monotonic() + _SECONDS_AT_THE_DOOR
    while True:
        try:
            door.enter_context(locked(directory))
            return
        except BusyError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.2)
