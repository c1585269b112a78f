"""The step's denominator and the weighted loss: sum first, divide once.

Key property: the number of loss tokens of the whole step, over dp and all microbatches, is known before the first
forward; the loss of a microbatch is its weighted sum over that number, and every reduction after it is a plain sum.
Rejected: a mean per rank averaged over ranks, which weighs tokens by where they happen to lie (with the last 3 of 8
tokens counted it turns a gradient of 7.00 into 6.75 at cp 2 while the logged loss looks right).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megacp.batch import PackedBatch
from megacp.distributed.collectives import all_gather
from megacp.distributed.grid import ProcessGrid

_FINGERPRINT_BITS = 48
"""Bits of the fingerprint that a float64 holds exactly."""


@dataclass(frozen=True)
class RankNews:
    """What one rank tells the others before a step, besides its packs."""

    stop: int = 0
    """Its wish to stop (`stopping.REASONS`), 0 for none."""
    flops: float = 0.0
    """Model FLOPs of its packs; told by one rank of each replica."""
    peak_bytes: int = 0
    data_wait: float = 0.0
    """Seconds it waited for its packs."""
    saving: int = 0
    """How far its files of a checkpoint in the background are (`saving.DONE`, `WRITING`, `FAILED`)."""
    image_documents: int = 0
    """Its documents with images; told by one rank of each replica."""


@dataclass(frozen=True)
class StepAgreement:
    """What all ranks know before the first forward of a step."""

    weight: float
    """Sum of the loss weights over all rows of the step."""
    tokens: int
    """Tokens of the step, padding left out."""
    news: RankNews
    """The highest wish to stop and state of saving, the sums of FLOPs and of documents with images, the fullest rank's
    memory, the longest wait.
    """

    @property
    def denominator(self) -> float:
        """What every summed loss is divided by: the weight, or 1 when nothing is counted."""
        return self.weight or 1.0


def agree(
    batches: Sequence[PackedBatch], grid: ProcessGrid, news: RankNews | None = None, *, replica: int | None = None
) -> StepAgreement:
    """One all-gather over the world: loss denominator, equality of the packs of ranks that read the same, news.

    `replica` names the ranks that read the same packs (default: those of one dp rank). Raises ValueError on every rank
    when the ranks of one replica read different packs.
    """
    fingerprint = 0
    for batch in batches:
        fingerprint = (fingerprint * 1_000_003 + batch.fingerprint()) % (1 << _FINGERPRINT_BITS)
    weights = sum(batch.weight_sum for batch in batches)
    tokens = sum(int((batch.document >= 0).sum()) for batch in batches)
    own = news or RankNews()
    row = [
        grid.dp.rank if replica is None else replica,
        fingerprint,
        weights,
        tokens,
        own.flops,
        own.stop,
        own.peak_bytes,
        own.data_wait,
        own.saving,
        own.image_documents,
    ]
    table = torch.tensor([row], dtype=torch.float64, device=grid.device)
    table = all_gather(table, grid.world).cpu()  # [1, 10] -> [world, 10]
    first = _first_rank_of_each_replica(table)
    weight, total, flops = (float(table[first, column].sum()) for column in (2, 3, 4))
    stop, peak, wait, saving = (float(table[:, column].max()) for column in (5, 6, 7, 8))
    documents = int(table[:, 9].sum())
    return StepAgreement(weight, int(total), RankNews(int(stop), flops, int(peak), wait, int(saving), documents))


def _first_rank_of_each_replica(table: torch.Tensor) -> list[int]:
    """The first rank of each replica; raises when its peers' fingerprints (column 1) differ."""
    first: dict[float, int] = {}
    for rank, (replica, fingerprint) in enumerate(table[:, :2].tolist()):
        leader = first.setdefault(replica, rank)
        expected = float(table[leader, 1])
        if fingerprint != expected:
            raise ValueError(
                f"ranks {leader} and {rank} of replica {int(replica)} read different packs (fingerprints "
                f"{int(expected):012x} and {int(fingerprint):012x}); do all machines see the same --data-path?"
            )
    return list(first.values())


def weighted_loss(losses: torch.Tensor, weights: torch.Tensor, denominator: float) -> torch.Tensor:
    """Scalar `sum(weights[t] * losses[t]) / denominator` over this rank's tokens: partial over dp and cp."""
    return (losses * weights.to(losses.dtype)).sum() / denominator
