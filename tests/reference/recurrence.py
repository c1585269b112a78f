"""Recurrent rules token by token, and a convolution tap by tap, along the path of each token of a
row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def before(leave: np.ndarray) -> list[int]:
    """Return the token before each token on its path, or -1.

    It is the nearest earlier token whose subtree contains it.
    """
    earlier = [[j for j in range(i) if leave[j] > i and leave[i] > 0] for i in range(len(leave))]
    return [tokens[-1] if tokens else -1 for tokens in earlier]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, leave: np.ndarray
) -> Tensor:
    """Return `[T, heads, V]`.

    The state of each token starts from the state of the token before it; padding gives 0.
    """
    share, states, outs = v.shape[1] // k.shape[1], dict[int, Tensor](), []
    for i, past in enumerate(before(leave)):
        rows = []
        for head in range(v.shape[1]):
            a, b = (
                x[i, head // share] / torch.sqrt((x[i, head // share] ** 2).sum() + 1e-6)
                for x in (q, k)
            )
            state = states[past][head] if past >= 0 else q.new_zeros(q.shape[-1], v.shape[-1])
            state = log_decay[i, head].exp() * state
            rows.append(state + beta[i, head] * torch.outer(b, v[i, head] - b @ state))
            outs.append(int(leave[i] > 0) * (a / q.shape[-1] ** 0.5) @ rows[-1])
        states[i] = torch.stack(rows)
    return torch.stack(outs).unflatten(0, (len(q), -1))


def state_space_dual(
    c: Tensor, b: Tensor, x: Tensor, log_decay: Tensor, leave: np.ndarray
) -> Tensor:
    """Return `[T, heads, V]` with the same rules."""
    share, states, outs = x.shape[1] // b.shape[1], dict[int, Tensor](), []
    c, b = (each.repeat_interleave(share, 1) for each in (c, b))
    for i, past in enumerate(before(leave)):
        state = states[past] if past >= 0 else 0 * b[i, :, :, None] * x[i, :, None]
        states[i] = log_decay[i].exp()[:, None, None] * state + b[i, :, :, None] * x[i, :, None]
        outs.append(int(leave[i] > 0) * (c[i, :, None] @ states[i]).squeeze(1))
    return torch.stack(outs)


def convolution(x: Tensor, weight: Tensor, leave: np.ndarray) -> Tensor:
    """Convolve `x[T, c]` with `weight[c, taps]`.

    The last tap is for the token itself; padding only uses itself.
    """
    past, rows = before(leave), []
    for i in range(len(x)):
        total, j = torch.zeros_like(x[i]), i
        for tap in reversed(range(weight.shape[1])):
            total = total + (weight[:, tap] * x[j] if j >= 0 else 0)
            j = past[j] if j >= 0 else -1
        rows.append(total)
    return torch.stack(rows)
