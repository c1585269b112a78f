"""A checkpoint written and committed in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.boxes import TensorBox
from megacp.storage.files import StrPath
from megacp.storage.place import Place
from megacp.storage.url import Url
from megacp.training.checkpoint.commit import Contents, PendingCheckpoint


def save_checkpoint(
    root: StrPath | Url,
    step: int,
    boxes: Sequence[TensorBox],
    *,
    extra: Mapping[str, Any],
    config_yaml: str,
    world: Axis,
    keep_last: int = 0,
    grid: Mapping[str, int] | None = None,
) -> Place:
    """Write and commit a checkpoint; return the step's directory. Collective over `world`."""
    return PendingCheckpoint(
        root, boxes, Contents(step, extra, config_yaml, grid or {}), world
    ).commit(keep_last)
