"""Layers with a recurrent state: chunks of tokens as affine maps of the state, and the scan over
them.

A rule defines how a chunk changes the state `S[K, V]` of a head, and what its tokens read from it:

    S' = A S + B        out = O + R S        A[K, K], B[K, V], R[C, K], O[C, V]

Any layer that is affine in its state can be a rule. Maps compose: (A2, B2) o (A1, B1) =
(A2 A1, A2 B1 + B2). Ranks combine their states in this way. The backward pass is the same scan
in reverse, with A transposed.

If a rule never mixes the keys of a state, A is diagonal. The rule then returns A as a column
`[K, 1]`, or as a scalar `[1, 1]`. To compose maps, ranks send the columns of A: K
columns initialised with the identity, or one column initialised with ones.

Letters in shapes: `n` chunks of `C` tokens, `groups` key heads, `heads` value heads, `K` keys and
`V` values in a head's state, `W` columns that are scanned together. The convolution has `t`
tokens and `c` channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megacp.attention.ops.device import fused
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.pointwise import FromInputs

Pair = tuple[torch.Tensor, torch.Tensor]
Rule = Callable[..., Iterator[Pair]]
"""A generator function of inputs `[n, C, ...]` in accumulation dtype. It yields A, B and then R, O,
all `[n, heads, ...]`. Chunks are padded with zero tokens, which must not change the state. The maps
come first, because they are sent while R and O are computed.
"""
Indices = slice | torch.Tensor


class Level(NamedTuple):
    """Chunks that can be computed together, because all previous chunks are complete."""

    rows: Indices
    before: Indices
    """The previous chunk of each of these chunks."""


def _decays(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three decay factors within a chunk, computed from log decays `[n, C, heads]`.

    * `[n, heads, C, C]`: from the write of token j to token i, 0 for j > i
    * `[n, heads, C, 1]`: from the state before the chunk to token i
    * `[n, heads, C, 1]`: from the write of token i to the end of the chunk
    """
    decay = log_decay.transpose(1, 2).cumsum(-1)  # from the beginning of the chunk through token i
    tokens = decay.shape[-1]
    past = torch.ones(tokens, tokens, dtype=torch.bool, device=decay.device).tril()
    # masked before exp, which would overflow above the diagonal
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~past, -torch.inf).exp()
    since = decay.exp().unsqueeze(-1)
    until = (decay[..., -1:] - decay).exp().unsqueeze(-1)
    return between, since, until


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> Iterator[Pair]:
    """Yield the maps of Gated DeltaNet (Yang et al., 2025).

    The rule is `S' = exp(g) (I - beta k k^T) S + beta k v^T`, `out = S'^T q`.

    `q, k[n, C, groups, K]` are normalised here. Each group serves `heads / groups` neighbouring
    heads of `v[n, C, heads, V]`. `log_decay` and `beta` are `[n, C, heads]`.

    The updates of a chunk are the solution of one triangular system (UT transform of Yang et al.,
    2024). Row i is the update of token i, corrected for the updates of earlier tokens.
    """
    share = v.shape[2] // k.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.transpose(1, 2).repeat_interleave(share, 1) for x in (q * q.shape[-1] ** -0.5, k))
    # [n, C, heads, ...] -> [n, heads, C, ...], like q and k
    v = v.transpose(1, 2)
    beta = beta.transpose(1, 2).unsqueeze(-1)
    between, since, until = _decays(log_decay)
    # token i adds k_i u_i^T with
    #     u_i = beta_i (v_i - since_i S^T k_i - sum over j < i of between_ij (k_i k_j) u_j)
    # u is linear in S: u = values - keys S, and one solve gives both; the solver assumes ones on
    # the diagonal and does not read it
    system = k * beta @ k.transpose(-1, -2) * between
    right = torch.cat([v * beta, k * beta * since], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    late = (k * until).transpose(-1, -2)  # [n, heads, K, C]
    # S' = since_C S + late u
    whole = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) * since[:, :, -1:]
    yield whole - late @ keys, late @ values
    # out_i = since_i S^T q_i + sum over j <= i of between_ij (q_i k_j) u_j
    seen = q @ k.transpose(-1, -2) * between
    yield q * since - seen @ keys, seen @ values


def convolved_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> Iterator[Pair]:
    """Yield the maps of `gated_delta_rule` with SiLU applied to q, k and v.

    The backward pass recomputes the SiLU.
    """
    yield from gated_delta_rule(F.silu(q), F.silu(k), F.silu(v), log_decay, beta)


def state_space_dual(
    c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, log_decay: torch.Tensor
) -> Iterator[Pair]:
    """Yield the maps of Mamba-2 (Dao and Gu, 2024): `S' = exp(g) S + b x^T`, `out = S'^T c`.

    Each group of `c, b[n, C, groups, K]` serves `heads / groups` neighbouring heads of
    `x[n, C, heads, V]`, which must be multiplied by the step dt. `log_decay` is `[n, C, heads]`. A
    is a scalar.
    """
    share = x.shape[2] // b.shape[2]
    c, b = (each.transpose(1, 2) for each in (c, b))  # [n, groups, C, K]
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(share, 1)  # computed once per group
    c, b = (each.repeat_interleave(share, 1) for each in (c, b))  # [n, heads, C, K]
    x = x.transpose(1, 2)
    between, since, until = _decays(log_decay)
    yield since[:, :, -1:], (b * until).transpose(-1, -2) @ x
    yield c * since, (scores * between) @ x


def unchanged(turn: torch.Tensor, keys: int) -> torch.Tensor:
    """Return the identity map in the same form as `turn`: `[K, K]`, or ones `[K, 1]`."""
    if turn.shape[-1] == 1:
        return turn.new_ones(keys, 1)
    return torch.eye(keys, dtype=turn.dtype, device=turn.device)


def turned(turn: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return `A S` for states `[..., K, W]`."""
    return turn * state if turn.shape[-1] == 1 else turn @ state


def turned_back(turn: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return `A^T` times the gradient of a state."""
    return turn * grad if turn.shape[-1] == 1 else turn.transpose(-1, -2) @ grad


def turn_gradient(turn: torch.Tensor, after: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the gradient of A, in the same form as A.

    `after` is the gradient of the state after a chunk, `state` the state before it, both
    `[..., K, V]`.
    """
    if turn.shape[-1] == 1:
        return (after * state).sum(-1, keepdim=True).sum_to_size(turn.shape)
    return after @ state.transpose(-1, -2)


def scan(maps: Pair, levels: Sequence[Level], initial: torch.Tensor) -> torch.Tensor:
    """Return the state before each chunk, `[n, heads, K, W]`, written into `initial`.

    `initial` must contain the states of chunks that are in no level. `maps` are A, and B with W
    columns.
    """
    for rows, before in levels:
        initial[rows] = turned(maps[0][before], initial[before]).add_(maps[1][before])
    return initial


def scan_back(
    turn: torch.Tensor, reads: torch.Tensor, levels: Sequence[Level], after: torch.Tensor
) -> torch.Tensor:
    """Return the gradients of the states after each chunk, accumulated in `after[n, heads, K, V]`.

    `after` must contain the gradients from other ranks. `turn` is A, and `reads` are the gradients
    `R^T dout` of the outputs. The gradient of the state before a chunk is `A^T after + reads`.
    """
    for rows, before in reversed(levels):
        found = turned_back(turn[rows], after[rows]).add_(reads[rows])
        # where the path branches, several chunks follow the same chunk; a slice has no duplicates
        if isinstance(before, slice):
            after[before] += found
        else:
            after.index_add_(0, before, found)
    return after


@fused
def _taps(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(accumulation_dtype(x.dtype))
    out = wide * weight[:, -1]
    for back in range(1, weight.shape[1]):
        out[back:].addcmul_(wide[:-back], weight[:, -1 - back])
    return out.to(x.dtype)


@fused
def _taps_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = grad.to(accumulation_dtype(x.dtype))
    wide_x = x.to(accumulation_dtype(x.dtype))
    dx = wide * weight[:, -1]
    # the gradient of the last tap; earlier taps are inserted before it
    d_weight = [(wide * wide_x).sum(0)]
    for back in range(1, weight.shape[1]):
        dx[:-back].addcmul_(wide[back:], weight[:, -1 - back])
        d_weight.insert(0, (wide[back:] * wide_x[:-back]).sum(0))
    return dx.to(x.dtype), torch.stack(d_weight, 1).to(weight.dtype)


def causal_taps(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x[t, c]` convolved with the previous rows, separately for each channel.

    `weight` is `[c, taps]`; the last tap is for the row itself.
    """
    return FromInputs.apply(_taps, _taps_backward, x, weight)
