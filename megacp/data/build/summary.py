"""What a build did, in numbers and in a sentence.

Key property: everything follows from the results of the units.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacp.data.build.parts import BuildPart
from megacp.data.build.progress import rate
from megacp.data.build.unit import UnitResult
from megacp.data.packed.manifest import DatasetManifest


@dataclass(frozen=True)
class BuildSummary:
    """What a build did."""

    manifest: DatasetManifest
    results: tuple[UnitResult, ...]
    """Of all units."""
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
    def learned_tokens(self) -> int:
        """Tokens that some token before them predicts with a loss weight."""
        return sum(result.learned_tokens for result in self.results)

    @property
    def unlearned(self) -> int:
        """Documents of which nothing is learned."""
        return sum(result.unlearned for result in self.results)

    @property
    def sentence(self) -> str:
        """What was made, how fast, and what was there before."""
        manifest = self.manifest
        unlearned = f" ({self.unlearned:,} teach nothing)" if self.unlearned else ""
        resumed = f" ({self.units_resumed} of {len(self.results)} shards were there)" if self.units_resumed else ""
        return (
            f"{self.documents:,} documents{unlearned}, {manifest.num_tokens:,} tokens "
            f"({self.learned_tokens / max(1, manifest.num_tokens):.1%} learned) in "
            f"{manifest.num_packs:,} packs of {manifest.seq_length:,} ({manifest.packing_efficiency:.2%} full), "
            f"{manifest.num_rejected:,} rejected; {self.seconds:.1f} s, {rate(self.read_bytes, self.seconds)}, "
            f"tokenizer {manifest.tokenizer.kind} ({self.tokenizer_engine}){resumed}"
        )


@dataclass(frozen=True)
class PartSummary:
    """What a build of one part did."""

    part: BuildPart
    results: tuple[UnitResult, ...]
    """Of its units."""
    units_resumed: int
    """Finished by an earlier run."""
    seconds: float

    @property
    def sentence(self) -> str:
        """What was made, and what was there before."""
        documents = sum(result.documents for result in self.results)
        return (
            f"part {self.part}, {len(self.results):,} units ({self.units_resumed:,} were there), "
            f"{documents:,} documents; {self.seconds:.1f} s. `finish` makes a dataset of all parts"
        )
