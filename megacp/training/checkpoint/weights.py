"""Initial weights in a format other than megacp's checkpoints. Each rank reads only its own part, a
few rows of a tensor at a time.

The boxes are the same as for a checkpoint, so a run starts with exactly the same values as from the
converted checkpoint.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.boxes import MODEL, TensorBox
from megacp.storage.files import sha256_of
from megacp.storage.place import Place
from megacp.training.checkpoint.outcome import on_all_ranks, sharers

BYTES_AT_ONCE = 64 << 20
"""Maximum number of bytes to read at a time, in whole rows, before selecting a rank's columns."""


class TensorRows(Protocol):
    """Tensors under megacp's global names, read by rows."""

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, on the CPU."""


class Weights(Protocol):
    """Initial weights of a run without a checkpoint, in any format that can be read by rows."""

    place: Path
    source: TensorRows
    tokenizer_sha256: str
    """Hash of the weights' tokenizer; empty if unknown."""
    fingerprint: str
    """Hash of names, shapes and config, equal on all ranks of a run."""
    files: Mapping[str, Path]
    """All files to read, by names that are equal on all ranks."""
    known_rows: Mapping[str, int]
    """Number of stored rows, for tensors that have more rows in the model. The other rows keep
    their initial values.
    """

    @property
    def image_rules(self) -> Mapping[str, Any] | None:
        """Rules that convert images to tokens, as in a manifest; None if unknown."""

    def image_misfits(self, where: str, image_rules: Mapping[str, Any]) -> list[str]:
        """Return how `image_rules` differ from the rules for which the weights were trained.

        `where` is the flag and path of the packs that were made with `image_rules`.
        """

    def keep(self, folder: Place) -> None:
        """Copy the files that an export needs (tokenizer, generation settings) to `folder`, the
        directory of the run's checkpoints.
        """


def require_one_model(files: Mapping[str, Path], world: Axis) -> None:
    """Raise ValueError on all ranks if their copies of `Weights.files` differ. Collective.

    Since ranks read different rows, the ranks that share a copy also share the work of hashing it
    completely. Nothing is hashed if all ranks have the same copy.
    """
    sharing = sharers(files.values(), world)
    host = socket.gethostname()
    if len(sharing) == world.size:
        return
    # distribute the files to the ranks that share this copy
    mine = sorted(files)[sharing.index(world.rank) :: len(sharing)]
    found = on_all_ranks(
        world,
        lambda: {name: (sha256_of(files[name])[1], files[name], host) for name in mine},
        ValueError,
    )
    for name in sorted(files):
        named = {}  # description of one copy, by hash
        for rank, of_rank in enumerate(found):
            if name in of_rank:
                digest, path, host = of_rank[name]
                named[digest] = f"{digest[:12]} in {path} on rank {rank} (host {host})"
        if len(named) > 1:
            raise ValueError(
                f"{name} is not the same on all machines (sha256): {', '.join(named.values())}"
            )


def bare_name(box: TensorBox) -> str:
    """Return the name of a box's tensor within the model."""
    return box.name.removeprefix(f"{MODEL}.")


@torch.no_grad()
def fill(box: TensorBox, source: TensorRows, known: int | None) -> None:
    """Fill a rank's box from `source`; rows starting at `known` keep their values.

    Whole rows of at most `BYTES_AT_ONCE` bytes in total are read at a time.
    """
    first = box.offsets[0]
    count = box.tensor.shape[0]
    if known is not None:
        count = max(0, min(count, known - first))
    columns = []  # ranges of this box in each dimension after the first
    for offset, size in zip(box.offsets[1:], box.tensor.shape[1:], strict=True):
        columns.append(slice(offset, offset + size))
    row_bytes = 8 * max(1, math.prod(box.global_shape[1:]))  # for the widest dtype
    step = max(1, BYTES_AT_ONCE // row_bytes)
    for begin in range(0, count, step):
        end = min(begin + step, count)
        rows = source.rows(bare_name(box), first + begin, first + end)  # [rows, all columns]
        box.tensor[begin:end].copy_(rows[(slice(None), *columns)])
