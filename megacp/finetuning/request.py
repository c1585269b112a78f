"""The request of a user to `megacp finetune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FinetuneRequest:
    """The command line of `megacp finetune`."""

    model: str
    data: tuple[str, ...]
    output: Path
    nproc: int | None = None
    verify: bool = True
    dry_run: bool = False
    words: tuple[str, ...] = ()
    """Flags of the three commands."""
