"""Whole checkpoints: each rank writes its file, all ranks commit together, and the newest complete
checkpoint is loaded.

A rename makes a checkpoint visible after all ranks have written their files. `PendingCheckpoint`
communicates only in its constructor and in `commit`, on the caller's thread. Files can therefore be
written while training continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
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
"""Maximum number of tensors or files in a message."""
_REMOVED = (
    "was removed while it was read (perhaps by a running job with --keep-last): try again with the "
    "newest checkpoint"
)


class SaveError(RuntimeError):
    """Error for a checkpoint that could not be written. Every rank raises it, with the reasons from
    all failed ranks.
    """


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint other than its tensors; only rank 0 writes them."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that can be written as JSON."""
    config_yaml: str = ""
    grid: Mapping[str, int] = field(default_factory=dict)


class PendingCheckpoint:
    """Checkpoint that has not been committed. Constructor and `commit` are collective over `world`.

    The `boxes` of all ranks together contain each element of each tensor once
    (`boxes.boxes_to_save`). With `background`, they are copied, and a thread writes the copies;
    otherwise, `commit` writes them. If the step has already been saved, the folder is named
    `step_0000100.2`.
    """

    def __init__(
        self,
        root: StrPath | Url,
        boxes: Sequence[TensorBox],
        contents: Contents,
        world: Axis,
        background: bool = False,
    ) -> None:
        self._root = place_of(root)
        self._contents = contents
        self._world = world
        self.step = contents.step
        self.notes: list[str] = []
        """Log lines from `commit` about old checkpoints that could not be removed."""
        self._outcome: Future[tuple[FileRecord, Stored]] = Future()
        # rank 0 creates the folder and sends its name, which all ranks need for their files
        with self._explained():
            self._folder: Place = on_rank_0(world, self._begin, SaveError)
        self._background = background
        self._boxes: Sequence[TensorBox] = [*boxes]
        if background:
            # training continues: the thread needs its own copies of the values
            self._boxes = [dataclasses.replace(box, tensor=_copied(box.tensor)) for box in boxes]
            device = None
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
                # A new thread uses GPU 0 by default, so every rank would create a context there.
                device = torch.cuda.current_device()
            threading.Thread(
                target=self._write, args=(device,), name="megacp save", daemon=True
            ).start()

    @property
    def writing(self) -> bool:
        """Whether this rank's thread is still writing."""
        return self._background and not self._outcome.done()

    @property
    def failed(self) -> bool:
        """Whether this rank's thread has failed, so that `commit` will raise an error."""
        return self._outcome.done() and self._outcome.exception() is not None

    def commit(self, keep_last: int = 0) -> Place:
        """Wait for this rank's file, commit the files of all ranks, and return the directory.

        If `keep_last` > 0, remove all but this number of newest checkpoints. If anything fails on
        any rank, raise SaveError on every rank; committed checkpoints then remain unchanged.
        """

        def wait() -> None:
            self._outcome.result()

        try:
            with self._explained():
                if not self._background:
                    self._write()
                # all files are complete before rank 0 writes the index and the manifest
                on_all_ranks(self._world, wait, SaveError)
                of_ranks = gather_to_first(self._outcome.result(), self._world)
                final: Place = on_rank_0(
                    self._world, lambda: self._complete(of_ranks or []), SaveError
                )
        except SaveError:
            if self._world.rank == 0:
                # If this fails too, the folder lacks a manifest and does not count as a checkpoint.
                with contextlib.suppress(OSError, ValueError):
                    if isinstance(self._folder, Path):
                        shutil.rmtree(self._folder)
                    else:
                        self._folder.remove_below()
            raise
        # the new checkpoint is committed, so failing to remove old ones only results in a note
        self.notes = on_rank_0(self._world, lambda: point_and_prune(final, keep_last), SaveError)
        return final

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the step and the directory to a SaveError."""
        try:
            yield
        except SaveError as why:
            raise SaveError(
                f"checkpoint of step {self.step} in {self._root} was not written: {why}"
            ) from why

    def _begin(self) -> Place:
        """Create the folder and return it. Only rank 0 calls this."""
        # fail now, not after writing gigabytes, if `extra` cannot be written as JSON
        to_json(self._manifest(0, {}))
        if isinstance(self._root, Url):
            # A store has no rename; a folder becomes a checkpoint when its manifest is written.
            return self._free_name()
        folder = temporary(self._root / f"step_{self.step:07d}")
        folder.mkdir(parents=True)
        return folder

    def _write(self, device: int | None = None) -> None:
        """Write this rank's file, and set the outcome."""
        try:
            if device is not None:
                torch.cuda.set_device(device)
            self._outcome.set_result(write_boxes(self._folder, self._world.rank, self._boxes))
        except Exception as error:  # `commit` raises it on all ranks
            self._outcome.set_exception(error)
        self._boxes = ()  # free the copies

    def _complete(self, of_ranks: list[tuple[FileRecord, Stored]]) -> Place:
        """Write index, config and manifest, rename a local folder, and return the final folder.

        Only rank 0 calls this.
        """
        records = {rank_file(rank): record for rank, (record, _) in enumerate(of_ranks)}
        index = index_of([stored for _, stored in of_ranks]).to_json()
        config = self._contents.config_yaml.encode()
        for name, content in ((INDEX_FILE, index), (CONFIG_FILE, config)):
            write_content(self._folder / name, content)
            records[name] = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        serials = [read_manifest(folder).serial for folder in committed(self._root)]
        serial = max(serials, default=0) + 1
        # the manifest is the last file: a folder without it is incomplete
        manifest = to_json(self._manifest(serial, records))
        write_content(self._folder / MANIFEST_FILE, manifest.encode())
        if isinstance(self._folder, Url):
            return self._folder
        final = self._free_name()
        place_folder(self._folder, str(final))
        return final

    def _manifest(self, serial: int, files: Mapping[str, FileRecord]) -> CheckpointManifest:
        what = self._contents
        return CheckpointManifest(what.step, serial, self._world.size, what.grid, files, what.extra)

    def _free_name(self) -> Place:
        """Return the first unused folder for this step. Leftovers from a crash count as used."""
        base = f"step_{self.step:07d}"
        name = base
        attempt = 1
        while (self._root / name).exists():
            attempt += 1
            name = f"{base}.{attempt}"
        return self._root / name


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in CPU memory. For a GPU tensor, the copy is asynchronous and pinned."""
    values = tensor.detach()
    on_gpu = tensor.is_cuda
    own = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
    return own.copy_(values, non_blocking=on_gpu)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Verified checkpoint, ready to be read; the same on every rank."""

    path: Place
    manifest: CheckpointManifest
    passed_over: tuple[str, ...]
    """Problems of skipped newer checkpoints, one line per file; empty if the newest checkpoint is
    complete.
    """
    config_yaml: str
    """Resolved config of the run that saved the checkpoint."""
    world: Axis

    @property
    def step(self) -> int:
        """Training step after which the checkpoint was saved."""
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        """JSON state saved with the checkpoint."""
        return dict(self.manifest.extra)

    def payload(self) -> Payload:
        """Return the checkpoint's tensors, opened for reading. Raise the errors of `Payload`."""
        return Payload(self.path, self.manifest.files)

    def read(self, boxes: Sequence[TensorBox]) -> None:
        """Load the tensors of `boxes` (`boxes.boxes_to_load`), saved on any grid. Collective.
        Before reading, raise ValueError on every rank if a tensor is missing, if its shape or dtype
        differs, or if the checkpoint has a tensor that no rank needs. The message lists these
        tensors. All ranks may omit a whole kind of tensors, such as optimizer state.
        """
        opened: list[Payload] = []  # a list, because `check` cannot return a value

        def check() -> None:
            with self.reading():
                opened.append(self.payload())
            problems = opened[0].problems(boxes)
            if problems:
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
        """Raise ValueError if the checkpoint has a tensor that no rank reads.

        Kinds of tensors that no rank reads at all are accepted.
        """
        asked = {box.name for box in boxes}
        device = boxes[0].tensor.device if boxes else "cpu"
        # [stored]: 1 if a rank reads the tensor
        marks = torch.tensor([name in asked for name in stored], dtype=torch.int32, device=device)
        found = all_reduce(marks, self.world, "max").tolist()
        read_by_some = {name for name, mark in zip(stored, found, strict=True) if mark}
        wanted_kinds = {_kind(name) for name in read_by_some}
        unused = []
        for name in stored:
            if name not in read_by_some and _kind(name) in wanted_kinds:
                unused.append(name)
        if unused:
            lines = [f"{name} is in the checkpoint but not in this model" for name in unused]
            raise ValueError(
                f"checkpoint {self.path} does not fit this run: {listed(lines, _NAMED, '; ')}"
            )

    def whole_tensors(self, kind: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole tensors of a kind, such as `optimizer.exp_avg`, sorted by global name.

        Only one tensor is in memory at a time, and no communication is needed.
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
        """Convert errors while reading this rank's payload to a ValueError with one reason."""
        try:
            yield
        except (OSError, ValueError) as error:
            # if the folder has disappeared, this explains the error better than its own message
            why = f"cannot be read: {reason_of(error)}" if self.path.is_dir() else _REMOVED
            raise ValueError(f"{self.path} {why}") from error


def _kind(name: str) -> str:
    """Return the kind of a tensor: `model` or, for optimizer state, `optimizer.<state>`."""
    # a name such as "model.decoder.weight" or "optimizer.exp_avg.decoder.weight"
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "optimizer" else first


def load_checkpoint(path: StrPath | Url, world: Axis, is_shared: bool = False) -> LoadedCheckpoint:
    """Choose and verify a checkpoint in `path`, and return it. Collective.

    `path` is a directory of checkpoints or one step directory. In a directory, `latest` is tried
    first, then the other checkpoints from newest to oldest. Skipped checkpoints are logged and
    listed in the result. Every file is hashed by one rank per machine or, if all ranks share the
    folder (`is_shared`), by only one rank. Raise ValueError on every rank, with the names of the
    damaged files, if no checkpoint is complete.
    """
    root = place_of(path)
    candidates: list[Place] = on_rank_0(world, lambda: _candidates(root), ValueError)
    if not candidates:
        raise ValueError(
            f"--load {root}: there is no committed checkpoint (no step_* folder with a "
            f"{MANIFEST_FILE}): check the path"
        )
    problems: list[str] = []
    # Every decision below is made on rank 0 or from gathered results, so it is the same everywhere.
    for folder in candidates:
        manifest, config, wrong = on_rank_0(world, partial(_opened, folder), ValueError)
        if manifest is not None:
            # sort by size and distribute round-robin, so that each rank hashes a similar amount
            names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
            if is_shared:
                sharing = list(range(world.size))
            else:
                sharing = sharers([folder / name for name in names], world)
            mine = names[sharing.index(world.rank) :: len(sharing)]
            found = on_all_ranks(world, lambda: damage(folder, manifest.files, mine), ValueError)  # noqa: B023
            wrong = []
            for rank, of_rank in enumerate(found):
                wrong += [f"rank {rank}: {line}" for line in of_rank]
            if not wrong:
                if world.rank == 0:
                    _log_skipped(problems, folder)
                return LoadedCheckpoint(folder, manifest, tuple(problems), config, world)
        # A removed folder looks damaged, so report the actual reason.
        if not on_rank_0(world, folder.is_dir, ValueError):
            wrong = [f"{folder} {_REMOVED}"]
        problems += wrong
    raise ValueError(f"--load {root}: no checkpoint is complete: {listed(problems, _NAMED, '; ')}")


def _log_skipped(problems: Sequence[str], folder: Place) -> None:
    """Log a warning for each problem of the skipped checkpoints, which are newer than `folder`."""
    for line in problems:
        _log.warning("skipped a checkpoint; loading %s instead: %s", folder, for_terminal(line))


def peek(path: StrPath | Url) -> tuple[Place, CheckpointManifest, str] | None:
    """Return the first step directory that would be loaded, its manifest and its config.

    Return None if there is none. No tensors are read, so `load_checkpoint` may still find this
    checkpoint damaged and skip it. A rank may call this function without the other ranks.
    """
    for folder in _candidates(place_of(path)):  # the same order as in `load_checkpoint`
        manifest, config, _ = _opened(folder)
        if manifest is not None:
            return folder, manifest, config
    return None


def _candidates(root: Place) -> list[Place]:
    """Return the step directories to try, in order.

    Directories with damaged manifests come early, so that they are reported.
    """
    if (root / MANIFEST_FILE).exists() or is_step_name(root.name):
        return [root] if root.is_dir() else []
    whole, damaged = step_folders(root)
    # sorting is stable: `latest` comes first, and the others keep their order
    latest = root / (latest_of(root) or "")
    return sorted([*damaged, *whole], key=lambda folder: folder != latest)


def _opened(folder: Place) -> tuple[CheckpointManifest | None, str, list[str]]:
    """Return the manifest, the config and the problems of a checkpoint.

    If there are problems, the manifest is None and the config is "".
    """
    try:
        manifest = read_manifest(folder)
        wrong = damage(folder, manifest.files, [CONFIG_FILE])
        if wrong:
            return None, "", wrong
        return manifest, read_content(folder / CONFIG_FILE).decode(), []
    except UnreachableError:  # this does not mean that an older checkpoint should be used
        raise
    except (OSError, ValueError) as error:
        return None, "", [str(error)]
