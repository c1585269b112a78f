"""Saving and loading whole checkpoints: a directory counts once everything in it is on disk and named with hashes.

Key property: a checkpoint appears by one rename after all ranks reported success, and a failure on any rank is raised
on every rank with the earlier checkpoints untouched. A directory is never written to again: saving a step that exists
makes `step_0000100.2`. All ranks agree on what they load. Rejected: writing in place, where a full disk destroys the
good checkpoint together with the new one. The directory must be on a file system that all ranks share.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacp.checkpoint.directory import CONFIG_FILE, LATEST_FILE, is_step_name, step_folders
from megacp.checkpoint.manifest import MANIFEST_FILE, Manifest, damage, read_manifest
from megacp.checkpoint.names import TensorBox
from megacp.checkpoint.pending import Contents, PendingCheckpoint
from megacp.checkpoint.storage import INDEX_FILE, Payload
from megacp.checkpoint.together import together
from megacp.distributed.collectives import all_reduce, gather_objects
from megacp.distributed.grid import Axis

_log = logging.getLogger(__name__)


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
    contents = Contents(step, extra, config_yaml, grid or {})
    pending = PendingCheckpoint(Path(directory), boxes, contents, world)
    final = pending.commit(keep_last)
    for note in pending.notes if world.rank == 0 else []:
        _log.warning("%s", note)
    return final


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint, ready to be read; the same one on every rank."""

    path: Path
    manifest: Manifest
    passed_over: tuple[str, ...]
    """What was wrong with newer checkpoints that were not taken, one line per file; empty when the newest is whole."""
    world: Axis
    rejected: tuple[Path, ...] = ()
    """The directories of those."""

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

        together(self.world, check, ValueError)
        self._refuse_unused(list(payload[0].tensors), boxes)
        together(self.world, lambda: payload[0].read(boxes), ValueError)

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
    rejected: list[Path] = []
    for folder in candidates:
        manifest, wrong = _verify(folder, world)
        if manifest is not None and not wrong:
            for line in problems if world.rank == 0 else []:
                _log.warning("checkpoint passed over: %s", line)
            if problems and world.rank == 0:
                _log.warning("loading the earlier checkpoint %s (step %d) instead", folder, manifest.step)
            return LoadedCheckpoint(folder, manifest, tuple(problems), world, tuple(rejected))
        problems += wrong
        rejected.append(folder)
    raise ValueError(_listed(problems, f"--load {root}: no checkpoint is whole"))


def _candidates(root: Path) -> list[Path]:
    """What to try, in order. Damaged manifests come before older whole ones, so that they are reported."""
    if (root / MANIFEST_FILE).exists() or is_step_name(root.name):
        return [root] if root.is_dir() else []
    whole, damaged = step_folders(root)
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
