"""Kernels of one full or causal block: torch's flash attention on a CPU, and plain torch anywhere.

`dense_attention` is the reference that both are tested against. See ops/kernel.py for shapes.
"""

from __future__ import annotations

import torch

from megacp.core.ops.calls import Allowed
from megacp.core.ops.kernel import KV, QKV, Saved, TileKernel, accumulation_dtype


class FlashKernel(TileKernel):
    """torch's flash attention for CPU: fp32, bf16, float64, grouped queries, returns the LSE."""

    causal_block = 512  # `kvSplitSize` in torch's FlashAttentionKernel.cpp

    def forward(self, qkv: QKV, allowed: Allowed, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TileKernel.forward`; the op wants [1, heads, n, d] views and returns lse [1, heads, n]."""
        batch = (x.transpose(0, 1).unsqueeze(0) for x in qkv)  # [n, heads, d] -> [1, heads, n, d]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *batch, 0.0, allowed.causal, attn_mask=_bias(allowed, qkv[0].dtype), scale=scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        """See `TileKernel.backward`."""
        dout, q, key, value, out = (
            x.transpose(0, 1).unsqueeze(0) for x in (saved.dout, saved.q, *kv, saved.out)
        )  # [n, heads, d] -> [1, heads, n, d]
        lse = saved.lse.t().unsqueeze(0)  # [n, heads] -> [1, heads, n]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, key, value, out, lse, 0.0, allowed.causal, attn_mask=_bias(allowed, q.dtype), scale=scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv


def _bias(allowed: Allowed, dtype: torch.dtype) -> torch.Tensor | None:
    """`[1, 1, n, m]` in the dtype of q, as the op wants it."""
    return None if allowed.bias is None else allowed.bias.to(dtype)[None, None]


class MathKernel(TileKernel):
    """Plain torch on any device, in blocks of query rows: memory `block x m` per head, never n x m."""

    block = 1024

    def forward(self, qkv: QKV, allowed: Allowed, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TileKernel.forward`."""
        q, k, v = qkv
        outs, lses = [], []
        for start in range(0, len(q), self.block):
            scores = self._scores(q, k, start, allowed, scale)  # [groups, heads/groups, b, m]
            lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse.unsqueeze(-1))
            out = torch.einsum("grnm,mgd->ngrd", weights, v.to(weights.dtype))
            outs.append(out.flatten(1, 2))  # [b, groups, r, d] -> [b, heads, d]
            lses.append(lse.flatten(0, 1).t())  # [groups, r, b] -> [b, heads]
        return torch.cat(outs).to(q.dtype), torch.cat(lses)

    def backward(self, saved: Saved, kv: KV, allowed: Allowed, scale: float) -> QKV:
        """See `TileKernel.backward`; formulas of FlashAttention-2 (Dao, 2023), section 3.1."""
        k, v = kv
        groups, wide = k.shape[1], accumulation_dtype(saved.q.dtype)
        dq = torch.empty_like(saved.q, dtype=wide)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for start in range(0, len(saved.q), self.block):
            rows = slice(start, min(start + self.block, len(saved.q)))
            scores = self._scores(saved.q, k, start, allowed, scale)
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

    def _scores(self, q: torch.Tensor, k: torch.Tensor, start: int, allowed: Allowed, scale: float) -> torch.Tensor:
        """Masked scores `[groups, heads/groups, b, m]` of the query block that begins at `start`."""
        wide = accumulation_dtype(q.dtype)
        rows = q[start : start + self.block].unflatten(1, (k.shape[1], -1)).to(wide)  # [b, heads, d] -> [b, g, r, d]
        scores = torch.einsum("ngrd,mgd->grnm", rows, k.to(wide)) * scale
        if allowed.causal:
            place = torch.arange(start, start + rows.shape[0], device=q.device)
            scores.masked_fill_(torch.arange(len(k), device=q.device)[None] > place[:, None], -torch.inf)
        if allowed.bias is not None:
            scores += allowed.bias[start : start + self.block]
        return scores


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
