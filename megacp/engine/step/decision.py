"""The decision on one step: whether its numbers are sound, and which packs are named."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from megacp.distributed.collectives import gather_objects
from megacp.distributed.grid import Axis
from megacp.storage.wording import listed


@dataclass(frozen=True)
class Decision:
    """What becomes of a step."""

    update: bool = True
    """Whether the optimizer may apply it."""
    finite: bool = True
    """False where the loss or the gradient norm is not."""
    findings: tuple[str, ...] = ()
    """What is not as it should be, in words."""
    end: str = ""
    """Why the run ends before this update; empty when it goes on."""


def finite_only(loss: float, grad_norm: float) -> Decision:
    """The decision without any history: an update needs a finite loss and a finite gradient."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return Decision()
    what = f"gradient norm {grad_norm}" if not math.isfinite(grad_norm) else f"loss {loss}"
    return Decision(update=False, finite=False, findings=(what,))


_MOST = 64


def suspects(
    packs: Sequence[tuple[int, ...]], losses: Sequence[torch.Tensor], finite: bool, world: Axis
) -> str:
    """A sentence about the packs of a step with findings, equal on all ranks. Collective over
    `world`.

    `packs` and `losses` are this rank's, by microbatch; no losses where it holds no last stage.
    `finite`: the whole step's loss and gradient are.
    """
    bad = [
        ids for ids, loss in zip(packs, losses, strict=False) if not math.isfinite(loss.item())
    ]  # this rank's
    found = gather_objects((_ids(bad), _ids(packs)), world)
    ranks = [rank for rank, (of_rank, _) in enumerate(found) if of_rank]
    if ranks:
        blamed = set().union(*(of_rank for of_rank, _ in found))
        return (
            f"the loss of {named_packs(blamed)} was not finite, on rank "
            f"{', '.join(map(str, ranks))}"
        )
    known = "" if finite else "all losses were finite, a gradient was not; "
    return f"{known}the step had {named_packs(set().union(*(of_rank for _, of_rank in found)))}"


def _ids(groups: Iterable[tuple[int, ...]]) -> set[int]:
    return {number for group in groups for number in group}


def named_packs(packs: Collection[int]) -> str:
    """`pack 3`, `packs 3, 5`, `packs ..., and 9 more`."""
    return f"pack{'s' if len(packs) != 1 else ''} {listed(sorted(packs), _MOST)}"
