"""Findings of one rank, made known to all: a refusal that looks at values reaches every rank.

Key property: ranks meet at points that the program's course decides, never its values. A rank notes its findings, the
next attention call asks all ranks at once, and all raise one message. Rejected: raising where the value is seen, which
leaves the other ranks in a collective until it times out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacp.core.distributed.collectives import all_reduce, gather_objects
from megacp.core.distributed.grid import Axis
from megacp.huggingface.door.call import refuse


class Agreement:
    """Findings of this rank, and the point where the other ranks hear of them."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._open = True
        self._noted: list[str] = []
        self._number = 0

    def note(self, problems: Sequence[str], number: int = 0) -> None:
        """Remember `problems` seen in values of this rank; every rank calls this at the same place, also with none.

        `number` must be the same on all ranks.
        """
        self._noted += problems
        self._number = max(self._number, number)
        self._open = True

    @property
    def noted(self) -> list[str]:
        """Problems of this rank that are not settled yet."""
        return list(self._noted)

    def settle(self, problems: Sequence[str], device: torch.device) -> None:
        """Raise one ValueError with the findings of all ranks on every rank; nothing is sent when nothing is open.

        The first attention call of a block always asks. `problems` of a later call may be raised on this rank alone.
        """
        found, number = [*self._noted, *problems], self._number
        if not self._open or self._axis.size == 1:
            self._noted = []
            refuse(found)
            return
        self._noted, self._number = [], 0
        kind = device if self._axis.backend == "nccl" else torch.device("cpu")
        mine = torch.tensor([bool(found), number, -number], dtype=torch.int64, device=kind)
        some, most, least = all_reduce(mine, self._axis, "max").tolist()
        if some:
            refuse(_by_rank(gather_objects(found, self._axis)))
        if most != -least:
            refuse(
                [
                    f"this model's rotary angles depend on the longest position, which is {-least} on one rank and "
                    f"{most} on another (rope type dynamic or longrope): such models need sequences within the length "
                    f"they were first trained on, or another rope type"
                ]
            )
        self._open = False


def _by_rank(found: Sequence[Sequence[str]]) -> list[str]:
    """Each problem once, behind the ranks that have it unless all do."""
    texts = dict.fromkeys(text for problems in found for text in problems)
    named = []
    for text in texts:
        ranks = [str(rank) for rank, problems in enumerate(found) if text in problems]
        many = "s" if len(ranks) > 1 else ""
        named.append(text if len(ranks) == len(found) else f"rank{many} {', '.join(ranks)}: {text}")
    return named
