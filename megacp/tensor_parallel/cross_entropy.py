"""Cross-entropy over a vocabulary sharded over tp: softmax in fp32 or wider, one collective per call.

Ranks share two numbers per token, the log-sum-exp and the target logit of their columns, in one all-gather. Backward
needs no message.
"""

from __future__ import annotations

import torch

from megacp.distributed.collectives import all_gather
from megacp.distributed.grid import Axis


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, first, axis):  # type: ignore[no-untyped-def]
        wide = _wide(logits)
        local = labels - first
        elsewhere = (local < 0) | (local >= logits.shape[1])  # [t]: the label's column is on another rank
        index = local.masked_fill(elsewhere, 0)
        if logits.shape[1]:
            lse = torch.logsumexp(wide, -1)  # [t, v] -> [t], of these columns
            target = wide.gather(1, index[:, None])[:, 0].masked_fill(elsewhere, 0.0)  # [t], 0 on the other ranks
        else:  # this rank holds no true row of the vocabulary
            lse, target = wide.new_full(labels.shape, -torch.inf), wide.new_zeros(labels.shape)
        shared = all_gather(torch.stack([lse, target])[None], axis)  # [1, 2, t] -> [tp, 2, t]
        lse, target = torch.logsumexp(shared[:, 0], 0), shared[:, 1].sum(0)  # [tp, t] -> [t], of all columns
        ctx.save_for_backward(logits, lse, index, elsewhere)
        return lse - target

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        logits, lse, index, elsewhere = ctx.saved_tensors
        d_logits = torch.exp(_wide(logits) - lse[:, None])  # softmax, minus 1 at the label: [t, v]
        if logits.shape[1]:
            hit = torch.where(elsewhere, 0.0, -1.0).to(d_logits.dtype)
            d_logits.scatter_add_(1, index[:, None], hit[:, None])
        return (d_logits * grad[:, None]).to(logits.dtype), None, None, None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, first: int, axis: Axis) -> torch.Tensor:
    """Loss per token, `[t]` in fp32 or wider, replicated over tp.

    `logits[t, v]` are this rank's true columns, the first of which is global index `first`; `labels[t]` int64 are
    global indices.
    """
    return _CrossEntropy.apply(logits, labels, first, axis)
