"""Layers that carry a state along a path: chunks of tokens as affine maps of it, and the scan over
them.

A rule says what a chunk does to the state `S[K, V]` of a head, and what it reads of it:

    S' = A S + B        out = O + R S        A[K, K], B[K, V], R[C, K], O[C, V]

so anything that is affine in its state is a rule. Maps compose, (A2, B2) o (A1, B1) = (A2 A1, A2 B1
+ B2), which is how states cross from rank to rank; backward is the same scan from the other end,
with A transposed.

A rule that keeps the keys of a state apart has a diagonal A, and gives it as a column, `[K, 1]`, or
as the one number `[1, 1]`. Of composed maps ranks send the columns of A: K, which began as the
identity, or one, which began as ones.

Letters: `n` chunks of `C` tokens, `groups` of key heads, `heads` of values; a state has `K` keys
and `V` values a head; `W` columns are scanned together; the convolution has `t` tokens and `c`
channels.
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
"""A function of inputs `[n, C, ...]`, in the accumulation dtype, that yields A, B, then R, O, all
`[n, heads, ...]`. Tokens of zeros fill a chunk up, and must leave the state as it is. Maps come
first: they travel while the rest is computed."""
Indices = slice | torch.Tensor


class Level(NamedTuple):
    """Chunks that can be computed together: all chunks before them on their paths are done."""

    rows: Indices
    before: Indices
    """The chunk before each of them."""


def _decays(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What logs `[n, C, heads]` leave at token i of what token j wrote, `[n, heads, C, C]` (0 for a
    later j); at token i of the state before the chunk, and behind the chunk of what token i wrote,
    `[n, heads, C, 1]`.
    """
    decay = log_decay.transpose(1, 2).cumsum(-1)  # from the beginning of the chunk through token i
    past = torch.ones(
        decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device
    ).tril()
    # masked before exp, which would overflow above the diagonal
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~past, -torch.inf).exp()
    return between, decay.exp().unsqueeze(-1), (decay[..., -1:] - decay).exp().unsqueeze(-1)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> Iterator[Pair]:
    """Gated DeltaNet (Yang et al., 2025): `S' = exp(g) (I - beta k k^T) S + beta k v^T`, `out =
    S'^T q`.

    `q, k[n, C, groups, K]` are normalised here, each for `heads / groups` neighbouring `v[n, C,
    heads, V]`; `log_decay, beta[n, C, heads]`. The updates of a chunk are one triangular system
    (the UT transform of Yang et al., 2024): row i of its solution is what token i adds to the state
    once those before it have corrected it.
    """
    share = v.shape[2] // k.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.transpose(1, 2).repeat_interleave(share, 1) for x in (q * q.shape[-1] ** -0.5, k))
    # [n, C, heads, ...] -> [n, heads, C, ...], as q and k are by now
    v = v.transpose(1, 2)
    beta = beta.transpose(1, 2).unsqueeze(-1)
    between, since, until = _decays(log_decay)
    # token i adds k_i u_i^T with u_i = beta_i (v_i - since_i S^T k_i - sum over j < i of between_ij
    # (k_i k_j) u_j) u is linear in S: u = values - keys S, both solved at once; the diagonal is
    # taken as 1 and not read
    system = k * beta @ k.transpose(-1, -2) * between
    right = torch.cat([v * beta, k * beta * since], -1)
    values, keys = torch.linalg.solve_triangular(
        system, right, upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], -1)
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
    """`gated_delta_rule` of the SiLU of q, k and v: nobody keeps it."""
    yield from gated_delta_rule(F.silu(q), F.silu(k), F.silu(v), log_decay, beta)


def state_space_dual(
    c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, log_decay: torch.Tensor
) -> Iterator[Pair]:
    """Mamba-2 (Dao and Gu, 2024): `S' = exp(g) S + b x^T`, `out = S'^T c`.

    `c, b[n, C, groups, K]`, each for `heads / groups` neighbouring `x[n, C, heads, V]`, which hold
    the step dt; `log_decay[n, C, heads]`. A is one number.
    """
    share = x.shape[2] // b.shape[2]
    c, b = (each.transpose(1, 2) for each in (c, b))  # [n, groups, C, K]
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(share, 1)  # once for the heads of a group
    c, b = (each.repeat_interleave(share, 1) for each in (c, b))  # [n, heads, C, K]
    x = x.transpose(1, 2)
    between, since, until = _decays(log_decay)
    yield since[:, :, -1:], (b * until).transpose(-1, -2) @ x
    yield c * since, (scores * between) @ x


def unchanged(turn: torch.Tensor, keys: int) -> torch.Tensor:
    """The columns of a map that changes nothing, in the form of `turn`: `[K, K]` or `[K, 1]`."""
    if turn.shape[-1] == 1:
        return turn.new_ones(keys, 1)
    return torch.eye(keys, dtype=turn.dtype, device=turn.device)


def turned(turn: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """`A S`, of states `[..., K, W]`."""
    return turn * state if turn.shape[-1] == 1 else turn @ state


def turned_back(turn: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """`A^T` times the gradient of a state."""
    return turn * grad if turn.shape[-1] == 1 else turn.transpose(-1, -2) @ grad


def turn_gradient(turn: torch.Tensor, after: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The gradient of A in its form, from the gradient behind a chunk and the state before it,
    `[..., K, V]`.
    """
    if turn.shape[-1] == 1:
        return (after * state).sum(-1, keepdim=True).sum_to_size(turn.shape)
    return after @ state.transpose(-1, -2)


def scan(maps: Pair, levels: Sequence[Level], initial: torch.Tensor) -> torch.Tensor:
    """The state before each chunk, `[n, heads, K, W]`, written into `initial`, which has it for
    chunks of no level.

    `maps`: A, and B of W columns.
    """
    for rows, before in levels:
        initial[rows] = turned(maps[0][before], initial[before]).add_(maps[1][before])
    return initial


def scan_back(
    turn: torch.Tensor, reads: torch.Tensor, levels: Sequence[Level], after: torch.Tensor
) -> torch.Tensor:
    """Gradients of the states behind chunks, added up in `after[n, heads, K, V]`, which has those
    from elsewhere.

    `turn` is A, `reads` the gradients `R^T dout` of what chunks read. Of the state before a chunk
    it is `A^T after + reads`.
    """
    for rows, before in reversed(levels):
        found = turned_back(turn[rows], after[rows]).add_(reads[rows])
        # several chunks go on from one where the path branches, but a slice has no chunk twice
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
    wide, wide_x = (t.to(accumulation_dtype(x.dtype)) for t in (grad, x))
    dx = wide * weight[:, -1]
    d_weight = [
        (wide * wide_x).sum(0)
    ]  # of the last tap; those of rows further back come before it
    for back in range(1, weight.shape[1]):
        dx[:-back].addcmul_(wide[back:], weight[:, -1 - back])
        d_weight.insert(0, (wide[back:] * wide_x[:-back]).sum(0))
    return dx.to(x.dtype), torch.stack(d_weight, 1).to(weight.dtype)


def causal_taps(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x[t, c]` convolved with the rows before, a channel by itself: `weight[c, taps]`, the last
    for the row itself.
    """
    return FromInputs.apply(_taps, _taps_backward, x, weight)
