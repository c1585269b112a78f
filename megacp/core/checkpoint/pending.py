"""A checkpoint being saved: begun by all ranks together, written by each alone, committed by all ranks together.

Only the constructor and `commit` talk to other ranks, and both run on the caller's thread. So files may be written on
another thread while training goes on, and no collective of the one meets one of the other. A checkpoint appears by one
rename after all ranks reported success; saving a step that exists makes `step_0000100.2`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megacp.core.checkpoint.agree import on_all_ranks, on_rank_0
from megacp.core.checkpoint.directory import CONFIG_FILE, committed, point_and_prune, temporary
from megacp.core.checkpoint.manifest import MANIFEST_FILE, CheckpointManifest, FileRecord, read_manifest, to_json
from megacp.core.checkpoint.names import TensorBox
from megacp.core.checkpoint.storage import PayloadError, PayloadWriter
from megacp.core.distributed.collectives import gather_to_first
from megacp.core.distributed.grid import Axis
from megacp.core.storage.files import place_folder, seen
from megacp.core.storage.place import Place, size_of, write_content
from megacp.core.storage.url import Url

_BYTES_PER_BOX, _MARGIN = 1024, 1 << 20
"""What a box takes in header and index besides its values, and the smallest files; the disk must not be full after."""
_ALIGNED, _BLOCK = 64, 1 << 30
"""Bytes at multiples of which the values of a box begin in the block of copies."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank with the reasons of the ranks that failed."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint says besides its tensors; that of rank 0 counts."""

    step: int
    extra: Mapping[str, Any]
    """Must be JSON."""
    config_yaml: str
    grid: Mapping[str, int] = field(default_factory=dict)


class PendingCheckpoint:
    """A checkpoint between its begin, which is this constructor, and `commit`; both are collective over `world`.

    `boxes` of all ranks together hold each element of each tensor once (`names.boxes_to_save`). `background` copies
    them and writes on a thread; else `commit` writes. The constructor raises SaveError on every rank, before anything
    is written, when the file system of `root` has too little space.
    """

    def __init__(
        self, root: Place, boxes: Sequence[TensorBox], contents: Contents, world: Axis, *, background: bool = False
    ) -> None:
        self._root, self._contents, self._world = root, contents, world
        self._error: Exception | None = None
        self._records: dict[str, FileRecord] = {}
        self._thread: threading.Thread | None = None
        self.notes: list[str] = []
        """What there is to say after `commit`: of old checkpoints that could not be removed."""
        sizes = gather_to_first(sum(b.tensor.nbytes + _BYTES_PER_BOX for b in boxes), world)
        try:
            self._folder: Place = on_rank_0(world, lambda: self._begin(sum(sizes or [])), SaveError)
        except SaveError as failure:
            raise self._failed(failure) from failure
        try:
            values: list[TensorBox] = []  # not a result of on_all_ranks, which would send it to the others
            on_all_ranks(world, lambda: values.extend(_copied(boxes) if background else boxes), SaveError)
            self._payload = PayloadWriter(values, world)
        except (SaveError, PayloadError) as failure:
            self._clean()
            raise self._failed(failure) from failure
        if background:
            # a thread begins with the first GPU as its own, where every rank would then hold a context
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = threading.Thread(target=self._write_quietly, args=(device,), name="megacp save", daemon=True)
            self._thread.start()

    @property
    def step(self) -> int:
        """The training step after which it is saved."""
        return self._contents.step

    @property
    def writing(self) -> bool:
        """Whether this rank's thread is still at work."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank's thread could not write: `commit` will raise."""
        return not self.writing and self._error is not None

    def commit(self, keep_last: int = 0) -> Place:
        """Wait for this rank's files, then commit those of all ranks; the checkpoint's directory.

        `keep_last` > 0 removes older checkpoints beyond that many. Raises SaveError on every rank when anything failed
        on any; committed checkpoints are untouched then.
        """
        try:
            on_all_ranks(self._world, self._written, SaveError)
            records = gather_to_first(self._records, self._world)
            final: Place = on_rank_0(self._world, lambda: self._commit(records), SaveError)
        except SaveError as failure:
            self._clean()
            raise self._failed(failure) from failure
        self.notes = on_rank_0(self._world, lambda: point_and_prune(final, keep_last), SaveError)
        return final

    def _begin(self, needed: int) -> Place:
        """Refuse before anything is written, then make the folder; rank 0 only."""
        to_json(self._manifest(0, {}))  # refuses an `extra` that is no JSON
        if isinstance(self._root, Url):
            return self._free_name()  # nothing is renamed there: the manifest alone makes it a checkpoint
        self._root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._root).free
        if free < needed + _MARGIN:
            raise ValueError(
                f"it needs about {(needed + _MARGIN) / 2**20:,.1f} MiB, the file system has {free / 2**20:,.1f} MiB "
                "free: make room, or keep fewer checkpoints by --keep-last"
            )
        folder = temporary(self._root, f"step_{self.step:07d}")
        folder.mkdir()
        return folder

    def _write_quietly(self, device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            self._records = self._payload.write(self._folder)
        except Exception as error:  # the step loop asks for it
            self._error = error

    def _written(self) -> None:
        """This rank's files are on disk; raises what kept them from it."""
        if self._thread is None:
            self._records = self._payload.write(self._folder)
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _commit(self, of_ranks: list[dict[str, FileRecord]] | None) -> Place:
        """Complete the written folder with config and manifest, and rename a local one; rank 0 only."""
        assert of_ranks is not None
        self._see_all(of_ranks)
        files = {name: record for of_rank in of_ranks for name, record in of_rank.items()}
        config = self._contents.config_yaml.encode()
        write_content(self._folder / CONFIG_FILE, config)
        files[CONFIG_FILE] = FileRecord(len(config), hashlib.sha256(config).hexdigest())
        serial = max((read_manifest(folder).serial for folder in committed(self._root)), default=0) + 1
        write_content(self._folder / MANIFEST_FILE, to_json(self._manifest(serial, files)).encode())
        if isinstance(self._folder, Url):
            return self._folder
        final = self._free_name()
        assert isinstance(final, Path), "both lie below the root"
        place_folder(self._folder, final)
        return final

    def _manifest(self, serial: int, files: Mapping[str, FileRecord]) -> CheckpointManifest:
        what = self._contents
        return CheckpointManifest(what.step, serial, self._world.size, what.grid, files, what.extra)

    def _free_name(self) -> Place:
        """The first name for this step that nothing has, not even what a crash has left."""
        base = f"step_{self.step:07d}"
        attempt, name = 1, base
        while (self._root / name).exists():
            attempt += 1
            name = f"{base}.{attempt}"
        return self._root / name

    def _see_all(self, of_ranks: list[dict[str, FileRecord]]) -> None:
        """Raise SaveError naming the first rank and file that is not where rank 0 commits: its machine has another
        directory under this name.
        """
        for rank, name, record in [(rank, *item) for rank, files in enumerate(of_ranks) for item in files.items()]:
            path, size = self._folder / name, -1
            with contextlib.suppress(OSError):
                size = seen(partial(size_of, path))
            if size != record.size:
                what = f"{size} bytes of {name}, rank {rank} wrote {record.size}" if size >= 0 else f"no {name}"
                raise SaveError(f"rank 0 sees {what} of rank {rank}: is {path} the same place for all machines?")

    def _failed(self, failure: Exception) -> SaveError:
        return SaveError(f"checkpoint of step {self.step} in {self._root} was not written: {failure}")

    def _clean(self) -> None:
        if self._world.rank != 0:
            return
        if isinstance(self._folder, Path):
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        with contextlib.suppress(ValueError):  # the store is not reached; without a manifest it is no checkpoint
            self._folder.remove_below()


def _copied(boxes: Sequence[TensorBox]) -> list[TensorBox]:
    """The boxes with values of their own on the CPU; those of a GPU in pinned blocks of at most 1 GiB or one box.

    One block for all would take up to twice their bytes: pinned memory comes in powers of two.
    """
    on_gpu = any(box.tensor.is_cuda for box in boxes)
    starts, filled = list[int](), list[int]()  # by box: its first byte in its block; by block: its bytes
    blocks = list[int]()
    for box in boxes:
        size = -(-box.tensor.nbytes // _ALIGNED) * _ALIGNED
        if not filled or filled[-1] + size > _BLOCK:
            filled.append(0)
        starts.append(filled[-1])
        blocks.append(len(filled) - 1)
        filled[-1] += size
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for size in filled]
    copies = []
    for box, block, start in zip(boxes, blocks, starts, strict=True):
        tensor = box.tensor.detach()
        own = memory[block][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(dataclasses.replace(box, tensor=own.copy_(tensor, non_blocking=on_gpu)))
    if on_gpu:
        torch.cuda.synchronize()
    return copies
