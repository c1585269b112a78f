"""The decision whether to apply a step, and the packs to report if there are problems with it."""

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
    """Decision on a training step."""

    update: bool = True
    """Whether to apply the optimizer update."""
    finite: bool = True
    """Whether loss and gradient norm are finite."""
    findings: tuple[str, ...] = ()
    """Descriptions of the step's problems."""
    end: str = ""
    """Reason to end the run before this update; empty if the run continues."""


def finite_only(loss: float, grad_norm: float) -> Decision:
    """Return a decision that does not depend on earlier steps.

    It allows the update if loss and gradient norm are finite.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return Decision()
    finding = f"loss {loss}"
    if not math.isfinite(grad_norm):
        finding = f"gradient norm {grad_norm}"
    return Decision(update=False, finite=False, findings=(finding,))


_MOST = 64  # maximum number of packs in a message


def suspects(
    packs: Sequence[tuple[int, ...]], losses: Sequence[torch.Tensor], finite: bool, world: Axis
) -> str:
    """Return a sentence about the packs of a step with findings, the same on all ranks.

    `packs` and `losses` are this rank's, per microbatch; only ranks of the last stage have losses.
    `finite` is whether the loss and the gradient of the whole step are finite. Collective over
    `world`.
    """
    # packs of this rank with a loss that is not finite
    bad = []
    for ids, loss in zip(packs, losses, strict=False):
        if not math.isfinite(loss.item()):
            bad.append(ids)
    found = gather_objects((_ids(bad), _ids(packs)), world)
    ranks = [rank for rank, (of_rank, _) in enumerate(found) if of_rank]
    if ranks:
        blamed = set().union(*(of_rank for of_rank, _ in found))
        on_ranks = ", ".join(map(str, ranks))
        return f"the loss of {named_packs(blamed)} was not finite, on rank {on_ranks}"
    # the gradient is a sum over all packs, so any of these may be the cause
    step_packs = set().union(*(of_rank for _, of_rank in found))
    known = "" if finite else "all losses were finite, but a gradient was not; "
    return f"{known}the step had {named_packs(step_packs)}"


def _ids(groups: Iterable[tuple[int, ...]]) -> set[int]:
    return set().union(*groups)


def named_packs(packs: Collection[int]) -> str:
    """Return the packs as text: `pack 3`, `packs 3, 5`, or `packs ..., and 9 more`."""
    noun = "pack" if len(packs) == 1 else "packs"
    return f"{noun} {listed(sorted(packs), _MOST)}"
