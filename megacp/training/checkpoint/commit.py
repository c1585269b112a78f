"""Whole checkpoints: written by each rank alone, committed by all together, and the newest whole
one loaded.

A checkpoint appears by one rename after all ranks have written. Only the constructor of
`PendingCheckpoint` and its `commit` talk to other ranks, on the caller's thread: files may be
written while training goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megacp.distributed.collectives import all_reduce, gather_to_first
from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.boxes import TensorBox
from megacp.storage.files import StrPath, place_folder
from megacp.storage.place import Place, place_of, read_content, write_content
from megacp.storage.url import UnreachableError, Url
from megacp.storage.wording import for_terminal, listed
from megacp.training.checkpoint.directory import (
    CONFIG_FILE,
    MANIFEST_FILE,
    CheckpointManifest,
    FileRecord,
    committed,
    damage,
    is_step_name,
    latest_of,
    point_and_prune,
    read_manifest,
    step_folders,
    temporary,
    to_json,
)
from megacp.training.checkpoint.outcome import on_all_ranks, on_rank_0, reason_of, sharers
from megacp.training.checkpoint.storage import (
    INDEX_FILE,
    Payload,
    Stored,
    index_of,
    rank_file,
    write_boxes,
)

_log = logging.getLogger(__name__)
_NAMED = 20
"""Tensors or files that a message names."""
_REMOVED = "was removed while it was read, as --keep-last of a running job does: start again, from the newest one"


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank with the reasons of the ranks that
    failed.
    """


@dataclass(frozen=True)
class Contents:
    """What a checkpoint says besides its tensors; that of rank 0 counts."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Must be JSON."""
    config_yaml: str = ""
    grid: Mapping[str, int] = field(default_factory=dict)


class PendingCheckpoint:
    """A checkpoint between its begin, which is this constructor, and `commit`; both are collective
    over `world`.

    `boxes` of all ranks together hold each element of each tensor once (`boxes.boxes_to_save`).
    `background` copies them and writes on a thread; else `commit` writes. Saving a step that exists
    makes `step_0000100.2`.
    """

    def __init__(
        self,
        root: StrPath | Url,
        boxes: Sequence[TensorBox],
        contents: Contents,
        world: Axis,
        background: bool = False,
    ) -> None:
        self._root, self._contents, self._world = place_of(root), contents, world
        self.step = contents.step
        self.notes: list[str] = []
        """What there is to say after `commit`: of old checkpoints that could not be removed."""
        self._outcome: Future[tuple[FileRecord, Stored]] = Future()
        with self._explained():
            self._folder: Place = on_rank_0(world, self._begin, SaveError)
        held = [*boxes]
        for number, box in enumerate(
            boxes if background else ()
        ):  # values of their own, of a GPU in pinned memory
            values, on_gpu = box.tensor.detach(), box.tensor.is_cuda
            own = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu).copy_(
                values, non_blocking=on_gpu
            )
            held[number] = dataclasses.replace(box, tensor=own)
        self._boxes: Sequence[TensorBox] = held
        if background and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if background:
            # a thread begins with the first GPU as its own, where every rank would then hold a
            # context
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            threading.Thread(
                target=self._write, args=(device,), name="megacp save", daemon=True
            ).start()
        self._background = background

    @property
    def writing(self) -> bool:
        """Whether this rank's thread is still at work."""
        return self._background and not self._outcome.done()

    @property
    def failed(self) -> bool:
        """Whether this rank's thread could not write: `commit` will raise."""
        return self._outcome.done() and self._outcome.exception() is not None

    def commit(self, keep_last: int = 0) -> Place:
        """Wait for this rank's files, then commit those of all ranks; the checkpoint's directory.

        `keep_last` > 0 removes older checkpoints beyond that many. Raises SaveError on every rank
        when anything failed on any; committed checkpoints are untouched then.
        """
        try:
            with self._explained():
                if not self._background:
                    self._write()
                on_all_ranks(
                    self._world,
                    lambda: self._outcome.exception() and self._outcome.result(),
                    SaveError,
                )
                of_ranks = gather_to_first(self._outcome.result(), self._world)
                final: Place = on_rank_0(
                    self._world, lambda: self._complete(of_ranks or []), SaveError
                )
        except SaveError:
            if self._world.rank == 0:
                with contextlib.suppress(
                    OSError, ValueError
                ):  # without a manifest it is no checkpoint
                    shutil.rmtree(self._folder) if isinstance(
                        self._folder, Path
                    ) else self._folder.remove_below()
            raise
        self.notes = on_rank_0(self._world, lambda: point_and_prune(final, keep_last), SaveError)
        return final

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except SaveError as why:
            raise SaveError(
                f"checkpoint of step {self.step} in {self._root} was not written: {why}"
            ) from why

    def _begin(self) -> Place:
        """Make the folder; rank 0 only."""
        to_json(self._manifest(0, {}))  # refuses an `extra` that is no JSON
        if isinstance(self._root, Url):
            return (
                self._free_name()
            )  # nothing is renamed there: only the manifest makes it a checkpoint
        folder = temporary(self._root / f"step_{self.step:07d}")
        folder.mkdir(parents=True)
        return folder

    def _write(self, device: int | None = None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            self._outcome.set_result(write_boxes(self._folder, self._world.rank, self._boxes))
        except Exception as error:  # `commit` tells it to all ranks
            self._outcome.set_exception(error)
        self._boxes = ()

    def _complete(self, of_ranks: list[tuple[FileRecord, Stored]]) -> Place:
        """Add index, config and manifest to what all ranks have written, and rename a local folder;
        rank 0 only.
        """
        records = {rank_file(rank): record for rank, (record, _) in enumerate(of_ranks)}
        index = index_of([stored for _, stored in of_ranks]).to_json()
        for name, content in (
            (INDEX_FILE, index),
            (CONFIG_FILE, self._contents.config_yaml.encode()),
        ):
            write_content(self._folder / name, content)
            records[name] = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        serial = (
            max((read_manifest(folder).serial for folder in committed(self._root)), default=0) + 1
        )
        write_content(
            self._folder / MANIFEST_FILE, to_json(self._manifest(serial, records)).encode()
        )
        if isinstance(self._folder, Url):
            return self._folder
        final = self._free_name()
        place_folder(self._folder, str(final))
        return final

    def _manifest(self, serial: int, files: Mapping[str, FileRecord]) -> CheckpointManifest:
        what = self._contents
        return CheckpointManifest(what.step, serial, self._world.size, what.grid, files, what.extra)

    def _free_name(self) -> Place:
        """The first name for this step that nothing has, not even what a crash has left."""
        base = f"step_{self.step:07d}"
        names = itertools.chain([base], (f"{base}.{attempt}" for attempt in itertools.count(2)))
        return next(self._root / name for name in names if not (self._root / name).exists())


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint, ready to be read; the same one on every rank."""

    path: Place
    manifest: CheckpointManifest
    passed_over: tuple[str, ...]
    """What was wrong with newer checkpoints that were not taken, one line per file; empty when the
    newest is whole.
    """
    config_yaml: str
    """The resolved config it was saved with."""
    world: Axis

    @property
    def step(self) -> int:
        """The training step after which it was saved."""
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        """The small JSON state it was saved with."""
        return dict(self.manifest.extra)

    def payload(self) -> Payload:
        """The tensors of the checkpoint, opened for reading. Raises like `Payload`."""
        return Payload(self.path, self.manifest.files)

    def read(self, boxes: Sequence[TensorBox]) -> None:
        """Fill the tensors of `boxes` (`boxes.boxes_to_load`), whatever grid wrote them. Collective
        over `world`.

        Raises ValueError on every rank, before anything is read. It names tensors that are missing,
        have another shape or dtype, or are in the checkpoint but on no rank. A kind that no rank
        asks for may be left out.
        """
        opened: list[Payload] = []

        def check() -> None:
            with self.reading():
                opened.append(self.payload())
            if problems := opened[0].problems(boxes):
                raise ValueError(
                    f"checkpoint {self.path} does not fit this run: "
                    f"{listed(problems, _NAMED, '; ')}"
                )

        def fill() -> None:
            with self.reading():
                opened[0].read(boxes)

        on_all_ranks(self.world, check, ValueError)
        self._refuse_unused(sorted(opened[0].tensors), boxes)
        on_all_ranks(self.world, fill, ValueError)

    def _refuse_unused(self, stored: list[str], boxes: Sequence[TensorBox]) -> None:
        """Raise when the run asks for a kind of tensor but no rank asks for some tensor of that
        kind.
        """
        asked = {box.name for box in boxes}
        device = boxes[0].tensor.device if boxes else "cpu"
        marks = torch.tensor([name in asked for name in stored], dtype=torch.int32, device=device)
        found = all_reduce(marks, self.world, "max").tolist()
        wanted = {_kind(name) for name, mark in zip(stored, found, strict=True) if mark}
        unused = [
            name
            for name, mark in zip(stored, found, strict=True)
            if not mark and _kind(name) in wanted
        ]
        if unused:
            lines = [f"{name} is in the checkpoint but not in this model" for name in unused]
            raise ValueError(
                f"checkpoint {self.path} does not fit this run: {listed(lines, _NAMED, '; ')}"
            )

    def whole_tensors(self, kind: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of a kind (`optimizer.exp_avg`), whole, by global name in sorted order, one
        at a time; no other rank is needed.
        """
        with self.reading():
            payload = self.payload()
        for name in sorted(payload.tensors):
            if _kind(name) == kind:
                with self.reading():
                    tensor = payload.read_whole(name)
                yield name.removeprefix(f"{kind}."), tensor

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn what goes wrong inside, where only this rank reads the payload, into a ValueError
        with one reason.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            why = f"cannot be read: {reason_of(error)}" if self.path.is_dir() else _REMOVED
            raise ValueError(f"{self.path} {why}") from error


def _kind(name: str) -> str:
    """`model` or, for the optimizer, `optimizer.<state>`."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "optimizer" else first


def load_checkpoint(path: StrPath | Url, world: Axis, is_shared: bool = False) -> LoadedCheckpoint:
    """Choose and verify a checkpoint: `path` is a directory of checkpoints or one step directory.
    Collective.

    In a directory, `latest` is tried first, then the others from the newest on; what is passed over
    is logged and listed in the result. A step directory is taken or refused. Every file is hashed
    by one of the ranks, and on each machine unless all see one folder (`is_shared`). Raises
    ValueError on every rank that names the damaged files when nothing whole is left.
    """
    root = place_of(path)
    candidates: list[Place] = on_rank_0(world, lambda: _candidates(root), ValueError)
    if not candidates:
        raise ValueError(
            f"--load {root}: there is no committed checkpoint (no step_* folder with a "
            f"{MANIFEST_FILE})"
        )
    problems: list[str] = []
    for folder in candidates:
        manifest, config, wrong = on_rank_0(world, partial(_opened, folder), ValueError)
        if manifest is not None:
            # the largest first, dealt out in turn: each rank hashes its share
            names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
            sharing = (
                list(range(world.size))
                if is_shared
                else sharers([folder / name for name in names], world)
            )
            mine = names[sharing.index(world.rank) :: len(sharing)]
            found = on_all_ranks(world, lambda: damage(folder, manifest.files, mine), ValueError)  # noqa: B023
            wrong = [
                f"rank {rank}: {line}" for rank, of_rank in enumerate(found) for line in of_rank
            ]
            if not wrong:
                for line in problems if world.rank == 0 else []:
                    _log.warning(
                        "checkpoint passed over, %s is loaded instead: %s",
                        folder,
                        for_terminal(line),
                    )
                return LoadedCheckpoint(folder, manifest, tuple(problems), config, world)
        if not on_rank_0(world, folder.is_dir, ValueError):
            wrong = [f"{folder} {_REMOVED}"]
        problems += wrong
    raise ValueError(f"--load {root}: no checkpoint is whole: {listed(problems, _NAMED, '; ')}")


def peek(path: StrPath | Url) -> tuple[Place, CheckpointManifest, str] | None:
    """The first step directory that would be loaded, its manifest and its config; None where there
    is none.

    Only one rank reads it, and no tensors: `load_checkpoint` may yet pass over it.
    """
    for folder in _candidates(place_of(path)):
        manifest, config, _ = _opened(folder)
        if manifest is not None:
            return folder, manifest, config
    return None


def _candidates(root: Place) -> list[Place]:
    """What to try, in order. Damaged manifests come before older whole ones, so that they are
    reported.
    """
    if (root / MANIFEST_FILE).exists() or is_step_name(root.name):
        return [root] if root.is_dir() else []
    whole, damaged = step_folders(root)
    latest = root / (latest_of(root) or "")
    return sorted([*damaged, *whole], key=lambda folder: folder != latest)


def _opened(folder: Place) -> tuple[CheckpointManifest | None, str, list[str]]:
    """The manifest and the config; None and what is wrong when one of them is damaged."""
    try:
        manifest = read_manifest(folder)
        if wrong := damage(folder, manifest.files, [CONFIG_FILE]):
            return None, "", wrong
        return manifest, read_content(folder / CONFIG_FILE).decode(), []
    except UnreachableError:  # says nothing of the checkpoint: an earlier one is no answer
        raise
    except (OSError, ValueError) as error:
        return None, "", [str(error)]
