"""Attention kernels behind one interface: they walk a tile table, merge forward parts and accumulate gradients.

Key property: forward and backward see only non-empty tiles; backward starts from the merged `(out, lse)`, so a
transport may call it once per source of keys and the sum is exact. Partial sums are held in fp32 or wider. Rejected:
one masked call over all keys, which pays for emptiness and needs an S x S mask.

Tensors are token-major: `q[n, heads, d]`, `k, v[m, groups, d]` with `heads % groups == 0` (grouped queries).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megacp.ops.mask import CAUSAL, TileTable
from megacp.ops.merge import merge_into

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or their gradients."""


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


class Kernel(Protocol):
    """One tile of attention, forward and backward."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out[n, heads, d]`, `lse[n, heads]` of one full or causal tile."""

    def backward(
        self, saved: Saved, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`dq, dk, dv` of one tile, shaped like q, k, v."""


class FlashKernel:
    """torch's flash attention for CPU: fp32, bf16, float64, grouped queries, returns the LSE."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`; the op wants [1, heads, n, d] views and returns lse [1, heads, n]."""
        batch = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [n, heads, d] -> [1, heads, n, d]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, causal, scale=scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(
        self, saved: Saved, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`."""
        dout, q, key, value, out = (
            x.transpose(0, 1).unsqueeze(0) for x in (saved.dout, saved.q, k, v, saved.out)
        )  # [n, heads, d] -> [1, heads, n, d]
        lse = saved.lse.t().unsqueeze(0)  # [n, heads] -> [1, heads, n]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, key, value, out, lse, 0.0, causal, scale=scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv


class MathKernel:
    """Plain torch on any device, in blocks of query rows: memory `block x m` per head, never n x m."""

    def __init__(self, block: int = 1024) -> None:
        self.block = block

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        outs, lses = [], []
        for start in range(0, len(q), self.block):
            scores = self._scores(q, k, start, causal, scale)  # [groups, heads/groups, b, m]
            lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse.unsqueeze(-1))
            out = torch.einsum("grnm,mgd->ngrd", weights, v.to(weights.dtype))
            outs.append(out.flatten(1, 2))  # [b, groups, r, d] -> [b, heads, d]
            lses.append(lse.flatten(0, 1).t())  # [groups, r, b] -> [b, heads]
        return torch.cat(outs).to(q.dtype), torch.cat(lses)

    def backward(
        self, saved: Saved, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`; formulas of FlashAttention-2 (Dao, 2023), section 3.1."""
        groups, wide = k.shape[1], accumulation_dtype(saved.q.dtype)
        dq = torch.empty_like(saved.q, dtype=wide)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for start in range(0, len(saved.q), self.block):
            rows = slice(start, min(start + self.block, len(saved.q)))
            scores = self._scores(saved.q, k, start, causal, scale)
            lse = saved.lse[rows].t().unflatten(0, (groups, -1)).to(wide)  # [b, heads] -> [groups, r, b]
            weights = torch.exp(scores - lse.unsqueeze(-1))
            q, out, dout = (
                x[rows].unflatten(1, (groups, -1)).to(wide) for x in (saved.q, saved.out, saved.dout)
            )  # [b, heads, d] -> [b, groups, r, d]
            delta = (out * dout).sum(-1).permute(1, 2, 0)  # [b, groups, r] -> [groups, r, b]
            dv += torch.einsum("grnm,ngrd->mgd", weights, dout)
            dscores = weights * (torch.einsum("ngrd,mgd->grnm", dout, v.to(wide)) - delta.unsqueeze(-1)) * scale
            dq[rows] = torch.einsum("grnm,mgd->ngrd", dscores, k.to(wide)).flatten(1, 2)
            dk += torch.einsum("grnm,ngrd->mgd", dscores, q)
        return dq, dk, dv

    def _scores(self, q: torch.Tensor, k: torch.Tensor, start: int, causal: bool, scale: float) -> torch.Tensor:
        """Masked scores `[groups, heads/groups, b, m]` of the query block that begins at `start`."""
        wide = accumulation_dtype(q.dtype)
        rows = q[start : start + self.block].unflatten(1, (k.shape[1], -1)).to(wide)  # [b, heads, d] -> [b, g, r, d]
        scores = torch.einsum("ngrd,mgd->grnm", rows, k.to(wide)) * scale
        if causal:
            place = torch.arange(start, start + rows.shape[0], device=q.device)
            scores.masked_fill_(torch.arange(len(k), device=q.device)[None] > place[:, None], -torch.inf)
        return scores


KERNELS: dict[str, type[FlashKernel] | type[MathKernel]] = {"flash": FlashKernel, "math": MathKernel}


def select_kernel(name: str, device: torch.device) -> Kernel:
    """The kernel of a `--attention-kernel` value; `auto` is flash on CPU and math elsewhere.

    Raises ValueError for an unknown name, or flash off the CPU.
    """
    chosen = ("flash" if device.type == "cpu" else "math") if name == "auto" else name
    if chosen not in KERNELS:
        raise ValueError(f"--attention-kernel {name} is unknown; choose auto, {', '.join(KERNELS)}")
    if chosen == "flash" and device.type != "cpu":
        raise ValueError(f"--attention-kernel flash runs on the CPU, this run is on {device.type}; choose auto or math")
    return KERNELS[chosen]()


def empty_partial(q: torch.Tensor) -> Partial:
    """The result of having seen no key: out 0, lse -inf."""
    dtype = accumulation_dtype(q.dtype)
    return Partial(torch.zeros_like(q, dtype=dtype), torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device))


def attend(kernel: Kernel, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
    """Merge into `partial` what `q` sees of these keys; rows that see nothing are left alone."""
    q, k, v = qkv
    for row in table.rows:
        rows = slice(row.q_start, row.q_stop)
        for number, tile in enumerate(row.tiles):
            keys = slice(tile.k_start, tile.k_stop)
            out, lse = kernel.forward(q[rows], k[keys], v[keys], tile.kind == CAUSAL, scale)
            if partial.untouched and number == 0:
                partial.out[rows], partial.lse[rows] = out, lse
            else:
                merge_into(partial.out[rows], partial.lse[rows], out, lse)
    partial.untouched &= not table.rows


def attend_backward(
    kernel: Kernel,
    saved: Saved,
    kv: tuple[torch.Tensor, torch.Tensor],
    table: TileTable,
    scale: float,
    grads: QKV,
) -> None:
    """Add this table's share to `grads = (dq, dk, dv)`, held in the accumulation dtype."""
    (k, v), (dq, dk, dv) = kv, grads
    for row in table.rows:
        rows = slice(row.q_start, row.q_stop)
        part = Saved(saved.q[rows], saved.out[rows], saved.lse[rows], saved.dout[rows])
        for tile in row.tiles:
            keys = slice(tile.k_start, tile.k_stop)
            d_query, d_key, d_value = kernel.backward(part, k[keys], v[keys], tile.kind == CAUSAL, scale)
            dq[rows] += d_query
            dk[keys] += d_key
            dv[keys] += d_value


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """The obvious reference: softmax over an explicit bool mask `visible[n, m]`, differentiated by autograd.

    Rows that see nothing give zero output and zero gradient. Returns `out[n, heads, d]`.
    """
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)  # [m, groups, d] -> [m, heads, d]
    scores = torch.einsum("nhd,mhd->hnm", q, keys).to(accumulation_dtype(q.dtype)) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    nothing = ~visible.any(-1)  # [n]
    weights = torch.softmax(scores.masked_fill(nothing[None, :, None], 0.0), -1)
    weights = weights.masked_fill(nothing[None, :, None], 0.0)
    return torch.einsum("hnm,mhd->nhd", weights.to(q.dtype), values)
