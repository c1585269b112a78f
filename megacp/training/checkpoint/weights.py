"""Weights of another format that a run starts from: each rank reads its own part, some rows of a
tensor at a time.

The boxes are those that a checkpoint fills: a run starts with the bits that the converted
checkpoint would give it.
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
"""Most bytes of rows that are read before a rank's columns are taken from them."""


class TensorRows(Protocol):
    """Tensors by our global names, read by rows."""

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor, on the CPU."""


class Weights(Protocol):
    """What `train` starts from instead of a checkpoint: any format that can be read by rows."""

    place: Path
    source: TensorRows
    tokenizer_sha256: str
    """Hash of the tokenizer that they were trained with; empty where it is not known."""
    fingerprint: str
    """Hash of names, shapes and config: equal on all ranks of a run."""
    files: Mapping[str, Path]
    """All that is read, by names that are equal on all ranks."""
    known_rows: Mapping[str, int]
    """First rows of a tensor that are there, where not all are: the rest stays as it was
    initialised.
    """

    @property
    def image_rules(self) -> Mapping[str, Any] | None:
        """Rules by which images become tokens, as a manifest has them; None if they are not
        known.
        """

    def image_misfits(self, where: str, image_rules: Mapping[str, Any]) -> list[str]:
        """List how packs at `where`, made by `image_rules`, differ from what the weights were
        trained with.
        """

    def keep(self, folder: Place) -> None:
        """Put what an export will need (tokenizer, generation settings) beside the run's
        checkpoints.
        """


def require_one_model(files: Mapping[str, Path], world: Axis) -> None:
    """Raise ValueError on all ranks where the copies of `Weights.files` that they see differ.
    Collective over `world`.

    Ranks read different rows, so each copy is hashed as a whole, by the ranks that see it; a single
    one is not.
    """
    sharing, host = sharers(files.values(), world), socket.gethostname()
    if len(sharing) == world.size:
        return
    mine = sorted(files)[sharing.index(world.rank) :: len(sharing)]
    found = on_all_ranks(
        world,
        lambda: {name: (sha256_of(files[name])[1], files[name], host) for name in mine},
        ValueError,
    )
    for name in sorted(files):
        read = [(rank, *of_rank[name]) for rank, of_rank in enumerate(found) if name in of_rank]
        named = {
            digest: f"{digest[:12]} in {path} on rank {rank} (host {host})"
            for rank, digest, path, host in read
        }
        if len(named) > 1:
            raise ValueError(
                f"{name} is not the same on all machines, by sha256: {', '.join(named.values())}"
            )


def bare_name(box: TensorBox) -> str:
    """The name of a box's tensor in the model."""
    return box.name.removeprefix(f"{MODEL}.")


@torch.no_grad()
def fill(box: TensorBox, source: TensorRows, known: int | None) -> None:
    """Read a rank's box, as many whole rows at a time as `BYTES_AT_ONCE` holds; rows from `known`
    on stay.
    """
    first, count = box.offsets[0], box.tensor.shape[0]
    count = count if known is None else max(0, min(count, known - first))
    columns = tuple(
        slice(o, o + n) for o, n in zip(box.offsets[1:], box.tensor.shape[1:], strict=True)
    )
    step = max(1, BYTES_AT_ONCE // (8 * max(1, math.prod(box.global_shape[1:]))))
    for begin in range(0, count, step):
        end = min(begin + step, count)
        rows = source.rows(bare_name(box), first + begin, first + end)  # [rows, all columns]
        box.tensor[begin:end].copy_(rows[(slice(None), *columns)])
