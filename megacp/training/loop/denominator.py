"""The denominator of a step's weighted loss: sum first, divide once.

The total loss weight of a step, across dp ranks and microbatches, is known before the first forward
pass. A microbatch's loss is its weighted sum divided by this total, and every later reduction is a
plain sum. With a mean of per-rank means, a token's influence would depend on its rank: if the last
3 of 8 tokens count, a gradient of 7.00 becomes 6.75 at cp 2, although the logged loss looks right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megacp.distributed.collectives import all_gather
from megacp.distributed.grid import ProcessGrid
from megacp.engine.rows.batch import PackedBatch

_FINGERPRINT_BITS = 48
"""Number of bits in a fingerprint; float64 represents such integers exactly."""


@dataclass(frozen=True)
class RankReport:
    """One rank's report before a step, or the combined reports of all ranks (sum or maximum)."""

    stop_reason: int = 0
    """Number in `stopping.REASONS`; 0 to continue."""
    flops: float = 0.0
    """Model FLOPs of the rank's packs, reported by one rank per replica."""
    peak_bytes: int = 0
    data_wait: float = 0.0
    """Seconds that the rank waited for its packs."""
    save_state: int = 0
    """State of the rank's background checkpoint files: `saving.DONE`, `WRITING` or `SAVE_FAILED`.
    """
    image_documents: int = 0
    """Documents with images in the rank's packs, reported by one rank per replica."""


_SUMMED = ("flops", "image_documents")


@dataclass(frozen=True)
class StepAgreement:
    """Values that all ranks have exchanged before a step's first forward pass."""

    weight: float
    """Sum of the loss weights in all rows of the step."""
    tokens: int
    """Number of tokens in the step, without padding."""
    report: RankReport
    """Combined reports: sums of FLOPs and documents with images, maxima of the other fields."""

    @property
    def denominator(self) -> float:
        """Divisor of every summed loss: the weight, or 1 if no token has a weight."""
        return self.weight or 1.0


def agree_on_step(
    batches: Sequence[PackedBatch],
    grid: ProcessGrid,
    report: RankReport | None = None,
    *,
    replica: int | None = None,
) -> StepAgreement:
    """Exchange loss weights and reports with one all-gather across all ranks, and return them.

    Raise ValueError on every rank if ranks of the same replica have read different packs. `replica`
    identifies the ranks that read the same packs (default: the dp rank).
    """
    bits = 1 << _FINGERPRINT_BITS
    fingerprint = 0
    for batch in batches:
        fingerprint = (fingerprint * 1_000_003 + batch.fingerprint()) % bits
    weights = sum(batch.weight_sum for batch in batches)
    tokens = sum(batch.real_tokens for batch in batches)
    # one row of numbers per rank, so that a single all-gather is enough
    own = dataclasses.astuple(report or RankReport())
    number = grid.dp.rank if replica is None else replica
    row = [number, fingerprint, weights, tokens, *own]
    # float64 represents the fingerprint and the counts exactly
    table = torch.tensor([row], dtype=torch.float64, device=grid.device)
    table = all_gather(table, grid.world).cpu()  # [1, 10] -> [world, 10]
    leaders: dict[float, int] = {}  # the first rank of each replica
    for rank, (number, fingerprint) in enumerate(table[:, :2].tolist()):
        leader = leaders.setdefault(number, rank)
        expected = float(table[leader, 1])
        if fingerprint != expected:
            raise ValueError(
                f"ranks {leader} and {rank} of replica {int(number)} read different packs "
                f"(fingerprints {int(expected):012x} and {int(fingerprint):012x}); check that "
                "--data-path is the same dataset on all machines"
            )
    first = list(leaders.values())  # count the packs of each replica once
    weight, total = table[first, 2:4].sum(0).tolist()
    reported: dict[str, Any] = {}
    for field, column in zip(dataclasses.fields(RankReport), table[:, 4:].T, strict=True):
        value = column.sum() if field.name in _SUMMED else column.max()
        kind = type(getattr(RankReport, field.name))  # type of the default: int or float
        reported[field.name] = kind(value.item())
    return StepAgreement(weight, int(total), RankReport(**reported))
