"""What one rank alone can see, made known to all: a refusal that looks at values reaches every rank.

Key property: ranks meet at points that the program's course decides, never its values, so no rank waits for another
that has raised. A rank notes what it found; the next attention call asks all ranks at once, and all raise one message.
Rejected: raising where the value is seen, which leaves the other ranks in a collective until it times out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacp.distributed.collectives import all_reduce, gather_objects
from megacp.distributed.grid import Axis
from megacp.sdpa.call import refuse


class Agreement:
    """Findings of this rank that the others must hear of, and the point where they do."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._open = True
        self._noted: list[str] = []
        self._number = 0

    def note(self, problems: Sequence[str], number: int = 0) -> None:
        """Remember `problems` seen in values of this rank; every rank calls this at the same place, also with none.

        `number`: one that must be the same on all ranks.
        """
        self._noted += problems
        self._number = max(self._number, number)
        self._open = True

    @property
    def noted(self) -> list[str]:
        """What was noted here and not yet settled."""
        return list(self._noted)

    def settle(self, problems: Sequence[str], device: torch.device) -> None:
        """Raise the ValueError of all ranks' findings on every rank; nothing is sent when nothing is open.

        The first attention call of a block is always such a point: `problems` of a later one are raised here alone.
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
