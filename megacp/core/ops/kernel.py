"""What an attention kernel is, and the walk over a tile table that kernels of single blocks share.

Key property: forward and backward visit non-empty tiles alone. Backward starts from the merged `(out, lse)`, so a
transport may call it once for each source of keys, and the sum is exact. Partial sums are held in fp32 or wider.
Rejected: one masked call over all keys, which pays for emptiness and needs an S x S mask.

Tensors are token-major: `q[n, heads, d]`, `k, v[m, groups, d]` with `heads % groups == 0` (grouped queries).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from megacp.core.large_blocks import zeros
from megacp.core.ops.calls import Allowed, Widths, table_calls
from megacp.core.ops.mask import TileTable
from megacp.core.ops.merge import merge_into

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or their gradients."""
KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


@dataclass
class Partial:
    """A running attention result: `out[n, heads, d]`, `lse[n, heads]`, in the accumulation dtype."""

    out: torch.Tensor
    lse: torch.Tensor
    untouched: bool = True
    """No row has seen a key yet, so the first tile of each row is written instead of merged."""


@dataclass(frozen=True)
class Saved:
    """What backward needs of the forward: `q`, merged `out` (dtype of q), merged `lse`, and the incoming `dout`.

    Kernels use of `out` its dot product with `dout` over the width of a head, so whatever has the same may stand there.
    """

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_partial(q: torch.Tensor) -> Partial:
    """The result of having seen no key: out 0, lse -inf."""
    dtype = accumulation_dtype(q.dtype)
    return Partial(zeros(q.shape, q, dtype), torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device))


class Kernel(Protocol):
    """Attention of queries over one table of tiles: forward merges into a running result, backward adds gradients."""

    def prepare(self, table: TileTable, widths: Widths) -> None:
        """Make on the host what the passes over a table need; called from the loader's threads."""

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """Merge into `partial` what `q` sees of these keys; rows that see nothing are left alone."""

    def attend_backward(self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV) -> None:
        """Add this table's share to `grads = (dq, dk, dv)`, held in the accumulation dtype."""


@runtime_checkable
class WholeKernel(Kernel, Protocol):
    """A kernel that autograd can differentiate where one table holds all keys: nothing is merged or computed again."""

    def whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: TileTable, scale: float) -> torch.Tensor:
        """`out[n, heads, d]` in q's dtype; differentiable."""


def _gather(x: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
    return x[slices[0]] if len(slices) == 1 else torch.cat([x[part] for part in slices])


def _scatter_add(x: torch.Tensor, slices: tuple[slice, ...], values: torch.Tensor) -> None:
    lengths = [part.stop - part.start for part in slices]
    for part, piece in zip(slices, values.split(lengths), strict=True):
        x[part] += piece


class TileKernel(ABC):
    """A kernel that walks the table and computes one block of queries and keys at a time."""

    causal_block: int | None = None
    """Keys that a causal block is computed in at a time, masked ones among them; None: its whole square is."""

    @abstractmethod
    def forward(self, qkv: QKV, allowed: Allowed, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """`out[n, heads, d]`, `lse[n, heads]` of one block."""

    @abstractmethod
    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        """`dq, dk, dv` of one block, shaped like q, k, v."""

    def prepare(self, table: TileTable, widths: Widths) -> None:
        """See `Kernel.prepare`."""
        table_calls(table, widths)

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """See `Kernel.attend`."""
        q, k, v = qkv
        for call in table_calls(table, widths_of(q, k)):
            rows, part = call.rows, (q[call.rows], _gather(k, call.keys), _gather(v, call.keys))
            out, lse = self.forward(part, call.allowed(q.device), scale)
            if partial.untouched and call.first:
                partial.out[rows], partial.lse[rows] = out, lse
            else:
                merge_into(partial.out[rows], partial.lse[rows], out, lse)
        partial.untouched &= table.num_tiles == 0

    def attend_backward(self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV) -> None:
        """See `Kernel.attend_backward`."""
        (k, v), (dq, dk, dv) = kv, grads
        for call in table_calls(table, widths_of(saved.q, k)):
            rows, keys = call.rows, (_gather(k, call.keys), _gather(v, call.keys))
            part = Saved(saved.q[rows], saved.out[rows], saved.lse[rows], saved.dout[rows])
            found = self.backward(part, keys, call.allowed(k.device), scale)
            dq[rows] += found[0]
            _scatter_add(dk, call.keys, found[1])
            _scatter_add(dv, call.keys, found[2])


def widths_of(q: torch.Tensor, k: torch.Tensor) -> Widths:
    """Of `q[n, heads, d]` and `k[m, groups, d]`."""
    return Widths(q.shape[1] * q.shape[2], k.shape[1] * k.shape[2])
