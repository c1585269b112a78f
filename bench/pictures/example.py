"""The row in the pictures: a short text, an image with three branches, a video and a long text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.mask import Metadata

CP = 4
_PIECES = (  # tokens, document, branch, span
    (14, 0, 0, 0),
    (4, 1, 0, 0),
    (26, 1, 0, 2),
    (12, 1, 1, 0),
    (9, 1, 2, 0),
    (7, 1, 3, 0),
    *((count, 2, 0, span) for _ in range(3) for count, span in ((3, 0), (10, 3))),
    (9, 2, 1, 0),
    (72, 3, 0, 0),
)
NAMES = ("text", "image, 3 branches", "video", "long text")
"""Names of the documents."""


@dataclass(frozen=True)
class DealtRow:
    """The example row under one layout, with a plan for each rank."""

    metadata: Metadata
    plans: tuple[AttentionPlan, ...]

    def areas(self) -> list[int]:
        """Return the number of allowed (query, key) pairs of each rank."""
        return [sum(plan.table(source).area for source in range(plan.cp)) for plan in self.plans]

    def received(self) -> list[int]:
        """Return for each rank the number of tokens whose keys and values come from other ranks."""
        return [
            sum(
                int(plan.table(source).needed_keys.sum())
                for source in range(plan.cp)
                if source != plan.cp_rank
            )
            for plan in self.plans
        ]


def example_metadata() -> Metadata:
    """Return the mask metadata of the example row."""
    columns = np.repeat(np.array(_PIECES), [piece[0] for piece in _PIECES], axis=0)  # [T, 4]
    return Metadata.of_documents(columns[:, 1], columns[:, 2], columns[:, 3])


def dealt(layout: str, cp: int = CP) -> DealtRow:
    """Return the example row, distributed to `cp` ranks."""
    metadata = example_metadata()
    indices = LAYOUTS[layout].deal(metadata, cp)
    return DealtRow(metadata, tuple(AttentionPlan(indices, metadata, rank) for rank in range(cp)))
