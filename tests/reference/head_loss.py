"""The loss of a head written out: one process, the whole table, token by token in float64, gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def head_loss(x: Tensor, table: Tensor, labels: Tensor, weights: Tensor, denominator: float) -> Tensor:
    """Scalar: each counted token's `log(sum(exp(logits))) - logits[label]`, weighed, over the denominator.

    `x[t, h]`, `table[vocabulary, h]`. A token of weight 0 is left out, so its label may be any number.
    """
    total = (x.sum() + table.sum()) * 0.0
    for row, label, weight in zip(x, labels.tolist(), weights.double(), strict=True):
        if weight:
            logits = table @ row
            total = total + weight * (torch.log(torch.exp(logits).sum()) - logits[label])
    return total / denominator


def head_gradients(
    x: Tensor, table: Tensor, labels: Tensor, weights: Tensor, denominator: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients `dx[t, h]`, `d_table[vocabulary, h]`."""
    x, table = (value.detach().double().requires_grad_() for value in (x, table))
    loss = head_loss(x, table, labels, weights, denominator)
    dx, d_table = torch.autograd.grad(loss, (x, table))
    return loss.detach(), dx, d_table
