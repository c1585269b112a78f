"""Kernels of one full or causal block, and how a table of tiles becomes calls of them.

A call costs as much as some thousand pairs. So small tiles of neighbouring rows (short documents,
branches) are computed together under a mask, while the masked block is cheaper than calls of their
own.

`FlashKernel` is torch's flash attention for the CPU, `MathKernel` plain torch anywhere;
`dense_attention` is the reference that both are tested against. See attention/ops/kernel.py for
shapes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from megacp.attention.ops.device import to_device
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.kernel import KV, QKV, Heads, Partial, Saved, merge_into
from megacp.attention.ops.mask import CAUSAL, FULL, WINDOW, TileRow, TileTable
from megacp.attention.ops.once import once

CALL = 300_000
"""What a call costs beside its pairs, in pairs times elements of a query: half as much or twice as
much is slower on a CPU, for rows of 1,024 tokens and elements from 32 to 2,048."""
GATHERED_ELEMENTS = 16_384
"""Elements of K up to which a tile is copied beside others into one kernel call (about 30
microseconds either way).
"""


TRIANGLE = 256
"""Queries of the triangles that one of `CUT` queries is computed as, with what is left of each:
torch's kernel takes as many at a time with all keys before their end, 62 % of a square of 1,024
instead of 50."""
CUT = range(512, 1_025)
"""Beyond it sums of results cost as much as is saved."""
MOST_PAIRS = 1 << 17
"""Pairs of a masked call: bounds the memory of masks, and keeps blocks of long documents without
one.
"""


class Allowed(NamedTuple):
    """Which pairs of `n` queries and `m` keys are allowed: all of them, a causal triangle, or what
    `bias` says.
    """

    causal: bool = False
    bias: torch.Tensor | None = None
    """fp16 `[n, m]`, to be added to the scores: 0 for an allowed pair, else -inf; every query sees
    a key.
    """


@dataclass(frozen=True, eq=False)
class KernelCall:
    """Queries and keys that a kernel computes at once: `n` queries, and `m` keys in ascending
    disjoint slices.
    """

    rows: slice
    keys: tuple[slice, ...]
    kind: int
    """What a call without a bias sees: all keys, or one triangle of them."""
    bias: np.ndarray | None
    """fp16 `[n, m]` of a masked call, see `Allowed`."""
    first: bool
    """No earlier call of the table has these queries."""

    @property
    def queries(self) -> int:
        """`n`."""
        return self.rows.stop - self.rows.start

    def allowed(self, device: torch.device) -> Allowed:
        """What a kernel on the device must know of the mask."""
        return Allowed(
            self.kind != FULL, None if self.bias is None else to_device(self.bias, device)
        )

    def turned(self, *tensors: torch.Tensor) -> Any:
        """Tensors that a kernel takes or gives, read backwards for a window's triangle: then it is
        a causal one.
        """
        return tuple(x.flip(0) for x in tensors) if self.kind == WINDOW else tensors


@once
def table_calls(table: TileTable, heads: Heads) -> tuple[KernelCall, ...]:
    """The calls of one pass over `table`, which compute every allowed pair once."""
    return tuple(call for group in _groups(table.rows, heads) for call in _calls(group, heads))


@dataclass(frozen=True)
class _RowGroup:
    """Rows that touch, the union of their keys, and the cost of the cheapest way to compute
    them.
    """

    rows: tuple[TileRow, ...]
    keys: tuple[slice, ...]
    cost: int

    @property
    def queries(self) -> slice:
        return slice(self.rows[0].q_start, self.rows[-1].q_stop)


def _groups(rows: Iterable[TileRow], heads: Heads) -> Iterator[_RowGroup]:
    """Rows in order, each joined to the group before it where that costs less."""
    group: _RowGroup | None = None
    for row in rows:
        keys = tuple(slice(tile.k_start, tile.k_stop) for tile in row.tiles)
        # by itself a row is computed as the cheaper of one masked call and several without a mask
        block = _block((row,), _union(keys), heads)
        alone = (
            block
            if block.cost < (apart := _apart(row, heads))
            else _RowGroup((row,), block.keys, apart)
        )
        if group is not None and group.queries.stop == row.q_start:
            joined = _block((*group.rows, row), _union((*group.keys, *keys)), heads)
            # joined rows save calls and add pairs: keys of one that another does not see
            if joined.cost < group.cost + alone.cost:
                group = joined
                continue
        if group is not None:
            yield group
        group = alone
    if group is not None:
        yield group


def _block(rows: tuple[TileRow, ...], keys: tuple[slice, ...], heads: Heads) -> _RowGroup:
    """The rows as one masked call; one of too many pairs is dearer than anything."""
    pairs = (rows[-1].q_stop - rows[0].q_start) * _length(keys)
    return _RowGroup(
        rows, keys, CALL + pairs * heads.heads * heads.dim if pairs <= MOST_PAIRS else sys.maxsize
    )


def _apart(row: TileRow, heads: Heads) -> int:
    height = row.q_stop - row.q_start
    sources = key_sources(row, heads.groups * heads.dim)
    halves = 2 if height > 128 else 1  # of a small triangle a kernel computes the square
    return sum(
        CALL + height * _length(keys) * heads.heads * heads.dim // (1 if kind == FULL else halves)
        for keys, kind in sources
    )


def _calls(group: _RowGroup, heads: Heads) -> Iterator[KernelCall]:
    if len(group.rows) == 1 and group.cost == _apart(group.rows[0], heads):
        for number, (keys, kind) in enumerate(key_sources(group.rows[0], heads.groups * heads.dim)):
            if kind == CAUSAL and _length(keys) in CUT:
                yield from _triangles(group.queries, keys[0], number == 0)
            else:
                yield KernelCall(group.queries, keys, kind, None, number == 0)
    else:
        yield KernelCall(group.queries, group.keys, FULL, _bias(group), True)


def _triangles(queries: slice, keys: slice, first: bool) -> Iterator[KernelCall]:
    """A causal triangle of many queries as smaller ones, and what each has of keys before its
    own.
    """
    for begin in range(0, queries.stop - queries.start, TRIANGLE):
        end = min(begin + TRIANGLE, queries.stop - queries.start)
        rows = slice(queries.start + begin, queries.start + end)
        yield KernelCall(rows, (slice(keys.start + begin, keys.start + end),), CAUSAL, None, first)
        if begin > 0:
            yield KernelCall(rows, (slice(keys.start, keys.start + begin),), FULL, None, False)


def _bias(group: _RowGroup) -> np.ndarray:
    """fp16 `[n, m]` of a masked call, which kernels turn into their dtype faster than a bool mask
    into a bias.
    """
    # [slices]: key k of a slice stands in column k + offset, as the slices lie side by side
    starts = np.array([part.start for part in group.keys])
    offsets = np.cumsum([0, *(part.stop - part.start for part in group.keys)])[:-1] - starts
    bias = np.full(
        (group.queries.stop - group.queries.start, _length(group.keys)), -np.inf, np.float16
    )
    for row in group.rows:
        rows = bias[row.q_start - group.queries.start : row.q_stop - group.queries.start]
        for tile in row.tiles:
            offset = offsets[np.searchsorted(starts, tile.k_start, side="right") - 1]
            pairs = rows[
                :, tile.k_start + offset : tile.k_stop + offset
            ]  # a view [row's queries, tile's keys]
            causal = np.tri(*pairs.shape) > 0
            pairs[... if tile.kind == FULL else causal if tile.kind == CAUSAL else causal.T] = 0.0
    return bias


KeySource = tuple[tuple[slice, ...], int]
"""Slices of keys that one call sees together, and their kind."""


def key_sources(row: TileRow, width: int) -> list[KeySource]:
    """How the tiles of a row become calls without a mask; `width` is the number of elements of a
    key.

    Small full tiles are copied together, as a call costs more than the copy; large ones are used
    where they are.
    """
    sources: list[KeySource] = []
    small: list[slice] = []
    for tile in row.tiles:
        keys = slice(tile.k_start, tile.k_stop)
        if tile.kind == FULL and (tile.k_stop - tile.k_start) * width <= GATHERED_ELEMENTS:
            small.append(keys)
        else:
            sources.append(((keys,), tile.kind))
    if small:
        sources.append((tuple(small), FULL))
    return sources


def _length(keys: tuple[slice, ...]) -> int:
    return sum(part.stop - part.start for part in keys)


def _union(keys: Iterable[slice]) -> tuple[slice, ...]:
    found: list[slice] = []
    for part in sorted(keys, key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = slice(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return tuple(found)


def _gather(x: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
    return x[slices[0]] if len(slices) == 1 else torch.cat([x[part] for part in slices])


def _scatter_add(x: torch.Tensor, slices: tuple[slice, ...], values: torch.Tensor) -> None:
    lengths = [part.stop - part.start for part in slices]
    for part, piece in zip(slices, values.split(lengths), strict=True):
        x[part] += piece


class TileKernel(ABC):
    """A kernel that walks the table and computes one block of queries and keys at a time."""

    @abstractmethod
    def forward(
        self, qkv: QKV, allowed: Allowed, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out[n, heads, d]`, `lse[n, heads]` of one block."""

    @abstractmethod
    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        """`dq, dk, dv` of one block, shaped like q, k, v."""

    def prepare(self, table: TileTable, heads: Heads) -> None:
        table_calls(table, heads)

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        q, k, v = qkv
        for call in table_calls(table, Heads(q.shape[1], *k.shape[1:])):
            rows = call.rows
            part = (q[rows], _gather(k, call.keys), _gather(v, call.keys))
            out, lse = call.turned(*self.forward(call.turned(*part), call.allowed(q.device), scale))
            if partial.untouched and call.first:
                partial.out[rows], partial.lse[rows] = out, lse
            else:
                merge_into(partial.out[rows], partial.lse[rows], out, lse)
        partial.untouched &= table.num_tiles == 0

    def attend_backward(
        self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV
    ) -> None:
        k, v = kv
        dq, dk, dv = grads
        for call in table_calls(table, Heads(saved.q.shape[1], *k.shape[1:])):
            rows = call.rows
            keys = (_gather(k, call.keys), _gather(v, call.keys))
            part = Saved(
                *call.turned(saved.q[rows], saved.out[rows], saved.lse[rows], saved.dout[rows])
            )
            found = call.turned(
                *self.backward(part, call.turned(*keys), call.allowed(k.device), scale)
            )
            dq[rows] += found[0]
            _scatter_add(dk, call.keys, found[1])
            _scatter_add(dv, call.keys, found[2])


class FlashKernel(TileKernel):
    """torch's flash attention for CPU: fp32, bf16, float64, grouped queries, returns the LSE."""

    def forward(
        self, qkv: QKV, allowed: Allowed, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = (x.transpose(0, 1).unsqueeze(0) for x in qkv)  # [n, heads, d] -> [1, heads, n, d]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *batch, 0.0, allowed.causal, attn_mask=_op_bias(allowed, qkv[0].dtype), scale=scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        dout, q, key, value, out = (
            x.transpose(0, 1).unsqueeze(0) for x in (saved.dout, saved.q, *kv, saved.out)
        )  # [n, heads, d] -> [1, heads, n, d]
        lse = saved.lse.t().unsqueeze(0)  # [n, heads] -> [1, heads, n]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout,
            q,
            key,
            value,
            out,
            lse,
            0.0,
            allowed.causal,
            attn_mask=_op_bias(allowed, q.dtype),
            scale=scale,
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv


def _op_bias(allowed: Allowed, dtype: torch.dtype) -> torch.Tensor | None:
    """`[1, 1, n, m]` in the dtype of q, as the op wants it."""
    return None if allowed.bias is None else allowed.bias.to(dtype)[None, None]


class MathKernel(TileKernel):
    """Plain torch on any device, in blocks of query rows: memory `block x m` per head, never n x
    m.
    """

    block = 1024

    def __init__(self, cap: float = 0.0) -> None:
        """`cap`: scores are `cap * tanh(score / cap)` where it is not 0 (Gemma 2)."""
        self.cap = cap

    def forward(
        self, qkv: QKV, allowed: Allowed, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = qkv
        outs, lses = [], []
        for start in range(0, len(q), self.block):
            scores, _ = self._scores(q, k, start, allowed, scale)  # [groups, heads/groups, b, m]
            lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse.unsqueeze(-1))
            out = torch.einsum("grnm,mgd->ngrd", weights, v.to(weights.dtype))
            outs.append(out.flatten(1, 2))  # [b, groups, r, d] -> [b, heads, d]
            lses.append(lse.flatten(0, 1).t())  # [groups, r, b] -> [b, heads]
        return torch.cat(outs).to(q.dtype), torch.cat(lses)

    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        k, v = kv
        groups = k.shape[1]
        wide = accumulation_dtype(saved.q.dtype)
        dq = torch.empty_like(saved.q, dtype=wide)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for start in range(0, len(saved.q), self.block):
            rows = slice(start, min(start + self.block, len(saved.q)))
            scores, slope = self._scores(saved.q, k, start, allowed, scale)
            # the merged lse: weights are of the softmax over all keys of a query, of which these
            # are a part
            lse = (
                saved.lse[rows].t().unflatten(0, (groups, -1)).to(wide)
            )  # [b, heads] -> [groups, r, b]
            weights = torch.exp(scores - lse.unsqueeze(-1))
            q, out, dout = (
                x[rows].unflatten(1, (groups, -1)).to(wide)
                for x in (saved.q, saved.out, saved.dout)
            )  # [b, heads, d] -> [b, groups, r, d]
            delta = (out * dout).sum(-1).permute(1, 2, 0)  # [b, groups, r] -> [groups, r, b]
            dv += torch.einsum("grnm,ngrd->mgd", weights, dout)
            dscores = (
                weights
                * (torch.einsum("ngrd,mgd->grnm", dout, v.to(wide)) - delta.unsqueeze(-1))
                * scale
            )
            dscores = dscores if slope is None else dscores * slope
            dq[rows] = torch.einsum("grnm,mgd->ngrd", dscores, k.to(wide)).flatten(1, 2)
            dk += torch.einsum("grnm,ngrd->mgd", dscores, q)
        return dq, dk, dv

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, start: int, allowed: Allowed, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Masked scores `[groups, heads/groups, b, m]` of the query block that begins at `start`;
        what a cap makes of their gradient.
        """
        wide = accumulation_dtype(q.dtype)
        rows = (
            q[start : start + self.block].unflatten(1, (k.shape[1], -1)).to(wide)
        )  # [b, heads, d] -> [b, g, r, d]
        scores = torch.einsum("ngrd,mgd->grnm", rows, k.to(wide)) * scale
        slope = None
        if self.cap:
            bent = torch.tanh(scores / self.cap)
            scores = bent * self.cap
            slope = 1 - bent.square()  # of cap * tanh(score / cap)
        if allowed.causal:
            place = torch.arange(start, start + rows.shape[0], device=q.device)
            scores.masked_fill_(
                torch.arange(len(k), device=q.device)[None] > place[:, None], -torch.inf
            )
        if allowed.bias is not None:
            scores += allowed.bias[start : start + self.block]
        return scores, slope


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """The obvious reference: softmax over an explicit bool mask `visible[n, m]`, differentiated by
    autograd.

    Rows that see nothing give zero output and zero gradient. Returns `out[n, heads, d]`.
    """
    repeat = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(repeat, 1)  # [m, groups, d] -> [m, heads, d]
    values = v.repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys).to(accumulation_dtype(q.dtype)) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:  # one more key, of value 0
        scores = torch.cat(
            [scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)], -1
        )
        values = torch.cat([values, torch.zeros_like(values[:1])])
        visible = torch.cat([visible, torch.ones_like(visible[:, :1])], -1)
    nothing = ~visible.any(
        -1
    )  # [n]; a softmax of -inf alone is NaN, also in its gradient, so it gets zeros
    weights = torch.softmax(scores.masked_fill(nothing[None, :, None], 0.0), -1)
    weights = weights.masked_fill(nothing[None, :, None], 0.0)
    return torch.einsum("hnm,mhd->nhd", weights.to(q.dtype), values)
