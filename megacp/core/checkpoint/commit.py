"""Loading whole checkpoints: the newest one whose files all have the size and sha256 that the manifest names.

All ranks agree on what they load. The directory must be on a file system, or in a store, that all ranks share.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megacp.core.checkpoint.agree import on_all_ranks, on_rank_0, reason_of
from megacp.core.checkpoint.directory import CONFIG_FILE, is_step_name, latest_of, step_folders
from megacp.core.checkpoint.manifest import MANIFEST_FILE, CheckpointManifest, damage, read_manifest
from megacp.core.checkpoint.names import TensorBox
from megacp.core.checkpoint.pending import Contents, PendingCheckpoint
from megacp.core.checkpoint.storage import INDEX_FILE, Payload
from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.grid import Axis
from megacp.core.storage.files import StrPath
from megacp.core.storage.place import Place, place_of, read_content
from megacp.core.storage.url import UnreachableError, Url
from megacp.core.storage.wording import listed

_log = logging.getLogger(__name__)
_NAMED = 20
"""Tensors or files that a message names."""


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
    """Write and commit one checkpoint in one call; returns its directory. See `PendingCheckpoint`."""
    contents = Contents(step, extra, config_yaml, grid or {})
    return PendingCheckpoint(place_of(directory), boxes, contents, world).commit(keep_last)


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
        return Payload(self.path, self.manifest.files)

    def read(self, boxes: Sequence[TensorBox]) -> None:
        """Fill the tensors of `boxes` (`names.boxes_to_load`), whatever grid wrote them. Collective over `world`.

        Raises ValueError on every rank, before anything is read. It names tensors that are missing, have another shape
        or dtype, or are in the checkpoint but on no rank. A kind that no rank asks for may be left out.
        """
        payload: list[Payload] = []

        def check() -> None:
            with self.reading():
                payload.append(self.payload())
            if problems := payload[0].problems(boxes):
                raise ValueError(f"checkpoint {self.path} does not fit this run: {listed(problems, _NAMED, '; ')}")

        def fill() -> None:
            with self.reading():
                payload[0].read(boxes)

        on_all_ranks(self.world, check, ValueError)
        self._refuse_unused(sorted(payload[0].tensors), boxes)
        on_all_ranks(self.world, fill, ValueError)

    def _refuse_unused(self, stored: list[str], boxes: Sequence[TensorBox]) -> None:
        """Raise when the run asks for a kind of tensor but no rank asks for some tensor of that kind."""
        asked = {box.name for box in boxes}
        device = boxes[0].tensor.device if boxes else "cpu"
        marks = torch.tensor([name in asked for name in stored], dtype=torch.int32, device=device)
        found = all_reduce(marks, self.world, "max").tolist()
        wanted = {_kind(name) for name, mark in zip(stored, found, strict=True) if mark}
        unused = [name for name, mark in zip(stored, found, strict=True) if not mark and _kind(name) in wanted]
        if unused:
            lines = [f"{name} is in the checkpoint but not in this model" for name in unused]
            raise ValueError(f"checkpoint {self.path} does not fit this run: {listed(lines, _NAMED, '; ')}")

    def whole_tensors(self, kind: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of a kind, whole, by global name in sorted order, one at a time; no other rank is needed."""
        with self.reading():
            payload = self.payload()
        for name in sorted(payload.tensors):
            if _kind(name) == kind:
                with self.reading():
                    tensor = payload.read_whole(name)
                yield name.removeprefix(f"{kind}."), tensor

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a read of the payload by this rank alone: what goes wrong becomes a ValueError with one reason."""
        try:
            yield
        except (OSError, ValueError) as error:
            if not self.path.is_dir():
                raise ValueError(f"{self.path} {_REMOVED}") from error
            raise ValueError(f"{self.path} cannot be read: {reason_of(error)}") from error


_REMOVED = "was removed while it was read, as --keep-last of a running job does: start again, from the newest one"


def _kind(name: str) -> str:
    """`model` or, for the optimizer, `optimizer.<state>`."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "optimizer" else first


def load_checkpoint(path: StrPath | Url, world: Axis) -> LoadedCheckpoint:
    """Choose and verify a checkpoint: `path` is a directory of checkpoints or one step directory. Collective.

    In a directory, `latest` is tried first, then the others from the newest on; what is passed over is logged and
    listed in the result. A step directory is taken or refused. Every file is hashed by one of the ranks. Raises
    ValueError on every rank that names the damaged files when nothing whole is left.
    """
    root = place_of(path)
    candidates: list[Place] = on_rank_0(world, lambda: _candidates(root), ValueError)
    if not candidates:
        raise ValueError(
            f"--load {root}: there is no committed checkpoint (no step_* directory with a {MANIFEST_FILE})"
        )
    problems: list[str] = []
    for folder in candidates:
        manifest, config, wrong = on_rank_0(world, lambda folder=folder: _opened(folder), ValueError)  # type: ignore[misc]
        if manifest is not None:
            # the largest first, dealt out in turn: each rank hashes its share
            names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
            mine = names[world.rank :: world.size]
            found = on_all_ranks(world, lambda: damage(folder, manifest.files, mine), ValueError)  # noqa: B023
            wrong = [line for of_rank in found for line in of_rank]
            if not wrong:
                for line in problems if world.rank == 0 else []:
                    _log.warning("checkpoint passed over, %s is loaded instead: %s", folder, line)
                return LoadedCheckpoint(folder, manifest, tuple(problems), config, world)
        if not on_rank_0(world, folder.is_dir, ValueError):
            wrong = [f"{folder} {_REMOVED}"]
        problems += wrong
    raise ValueError(f"--load {root}: no checkpoint is whole: {listed(problems, _NAMED, '; ')}")


def peek(path: StrPath | Url) -> tuple[Place, CheckpointManifest, str] | None:
    """The first step directory that would be loaded, its manifest and its config; None where there is none.

    One rank alone reads it, and no tensors: `load_checkpoint` may yet pass over it.
    """
    for folder in _candidates(place_of(path)):
        manifest, config, _ = _opened(folder)
        if manifest is not None:
            return folder, manifest, config
    return None


def _candidates(root: Place) -> list[Place]:
    """What to try, in order. Damaged manifests come before older whole ones, so that they are reported."""
    if (root / MANIFEST_FILE).exists() or is_step_name(root.name):
        return [root] if root.is_dir() else []
    whole, damaged = step_folders(root)
    others = [*damaged, *whole]
    latest = root / (latest_of(root) or "")
    return [latest, *(folder for folder in others if folder != latest)] if latest in others else others


def _opened(folder: Place) -> tuple[CheckpointManifest | None, str, list[str]]:
    """The manifest and the config; None and what is wrong when one of them is damaged."""
    try:
        manifest = read_manifest(folder)
        if missing := sorted({INDEX_FILE, CONFIG_FILE} - set(manifest.files)):
            return None, "", [f"{folder / MANIFEST_FILE} does not list {name}" for name in missing]
        if wrong := damage(folder, manifest.files, [CONFIG_FILE]):
            return None, "", wrong
        return manifest, read_content(folder / CONFIG_FILE).decode(), []
    except UnreachableError:  # says nothing of the checkpoint: an earlier one is no answer
        raise
    except (OSError, ValueError) as error:
        return None, "", [str(error)]
