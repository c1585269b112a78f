"""Which packs made a step's gradient not finite, so that they can be looked at or left out.

Key property: asked only after a step was skipped, by all ranks together; a good step pays nothing. A loss belongs to
its microbatch, so its packs are named; a gradient that is not finite behind finite losses has been summed over ranks
before anybody sees it, so then all packs of the step are. Rejected: a check of each rank's gradients in every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megacp.batch import PackedBatch
from megacp.distributed.collectives import gather_objects
from megacp.distributed.grid import Axis

_MOST = 64


def suspects(batches: Sequence[PackedBatch], losses: Sequence[torch.Tensor], world: Axis) -> str:
    """One sentence with the ids of the packs, equal on all ranks. Collective over `world`.

    `losses` are this rank's, one a microbatch, or none where it holds no last stage.
    """
    pairs = zip(batches, losses, strict=False)
    bad = [batch.pack_ids for batch, loss in pairs if not math.isfinite(loss.item())]
    found = gather_objects((_ids(bad), _ids(batch.pack_ids for batch in batches)), world)
    ranks = [rank for rank, (of_rank, _) in enumerate(found) if of_rank]
    if ranks:
        packs = set().union(*(of_rank for of_rank, _ in found))
        return f"the loss of {_listed(packs)} was not finite, on rank {', '.join(map(str, ranks))}"
    packs = set().union(*(of_rank for _, of_rank in found))
    return f"all losses were finite, a gradient was not; the step had {_listed(packs)}"


def _ids(groups: Sequence[tuple[int, ...]]) -> set[int]:
    return {number for group in groups for number in group}


def _listed(packs: set[int]) -> str:
    shown = sorted(packs)[:_MOST]
    more = f" and {len(packs) - _MOST} more" if len(packs) > _MOST else ""
    return f"pack {shown[0]}" if len(packs) == 1 else f"packs {', '.join(map(str, shown))}{more}"
