"""Slow twins of the mask, of masked attention and of rotary embedding, written one token and one head at a time."""

from __future__ import annotations

import math

import numpy as np
import torch

from megacp.ops.mask import Metadata


def visible(q: Metadata, k: Metadata) -> np.ndarray:
    """The rule of the mask, pair by pair, bool `[len(q), len(k)]`."""
    mask = np.zeros((len(q), len(k)), bool)
    for i in range(len(q)):
        for j in range(len(k)):
            if k.document[j] < 0 or k.document[j] != q.document[i]:
                continue
            if k.branch[j] not in (0, q.branch[i]):
                continue
            in_span = q.span[i] != 0 and q.span[i] == k.span[j]
            mask[i, j] = k.order[j] <= q.order[i] or in_span
    return mask


def molmo2_visible(subsegment: np.ndarray, is_image: np.ndarray) -> np.ndarray:
    """The published rule of Molmo2: a key is seen when its subsegment id is not below the query's, and it is not later
    or both are image tokens of one example. It relies on branches after their prefix and examples in order.

    `subsegment = 100000 * example + (10000 for the shared prefix, else the branch number)`; a negative id is padding.
    """
    place = np.arange(len(subsegment))
    example = subsegment // 100_000
    causal = place[None] <= place[:, None]
    both_image = is_image[:, None] & is_image[None] & (example[:, None] == example[None])
    same = (subsegment[:, None] <= subsegment[None]) & (subsegment[None] >= 0) & (subsegment[:, None] >= 0)
    return same & (causal | both_image)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: np.ndarray, scale: float) -> torch.Tensor:
    """`q[n, heads, d]`, `k, v[m, groups, d]`: one row and one head at a time; a row that sees nothing is zero."""
    rows = []
    for i in range(q.shape[0]):
        seen = torch.from_numpy(np.flatnonzero(mask[i]))
        heads = []
        for h in range(q.shape[1]):
            group = h // (q.shape[1] // k.shape[1])
            scores = k[seen, group] @ q[i, h] * scale
            weights = torch.softmax(scores, 0) if len(seen) else scores
            heads.append(weights @ v[seen, group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def rotate(x: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """One head `[d]`: the pair (i, i + d/2) as a complex number, times exp(i * position * base^(-2i/d))."""
    half = len(x) // 2
    out = torch.zeros_like(x)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        turned = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
        out[i], out[i + half] = turned.real, turned.imag
    return out
