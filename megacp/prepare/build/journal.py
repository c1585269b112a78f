"""The directory of a build: its lock, and `journal.jsonl`, which says what is finished.

The first line holds everything that decides the bytes, so that a rerun with other settings is refused by name. Each
other line is one finished unit, made durable after its shard has its final name. A line torn by a crash is cut off, and
its unit is built again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacp.core.data.manifest import MANIFEST_NAME, ShardEntry
from megacp.core.storage import files
from megacp.prepare.build.unit import IMAGES_DIRECTORY, UnitResult
from megacp.prepare.build.upload import FAILED_IMAGES_NAME, JOURNAL_NAME, REJECTS_NAME, TOKENIZER_DIRECTORY
from megacp.prepare.records.record import Refusal

PARTS_DIRECTORY = ".parts"
"""Of the journals and locks of a build by `--units`, until it is finished."""
_LOCK_NAME = ".lock"
_LARGEST = 1 << 32
"""Bytes of a journal, which holds a line for each refused record."""
_HELD: set[Path] = set()
"""Locks that builds of this process hold: record locks do not keep out the process that has them."""
_HELD_CHANGES = threading.Lock()


class BusyError(ValueError):
    """Another build holds the directory."""


@contextmanager
def locked(directory: Path, name: str = _LOCK_NAME) -> Iterator[None]:
    """Hold DIRECTORY against other builds; BusyError when one is running, in this process or another.

    Dying releases it. The lock file stays: a lock on a removed file keeps out no other build. `name`: of that file.
    """
    held = directory.resolve() / name
    busy = f"{directory}: another build is writing to it; wait for it or choose another --output"
    with _HELD_CHANGES:
        if held in _HELD:
            raise BusyError(busy)
        try:
            descriptor = files.lock(directory / name)
        except (BlockingIOError, PermissionError) as error:
            if _is_locked(error):
                raise BusyError(busy) from error
            raise ValueError(f"{directory}: cannot be locked: {error}") from error
        _HELD.add(held)
    try:
        yield
    finally:
        with _HELD_CHANGES:
            os.close(descriptor)
            _HELD.remove(held)


def _is_locked(error: OSError) -> bool:
    """Whether a lock was refused because it is held; a folder without write permission names a file."""
    return error.filename is None


def is_dataset(directory: Path) -> bool:
    """Whether a build, finished or not, has begun here."""
    return (directory / MANIFEST_NAME).exists() or (directory / JOURNAL_NAME).exists()


def remove_dataset(directory: Path) -> None:
    """Delete what builds write, and nothing else."""
    for name in (MANIFEST_NAME, JOURNAL_NAME, REJECTS_NAME, FAILED_IMAGES_NAME):
        (directory / name).unlink(missing_ok=True)
    for path in (directory / TOKENIZER_DIRECTORY, *directory.glob("shard_*")):
        shutil.rmtree(path, ignore_errors=True)
    remove_leftovers(directory)


def remove_leftovers(directory: Path) -> None:
    """Delete what is of use to a build alone, and what killed builds and lost workers were just writing."""
    for name in (IMAGES_DIRECTORY, PARTS_DIRECTORY, ".ids"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for path in [*directory.glob(".*.partial"), *(directory / TOKENIZER_DIRECTORY).glob(".*.partial")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def prepare_directory(directory: Path, overwrite: bool) -> None:
    """Create DIRECTORY; ValueError when it holds something else than a dataset. `overwrite` empties a dataset."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--output {directory} is not a directory")
    directory.mkdir(parents=True, exist_ok=True)
    own = (_LOCK_NAME, ".partial")  # left by a build that was killed before its first line
    foreign = sorted(path.name for path in directory.iterdir() if not path.name.endswith(own))
    if foreign and not is_dataset(directory):
        raise ValueError(
            f"--output {directory} holds files but no dataset ({', '.join(foreign[:5])}); nothing was overwritten, "
            "choose an empty or a new directory"
        )
    if overwrite:
        with locked(directory):
            remove_dataset(directory)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return [f"{name}: {_short(old.get(name))} before, {_short(new.get(name))} now" for name in names]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


class Journal:
    """journal.jsonl of one directory; `results` holds what is finished, by unit."""

    def __init__(
        self,
        directory: Path,
        decisive: dict[str, Any],
        name: str = JOURNAL_NAME,
        stored: Mapping[str, int] | None = None,
    ) -> None:
        """Open or begin; `decisive` are the settings that decide the bytes, `name` is that of the file.

        `stored` are the bytes of files that lie elsewhere.

        ValueError lists every setting that differs from those the directory was begun with.
        """
        self.path = directory / name
        self.results: dict[int, UnitResult] = {}
        decisive = json.loads(json.dumps(decisive))  # tuples become lists, as they come back from the file
        self.inputs = decisive.get("input", [])
        """The identities of the input files when the build began."""
        header = {"settings": decisive}
        if not self.path.exists():
            files.write_atomically(self.path, _line(header))
            return
        data = files.read_regular(self.path, _LARGEST)
        whole = data[: data.rfind(b"\n") + 1]
        before, results = self._parse(whole)
        if not before.keys() & decisive.keys():
            raise ValueError(f"{directory} holds a merged dataset; nothing was overwritten, --overwrite replaces it")
        differences = _differences(before, decisive)
        has_parts = any((directory / PARTS_DIRECTORY).glob("*.jsonl"))
        if differences and not results and not has_parts:  # nothing was finished, so nothing is lost
            files.write_atomically(self.path, _line(header))
            return
        if differences:
            raise ValueError(
                f"{directory} was begun with other settings or other input; nothing was overwritten, "
                "--overwrite starts again. " + "; ".join(differences)
            )
        for result in results:  # a later line replaces an earlier one
            if result.entry is None or _is_there(directory, result.entry, stored):
                self.results[result.unit] = result
            else:
                self.results.pop(result.unit, None)
        if len(whole) < len(data):
            files.write_atomically(self.path, whole)

    def _parse(self, text: bytes) -> tuple[dict[str, Any], list[UnitResult]]:
        """The settings, and a result for each further line."""
        number = 0
        try:
            first, *lines = text.splitlines()
            before = json.loads(first)["settings"]
            results = [_from_json(json.loads(line)) for number, line in enumerate(lines, 2)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is damaged (line {number}: {error}); --overwrite starts again") from error
        return before, results

    def add(self, result: UnitResult) -> None:
        """Enter a finished unit, durably."""
        self.results[result.unit] = result
        with open(self.path, "ab") as stream:
            stream.write(_line(_to_json(result)))
            files.sync_file(stream)

    def settle(self) -> None:
        """Rewrite the lines in the order of units, so that equal builds have equal journals."""
        header = files.read_regular(self.path, _LARGEST).split(b"\n", 1)[0] + b"\n"
        lines = [_line(_to_json(self.results[unit])) for unit in sorted(self.results)]
        files.write_atomically(self.path, header + b"".join(lines))


def _is_there(directory: Path, entry: ShardEntry, stored: Mapping[str, int] | None) -> bool:
    """Whether all files of a shard have their size, in the directory or where they were sent."""
    if stored is not None:
        return all(stored.get(f"{entry.name}/{file.name}") == file.size for file in entry.files)
    paths = [(directory / entry.name / file.name, file.size) for file in entry.files]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def _to_json(result: UnitResult) -> dict[str, Any]:
    values = dataclasses.asdict(result)
    values["shard"] = values.pop("entry")
    for name in ("refusals", "dropped"):
        values[name] = [refusal.to_json() for refusal in getattr(result, name)]
    return values


def _from_json(values: dict[str, Any]) -> UnitResult:
    shard = values.pop("shard")
    for name in ("refusals", "dropped"):
        values[name] = tuple(Refusal(**refusal) for refusal in values[name])
    return UnitResult(entry=ShardEntry.from_json(shard) if shard else None, **values)
