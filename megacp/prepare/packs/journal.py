"""The directory of a build: its lock, `.build/settings.json`, and a file in `.build` for each
finished unit.

The settings are all that decides the bytes: a rerun with others is refused by name. A unit's file
is made, in one rename, after its shard has its final name. Whoever builds a unit writes the same
bytes, so parts need no order.
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

_STATE = ".build"
"""Folder of what a build knows of itself."""
REJECTS_NAME = "rejects.jsonl"
_LOCK_NAME = ".lock"
_LARGEST = 1 << 30
"""Bytes of a unit's file, which names each refused record."""


@contextmanager
def locked(directory: Path, shared: bool = False) -> Iterator[None]:
    """Hold DIRECTORY against builds of other processes; `shared`: beside those that build parts.
    Dying releases it.

    ValueError: others hold it.
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
    """Delete what killed builds and lost workers were just writing."""
    for folder in (".", _STATE, TOKENIZER_DIRECTORY):
        for path in (directory / folder).glob(".*.partial"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def prepare_directory(directory: Path, overwrite: bool) -> None:
    """Create DIRECTORY; ValueError when it holds something else than a dataset. `overwrite` empties
    a dataset.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--output {directory} is not a directory")
    directory.mkdir(parents=True, exist_ok=True)
    own = (_LOCK_NAME, ".partial")  # left by a build that was killed before it began
    foreign = sorted(path.name for path in directory.iterdir() if not path.name.endswith(own))
    if foreign and not {MANIFEST_NAME, _STATE} & {*foreign}:
        raise ValueError(
            f"--output {directory} holds files but no dataset ({', '.join(foreign[:5])}); nothing "
            "was overwritten, "
            "choose an empty or a new directory"
        )
    if not overwrite:
        return
    with locked(directory):
        remove_partial(directory)
        for name in (MANIFEST_NAME, REJECTS_NAME):
            (directory / name).unlink(missing_ok=True)
        folders = (directory / name for name in (_STATE, TOKENIZER_DIRECTORY, VALID_FOLDER))
        for path in (*folders, *directory.glob("shard_*")):
            shutil.rmtree(path, ignore_errors=True)


class Journal:
    """What is finished of a build; `results` by unit."""

    def __init__(self, directory: Path, decisive: dict[str, Any]) -> None:
        """Open or begin. `decisive`: the settings that decide the bytes.

        ValueError lists every setting that differs from those the directory was begun with.
        """
        self._directory = directory
        text = json.dumps(decisive, sort_keys=True).encode()
        now = json.loads(text)  # tuples become lists, as they come back from the file
        self.fingerprint = hashlib.sha256(text).hexdigest()
        path = directory / _STATE / "settings.json"
        if not path.exists() and (directory / MANIFEST_NAME).exists():
            raise ValueError(
                f"{directory} holds a dataset of an earlier version; nothing was overwritten, "
                "--overwrite replaces it"
            )
        before = files.read_json(path) if path.exists() else now
        finished = [_read(path) for path in sorted((directory / _STATE).glob("[0-9]*.json"))]
        if finished and (before != now or any(print != self.fingerprint for print, _ in finished)):
            differences = [
                f"{name}: {_short(before.get(name))} before, {_short(now.get(name))} now"
                for name in sorted({*before, *now})
                if before.get(name) != now.get(name)
            ]
            raise ValueError(
                f"{directory} was begun with other settings or other input; nothing was "
                "overwritten, "
                "--overwrite starts again. " + "; ".join(differences)
            )
        if not path.exists() or before != now:  # where nothing is finished, nothing is lost
            path.parent.mkdir(exist_ok=True)
            files.write_atomically(path, text)
        self.results: dict[int, UnitResult] = {}
        for _, result in finished:
            shard = result.entry
            found = (
                [(directory / shard.name / file.name, file.size) for file in shard.files]
                if shard
                else []
            )
            if all(path.is_file() and path.stat().st_size == size for path, size in found):
                self.results[result.unit] = result

    def add(self, result: UnitResult) -> None:
        """Enter a finished unit, durably."""
        self.results[result.unit] = result
        values = {**dataclasses.asdict(result), "settings": self.fingerprint}
        path = self._directory / _STATE / f"{result.unit:05d}.json"
        files.write_atomically(path, json.dumps(values, sort_keys=True).encode())


def _read(path: Path) -> tuple[str, UnitResult]:
    """The fingerprint of the settings of a finished unit, and what became of it."""
    try:
        values = files.read_json(path, _LARGEST)
        fingerprint, shard = values.pop("settings"), values.pop("entry")
        for name in ("refusals", "dropped"):
            values[name] = tuple(Refusal(**refusal) for refusal in values[name])
        return fingerprint, UnitResult(
            entry=ShardEntry.from_json(shard) if shard else None, **values
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): remove it, and its unit is built again"
        ) from error


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
