"""Sample the packs of a dataset to predict the work of attention.

The sample contains the mask area of each pack. Layouts divide these areas among cp ranks to predict
the imbalance of the ranks.
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

# Maximum numbers of sampled packs and of their tokens; a sample of long packs has fewer packs.
SAMPLE, SAMPLE_TOKENS = 64, 2**22
# Number of tokens in the first packs; only these are divided among the cp ranks.
DEALT_TOKENS = 2**18
# Approximate number of cp ranks whose needed keys are counted.
ASKED = 16
# Maximum numbers of simulated steps and of their packs.
DRAWN_STEPS, DRAWN_PACKS = 200, 2**22
# A row of one document. Longer documents divide in the same proportions.
WHOLE_ROW = Metadata.of_documents(np.zeros(4096, np.int64))


@dataclass(frozen=True, eq=False)
class PackSample:
    """A sample of packs; by default a single causal document fills each pack."""

    areas: tuple[float, ...] = (1.0,)
    """Allowed (query, key) pairs of each pack relative to one causal document.

    Each value is the mean over layers with attention.
    """
    rows: tuple[Metadata, ...] = (WHOLE_ROW,)
    """Masks of the packs."""
    mix: Mix = field(default_factory=lambda: ALIKE)
    packs: int = 1
    """Number of packs in each row."""

    @functools.cached_property
    def area(self) -> float:
        """Mean relative area of a pack."""
        return float(np.mean(self.areas))

    @functools.cached_property
    def causal(self) -> float:
        """Fraction of rows that contain only causal documents, without spans or branches."""
        plain = []
        for row in self.rows:
            ends = row.leave[row.leave > 0]
            # `leave` decreases only where a branch starts, because a branch ends before its prefix
            ascending = bool((np.diff(ends) >= 0).all())
            plain.append(not row.span.any() and ascending)
        return float(np.mean(plain))

    @once
    def mean(self) -> PackSample:
        """Return a sample in which each pack has the mean area."""
        return replace(self, areas=(self.area,))

    @once
    def joined(self, size: int) -> PackSample:
        """Return a sample whose rows have `size` packs each, without leftover packs."""
        if size == 1:
            return self
        areas, rows = [], []
        for start in range(0, len(self.rows) - size + 1, size):
            packs = slice(start, start + size)
            areas.append(float(np.mean(self.areas[packs])))
            rows.append(_row(self.rows[packs]))
        return PackSample(tuple(areas), tuple(rows), self.mix, size)

    def shared(self, config: RunConfig) -> tuple[float, float]:
        """Return the imbalance of the cp ranks, and the keys that they need from other ranks.

        The imbalance is the largest area of a rank divided by the mean area. The number of keys is
        the maximum over the ranks, relative to a rank's own tokens. Both are averages over rows.
        """
        p = config.parallel
        packs = config.training.micro_batch_size
        # a row with fewer packs than a microbatch is divided among fewer ranks
        ranks = max(1, p.context_parallel_size * min(self.packs, packs) // packs)
        only_needed = transport_of(config).keys == "needed"
        # `auto` also finds a balanced layout
        layout = BALANCED.name if p.chooses_layout else p.cp_layout
        return self._shared(layout, ranks, min(heads_group(config), ranks), only_needed)

    @once
    def _shared(self, name: str, ranks: int, group: int, exchanging: bool) -> tuple[float, float]:
        if ranks == group:
            return 1.0, 0.0
        layout = LAYOUTS[name]
        areas, keys = [], []
        count = max(1, DEALT_TOKENS // len(self.rows[0]))
        for row in self.rows[:count]:
            missing = (0, layout.padded_length(row, ranks, 1) - len(row))
            filled = Metadata.of_row(np.pad(row.leave, missing), np.pad(row.span, missing))
            dealt = layout.deal(filled, ranks, self.mix)  # [ranks, t]
            # ranks that exchange heads share the area of their tokens equally
            areas.append(row_area(filled, self.mix)[dealt].reshape(ranks // group, -1).sum(1))
            most_keys = 0.0
            if exchanging:
                step = -(-ranks // ASKED)
                most_keys = max(_others(filled, own) for own in dealt[::step])
            keys.append(most_keys)
        # areas: one [ranks / group] per row
        return float(np.max(areas, 1).sum() / np.mean(areas, 1).sum()), float(np.mean(keys))

    @once
    def largest(self, dp: int, microbatches: int) -> float:
        """Return the imbalance of `dp` ranks: the largest area of a rank divided by the mean.

        The result is an average over many simulated steps with random packs from the sample.
        """
        steps = max(1, min(DRAWN_STEPS, DRAWN_PACKS // (dp * microbatches)))
        rng = np.random.default_rng(0)
        drawn = rng.choice(self.areas, (steps, dp, microbatches)).mean(-1)  # [steps, dp]
        return float((drawn.max(1) / drawn.mean(1)).mean())


def _others(row: Metadata, own: np.ndarray) -> float:
    """Return the number of other tokens that `own` attend to, relative to the length of `own`."""
    seen = tile_table(row.take(own), row).needed_keys  # [T]
    return float((seen.sum() - seen[own].sum()) / len(own))


def _row(packs: Sequence[Metadata]) -> Metadata:
    """Join several packs into one row."""
    # `leave` counts from the start of a pack, so it moves by the pack's first token
    first = np.cumsum([0, *map(len, packs)])
    leave = [
        np.where(one.leave > 0, one.leave + start, 0)
        for one, start in zip(packs, first, strict=False)
    ]
    # numbers in the upper bits keep spans of different packs apart
    span = [
        np.where(one.span != 0, one.span + (np.int64(number) << 32), 0)
        for number, one in enumerate(packs)
    ]
    return Metadata.of_row(np.concatenate(leave), np.concatenate(span))


def one_row(config: RunConfig, world_size: int, sample: PackSample) -> tuple[RunConfig, PackSample]:
    """Return an equivalent configuration without dynamic context parallelism, and its sample.

    Under dynamic context parallelism, all replicas share a row; in the result, a single replica
    has it. Otherwise, a row has the packs of one microbatch, and the configuration is unchanged.
    """
    replicas = packs_in_a_row(config, world_size)
    packs = config.training.micro_batch_size * replicas
    if replicas > 1:
        cp = config.parallel.context_parallel_size * replicas
        sizes: dict[str, Value] = {"context_parallel_size": cp, "micro_batch_size": packs}
        config = with_values(config, {**sizes, "dynamic_context_parallel": False})
    return config, sample.joined(min(packs, len(sample.rows)))


def sample_of(config: RunConfig, rows: Iterable[Metadata]) -> PackSample:
    """Return the sample for packs with these masks."""
    # layers with a recurrent state have no attention area
    mix = mix_of(config.model) or ALIKE
    length = config.data.seq_length
    whole = sum(causal_area(length, reach.window) * layers for reach, layers in mix.items())
    kept = tuple(rows)
    areas = tuple(float(row_area(row, mix).sum() / whole) for row in kept)
    return PackSample(areas, kept, mix)


def sample_packs(config: RunConfig, documents: Sequence[int] = ()) -> PackSample:
    """Return a sample of packs from the first dataset of `--data-path`.

    Without `--data-path`, packs contain documents with random lengths from `documents`, or a single
    causal document each if `documents` is empty. Raise ValueError if the dataset cannot be
    read.
    """
    # at least 4 packs, even if they are longer than the token limit allows
    count = min(SAMPLE, max(4, SAMPLE_TOKENS // max(1, config.data.seq_length)))
    if config.data.data_path is not None:
        return sample_of(config, _stored(config, count))
    if documents:
        return sample_of(config, _stated(config.data.seq_length, documents, count))
    return PackSample()


def _stored(config: RunConfig, count: int) -> Iterator[Metadata]:
    folder, *_ = named_folders(config.data.data_path)
    packs = PackedDataset(folder)
    for number in np.random.default_rng(0).permutation(len(packs))[:count].tolist():
        row = collate([packs.pack(number)], config.data.attention_mask, config.data.image_attention)
        yield Metadata.of_row(row.leave, row.span)


def _stated(tokens: int, documents: Sequence[int], count: int) -> Iterator[Metadata]:
    """Yield packs of documents with random lengths; the last document of a pack is truncated."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        # enough documents to fill the pack if all have the minimum length
        lengths = rng.choice(documents, -(-tokens // min(documents)))
        ends = np.minimum(np.cumsum(lengths), tokens)
        leave = np.repeat(ends, np.diff(ends, prepend=0))  # [tokens]
        yield Metadata.of_row(leave, np.zeros_like(leave))
