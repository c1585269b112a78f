"""Documents of packed rows, read from what collators of other libraries hand to a model.

Key property: the numbers are those that `context_parallel` takes, so packing by restarting positions and padding by an
attention mask become one mask. Rejected: reading them inside the block, where positions are permuted.
"""

from __future__ import annotations

import torch

from megacp.core.data.batch import PADDING


def documents_of(position_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Document numbers int64 `[B, S]` of whole rows, -1 at padding.

    `position_ids[B, S]`: a document begins where a position is not its left neighbour's plus one. None: each row is one
    document. `attention_mask[B, S]`: 1 (or True) at tokens, 0 at padding; one row may stand for all. Raises ValueError
    for other shapes and values.
    """
    given = [x for x in (position_ids, attention_mask) if x is not None]
    rows = {len(x) for x in given if x.dim() == 2} - {1}  # one row of positions may stand for all
    if not given or len(rows) > 1 or any(x.dim() != 2 or x.shape[1] != given[0].shape[1] for x in given):
        shapes = ", ".join(str(tuple(x.shape)) for x in given) or "neither"
        raise ValueError(
            f"documents_of wants position_ids and attention_mask [B, S], one or both, got {shapes}; describe masks of "
            f"more dims, and positions of several axes, by document_ids of your own"
        )
    numbers = torch.zeros(given[0].shape, dtype=torch.int64, device=given[0].device)
    if position_ids is not None:
        numbers[:, 1:] = (position_ids.diff(dim=1) != 1).cumsum(1)
    if attention_mask is None:
        return numbers
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        found = sorted(set(attention_mask.unique().tolist()) - {0, 1})[:4]
        raise ValueError(f"an attention_mask of {found} is no mask of padding: documents_of wants 0 and 1")
    return numbers.masked_fill(attention_mask == 0, PADDING)  # [1 or B, S] of either
