"""Cross-entropy over a vocabulary sharded over tp, with its gradient: softmax in fp32 or wider, one collective a call.

Ranks share two numbers per token, the log-sum-exp and the target logit of their columns, in one all-gather. The
gradient needs no message: it takes the place of the logits, so both never exist at once.
"""

from __future__ import annotations

import torch

from megacp.core.distributed.collectives import all_gather
from megacp.core.distributed.grid import Axis


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and sums: fp32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, first: int, axis: Axis, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Loss per token, `[t]` in fp32 or wider, replicated over tp; the logits are overwritten.

    `logits[t, v]` are this rank's true columns, the first of which is global index `first`; `labels[t]` int64 are
    global indices. With `scale[t]`, as wide, the logits become the gradient of `sum(scale * losses)`, else scratch.
    """
    wide = logits.to(wide_dtype(logits.dtype))  # [t, v]: the logits themselves, or a copy of halves
    local = labels - first
    elsewhere = (local < 0) | (local >= logits.shape[1])  # [t]: the label's column is on another rank, or on none
    index = local.masked_fill(elsewhere, 0)[:, None]  # [t, 1]
    if logits.shape[1]:
        target = wide.gather(1, index)[:, 0].masked_fill(elsewhere, 0.0)  # [t], 0 on the other ranks
        highest = wide.amax(-1)
        lse = highest + wide.sub_(highest[:, None]).exp_().sum(-1).log()  # [t, v] -> [t], of these columns
    else:  # this rank holds no true row of the vocabulary
        target, lse = wide.new_zeros(labels.shape), wide.new_full(labels.shape, -torch.inf)
    shared = all_gather(torch.stack([lse, target])[None], axis)  # [1, 2, t] -> [tp, 2, t]
    lse, target = torch.logsumexp(shared[:, 0], 0), shared[:, 1].sum(0)  # [tp, t] -> [t], of all columns
    if scale is not None and logits.shape[1]:
        wide.mul_((scale * torch.exp(highest - lse))[:, None])  # softmax, scaled: the exponentials are there already
        wide.scatter_add_(1, index, (-scale).masked_fill(elsewhere, 0.0)[:, None])  # minus 1 at the label, scaled
        if wide is not logits:
            logits.copy_(wide)
    return lse - target
