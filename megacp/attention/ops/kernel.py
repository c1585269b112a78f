"""What an attention kernel is, and how the results of several sources of keys are merged.

Forward and backward visit the non-empty tiles of a table alone. Backward starts from the merged
`(out, lse)`, so a transport may call it once for each source of keys, and the sum is exact. Partial
sums are held in fp32 or wider.

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
"""`call(function, q, k, v)` is `function(q, k, v)`, or what it gave when its block was computed the
first time.
"""


def at_once(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """The `Caller` that just calls."""
    return function(*inputs)


class Heads(NamedTuple):
    """Core attention of one rank: query heads, K/V heads (groups), and the width of each."""

    heads: int
    groups: int
    dim: int


@dataclass
class Partial:
    """A running attention result: `out[n, heads, d]`, `lse[n, heads]`, in the accumulation
    dtype.
    """

    out: torch.Tensor
    lse: torch.Tensor
    untouched: bool = True
    """No row has seen a key yet, so the first tile of each row is written instead of merged."""


@dataclass(frozen=True)
class Saved:
    """What backward needs of the forward: `q`, merged `out` (dtype of q), merged `lse`, and the
    incoming `dout`.
    """

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor


def empty_partial(q: torch.Tensor) -> Partial:
    """The result of having seen no key: out 0, lse -inf."""
    dtype = accumulation_dtype(q.dtype)
    return Partial(
        zeros(q.shape, q, dtype), torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    )


class Kernel(Protocol):
    """Attention of queries over one table of tiles: forward merges into a running result, backward
    adds gradients.
    """

    def prepare(self, table: TileTable, heads: Heads) -> None:
        """Make on the host what the passes over a table need; called from the loader's threads."""

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """Merge into `partial` what `q` sees of these keys; rows that see nothing are left
        alone.
        """

    def attend_backward(
        self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV
    ) -> None:
        """Add this table's share to `grads = (dq, dk, dv)`, held in the accumulation dtype."""


@runtime_checkable
class WholeKernel(Kernel, Protocol):
    """A kernel that autograd can differentiate where one table holds all keys: nothing is merged or
    computed again.
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
        """`out[n, heads, d]` in q's dtype; differentiable. `call` is given what autograd saves of
        q, k and v.
        """


@fused
def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge a part into `out[n, heads, d]`, `lse[n, heads]` in place, by their log-sum-exp (Milakov
    and Gimelshein, 2018): exact in any order, and a part that saw nothing has lse -inf and changes
    nothing.
    """
    total = torch.logaddexp(lse, part_lse)
    shift = total.masked_fill(
        total == -torch.inf, 0.0
    )  # a row that saw nothing keeps out 0: exp(-inf - 0) = 0
    out.mul_(torch.exp(lse - shift).unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), torch.exp(part_lse - shift).unsqueeze(-1).to(out.dtype))
    lse.copy_(total)


@fused
def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Merge, in place and after all keys, one more key a head: its score is `sinks[heads]`, its
    value 0.

    A head then need not attend to any token (Xiao et al., 2023; learned as in gpt-oss).
    """
    # only the denominator grows: out = sum of e^s v over sum of e^s becomes the same over that sum
    # and e^sink
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    lse.copy_(total)


def sinks_gradient(saved: Saved, sinks: torch.Tensor) -> torch.Tensor:
    """`d sinks[heads]`: over all queries, a sink's weight times `dout . (0 - out)`."""
    weights = torch.exp(sinks.to(saved.lse.dtype) - saved.lse)  # [n, heads]
    inner = (saved.dout.to(weights.dtype) * saved.out.to(weights.dtype)).sum(-1)
    return -(weights * inner).sum(0).to(sinks.dtype)
