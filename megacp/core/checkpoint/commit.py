"""Saving and loading whole checkpoints: a directory counts once everything in it is on disk and named with hashes.

Key property: a checkpoint appears by one rename after all ranks reported success. A failure on any rank is raised on
every rank, and the earlier checkpoints are untouched. A directory is never written to again: saving a step that exists
makes `step_0000100.2`. All ranks agree on what they load. The directory must be on a file system that all ranks share.
Rejected: writing in place, where a full disk destroys the good checkpoint together with the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megacp.core.checkpoint.agree import on_all_ranks, on_rank_0, reason_of
from megacp.core.checkpoint.directory import CONFIG_FILE, MOST_CONFIG_BYTES, is_step_name, latest_of, step_folders
from megacp.core.checkpoint.manifest import MANIFEST_FILE, CheckpointManifest, FormatError, damage, read_manifest
from megacp.core.checkpoint.names import TensorBox
from megacp.core.checkpoint.pending import Contents, PendingCheckpoint
from megacp.core.checkpoint.storage import INDEX_FILE, Payload
from megacp.core.distributed.collectives import all_reduce, gather_objects
from megacp.core.distributed.grid import Axis
from megacp.core.storage.files import StrPath
from megacp.core.storage.place import Place, place_of, read_content
from megacp.core.storage.retry import UnreachableError
from megacp.core.storage.url import Url
from megacp.core.storage.wording import listed

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_ATTEMPTS = 10
"""At checkpoints that a running job removes while they are looked at."""
_SECONDS = 10.0
"""For which a file that another rank sees, or has seen, is waited for."""
_TOLD = 20
"""Tensors or files that a message names."""


class RemovedError(ValueError):
    """A checkpoint was removed while it was read, as --keep-last of a running job does; the same on all ranks."""

    def __init__(self, folder: Place) -> None:
        super().__init__(
            f"{folder} was removed while it was read, as --keep-last of a running job does: name the directory above "
            "it instead of one step, then the newest checkpoint is taken"
        )
        self.folder = folder


def save_checkpoint(
    directory: StrPath | Url,
    step: int,
    boxes: Sequence[TensorBox],
    *,
    extra: Mapping[str, Any],
    config_yaml: str,
    world: Axis,
    keep_last: int = 0,
    grid: Mapping[str, int] | None = None,
) -> Place:
    """Write and commit one checkpoint; returns its directory. Collective over `world`, all ranks of the run.

    `boxes` of all ranks together hold each element of each tensor once (`names.boxes_to_save`). `extra`, `config_yaml`
    and `grid` are taken from rank 0; `extra` must be JSON. `keep_last` > 0 removes older checkpoints beyond that many.
    Raises SaveError on every rank when anything failed on any; committed checkpoints are untouched then.
    """
    contents = Contents(step, extra, config_yaml, grid or {})
    pending = PendingCheckpoint(place_of(directory), boxes, contents, world)
    final = pending.commit(keep_last)
    for note in pending.notes if world.rank == 0 else []:
        _log.warning("%s", note)
    return final


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint, ready to be read; the same one on every rank."""

    path: Place
    manifest: CheckpointManifest
    passed_over: tuple[str, ...]
    """What was wrong with newer checkpoints that were not taken, one line per file; empty when the newest is whole."""
    config_yaml: str
    """The resolved config it was saved with."""
    world: Axis
    rejected: tuple[Place, ...] = ()
    """The directories of those that were passed over."""

    @property
    def step(self) -> int:
        """The training step after which it was saved."""
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        """The small JSON state it was saved with."""
        return dict(self.manifest.extra)

    def payload(self) -> Payload:
        """Its tensors, opened for reading. Raises like `Payload`."""
        return Payload(self.path, self.manifest.files, _SECONDS if self.world.size > 1 else 0.0)

    def read(self, boxes: Sequence[TensorBox]) -> None:
        """Fill the tensors of `boxes` (`names.boxes_to_load`), whatever grid wrote them. Collective over `world`.

        Raises ValueError on every rank, before anything is read. It names tensors that are missing, have another shape
        or dtype, or are in the checkpoint but on no rank. A kind that no rank asks for may be left out. RemovedError
        when it is there no more: some of the tensors may be filled then.
        """
        try:
            self._read(boxes)
        except ValueError as error:
            if _is_removed(self.path, self.world):
                raise RemovedError(self.path) from error
            raise

    def _read(self, boxes: Sequence[TensorBox]) -> None:
        payload: list[Payload] = []

        def check() -> None:
            payload.append(self.payload())
            problems = payload[0].problems(boxes)
            if problems:
                raise ValueError(f"checkpoint {self.path} does not fit this run: {listed(problems, _TOLD, '; ')}")

        on_all_ranks(self.world, check, ValueError)
        self._refuse_unused(list(payload[0].tensors), boxes)
        on_all_ranks(self.world, lambda: payload[0].read(boxes), ValueError)

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
            raise ValueError(f"checkpoint {self.path} does not fit this run: {listed(lines, _TOLD, '; ')}")

    def whole_tensors(self, kind: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of a kind, whole, by global name in sorted order, one at a time; no other rank is needed.

        Raises ValueError when they cannot be read, RemovedError when the checkpoint is there no more.
        """
        with self.reading():
            payload = self.payload()
        for name in sorted(payload.tensors):
            if _kind(name) == kind:
                with self.reading():
                    tensor = payload.read_whole(name)
                yield name.removeprefix(f"{kind}."), tensor

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a read of the payload by this rank alone: what goes wrong becomes ValueError, or RemovedError."""
        try:
            yield
        except (OSError, ValueError) as error:
            if not self.path.is_dir():
                raise RemovedError(self.path) from error
            raise ValueError(f"{self.path} cannot be read: {reason_of(error)}") from error


def _config_of(folder: Place, manifest: CheckpointManifest) -> str:
    path = folder / CONFIG_FILE
    try:
        content, size = read_content(path, MOST_CONFIG_BYTES), manifest.files[CONFIG_FILE].size
        if len(content) != size:
            raise ValueError(f"{path} has {len(content)} bytes, expected {size}")
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8") from error


def _is_removed(folder: Place, world: Axis) -> bool:
    return on_rank_0(world, lambda: not folder.is_dir(), ValueError)


def _kind(name: str) -> str:
    """`model` or, for the optimizer, `optimizer.<state>`."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "optimizer" else first


def load_checkpoint(path: StrPath | Url, world: Axis) -> LoadedCheckpoint:
    """Choose and verify a checkpoint: `path` is a directory of checkpoints or one step directory. Collective.

    In a directory, `latest` is tried first, then the others from the newest on; what is passed over is logged and
    listed in the result. A step directory is taken or refused. Every file is hashed by one of the ranks. Raises
    ValueError on every rank that names the damaged files when nothing whole is left. The choice begins again when a
    running job removes what is looked at.
    """
    root = place_of(path)
    for _ in range(_ATTEMPTS):
        found = _choose(root, world)
        if found is not None:
            return found
    raise RemovedError(root)


def _choose(root: Place, world: Axis) -> LoadedCheckpoint | None:
    """The checkpoint to load; None when the one that was looked at has been removed meanwhile."""
    candidates: list[Place] = on_rank_0(world, lambda: _candidates(root), ValueError)
    if not candidates:
        raise ValueError(
            f"--load {root}: there is no committed checkpoint (no step_* directory with a {MANIFEST_FILE})"
        )
    problems: list[str] = []
    rejected: list[Place] = []
    for folder in candidates:
        manifest, config, wrong = _verify(folder, world)
        if manifest is not None and not wrong:
            for line in problems if world.rank == 0 else []:
                _log.warning("checkpoint passed over: %s", line)
            if problems and world.rank == 0:
                _log.warning("loading the earlier checkpoint %s (step %d) instead", folder, manifest.step)
            return LoadedCheckpoint(folder, manifest, tuple(problems), config, world, tuple(rejected))
        if _is_removed(folder, world):
            if folder == root:
                raise RemovedError(root)
            return None
        problems += wrong
        rejected.append(folder)
    raise ValueError(f"--load {root}: no checkpoint is whole: {listed(problems, _TOLD, '; ')}")


def again_when_removed(path: StrPath | Url, action: Callable[[], _T]) -> _T:
    """`action`, which loads from `path` and reads; from its beginning when the checkpoint was removed meanwhile.

    Not when `path` names that step: RemovedError then. Collective when `action` is; without other effects it must be.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return action()
        except RemovedError as error:
            if error.folder == place_of(path):
                raise
            _log.warning("%s was removed while it was read: taking the newest one there is now", error.folder)
    return action()


def peek(path: StrPath | Url) -> tuple[Place, CheckpointManifest, str] | None:
    """The first step directory that would be loaded, its manifest and its config; None where there is none.

    One rank alone reads it, and no tensors: `load_checkpoint` may yet pass over it. Raises ValueError, which says what
    to do, where an earlier format is all there is.
    """
    earlier: FormatError | None = None
    for folder in _candidates(place_of(path)):
        try:
            manifest = read_manifest(folder)
            if not damage(folder, manifest.files, [CONFIG_FILE]):
                return folder, manifest, _config_of(folder, manifest)
        except FormatError as error:
            earlier = earlier or error
        except UnreachableError:
            raise
        except (OSError, ValueError, KeyError):
            continue
    if earlier is not None:
        raise earlier
    return None


def _candidates(root: Place) -> list[Place]:
    """What to try, in order. Damaged manifests come before older whole ones, so that they are reported."""
    if (root / MANIFEST_FILE).exists() or is_step_name(root.name):
        return [root] if root.is_dir() else []
    whole, damaged = step_folders(root)
    others = [*damaged, *whole]
    latest = root / (latest_of(root) or "")
    return [latest, *(folder for folder in others if folder != latest)] if latest in others else others


def _verify(folder: Place, world: Axis) -> tuple[CheckpointManifest | None, str, list[str]]:
    """The manifest, the config and what is wrong; each rank hashes its share of the files."""
    manifest, problem = on_rank_0(world, lambda: _manifest_or_problem(folder), ValueError)
    if manifest is None:
        return None, "", [problem]
    needed = {INDEX_FILE, CONFIG_FILE} - set(manifest.files)
    wrong = [f"{folder / MANIFEST_FILE} does not list {name}" for name in sorted(needed)]
    wrong += _damage_of_all(folder, manifest, world)
    if wrong:
        return manifest, "", wrong
    try:
        return manifest, on_rank_0(world, lambda: _config_of(folder, manifest), ValueError), []
    except ValueError as error:
        return manifest, "", [str(error)]


def _manifest_or_problem(folder: Place) -> tuple[CheckpointManifest | None, str]:
    try:
        return read_manifest(folder), ""
    except UnreachableError:  # says nothing of the checkpoint: an earlier one is no answer
        raise
    except ValueError as error:
        return None, str(error)


def _damage_of_all(folder: Place, manifest: CheckpointManifest, world: Axis) -> list[str]:
    """What is wrong with the files; one that another rank sees gets a second look, since it may be seen late here."""
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))[world.rank :: world.size]
    found = on_all_ranks(world, lambda: damage(folder, manifest.files, names), ValueError)
    mine, wrong = found[world.rank], {name: line for of_rank in found for name, line in of_rank.items()}
    if wrong and world.size > 1:
        present = [name for name in wrong if (folder / name).exists()]
        anywhere = {name for of_rank in gather_objects(present, world) for name in of_rank}
        look = [name for name in mine if name in anywhere]
        found = on_all_ranks(world, lambda: damage(folder, manifest.files, look, _SECONDS), ValueError)
        again = {name: line for of_rank in found for name, line in of_rank.items()}
        wrong = {name: line for name, line in wrong.items() if name not in anywhere} | again
    return list(wrong.values())
