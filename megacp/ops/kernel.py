"""What an attention kernel is, and the walk over a tile table that kernels of single blocks share.

Key property: forward and backward visit non-empty tiles alone. Backward starts from the merged `(out, lse)`, so a
transport may call it once for each source of keys, and the sum is exact. Partial sums are held in fp32 or wider.
Rejected: one masked call over all keys, which pays for emptiness and needs an S x S mask.

Tensors are token-major: `q[n, heads, d]`, `k, v[m, groups, d]` with `heads % groups == 0` (grouped queries).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megacp.ops.mask import CAUSAL, FULL, TileRow, TileTable
from megacp.ops.merge import merge_into

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or their gradients."""

GATHERED_ELEMENTS = 16_384
"""Elements of K up to which a tile is copied beside others into one kernel call (about 30 microseconds either way)."""


@dataclass
class Partial:
    """A running attention result: `out[n, heads, d]`, `lse[n, heads]`, in the accumulation dtype."""

    out: torch.Tensor
    lse: torch.Tensor
    untouched: bool = True
    """No row has seen a key yet, so the first tile of each row is written instead of merged."""


@dataclass(frozen=True)
class Saved:
    """What backward needs of the forward: `q`, merged `out` (dtype of q), merged `lse`, and the incoming `dout`."""

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
    return Partial(torch.zeros_like(q, dtype=dtype), torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device))


class Kernel(Protocol):
    """Attention of queries over one table of tiles: forward merges into a running result, backward adds gradients."""

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """Merge into `partial` what `q` sees of these keys; rows that see nothing are left alone."""

    def attend_backward(
        self, saved: Saved, kv: tuple[torch.Tensor, torch.Tensor], table: TileTable, scale: float, grads: QKV
    ) -> None:
        """Add this table's share to `grads = (dq, dk, dv)`, held in the accumulation dtype."""


KeySource = tuple[tuple[slice, ...], bool]
"""Slices of keys that one kernel call sees together, and whether they are a causal triangle."""


def key_sources(row: TileRow, width: int) -> list[KeySource]:
    """How the tiles of a row become kernel calls; `width` is the number of elements of a key.

    Small full tiles are copied together, as a call costs more than the copy; large ones are used where they are.
    """
    sources: list[KeySource] = []
    small: list[slice] = []
    for tile in row.tiles:
        keys = slice(tile.k_start, tile.k_stop)
        if tile.kind == FULL and (tile.k_stop - tile.k_start) * width <= GATHERED_ELEMENTS:
            small.append(keys)
        else:
            sources.append(((keys,), tile.kind == CAUSAL))
    if small:
        sources.append((tuple(small), False))
    return sources


def _gather(x: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
    return x[slices[0]] if len(slices) == 1 else torch.cat([x[part] for part in slices])


def _scatter_add(x: torch.Tensor, slices: tuple[slice, ...], values: torch.Tensor) -> None:
    lengths = [part.stop - part.start for part in slices]
    for part, piece in zip(slices, values.split(lengths), strict=True):
        x[part] += piece


class TileKernel:
    """A kernel that walks the table and computes one full or causal block of keys at a time."""

    causal_block: int | None = None
    """Keys that a causal block is computed in at a time, masked ones among them; None: its whole square is."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out[n, heads, d]`, `lse[n, heads]` of one full or causal block."""
        raise NotImplementedError

    def backward(
        self, saved: Saved, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`dq, dk, dv` of one block, shaped like q, k, v."""
        raise NotImplementedError

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """See `Kernel.attend`."""
        q, k, v = qkv
        for row in table.rows:
            rows = slice(row.q_start, row.q_stop)
            for number, (slices, causal) in enumerate(key_sources(row, k.shape[1] * k.shape[2])):
                out, lse = self.forward(q[rows], _gather(k, slices), _gather(v, slices), causal, scale)
                if partial.untouched and number == 0:
                    partial.out[rows], partial.lse[rows] = out, lse
                else:
                    merge_into(partial.out[rows], partial.lse[rows], out, lse)
        partial.untouched &= not table.rows

    def attend_backward(
        self, saved: Saved, kv: tuple[torch.Tensor, torch.Tensor], table: TileTable, scale: float, grads: QKV
    ) -> None:
        """See `Kernel.attend_backward`."""
        (k, v), (dq, dk, dv) = kv, grads
        for row in table.rows:
            rows = slice(row.q_start, row.q_stop)
            part = Saved(saved.q[rows], saved.out[rows], saved.lse[rows], saved.dout[rows])
            for slices, causal in key_sources(row, k.shape[1] * k.shape[2]):
                found = self.backward(part, _gather(k, slices), _gather(v, slices), causal, scale)
                dq[rows] += found[0]
                _scatter_add(dk, slices, found[1])
                _scatter_add(dv, slices, found[2])
