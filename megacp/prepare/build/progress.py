"""The progress of a build on stderr: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

from megacp.core.data.manifest import DatasetManifest
from megacp.prepare.build.unit import UnitResult

_EVERY_SECONDS = 10.0
"""Between two lines when the stream is no terminal."""


@dataclass
class BuildProgress:
    """Documents, input bytes, tokens and pack places done; `total_bytes` is all of the input."""

    stream: TextIO
    total_bytes: int
    resumed_bytes: int = 0
    """Bytes that an earlier run has done: not part of the speed."""
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    places: int = 0
    image_bytes: int = 0
    """Stored of images and videos; those that lie in files of their own are no bytes of the input."""

    def __post_init__(self) -> None:
        self._terminal = self.stream.isatty()
        self._started = self._shown = time.monotonic()

    def add(self, result: UnitResult, size: int, seq_length: int) -> None:
        """One more unit, of `size` bytes of input, is done."""
        self.documents += result.documents
        self.bytes += size
        if result.entry is not None:
            self.tokens += result.entry.num_tokens
            self.places += result.entry.num_packs * seq_length
            self.image_bytes += sum(file.size for file in result.entry.files if file.name == "images.bin")
        now = time.monotonic()
        if self._terminal or now - self._shown >= _EVERY_SECONDS:
            self._shown = now
            print(f"\r\x1b[K{self.line()}" if self._terminal else self.line(), file=self.stream, flush=True)

    def finish(self) -> None:
        """Leave the line of a terminal."""
        if self._terminal and self.documents:
            print(file=self.stream)

    def line(self) -> str:
        """The progress in one line."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        done = (self.resumed_bytes + self.bytes) / max(1, self.total_bytes)
        left = (self.total_bytes - self.resumed_bytes - self.bytes) * seconds / max(1, self.bytes)
        return (
            f"{done:4.0%}  {self.documents / seconds:,.0f} docs/s  {rate(self.read_bytes, seconds)}  "
            f"{self.tokens / seconds:,.0f} tokens/s  packed {self.tokens / max(1, self.places):.2%}  "
            f"{timedelta(seconds=round(left))} left"
        )

    @property
    def read_bytes(self) -> int:
        """Bytes read: of the input, or of images where those are more (a tar's are part of it, and count once)."""
        return max(self.bytes, self.image_bytes)


def rate(size: int, seconds: float) -> str:
    """Bytes a second in words, with three digits that mean something."""
    speed = size / max(seconds, 1e-9)
    return f"{speed / 1e6:.1f} MB/s" if speed >= 1e6 else f"{speed / 1e3:.1f} kB/s"


@dataclass(frozen=True)
class BuildSummary:
    """What a build did."""

    manifest: DatasetManifest | None
    """None for a part of a build."""
    results: tuple[UnitResult, ...]
    """Of all units, or those of the part."""
    read_bytes: int
    """Of the input, or of images where those are more; by this run."""
    seconds: float
    units_resumed: int
    """Finished by an earlier run."""
    already_complete: bool
    """Nothing was done."""
    tokenizer_engine: str

    @property
    def documents(self) -> int:
        """Documents in the dataset."""
        return sum(result.documents for result in self.results)

    @property
    def unlearned(self) -> int:
        """Documents of which nothing is learned."""
        return sum(result.unlearned for result in self.results)

    @property
    def learned_tokens(self) -> int:
        """Tokens that some token before them predicts with a loss weight."""
        return sum(result.learned_tokens for result in self.results)

    @property
    def sentence(self) -> str:
        """What was made, how fast, and what was there before."""
        manifest, there = self.manifest, f"{self.units_resumed} of {len(self.results)} shards were there"
        if manifest is None:
            return f"{self.documents:,} documents ({there}); {self.seconds:.1f} s; `finish` makes the dataset"
        if self.already_complete:
            return f"already complete: {manifest.num_packs:,} packs; nothing to do"
        return (
            f"{self.documents:,} documents{f' ({self.unlearned:,} teach nothing)' if self.unlearned else ''}, "
            f"{manifest.num_tokens:,} tokens ({self.learned_tokens / max(1, manifest.num_tokens):.1%} learned) in "
            f"{manifest.num_packs:,} packs of {manifest.seq_length:,} ({manifest.packing_efficiency:.2%} full), "
            f"{manifest.num_rejected:,} rejected; {self.seconds:.1f} s, {rate(self.read_bytes, self.seconds)}, "
            f"tokenizer {manifest.tokenizer.kind} ({self.tokenizer_engine})"
            f"{f' ({there})' if self.units_resumed else ''}"
        )
