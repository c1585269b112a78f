"""The kernel for CUDA: torch's FlexAttention under a block mask that is built from the tile table.

Key property: one fused call per source of keys, however many tiles it has. Empty blocks cost nothing, full blocks do
not look at the mask. The mask of the others is the rule itself, asked by the GPU about integers per token. Only torch's
documented API is used, so the backward of a part computes that part's forward again to be handed its graph. Rejected: a
call per tile, hundreds of launches a layer; `create_block_mask`, which asks the rule about every pair; the operator
behind FlexAttention's backward, which would take the merged results as they are but is private.

**Backward of a part.** Let `p` be one source of keys and `lse = log(sum over p of exp(lse_p))`. The merged output is
`out = sum over p of w_p out_p` with `w_p = exp(lse_p - lse)`. From `d w_p / d lse_p = w_p (1 - w_p)` and
`d w_r / d lse_p = -w_r w_p` for another source r:

    d out_p = w_p dout
    d lse_p = dout . (w_p out_p - w_p sum over r of w_r out_r) = w_p dout . (out_p - out)

with the dot product over the width of a head. Both need of the other sources only the merged `(out, lse)`. They are
handed to autograd as the gradients of `(out_p, lse_p)`. A row that sees nothing in p has lse_p = -inf and w_p = 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from megacp.ops.blocks import BLOCK, BlockCover, block_cover
from megacp.ops.calls import Widths
from megacp.ops.compiled import whole_graph
from megacp.ops.kernel import QKV, Partial, Saved, accumulation_dtype
from megacp.ops.mask import Metadata, TileTable
from megacp.ops.merge import merge_into
from megacp.ops.to_device import to_device

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask, float], tuple[torch.Tensor, torch.Tensor]]
"""`q[1, heads, n, d]`, `k, v[1, groups, m, d]`, block mask, scale -> `out[1, heads, n, d]`, natural `lse[1, heads, n]`.

Differentiable in q, k, v by both results; a row that sees nothing has out 0, lse -inf and gradient 0.
"""

NARROWEST = 16
"""FlexAttention refuses narrower heads on CUDA; they are filled up with zeros, which add nothing to any product."""

_NOBODY = np.iinfo(np.int32).min
"""Stands for a value that equals none of the other side."""


def with_lse(function: Callable) -> Attention:
    """`flex_attention`, compiled or not, as an `Attention`."""

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # TRITON: the same kernel for any number of queries; the default takes a decoding kernel below 128 of them
        out, aux = function(
            q,
            k,
            v,
            block_mask=mask,
            scale=scale,
            enable_gqa=True,
            kernel_options={"BACKEND": "TRITON"},
            return_aux=AuxRequest(lse=True),
        )
        return out, aux.lse

    return attention


def compiled(backend: str | Callable = "inductor") -> Attention:
    """`flex_attention` as a fused kernel, compiled at the first call.

    Lengths are taken as fixed until they change, then as free, so packs of any length need no form of their own.
    """
    # one graph or an error: without a fused kernel the scores of all pairs would be made
    if torch._dynamo.config.disable:
        raise ValueError("TORCH_COMPILE_DISABLE turns off what --attention-kernel flex needs: unset it, or choose math")
    return with_lse(whole_graph(flex_attention, backend))


def _rule(q: Metadata, k: Metadata, device: torch.device) -> Callable[..., torch.Tensor]:
    """The rule of ops/mask.py for one pair of indices, over int32 tensors on the device.

    Keys of no document or no span get values that no query has, which leaves one comparison for each.
    """

    def tensors(*columns: np.ndarray) -> list[torch.Tensor]:
        return [to_device(column.astype(np.int32), device) for column in columns]

    q_document, q_branch, q_span, q_place = tensors(q.document, q.branch, q.span, q.order)
    k_document, k_branch, k_span, k_place = tensors(
        np.where(k.document >= 0, k.document, _NOBODY), k.branch, np.where(k.span != 0, k.span, _NOBODY), k.order
    )

    def rule(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        same_branch = (k_branch[j] == 0) | (k_branch[j] == q_branch[i])
        seen = (k_place[j] <= q_place[i]) | (k_span[j] == q_span[i])
        return (k_document[j] == q_document[i]) & same_branch & seen

    return rule


def _lists(cover: BlockCover, full: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's form of the full or the partial blocks: how many key blocks each query block sees, int32
    `[1, 1, q_blocks]`, and which, int32 `[1, 1, q_blocks, k_blocks]`, filled up with 0.
    """
    chosen = np.flatnonzero(cover.full == full)
    row = cover.q_block[chosen]
    count = np.bincount(row, minlength=cover.q_blocks)
    within = np.arange(len(row)) - (np.cumsum(count) - count)[row]
    indices = torch.zeros(1, 1, cover.q_blocks, cover.k_blocks, dtype=torch.int32, device=device)
    place, column = (to_device(x, device) for x in (np.stack([row, within]), cover.k_block[chosen]))
    indices[0, 0, place[0], place[1]] = column.int()
    return to_device(count.astype(np.int32), device)[None, None], indices


def block_mask(table: TileTable, device: torch.device, size: int = BLOCK) -> BlockMask:
    """The table's mask in FlexAttention's form; its lists hold one int32 for a pair of blocks, not of tokens."""
    cover = _cover(table, size)
    return BlockMask.from_kv_blocks(
        *_lists(cover, False, device),
        *_lists(cover, True, device),
        BLOCK_SIZE=size,
        mask_mod=_rule(table.q, table.k, device),
        seq_lengths=(table.queries, table.keys),
    )


def _cover(table: TileTable, size: int) -> BlockCover:
    return table.part(size, lambda: block_cover(table, size))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    x = x.transpose(0, 1).unsqueeze(0)  # [n, heads, d] -> [1, heads, n, d]
    return x if x.shape[-1] >= NARROWEST else pad(x, (0, NARROWEST - x.shape[-1]))


def _tokens_first(x: torch.Tensor, width: int) -> torch.Tensor:
    return x[0].transpose(0, 1)[..., :width]  # [1, heads, n, d] -> [n, heads, d]


class FlexKernel:
    """See `Kernel`; for float32 and bfloat16, as FlexAttention adds up in float32.

    `attention` takes the place of the compiled `flex_attention`; `size` is the side of a block.
    """

    def __init__(self, attention: Attention | None = None, size: int = BLOCK) -> None:
        self._attention = attention or compiled()
        self._size = size
        self._masks: weakref.WeakKeyDictionary[TileTable, dict[torch.device, BlockMask]] = weakref.WeakKeyDictionary()

    def mask(self, table: TileTable, device: torch.device) -> BlockMask:
        """The block mask of a table: built by the first layer that asks, dropped with the table."""
        masks = self._masks.setdefault(table, {})
        if device not in masks:
            masks[device] = block_mask(table, device, self._size)
        return masks[device]

    def prepare(self, table: TileTable, widths: Widths) -> None:
        """See `Kernel.prepare`."""
        if table.num_tiles:
            _cover(table, self._size)

    @torch.no_grad()  # and detached: the compiled function has one form less
    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """See `Kernel.attend`."""
        if table.num_tiles == 0:
            return
        q, k, v = (_heads_first(x.detach()) for x in qkv)
        out, lse = self._attention(q, k, v, self.mask(table, q.device), scale)
        out, lse = _tokens_first(out, partial.out.shape[-1]), lse[0].t()  # [1, heads, n] -> [n, heads]
        if partial.untouched:
            partial.out.copy_(out)
            partial.lse.copy_(lse)
        else:
            merge_into(partial.out, partial.lse, out, lse)
        partial.untouched = False

    def attend_backward(
        self, saved: Saved, kv: tuple[torch.Tensor, torch.Tensor], table: TileTable, scale: float, grads: QKV
    ) -> None:
        """See `Kernel.attend_backward`."""
        if table.num_tiles == 0:
            return
        q, k, v = (_heads_first(x.detach()).requires_grad_() for x in (saved.q, *kv))
        with torch.enable_grad():
            out, lse = self._attention(q, k, v, self.mask(table, q.device), scale)
        gradients = _gradients_of_part(saved, out.detach(), lse.detach())
        found = torch.autograd.grad((out, lse), (q, k, v), gradients)
        for total, grad in zip(grads, found, strict=True):
            total += _tokens_first(grad, total.shape[-1])


def _gradients_of_part(saved: Saved, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a part's `out[1, heads, n, d]` and `lse[1, heads, n]`; see the module's docstring."""
    wide = accumulation_dtype(out.dtype)
    merged, dout = _heads_first(saved.out), _heads_first(saved.dout)
    total = saved.lse.t()  # [n, heads] -> [heads, n]
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    dout = (dout.to(wide) * weight.unsqueeze(-1)).to(out.dtype)
    return dout, (dout.to(wide) * (out.to(wide) - merged.to(wide))).sum(-1)
