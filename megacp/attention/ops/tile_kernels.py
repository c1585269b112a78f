"""Kernels for one full or causal block, and the conversion of a tile table into kernel calls.

A kernel call costs as much as hundreds or thousands of pairs. Small tiles of neighbouring rows
(short documents, branches) are therefore computed together with a mask, as long as the masked block
is cheaper than separate calls.

`FlashKernel` is torch's flash attention for the CPU. `MathKernel` is plain torch for any device.
Both are tested against the reference `dense_attention`. Shapes are described in
attention/ops/kernel.py.
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
"""Overhead of a kernel call, in pairs times elements per query. On a CPU, half or twice this value
was slower for rows of 1,024 tokens with 32 to 2,048 elements.
"""
GATHERED_ELEMENTS = 16_384
"""Maximum number of K elements in a tile that is copied to share a kernel call with other tiles. At
this size, the copy and a call each take about 30 microseconds.
"""


TRIANGLE = 256
"""Number of queries in the small triangles into which a large triangle is cut. torch's kernel
processes 256 queries together, with all keys up to the last of them. For a triangle of 1,024
queries, it therefore computes 62 % of the square instead of 50 %.
"""
CUT = range(512, 1_025)
"""Sizes of triangles that are cut. For larger ones, merging costs as much as cutting saves."""
MOST_PAIRS = 1 << 17
"""Maximum number of pairs in a masked call. The limit bounds the memory of masks, and keeps long
documents free of masks.
"""


class Allowed(NamedTuple):
    """The allowed pairs of `n` queries and `m` keys: all, a causal triangle, or given by `bias`."""

    causal: bool = False
    bias: torch.Tensor | None = None
    """fp16 `[n, m]`, added to the scores: 0 for an allowed pair, else -inf. Every query has
    at least one key.
    """


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One kernel call with `n` queries and `m` keys; the keys are ascending disjoint slices."""

    rows: slice
    keys: tuple[slice, ...]
    kind: int
    """Mask of a call without a bias: FULL, CAUSAL or WINDOW."""
    bias: np.ndarray | None
    """fp16 `[n, m]` of a masked call, see `Allowed`."""
    first: bool
    """Whether no earlier call of the table has these queries."""

    @property
    def queries(self) -> int:
        """Number of queries, `n`."""
        return self.rows.stop - self.rows.start

    def allowed(self, device: torch.device) -> Allowed:
        """Return the mask in the form that kernels accept, on the device."""
        bias = None if self.bias is None else to_device(self.bias, device)
        return Allowed(self.kind != FULL, bias)

    def turned(self, *tensors: torch.Tensor) -> Any:
        """Return the tensors, reversed along tokens if this call is a window triangle.

        The reversal turns a window triangle into a causal one. It applies to both the inputs and
        the outputs of a kernel.
        """
        return tuple(x.flip(0) for x in tensors) if self.kind == WINDOW else tensors


@once
def table_calls(table: TileTable, heads: Heads) -> tuple[KernelCall, ...]:
    """Return the calls for one pass over `table`, which compute every allowed pair once."""
    calls: list[KernelCall] = []
    for group in _groups(table.rows, heads):
        calls.extend(_calls(group, heads))
    return tuple(calls)


@dataclass(frozen=True)
class _RowGroup:
    """Adjacent rows, the union of their keys, and the cost of the cheapest way to compute them."""

    rows: tuple[TileRow, ...]
    keys: tuple[slice, ...]
    cost: int

    @property
    def queries(self) -> slice:
        return slice(self.rows[0].q_start, self.rows[-1].q_stop)


def _groups(rows: Iterable[TileRow], heads: Heads) -> Iterator[_RowGroup]:
    """Yield the rows in groups, joining a row with the previous group if that costs less."""
    group: _RowGroup | None = None
    for row in rows:
        keys = tuple(slice(tile.k_start, tile.k_stop) for tile in row.tiles)
        # a single row is either one masked call or several calls without a mask
        single = _block((row,), _union(keys), heads)
        apart = _apart(row, heads)
        if apart <= single.cost:
            single = _RowGroup((row,), single.keys, apart)
        if group is not None and group.queries.stop == row.q_start:
            all_keys = _union((*group.keys, *keys))
            joined = _block((*group.rows, row), all_keys, heads)
            # joining saves calls but adds pairs: keys that only some of the rows need
            if joined.cost < group.cost + single.cost:
                group = joined
                continue
        if group is not None:
            yield group
        group = single
    if group is not None:
        yield group


def _block(rows: tuple[TileRow, ...], keys: tuple[slice, ...], heads: Heads) -> _RowGroup:
    """Return the rows as one masked call, with unlimited cost if it has too many pairs."""
    pairs = (rows[-1].q_stop - rows[0].q_start) * _length(keys)
    cost = sys.maxsize
    if pairs <= MOST_PAIRS:
        cost = CALL + pairs * heads.heads * heads.dim
    return _RowGroup(rows, keys, cost)


def _apart(row: TileRow, heads: Heads) -> int:
    """Return the cost of computing a row without a mask, in one call per source of keys."""
    height = row.q_stop - row.q_start
    cost = 0
    for keys, kind in key_sources(row, heads.groups * heads.dim):
        elements = height * _length(keys) * heads.heads * heads.dim
        # kernels compute small triangles as squares, and about half of a large one
        if kind != FULL and height > 128:
            elements //= 2
        cost += CALL + elements
    return cost


def _calls(group: _RowGroup, heads: Heads) -> Iterator[KernelCall]:
    """Yield the kernel calls of a group, in the cheapest form."""
    if len(group.rows) > 1 or group.cost != _apart(group.rows[0], heads):
        yield KernelCall(group.queries, group.keys, FULL, _bias(group), True)
        return
    sources = key_sources(group.rows[0], heads.groups * heads.dim)
    for number, (keys, kind) in enumerate(sources):
        first = number == 0
        if kind == CAUSAL and _length(keys) in CUT:
            yield from _triangles(group.queries, keys[0], first)
        else:
            yield KernelCall(group.queries, keys, kind, None, first)


def _triangles(queries: slice, keys: slice, first: bool) -> Iterator[KernelCall]:
    """Yield a large causal triangle as small triangles and the rectangles before them."""
    length = queries.stop - queries.start
    for begin in range(0, length, TRIANGLE):
        end = min(begin + TRIANGLE, length)
        rows = slice(queries.start + begin, queries.start + end)
        own = slice(keys.start + begin, keys.start + end)
        yield KernelCall(rows, (own,), CAUSAL, None, first)
        if begin > 0:
            earlier = slice(keys.start, keys.start + begin)
            yield KernelCall(rows, (earlier,), FULL, None, False)


def _bias(group: _RowGroup) -> np.ndarray:
    """Return the bias of a masked call, fp16 `[n, m]`.

    Kernels convert an fp16 bias to their dtype faster than they turn a bool mask into a bias.
    """
    # [slices]: the slices are stored side by side, so key k of a slice is in column k + offset
    starts = np.array([part.start for part in group.keys])
    lengths = [part.stop - part.start for part in group.keys]
    offsets = np.cumsum([0, *lengths])[:-1] - starts
    queries = group.queries
    shape = (queries.stop - queries.start, sum(lengths))
    bias = np.full(shape, -np.inf, np.float16)
    for row in group.rows:
        rows = bias[row.q_start - queries.start : row.q_stop - queries.start]
        for tile in row.tiles:
            offset = offsets[np.searchsorted(starts, tile.k_start, side="right") - 1]
            # a view [row's queries, tile's keys]
            pairs = rows[:, tile.k_start + offset : tile.k_stop + offset]
            if tile.kind == FULL:
                pairs[...] = 0.0
            else:
                causal = np.tri(*pairs.shape) > 0
                pairs[causal if tile.kind == CAUSAL else causal.T] = 0.0
    return bias


KeySource = tuple[tuple[slice, ...], int]
"""Slices of keys that one call processes together, and their kind."""


def key_sources(row: TileRow, width: int) -> list[KeySource]:
    """Return the keys of each call without a mask; `width` is the number of elements per key.

    Small full tiles are copied into a single call, because another call would cost more than the
    copy. Large tiles are used in place.
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
    """Return the number of keys in all slices."""
    return sum(part.stop - part.start for part in keys)


def _union(keys: Iterable[slice]) -> tuple[slice, ...]:
    """Return the union of slices as ascending disjoint slices."""
    found: list[slice] = []
    for part in sorted(keys, key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            stop = max(found[-1].stop, part.stop)
            found[-1] = slice(found[-1].start, stop)
        else:
            found.append(part)
    return tuple(found)


def _gather(x: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
    """Return the rows of all slices, without a copy if there is only one slice."""
    if len(slices) == 1:
        return x[slices[0]]
    return torch.cat([x[part] for part in slices])


def _scatter_add(x: torch.Tensor, slices: tuple[slice, ...], values: torch.Tensor) -> None:
    """Add `values` to the rows of all slices; the reverse of `_gather`."""
    lengths = [part.stop - part.start for part in slices]
    for part, piece in zip(slices, values.split(lengths), strict=True):
        x[part] += piece


class TileKernel(ABC):
    """A kernel that iterates over the table and computes one block of queries and keys per call."""

    @abstractmethod
    def forward(
        self, qkv: QKV, allowed: Allowed, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `out[n, heads, d]` and `lse[n, heads]` of one block."""

    @abstractmethod
    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        """Return `dq, dk, dv` of one block, shaped like q, k, v."""

    def prepare(self, table: TileTable, heads: Heads) -> None:
        """Build the calls of the table; see `Kernel.prepare`."""
        table_calls(table, heads)

    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """Merge every call of the table into `partial`; see `Kernel.attend`."""
        q, k, v = qkv
        for call in table_calls(table, Heads(q.shape[1], *k.shape[1:])):
            rows = call.rows
            part = (q[rows], _gather(k, call.keys), _gather(v, call.keys))
            found = self.forward(call.turned(*part), call.allowed(q.device), scale)
            out, lse = call.turned(*found)
            if partial.untouched and call.first:
                partial.out[rows] = out
                partial.lse[rows] = lse
            else:
                merge_into(partial.out[rows], partial.lse[rows], out, lse)
        partial.untouched &= table.num_tiles == 0

    def attend_backward(
        self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV
    ) -> None:
        """Add the gradients of every call of the table; see `Kernel.attend_backward`."""
        k, v = kv
        dq, dk, dv = grads
        for call in table_calls(table, Heads(saved.q.shape[1], *k.shape[1:])):
            rows = call.rows
            keys = call.turned(_gather(k, call.keys), _gather(v, call.keys))
            queries = (saved.q[rows], saved.out[rows], saved.lse[rows], saved.dout[rows])
            part = Saved(*call.turned(*queries))
            found = call.turned(*self.backward(part, keys, call.allowed(k.device), scale))
            dq[rows] += found[0]
            _scatter_add(dk, call.keys, found[1])
            _scatter_add(dv, call.keys, found[2])


class FlashKernel(TileKernel):
    """torch's flash attention for the CPU: fp32, bf16 and float64, with grouped queries."""

    def forward(
        self, qkv: QKV, allowed: Allowed, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `out` and `lse` of one block; see `TileKernel.forward`."""
        batch = (x.transpose(0, 1).unsqueeze(0) for x in qkv)  # [n, heads, d] -> [1, heads, n, d]
        bias = _op_bias(allowed, qkv[0].dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *batch, 0.0, allowed.causal, attn_mask=bias, scale=scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        """Return `dq, dk, dv` of one block; see `TileKernel.backward`."""
        tokens_first = (saved.dout, saved.q, *kv, saved.out)
        # [n, heads, d] -> [1, heads, n, d]
        dout, q, key, value, out = (x.transpose(0, 1).unsqueeze(0) for x in tokens_first)
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
    """Return the bias as `[1, 1, n, m]` in the dtype of q, which the operator requires."""
    return None if allowed.bias is None else allowed.bias.to(dtype)[None, None]


class MathKernel(TileKernel):
    """Plain torch on any device, in blocks of query rows.

    Memory per head is `block x m`, never n x m. If `cap` is not 0, scores are
    `cap * tanh(score / cap)` (Gemma 2).
    """

    block = 1024

    def __init__(self, cap: float = 0.0) -> None:
        self.cap = cap

    def forward(
        self, qkv: QKV, allowed: Allowed, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `out` and `lse` of one block; see `TileKernel.forward`."""
        q, k, v = qkv
        outs = []
        lses = []
        for start in range(0, len(q), self.block):
            scores, _ = self._scores(q, k, start, allowed, scale)  # [groups, heads/groups, b, m]
            lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse.unsqueeze(-1))
            out = torch.einsum("grnm,mgd->ngrd", weights, v.to(weights.dtype))
            outs.append(out.flatten(1, 2))  # [b, groups, r, d] -> [b, heads, d]
            lses.append(lse.flatten(0, 1).t())  # [groups, r, b] -> [b, heads]
        return torch.cat(outs).to(q.dtype), torch.cat(lses)

    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        """Return `dq, dk, dv` of one block; see `TileKernel.backward`."""
        k, v = kv
        groups = k.shape[1]
        wide = accumulation_dtype(saved.q.dtype)
        dq = torch.empty_like(saved.q, dtype=wide)
        dk = torch.zeros_like(k, dtype=wide)
        dv = torch.zeros_like(v, dtype=wide)
        for start in range(0, len(saved.q), self.block):
            rows = slice(start, min(start + self.block, len(saved.q)))
            scores, slope = self._scores(saved.q, k, start, allowed, scale)
            # with the merged lse, the weights belong to the softmax over all keys of a query, not
            # only over the keys of this block
            lse = saved.lse[rows].t()  # [heads, b]
            lse = lse.unflatten(0, (groups, -1)).to(wide)  # [groups, r, b]
            weights = torch.exp(scores - lse.unsqueeze(-1))
            # [b, heads, d] -> [b, groups, r, d]
            q, out, dout = (
                x[rows].unflatten(1, (groups, -1)).to(wide)
                for x in (saved.q, saved.out, saved.dout)
            )
            delta = (out * dout).sum(-1).permute(1, 2, 0)  # [b, groups, r] -> [groups, r, b]
            dv += torch.einsum("grnm,ngrd->mgd", weights, dout)
            # reassigned step by step, so that intermediate tensors are freed
            dscores = torch.einsum("ngrd,mgd->grnm", dout, v.to(wide))
            dscores = dscores - delta.unsqueeze(-1)
            dscores = weights * dscores
            dscores = dscores * scale
            dscores = dscores if slope is None else dscores * slope
            dq[rows] = torch.einsum("grnm,mgd->ngrd", dscores, k.to(wide)).flatten(1, 2)
            dk += torch.einsum("grnm,ngrd->mgd", dscores, q)
        return dq, dk, dv

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, start: int, allowed: Allowed, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the masked scores of the query block at `start`, and the slope of the cap.

        Scores are `[groups, heads/groups, b, m]`. The slope is the derivative of the capped scores;
        None without a cap.
        """
        wide = accumulation_dtype(q.dtype)
        # [b, heads, d] -> [b, groups, r, d]
        rows = q[start : start + self.block]
        rows = rows.unflatten(1, (k.shape[1], -1)).to(wide)
        scores = torch.einsum("ngrd,mgd->grnm", rows, k.to(wide)) * scale
        slope = None
        if self.cap:
            bent = torch.tanh(scores / self.cap)
            scores = bent * self.cap
            slope = 1 - bent.square()  # derivative of cap * tanh(score / cap)
        if allowed.causal:
            query = torch.arange(start, start + rows.shape[0], device=q.device)
            key = torch.arange(len(k), device=q.device)
            scores.masked_fill_(key[None] > query[:, None], -torch.inf)
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
    """Return reference attention with an explicit bool mask `visible[n, m]`; differentiable.

    The result is `out[n, heads, d]`. Rows without keys have zero output and zero gradient.
    """
    repeat = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(repeat, 1)  # [m, groups, d] -> [m, heads, d]
    values = v.repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys).to(accumulation_dtype(q.dtype)) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:  # one extra key with value 0
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
        visible = torch.cat([visible, torch.ones_like(visible[:, :1])], -1)
    # a softmax over only -inf is NaN, and so is its gradient: compute these rows with zeros instead
    nothing = ~visible.any(-1)  # [n]
    weights = torch.softmax(scores.masked_fill(nothing[None, :, None], 0.0), -1)
    weights = weights.masked_fill(nothing[None, :, None], 0.0)
    return torch.einsum("hnm,mhd->nhd", weights.to(q.dtype), values)
