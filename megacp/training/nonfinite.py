"""What is not finite: which packs made a step's gradient so, and which weights are.

Key property: packs are asked for only after a finding, by all ranks together; a good step pays nothing. A loss belongs
to its microbatch, so its packs are named; a gradient that is not finite behind finite losses has been summed over ranks
before anybody sees it, so then all packs of the step are. Weights are looked at before they are saved and after they
are read. Rejected: a check of each rank's gradients in every step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from megacp.batch import PackedBatch
from megacp.checkpoint.names import TensorBox
from megacp.distributed.collectives import gather_objects
from megacp.distributed.grid import Axis

_MOST, _MOST_TENSORS = 64, 4


@dataclass(frozen=True)
class Suspects:
    """Packs that may be to blame for a step, and one sentence about them."""

    packs: frozenset[int]
    sentence: str


def suspects(batches: Sequence[PackedBatch], losses: Sequence[torch.Tensor], finite: bool, world: Axis) -> Suspects:
    """The packs of a step with findings, equal on all ranks. Collective over `world`.

    `losses` are this rank's, one a microbatch, or none where it holds no last stage. `finite`: the whole step's loss
    and gradient are.
    """
    pairs = zip(batches, losses, strict=False)
    bad = [batch.pack_ids for batch, loss in pairs if not math.isfinite(loss.item())]
    found = gather_objects((_ids(bad), _ids(batch.pack_ids for batch in batches)), world)
    ranks = [rank for rank, (of_rank, _) in enumerate(found) if of_rank]
    if ranks:
        packs = set().union(*(of_rank for of_rank, _ in found))
        told = f"the loss of {listed(packs)} was not finite, on rank {', '.join(map(str, ranks))}"
        return Suspects(frozenset(packs), told)
    packs = set().union(*(of_rank for _, of_rank in found))
    known = "" if finite else "all losses were finite, a gradient was not; "
    return Suspects(frozenset(packs), f"{known}the step had {listed(packs)}")


def _ids(groups: Iterable[tuple[int, ...]]) -> set[int]:
    return {number for group in groups for number in group}


def listed(packs: Collection[int]) -> str:
    """`pack 3`, `packs 3, 5`, `packs ... and 9 more`."""
    shown = sorted(packs)[:_MOST]
    more = f" and {len(packs) - _MOST} more" if len(packs) > _MOST else ""
    return f"pack {shown[0]}" if len(packs) == 1 else f"packs {', '.join(map(str, shown))}{more}"


def damaged_tensors(boxes: Sequence[TensorBox], world: Axis) -> str:
    """Which tensors hold a number that is not finite, in words equal on all ranks; empty when none does. Collective."""
    ends = [torch.stack(box.tensor.detach().aminmax()) for box in boxes if box.tensor.numel()]
    finite = torch.stack([end.isfinite().all() for end in ends]).tolist() if ends else []
    names = [box.name for box in boxes if box.tensor.numel()]
    bad = sorted({name for name, sound in zip(names, finite, strict=True) if not sound})
    found = gather_objects(bad, world)
    ranks = [str(rank) for rank, of_rank in enumerate(found) if of_rank]
    if not ranks:
        return ""
    every = sorted(set().union(*found))
    more = f" and {len(every) - _MOST_TENSORS} more" if len(every) > _MOST_TENSORS else ""
    return f"{', '.join(every[:_MOST_TENSORS])}{more} on rank {', '.join(ranks)}"
