"""The step's denominator of the weighted loss: sum first, divide once.

The number of loss tokens of the whole step, over dp and all microbatches, is known before the first
forward. The loss of a microbatch is its weighted sum over that number, and every reduction after it
is a plain sum. A mean per rank averaged over ranks would weigh tokens by where they happen to lie:
with the last 3 of 8 tokens counted, it turns a gradient of 7.00 into 6.75 at cp 2 while the logged
loss looks right.
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
"""Bits of the fingerprint that a float64 holds exactly."""


@dataclass(frozen=True)
class RankReport:
    """What one rank reports before a step, besides its packs; or the reports of all of them, summed
    or highest.
    """

    stop_reason: int = 0
    """A number of `stopping.REASONS`, 0 to go on."""
    flops: float = 0.0
    """Model FLOPs of its packs; reported by one rank of each replica."""
    peak_bytes: int = 0
    data_wait: float = 0.0
    """Seconds it waited for its packs."""
    save_state: int = 0
    """How far its files of a checkpoint in the background are (`saving.DONE`, `WRITING`,
    `SAVE_FAILED`).
    """
    image_documents: int = 0
    """Documents with images in its packs; reported by one rank of each replica."""


_SUMMED = ("flops", "image_documents")


@dataclass(frozen=True)
class StepAgreement:
    """What all ranks know before the first forward of a step."""

    weight: float
    """Sum of the loss weights over all rows of the step."""
    tokens: int
    """Tokens of the step, padding left out."""
    report: RankReport
    """The reports of all ranks: FLOPs and documents with images are summed, of all else the highest
    counts.
    """

    @property
    def denominator(self) -> float:
        """What every summed loss is divided by: the weight, or 1 when nothing is counted."""
        return self.weight or 1.0


def agree_on_step(
    batches: Sequence[PackedBatch],
    grid: ProcessGrid,
    report: RankReport | None = None,
    *,
    replica: int | None = None,
) -> StepAgreement:
    """One all-gather over the world: loss denominator, equality of the packs of ranks that read the
    same, reports.

    `replica` names the ranks that read the same packs (default: those of one dp rank). Raises
    ValueError on every rank when the ranks of one replica read different packs.
    """
    fingerprint = 0
    for batch in batches:
        fingerprint = (fingerprint * 1_000_003 + batch.fingerprint()) % (
            1 << _FINGERPRINT_BITS
        )  # exact in float64
    weights = sum(batch.weight_sum for batch in batches)
    tokens = sum(batch.real_tokens for batch in batches)
    own = dataclasses.astuple(report or RankReport())
    row = [grid.dp.rank if replica is None else replica, fingerprint, weights, tokens, *own]
    table = torch.tensor([row], dtype=torch.float64, device=grid.device)
    table = all_gather(table, grid.world).cpu()  # [1, 10] -> [world, 10]
    leaders: dict[float, int] = {}  # the first rank of each replica
    for rank, (number, fingerprint) in enumerate(table[:, :2].tolist()):
        leader = leaders.setdefault(number, rank)
        expected = float(table[leader, 1])
        if fingerprint != expected:
            raise ValueError(
                f"ranks {leader} and {rank} of replica {int(number)} read different packs "
                "(fingerprints "
                f"{int(expected):012x} and {int(fingerprint):012x}); do all machines see the same "
                "--data-path?"
            )
    first = list(leaders.values())
    weight, total = table[first, 2:4].sum(0).tolist()
    reported: dict[str, Any] = {}
    for field, column in zip(dataclasses.fields(RankReport), table[:, 4:].T, strict=True):
        value = column.sum() if field.name in _SUMMED else column.max()
        reported[field.name] = type(getattr(RankReport, field.name))(value.item())
    return StepAgreement(weight, int(total), RankReport(**reported))
