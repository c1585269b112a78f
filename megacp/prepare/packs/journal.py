"""Lock and state of a dataset directory during a build.

The folder `.build` contains `settings.json` and one file per finished unit. The settings include
everything that determines the bytes of the dataset; a rerun with different settings is an error
that names the differences. A unit's file appears atomically, after its shard has its final name.
Every process builds the same bytes for a unit, so parts can run in any order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacp.prepare.packs.settings import VALID_FOLDER
from megacp.prepare.packs.unit import UnitResult
from megacp.prepare.records.record import Refusal
from megacp.prepare.tokenize.kept import TOKENIZER_DIRECTORY
from megacp.storage import files
from megacp.training.data.manifest import MANIFEST_NAME, ShardEntry

# Folder with the state of the build.
_STATE = ".build"
REJECTS_NAME = "rejects.jsonl"
_LOCK_NAME = ".lock"
# Maximum bytes of a unit's file. The limit is high, because the file lists each refused record.
_LARGEST = 1 << 30


@contextmanager
def locked(directory: Path, shared: bool = False) -> Iterator[None]:
    """Lock `directory` against builds by other processes.

    With `shared`, other processes may hold the same shared lock (parts of one build). The operating
    system releases the lock if the process dies.

    Raise ValueError if another process holds a conflicting lock.
    """
    try:
        descriptor = files.lock(directory / _LOCK_NAME, shared)
    except BlockingIOError as error:
        raise ValueError(
            f"{directory}: another build is writing to it; wait for it or choose another --output"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def remove_partial(directory: Path) -> None:
    """Delete the unfinished files and folders of killed builds and lost workers."""
    for folder in (".", _STATE, TOKENIZER_DIRECTORY):
        for path in (directory / folder).glob(".*.partial"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def prepare_directory(directory: Path, overwrite: bool) -> None:
    """Create `directory`; with `overwrite`, delete the dataset in it.

    Raise ValueError if the path is not a directory, or contains files but not a dataset.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--output {directory} is a file, but a dataset is a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    # A build that was killed before its first unit leaves only these files.
    own = (_LOCK_NAME, ".partial")
    # Never mix a dataset with files of the user.
    foreign = sorted(path.name for path in directory.iterdir() if not path.name.endswith(own))
    if foreign and not {MANIFEST_NAME, _STATE} & {*foreign}:
        raise ValueError(
            f"--output {directory} contains files but no dataset ({', '.join(foreign[:5])}); "
            "nothing was overwritten. Choose an empty or new directory"
        )
    if not overwrite:
        return
    with locked(directory):
        remove_partial(directory)
        # The manifest goes first: without it, a half-deleted directory is not a valid dataset.
        for name in (MANIFEST_NAME, REJECTS_NAME):
            (directory / name).unlink(missing_ok=True)
        folders = (directory / name for name in (_STATE, TOKENIZER_DIRECTORY, VALID_FOLDER))
        for path in (*folders, *directory.glob("shard_*")):
            shutil.rmtree(path, ignore_errors=True)


class Journal:
    """Record of the finished units of a build: `results` maps unit numbers to results."""

    def __init__(self, directory: Path, decisive: dict[str, Any]) -> None:
        """Open the journal in `directory`, or start a new one.

        `decisive` contains the settings that determine the bytes of the dataset. Raise ValueError
        if units were finished with different settings; the message lists every difference.
        """
        self._directory = directory
        text = json.dumps(decisive, sort_keys=True).encode()
        # The round trip turns tuples into lists, as in the settings that are read from the file.
        now = json.loads(text)
        self.fingerprint = hashlib.sha256(text).hexdigest()
        path = directory / _STATE / "settings.json"
        if not path.exists() and (directory / MANIFEST_NAME).exists():
            raise ValueError(
                f"{directory} contains a dataset of an earlier version; nothing was overwritten. "
                "Use --overwrite to replace it"
            )
        before = files.read_json(path) if path.exists() else now
        # Each unit file repeats the fingerprint, which detects files of a different build.
        unit_files = sorted((directory / _STATE).glob("[0-9]*.json"))
        finished = [_read(unit_file) for unit_file in unit_files]
        is_foreign = any(fingerprint != self.fingerprint for fingerprint, _ in finished)
        if finished and (before != now or is_foreign):
            differences = [
                f"{name}: {_short(before.get(name))} before, {_short(now.get(name))} now"
                for name in sorted({*before, *now})
                if before.get(name) != now.get(name)
            ]
            raise ValueError(
                f"{directory} was begun with other settings or other input; nothing was "
                "overwritten. Use --overwrite to start again. " + "; ".join(differences)
            )
        # Without finished units there is nothing to lose, so the new settings replace the old ones.
        if not path.exists() or before != now:
            path.parent.mkdir(exist_ok=True)
            files.write_atomically(path, text)
        self.results: dict[int, UnitResult] = {}
        for _, result in finished:
            # A unit whose shard was deleted or truncated is not finished: it is built again.
            if result.entry is None or _is_complete(directory, result.entry):
                self.results[result.unit] = result

    def add(self, result: UnitResult) -> None:
        """Store the result of a finished unit durably."""
        self.results[result.unit] = result
        values = {**dataclasses.asdict(result), "settings": self.fingerprint}
        path = self._directory / _STATE / f"{result.unit:05d}.json"
        files.write_atomically(path, json.dumps(values, sort_keys=True).encode())


def _is_complete(directory: Path, shard: ShardEntry) -> bool:
    """Return whether every file of a shard exists with its recorded size."""
    for file in shard.files:
        path = directory / shard.name / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
    return True


def _read(path: Path) -> tuple[str, UnitResult]:
    """Return the settings fingerprint and the result from a unit's file."""
    try:
        values = files.read_json(path, _LARGEST)
        fingerprint = values.pop("settings")
        shard = values.pop("entry")
        # JSON has turned the refusals into dicts in a list.
        for name in ("refusals", "dropped"):
            values[name] = tuple(Refusal(**refusal) for refusal in values[name])
        entry = ShardEntry.from_json(shard) if shard else None
        return fingerprint, UnitResult(entry=entry, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete the file to build its unit again"
        ) from error


def _short(value: Any) -> str:
    """Return a value as JSON of at most 120 characters."""
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
