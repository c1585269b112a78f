"""What the packs of a dataset ask of attention: areas of their masks, and how layouts deal them
over cp ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megacp.attention.context_parallel.balance import ALIKE, Mix, row_area
from megacp.attention.context_parallel.layout import BALANCED, LAYOUTS
from megacp.attention.ops.mask import Metadata, tile_table
from megacp.attention.ops.once import once
from megacp.engine.checks import packs_in_a_row
from megacp.engine.config.blend import named_folders
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.engine.layers.attention import heads_group, transport_of
from megacp.engine.models.costs import causal_area
from megacp.engine.rows.mix import mix_of
from megacp.training.data.collate import collate
from megacp.training.data.reader import PackedDataset

SAMPLE, SAMPLE_TOKENS = 64, 2**22
"""Packs that are looked at, and their tokens: long ones are fewer."""
DEALT_TOKENS = 2**18
"""Tokens of the first of them, which are dealt over ranks."""
ASKED = 16
"""Ranks whose keys are counted, of many."""
DRAWN_STEPS, DRAWN_PACKS = 200, 2**22
"""Steps that are drawn of them, and their packs at the most."""
WHOLE_ROW = Metadata.of_documents(np.zeros(4096, np.int64))
"""One document; ranks share a longer one alike."""


@dataclass(frozen=True, eq=False)
class PackSample:
    """A sample of packs; by default one causal document fills each."""

    areas: tuple[float, ...] = (1.0,)
    """Allowed (query, key) pairs of each pack over those of one causal document, mean of the layers
    with attention.
    """
    rows: tuple[Metadata, ...] = (WHOLE_ROW,)
    """Their masks."""
    mix: Mix = field(default_factory=lambda: ALIKE)
    packs: int = 1
    """How many packs stand in a row, where they are joined."""

    @functools.cached_property
    def area(self) -> float:
        """The mean pack's."""
        return float(np.mean(self.areas))

    @functools.cached_property
    def causal(self) -> float:
        """How many of them are documents under a causal rule, without spans or branches, over
        all.
        """
        # tokens of a branch end before those that stand in front of them
        plain = [
            not row.span.any() and bool((np.diff(row.leave[row.leave > 0]) >= 0).all())
            for row in self.rows
        ]
        return float(np.mean(plain))

    @once
    def mean(self) -> PackSample:
        """All packs as the mean one."""
        return replace(self, areas=(self.area,))

    @once
    def joined(self, size: int) -> PackSample:
        """Rows of so many packs each."""
        if size == 1:
            return self
        starts = range(0, len(self.rows) - size + 1, size)
        areas = tuple(float(np.mean(self.areas[start : start + size])) for start in starts)
        return PackSample(
            areas, tuple(_row(self.rows[start : start + size]) for start in starts), self.mix, size
        )

    def shared(self, config: RunConfig) -> tuple[float, float]:
        """Area of the cp rank with the most over the mean one's, and the most keys of others that
        one's queries see, over its own tokens: in the mean of the rows.
        """
        p, packs = config.parallel, config.training.micro_batch_size
        ranks = max(1, p.context_parallel_size * min(self.packs, packs) // packs)
        only_needed = transport_of(config).keys == "needed"
        # `auto` finds an even layout too
        layout = BALANCED.name if p.chooses_layout else p.cp_layout
        return self._shared(layout, ranks, min(heads_group(config), ranks), only_needed)

    @once
    def _shared(self, name: str, ranks: int, group: int, exchanging: bool) -> tuple[float, float]:
        if ranks == group:
            return 1.0, 0.0
        layout = LAYOUTS[name]
        areas, keys = [], []
        for row in self.rows[: max(1, DEALT_TOKENS // len(self.rows[0]))]:
            missing = (0, layout.padded_length(row, ranks, 1) - len(row))
            filled = Metadata.of_row(np.pad(row.leave, missing), np.pad(row.span, missing))
            dealt = layout.deal(filled, ranks, self.mix)  # [ranks, t]
            areas.append(row_area(filled, self.mix)[dealt].reshape(ranks // group, -1).sum(1))
            asked = dealt[:: -(-ranks // ASKED)] if exchanging else ()
            keys.append(max((_others(filled, own) for own in asked), default=0.0))
        return float(np.max(areas, 1).sum() / np.mean(areas, 1).sum()), float(np.mean(keys))

    @once
    def largest(self, dp: int, microbatches: int) -> float:
        """Area of the packs of the rank with the most of `dp`, over the mean one's, in the mean of
        many drawn steps.
        """
        steps = max(1, min(DRAWN_STEPS, DRAWN_PACKS // (dp * microbatches)))
        drawn = (
            np.random.default_rng(0).choice(self.areas, (steps, dp, microbatches)).mean(-1)
        )  # [steps, dp]
        return float((drawn.max(1) / drawn.mean(1)).mean())


def _others(row: Metadata, own: np.ndarray) -> float:
    """Tokens that the tokens `own` see of the rest of a row, over theirs."""
    seen = tile_table(row.take(own), row).needed_keys  # [T]
    return float((seen.sum() - seen[own].sum()) / len(own))


def _row(packs: Sequence[Metadata]) -> Metadata:
    """One row of several."""
    first = np.cumsum([0, *map(len, packs)])
    leave = [
        np.where(one.leave > 0, one.leave + start, 0)
        for one, start in zip(packs, first, strict=False)
    ]
    span = [
        np.where(one.span != 0, one.span + (np.int64(number) << 32), 0)
        for number, one in enumerate(packs)
    ]
    return Metadata.of_row(np.concatenate(leave), np.concatenate(span))


def one_row(config: RunConfig, world_size: int, sample: PackSample) -> tuple[RunConfig, PackSample]:
    """Return a config and a sample in which one replica has the rows that all share under dynamic
    context parallelism.

    Without dynamic context parallelism a row has the packs of one microbatch, and the config is the
    same.
    """
    replicas = packs_in_a_row(config, world_size)
    packs = config.training.micro_batch_size * replicas
    if replicas > 1:
        cp = config.parallel.context_parallel_size * replicas
        sizes: dict[str, Value] = {"context_parallel_size": cp, "micro_batch_size": packs}
        config = with_values(config, {**sizes, "dynamic_context_parallel": False})
    return config, sample.joined(min(packs, len(sample.rows)))


def sample_of(config: RunConfig, rows: Iterable[Metadata]) -> PackSample:
    """The sample of packs with these masks."""
    mix = mix_of(config.model) or ALIKE  # layers with a state ask for no area
    whole = sum(
        causal_area(config.data.seq_length, reach.window) * layers for reach, layers in mix.items()
    )
    kept = tuple(rows)
    return PackSample(tuple(float(row_area(row, mix).sum() / whole) for row in kept), kept, mix)


def sample_packs(config: RunConfig, documents: Sequence[int] = ()) -> PackSample:
    """A sample of what `--data-path` names first, else of packs of documents with stated lengths,
    else of one causal document each. ValueError where it cannot be read.
    """
    count = min(SAMPLE, max(4, SAMPLE_TOKENS // max(1, config.data.seq_length)))
    if config.data.data_path is not None:
        return sample_of(config, _stored(config, count))
    return (
        sample_of(config, _stated(config.data.seq_length, documents, count))
        if documents
        else PackSample()
    )


def _stored(config: RunConfig, count: int) -> Iterator[Metadata]:
    folder, *_ = named_folders(config.data.data_path)
    packs = PackedDataset(folder)
    for number in np.random.default_rng(0).permutation(len(packs))[:count].tolist():
        row = collate([packs.pack(number)], config.data.attention_mask, config.data.image_attention)
        yield Metadata.of_row(row.leave, row.span)


def _stated(tokens: int, documents: Sequence[int], count: int) -> Iterator[Metadata]:
    """Packs of documents that are drawn from those lengths; the last one of a pack is cut off."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        ends = np.minimum(np.cumsum(rng.choice(documents, -(-tokens // min(documents)))), tokens)
        leave = np.repeat(ends, np.diff(ends, prepend=0))  # [tokens]
        yield Metadata.of_row(leave, np.zeros_like(leave))
