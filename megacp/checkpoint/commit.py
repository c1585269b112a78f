"""Saving and loading whole checkpoints: a directory counts once everything in it is on disk and named with hashes.

    DIRECTORY/latest                  name of the last committed checkpoint
    DIRECTORY/step_0000100/           manifest.json, config.yaml, DCP files (.metadata, __RANK_0.distcp)
    DIRECTORY/step_0000100.tmp-*/     being written, or left by a crash: never read

Key property: a checkpoint appears by one rename after all ranks reported success, and a failure on any rank is raised
on every rank with the earlier checkpoints untouched. A directory is never written to again: saving a step that exists
makes `step_0000100.2`. All ranks agree on what they load. Rejected: writing in place, where a full disk destroys the
good checkpoint together with the new one. The directory must be on a file system that all ranks share.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from megacp.checkpoint.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    damage,
    hash_file,
    read_manifest,
    sync_folder,
    to_json,
    write_synced,
)
from megacp.checkpoint.names import TensorBox
from megacp.checkpoint.storage import INDEX_FILE, Payload, PayloadError, write_payload
from megacp.distributed.collectives import all_reduce, gather_objects
from megacp.distributed.grid import Axis

LATEST_FILE = "latest"
CONFIG_FILE = "config.yaml"
_STEP = re.compile(r"step_\d{7,}(\.\d+)?")
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank with the reasons of the ranks that failed."""


def _together(world: Axis, action: Callable[[], _T], error: type[Exception]) -> list[_T]:
    """Run `action` on every rank; its results in rank order, or `error` on all ranks when it raised on any."""
    result: _T | None = None
    own: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # whatever it is, the other ranks wait to hear of it
        own = raised
    reason = None if own is None else str(own) or type(own).__name__
    outcomes = gather_objects((result, reason), world)
    failures: dict[str, list[int]] = {}
    for rank, (_, why) in enumerate(outcomes):
        if why is not None:
            failures.setdefault(why, []).append(rank)
    if failures:
        lines = (f"rank {', '.join(map(str, ranks))}: {why}" for why, ranks in failures.items())
        raise error("; ".join(lines)) from own
    return [value for value, _ in outcomes]


def _step_folders(directory: Path) -> tuple[list[Path], list[Path]]:
    """Step directories with a whole manifest, newest first, and those whose manifest is missing or damaged."""
    serials: dict[Path, int] = {}
    damaged = []
    for folder in sorted(directory.iterdir()) if directory.is_dir() else []:
        if _STEP.fullmatch(folder.name) and folder.is_dir():
            try:
                serials[folder] = read_manifest(folder).serial
            except ValueError:
                damaged.append(folder)
    return sorted(serials, key=lambda folder: serials[folder], reverse=True), damaged


def committed(directory: Path | str) -> list[Path]:
    """The committed step directories below `directory`, newest first; their payload is not verified."""
    return _step_folders(Path(directory))[0]


def save_checkpoint(
    directory: Path | str,
    step: int,
    boxes: Sequence[TensorBox],
    *,
    extra: Mapping[str, Any],
    config_yaml: str,
    world: Axis,
    keep_last: int = 0,
    grid: Mapping[str, int] | None = None,
) -> Path:
    """Write and commit one checkpoint; returns its directory. Collective over `world`, all ranks of the run.

    `boxes` of all ranks together hold each element of each tensor once (`names.boxes_to_save`). `extra`, `config_yaml`
    and `grid` are taken from rank 0; `extra` must be JSON. `keep_last` > 0 removes older checkpoints beyond that many.
    Raises SaveError on every rank when anything failed on any; committed checkpoints are untouched then.
    """
    root = Path(directory)

    def begin() -> Path | None:
        if world.rank != 0:
            return None
        to_json(Manifest(step, 0, world.size, grid or {}, {}, extra))  # refuse before anything is written
        root.mkdir(parents=True, exist_ok=True)
        folder = root / f"step_{step:07d}.tmp-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    folder = _together(world, begin, SaveError)[0]
    assert folder is not None
    try:
        written = write_payload(folder, boxes, world)
        hashes = _together(world, lambda: {path.name: hash_file(path) for path in written}, SaveError)
        files = {name: record for of_rank in hashes for name, record in of_rank.items()}

        def commit() -> Path | None:
            if world.rank != 0:
                return None
            manifest = Manifest(step, _next_serial(root), world.size, grid or {}, files, extra)
            return _commit(folder, manifest, config_yaml)

        final = _together(world, commit, SaveError)[0]
    except (SaveError, PayloadError) as failure:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise SaveError(f"checkpoint of step {step} in {root} was not written: {failure}") from failure
    assert final is not None
    _together(world, lambda: _point_and_prune(final, keep_last) if world.rank == 0 else None, SaveError)
    return final


def _next_serial(root: Path) -> int:
    return max((read_manifest(folder).serial for folder in committed(root)), default=0) + 1


def _commit(folder: Path, manifest: Manifest, config_yaml: str) -> Path:
    """Complete the written folder with its config and manifest, and rename it; rank 0 only."""
    write_synced(folder / CONFIG_FILE, config_yaml)
    files: dict[str, FileRecord] = {**manifest.files, CONFIG_FILE: hash_file(folder / CONFIG_FILE)}
    complete = Manifest(manifest.step, manifest.serial, manifest.world_size, manifest.grid, files, manifest.extra)
    write_synced(folder / MANIFEST_FILE, to_json(complete))
    sync_folder(folder)
    base = folder.name.split(".tmp-")[0]
    attempt = 1
    final = folder.parent / base
    while final.exists():
        attempt += 1
        final = folder.parent / f"{base}.{attempt}"
    folder.rename(final)
    sync_folder(folder.parent)
    return final


def _point_and_prune(final: Path, keep_last: int) -> None:
    root = final.parent
    pointer = root / f"{LATEST_FILE}.tmp-{secrets.token_hex(4)}"
    write_synced(pointer, final.name + "\n")
    pointer.replace(root / LATEST_FILE)
    sync_folder(root)
    if keep_last > 0:
        for old in [folder for folder in committed(root) if folder != final][keep_last - 1 :]:
            doomed = root / f"{old.name}.tmp-{secrets.token_hex(4)}"
            old.rename(doomed)  # a half-deleted directory is never taken for a checkpoint
            shutil.rmtree(doomed)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint, ready to be read; the same one on every rank."""

    path: Path
    manifest: Manifest
    passed_over: tuple[str, ...]
    """What was wrong with newer checkpoints that were not taken, one line per file; empty when the newest is whole."""
    world: Axis

    @property
    def step(self) -> int:
        """The training step after which it was saved."""
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        """The small JSON state it was saved with."""
        return dict(self.manifest.extra)

    @property
    def config_yaml(self) -> str:
        """The resolved config it was saved with."""
        return (self.path / CONFIG_FILE).read_text(encoding="utf-8")

    def _payload(self) -> Payload:
        return Payload(self.path, {name: record.sha256 for name, record in self.manifest.files.items()})

    def read(self, boxes: Sequence[TensorBox]) -> None:
        """Fill the tensors of `boxes` (`names.boxes_to_load`), whatever grid wrote them. Collective over `world`.

        Raises ValueError on every rank, before anything is read, that names the tensors which are missing, have another
        shape or dtype, or are in the checkpoint but on no rank (a kind that no rank asks for may be left out).
        """
        payload: list[Payload] = []

        def check() -> None:
            payload.append(self._payload())
            problems = payload[0].problems(boxes)
            if problems:
                raise ValueError(_listed(problems, f"checkpoint {self.path} does not fit this run"))

        _together(self.world, check, ValueError)
        self._refuse_unused(list(payload[0].tensors), boxes)
        _together(self.world, lambda: payload[0].read(boxes), ValueError)

    def _refuse_unused(self, stored: list[str], boxes: Sequence[TensorBox]) -> None:
        """Raise when the run asks for a kind of tensor but no rank asks for some tensor of that kind."""
        stored = sorted(stored)
        kinds = sorted({_kind(name) for name in stored})
        asked = {box.name for box in boxes}
        asked_kinds = {_kind(name) for name in asked}
        marks = [name in asked for name in stored] + [kind in asked_kinds for kind in kinds]
        device = boxes[0].tensor.device if boxes else "cpu"
        found = all_reduce(torch.tensor(marks, dtype=torch.int32, device=device), self.world, "max").tolist()
        wanted = {kind for kind, mark in zip(kinds, found[len(stored) :], strict=True) if mark}
        unused = [n for n, mark in zip(stored, found, strict=False) if not mark and _kind(n) in wanted]
        if unused:
            lines = [f"{name} is in the checkpoint but not in this model" for name in unused]
            raise ValueError(_listed(lines, f"checkpoint {self.path} does not fit this run"))

    def whole_tensors(self, kind: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of a kind, whole, by global name in sorted order, one at a time; no other rank is needed."""
        payload = self._payload()
        for name in sorted(payload.tensors):
            if _kind(name) == kind:
                yield name.removeprefix(f"{kind}."), payload.read_whole(name)


def _kind(name: str) -> str:
    """`model` or, for the optimizer, `optimizer.<state>`."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "optimizer" else first


def _listed(lines: Sequence[str], title: str, most: int = 20) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return f"{title}: " + "; ".join([*lines[:most], *more])


def load_checkpoint(path: Path | str, world: Axis) -> LoadedCheckpoint:
    """Choose and verify a checkpoint: `path` is a directory of checkpoints or one step directory. Collective.

    In a directory, `latest` is tried first, then the others from the newest on; what is passed over is logged and
    listed in the result. A step directory is taken or refused. Every file is hashed by one of the ranks. Raises
    ValueError on every rank that names the damaged files when nothing whole is left.
    """
    root = Path(path)
    candidates: list[Path] = gather_objects(_candidates(root) if world.rank == 0 else [], world)[0]
    if not candidates:
        raise ValueError(
            f"--load {root}: there is no committed checkpoint (no step_* directory with a {MANIFEST_FILE})"
        )
    problems: list[str] = []
    for folder in candidates:
        manifest, wrong = _verify(folder, world)
        if manifest is not None and not wrong:
            for line in problems if world.rank == 0 else []:
                _log.warning("checkpoint passed over: %s", line)
            if problems and world.rank == 0:
                _log.warning("loading the earlier checkpoint %s (step %d) instead", folder, manifest.step)
            return LoadedCheckpoint(folder, manifest, tuple(problems), world)
        problems += wrong
    raise ValueError(_listed(problems, f"--load {root}: no checkpoint is whole"))


def _candidates(root: Path) -> list[Path]:
    """What to try, in order. Damaged manifests come before older whole ones, so that they are reported."""
    if (root / MANIFEST_FILE).exists() or _STEP.fullmatch(root.name):
        return [root] if root.is_dir() else []
    whole, damaged = _step_folders(root)
    others = [*damaged, *whole]
    try:
        latest = root / (root / LATEST_FILE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return others
    return [latest, *(folder for folder in others if folder != latest)] if latest in others else others


def _verify(folder: Path, world: Axis) -> tuple[Manifest | None, list[str]]:
    """The manifest and what is wrong; each rank hashes its share of the files."""
    manifest: Manifest | None = None
    wrong: list[str] = []
    if world.rank == 0:
        try:
            manifest = read_manifest(folder)
        except ValueError as error:
            wrong = [str(error)]
    manifest, wrong = gather_objects((manifest, wrong), world)[0]
    if manifest is None:
        return None, wrong
    needed = {INDEX_FILE, CONFIG_FILE} - set(manifest.files)
    wrong = [f"{folder / MANIFEST_FILE} does not list {name}" for name in sorted(needed)]
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    mine = damage(folder, manifest.files, names[world.rank :: world.size])
    return manifest, [*wrong, *(line for of_rank in gather_objects(mine, world) for line in of_rank)]
