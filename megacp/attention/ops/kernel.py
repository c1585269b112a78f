"""The interface of attention kernels, and the merging of results from several sources of keys.

The forward and backward passes visit only the non-empty tiles of a table. The backward pass starts
from the merged `(out, lse)`. A transport may therefore call it once per source of keys, and the sum
is exact. Partial sums are in fp32 or wider.

Tensors are token-major: `q[n, heads, d]`, `k, v[m, groups, d]` with `heads % groups == 0` (grouped
queries).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from megacp.attention.ops.device import fused
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.mask import TileTable
from megacp.distributed.large_blocks import zeros

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or their gradients."""
KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


Caller = Callable[..., torch.Tensor]
"""`call(function, q, k, v)` returns `function(q, k, v)`, or its recorded result while a block is
recomputed.
"""


def at_once(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Call the function directly; the default `Caller`."""
    return function(*inputs)


class Heads(NamedTuple):
    """Core attention on one rank: numbers of query heads and K/V heads (groups), and head dim."""

    heads: int
    groups: int
    dim: int


@dataclass
class Partial:
    """A running attention result: `out[n, heads, d]` and `lse[n, heads]` in accumulation dtype."""

    out: torch.Tensor
    lse: torch.Tensor
    untouched: bool = True
    """Whether no keys have been merged yet; a row's first tile is then written, not merged."""


@dataclass(frozen=True)
class Saved:
    """Inputs of the backward pass: `q`, merged `out` (q's dtype), merged `lse`, incoming `dout`."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor


def empty_partial(q: torch.Tensor) -> Partial:
    """Return the initial result, before any keys are merged: out 0, lse -inf."""
    dtype = accumulation_dtype(q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    return Partial(zeros(q.shape, q, dtype), lse)


class Kernel(Protocol):
    """Attention of queries over one tile table.

    The forward pass merges into a running result; the backward pass adds to gradients.
    """

    def prepare(self, table: TileTable, heads: Heads) -> None:
        """Build the host data for passes over a table; runs in loader threads."""

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """Merge the attention of `q` over these keys into `partial`.

        Rows that attend to none of these keys do not change.
        """

    def attend_backward(
        self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV
    ) -> None:
        """Add this table's gradients to `grads = (dq, dk, dv)`, which have accumulation dtype."""


@runtime_checkable
class WholeKernel(Kernel, Protocol):
    """A kernel that autograd can differentiate if one table contains all keys.

    It merges nothing and recomputes nothing.
    """

    def whole(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: TileTable,
        scale: float,
        call: Caller = at_once,
    ) -> torch.Tensor:
        """Return `out[n, heads, d]` in q's dtype; differentiable.

        `call` receives the q, k and v that autograd saves.
        """


@fused
def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge a partial result into `out[n, heads, d]`, `lse[n, heads]` in place.

    The log-sum-exps determine the weights (Milakov and Gimelshein, 2018). The merge is exact in any
    order. A part without keys has lse -inf and changes nothing.
    """
    total = torch.logaddexp(lse, part_lse)
    # a row without any key keeps out 0: exp(-inf - 0) = 0, while exp(-inf + inf) would be NaN
    shift = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - shift).unsqueeze(-1))
    weight = torch.exp(part_lse - shift).unsqueeze(-1)
    out.addcmul_(part.to(out.dtype), weight.to(out.dtype))
    lse.copy_(total)


@fused
def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Merge one extra key per head in place, with score `sinks[heads]` and value 0.

    Call this function only after all keys have been merged. Sinks allow a head to ignore all tokens
    (Xiao et al., 2023); they are learned, as in gpt-oss.
    """
    # the value is 0, so only the denominator of the softmax grows, by exp(sink)
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    lse.copy_(total)


def sinks_gradient(saved: Saved, sinks: torch.Tensor) -> torch.Tensor:
    """Return `d sinks[heads]`, summed over all queries.

    Each query contributes the weight of the sink times `dout . (0 - out)`.
    """
    weights = torch.exp(sinks.to(saved.lse.dtype) - saved.lse)  # [n, heads]
    inner = (saved.dout.to(weights.dtype) * saved.out.to(weights.dtype)).sum(-1)
    return -(weights * inner).sum(0).to(sinks.dtype)
