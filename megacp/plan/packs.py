"""What the packs of a dataset ask of attention: areas of their masks, and how far documents spread over cp ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megacp.core.config.blend import named_folders
from megacp.core.config.run import RunConfig
from megacp.core.context_parallel.balance import mix_of, row_area
from megacp.core.data.collate import collate
from megacp.core.data.reader import PackedDataset
from megacp.core.models.costs import causal_area
from megacp.core.ops.mask import Metadata

SAMPLE = 64
"""Packs that are looked at."""
DRAWN_STEPS = 200
"""Steps that are drawn of them."""


@dataclass(frozen=True)
class PackSample:
    """A sample of packs; by default one causal document fills each."""

    areas: tuple[float, ...] = (1.0,)
    """Allowed (query, key) pairs of each pack over those of one causal document, mean of the layers with attention."""
    parts: tuple[tuple[float, ...], ...] = ((1.0,),)
    """Shares of each pack that its documents take."""

    @property
    def area(self) -> float:
        """The mean pack's."""
        return float(np.mean(self.areas))

    def needed(self, cp: int) -> float:
        """Share of the other ranks' keys that a rank's queries see: of a document that spreads over n of `cp` ranks the
        half of the keys on n - 1 others.
        """
        spread = [share * max(0.0, share * cp - 1) for of_pack in self.parts for share in of_pack]
        return sum(spread) / len(self.parts) / max(1, cp - 1) / 2

    def slowest(self, dp: int, microbatches: int, attention: float) -> float:
        """Work of the busiest of `dp` ranks over the mean one's, in the mean of many steps of drawn packs.

        `attention` is the share of a step that grows with the area.
        """
        if len(self.areas) == 1:
            return 1.0
        most, mean = _drawn_areas(self.areas, dp, microbatches)
        work = 1 - attention + attention * most / self.area
        return float((work / (1 - attention + attention * mean / self.area)).mean())


@functools.cache
def _drawn_areas(areas: tuple[float, ...], dp: int, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    """Areas `[steps]` of the busiest rank and of the mean one."""
    drawn = np.random.default_rng(0).choice(areas, (DRAWN_STEPS, dp, microbatches)).mean(-1)  # [steps, dp]
    return drawn.max(1), drawn.mean(1)


def sample_packs(config: RunConfig, documents: Sequence[int] = ()) -> PackSample:
    """A sample of what `--data-path` names first, else of packs that are filled with documents of stated lengths, else
    of one causal document each. ValueError where it cannot be read.
    """
    if config.data.data_path is not None:
        rows = _stored(config)
    elif documents:
        rows = _drawn(config.data.seq_length, documents)
    else:
        return PackSample()
    mix = mix_of(config.model)
    whole = sum(causal_area(config.data.seq_length, reach.window) * layers for reach, layers in mix.items())
    areas, parts = [], []
    for metadata, lengths in rows:
        areas.append(float(row_area(metadata, mix).sum() / max(1, whole)))
        parts.append(tuple((lengths / config.data.seq_length).tolist()))
    return PackSample(tuple(areas), tuple(parts))


def _stored(config: RunConfig) -> Iterator[tuple[Metadata, np.ndarray]]:
    """Masks of stored packs, and the lengths of their documents."""
    folder, *_ = named_folders(config.data.data_path)
    packs = PackedDataset(folder)
    for number in np.random.default_rng(0).permutation(len(packs))[:SAMPLE].tolist():
        row = collate([packs.pack(number)], config.data.attention_mask, config.data.image_attention)
        yield Metadata.of_row(row.leave, row.span), np.bincount(row.document[row.leave > 0])


def _drawn(tokens: int, documents: Sequence[int]) -> Iterator[tuple[Metadata, np.ndarray]]:
    """Packs of so many tokens, filled with documents drawn from those lengths; the last one is cut off."""
    rng = np.random.default_rng(0)
    for _ in range(SAMPLE):
        drawn = rng.choice(documents, -(-tokens // min(documents)))
        lengths = np.diff(np.minimum(np.cumsum(drawn), tokens), prepend=0)
        lengths = lengths[lengths > 0]
        leave = np.repeat(np.cumsum(lengths), lengths)
        yield Metadata.of_row(leave, np.zeros_like(leave)), lengths
