"""Slow references of the mask, masked attention and rotary embedding, one token and one head at a
time.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from megacp.attention.ops.mask import UNLIMITED, Metadata, Reach


def visible(q: Metadata, k: Metadata, reach: Reach = UNLIMITED) -> np.ndarray:
    """Return the mask pair by pair: bool `[len(q), len(k)]`."""
    mask = np.zeros((len(q), len(k)), bool)
    for i in range(len(q)):
        for j in range(len(k)):
            if q.leave[i] == 0 or k.leave[j] == 0:
                continue
            on_path = k.order[j] <= q.order[i] < k.leave[j]
            back, (window, chunk) = q.depth[i] - k.depth[j], reach
            near = (not window or back < window) and (
                not chunk or q.depth[i] // chunk == k.depth[j] // chunk
            )
            mask[i, j] = near and (on_path or q.span[i] == k.span[j] != 0)
    return mask


def molmo2_visible(subsegment: np.ndarray, is_image: np.ndarray) -> np.ndarray:
    """Return the mask by the published rule of Molmo2.

    A key is visible if its subsegment id is not below the query's, and if it is not later or both
    are image tokens of one example. The rule relies on branches after their prefix and on examples
    in order.

    `subsegment = 100000 * example + (10000 for the shared prefix, else the branch number)`; a
    negative id is padding.
    """
    place = np.arange(len(subsegment))
    example = subsegment // 100_000
    causal = place[None] <= place[:, None]
    both_image = is_image[:, None] & is_image[None] & (example[:, None] == example[None])
    same = (
        (subsegment[:, None] <= subsegment[None])
        & (subsegment[None] >= 0)
        & (subsegment[:, None] >= 0)
    )
    return same & (causal | both_image)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: np.ndarray,
    scale: float,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """Compute attention one row and one head at a time.

    The inputs are `q[n, heads, d]`, `k, v[m, groups, d]` and `sinks[heads]`; a row without a
    visible key is 0.
    """
    rows = []
    for i in range(q.shape[0]):
        seen = torch.from_numpy(np.flatnonzero(mask[i]))
        heads = []
        for h in range(q.shape[1]):
            group = h // (q.shape[1] // k.shape[1])
            scores = k[seen, group] @ q[i, h] * scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            scores = scores if sinks is None else torch.cat([scores, sinks[h : h + 1]])
            heads.append(torch.softmax(scores, 0)[: len(seen)] @ v[seen, group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def rounding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: np.ndarray,
    scale: float,
) -> list[float]:
    """Return bounds on the errors of out, dq, dk and dv if every product and sum is rounded to
    float32, in any order.

    A sum of n products has an error of at most 4 sqrt(n) u times the sum of their sizes, u = 2^-24,
    except for one in 1,500 sums (Higham and Mary, 2019, theorem 2.8). Errors of its terms add up in
    squares. Squares of errors are `e_`, in units of u^2. Errors that a row shares (lse, delta) are
    kept apart from independent errors, which are summed over keys.
    """
    (n, _, d), m, groups = q.shape, len(k), q.shape[1] // k.shape[1]
    q, dout = q.transpose(0, 1), dout.transpose(0, 1)  # [heads, n, d]
    k, v = (
        x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v)
    )  # [m, groups, d] -> [heads, m, d]
    seen = torch.from_numpy(mask)
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)  # [heads, n, m]
    lse = torch.logsumexp(scores, -1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    p, scores = torch.exp(scores - lse), scores.masked_fill(~seen, 0.0)
    e_score = (d + 1) * (q.abs() @ k.abs().mT * scale) ** 2
    e_lse = (p**2 * e_score).sum(-1, keepdim=True) + m + 4 + lse**2
    e_p = e_score + scores**2 + lse**2 + 4  # error of a weight relative to the weight
    out, sizes = p @ v, p @ v.abs()
    e_out = (p**2 * e_p) @ v**2 + out**2 * e_lse + m * sizes**2
    delta, sizes = (out * dout).sum(-1, keepdim=True), (out * dout).abs().sum(-1, keepdim=True)
    e_delta = (e_out * dout**2).sum(-1, keepdim=True) + d * sizes**2
    dp, e_dp = dout @ v.mT, d * (dout.abs() @ v.abs().mT) ** 2
    p_scale, ds = p * scale, p * (dp - delta) * scale
    e_ds = ds**2 * (e_p + 2) + p_scale**2 * e_dp
    e_dq = (
        e_ds @ k**2
        + (ds @ k) ** 2 * e_lse
        + (p_scale @ k) ** 2 * e_delta
        + m * (ds.abs() @ k.abs()) ** 2
    )
    e_dk = (e_ds + ds**2 * e_lse + p_scale**2 * e_delta).mT @ q**2
    e_dv = (p**2 * (e_p + e_lse)).mT @ dout**2
    sizes_k, sizes_v = ds.abs().mT @ q.abs(), p.mT @ dout.abs()
    shared = [
        x.unflatten(0, (-1, groups)).sum(1) for x in (e_dk, sizes_k, e_dv, sizes_v)
    ]  # over the heads of a group
    e_dk, e_dv = (e + groups * n * size**2 for e, size in (shared[:2], shared[2:]))
    return [4 * 2.0**-24 * x.max().sqrt().item() for x in (e_out, e_dq, e_dk, e_dv)]


def rotate(x: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """Rotate one head `[d]`: the pair (i, i + d/2) is a complex number, times exp(i * position *
    base^(-2i/d)).
    """
    half = len(x) // 2
    out = torch.zeros_like(x)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        turned = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
        out[i], out[i + half] = turned.real, turned.imag
    return out
