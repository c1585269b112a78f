"""The kernel for CUDA: torch's FlexAttention under a block mask that is built from the tile table.

One fused call per source of keys, however many tiles it has. Empty blocks cost nothing, full blocks
do not look at the mask. The mask of the others is the rule itself, asked by the GPU about integers
per token. A row whose keys are all here is differentiated by FlexAttention itself, the backward of
one part among several is FlexAttention's backward alone, given the merged `(out, lse)`: it needs
nothing else of the other sources.

Tokens are padded to whole blocks, so that the kernel of any length need not look where a row ends:
with those comparisons it holds more than registers do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    flex_attention,
)
from torch.nn.functional import pad

from megacp.attention.ops.blocks import BLOCK, BlockCover, block_cover
from megacp.attention.ops.device import lend_scratch, to_device, whole_graph
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.kernel import KV, QKV, Caller, Heads, Partial, Saved, at_once, merge_into
from megacp.attention.ops.mask import Reach, TileTable
from megacp.attention.ops.once import once
from megacp.attention.ops.tile_kernels import MathKernel

FlexAttention = Callable[..., Any]
"""`flex_attention` (or `flex_backward`), compiled or not, or a function with its arguments.

Results are differentiable; a row that sees nothing has out 0, lse -inf and gradient 0.
"""

Results = tuple[torch.Tensor, torch.Tensor]
Backend = Literal["TRITON", "FLASH"]

NARROWEST = 16
"""FlexAttention refuses narrower heads on CUDA; they are filled up with zeros, which add nothing to
any product.
"""

_NOBODY = np.iinfo(np.int32).min
"""Stands for a value that equals none of the other side."""
_ALIGNED = 32
"""Elements between the beginnings of arrays are a multiple of it: 128 bytes."""


def flex_backward(
    qkv: QKV,
    results: Results,
    dout: torch.Tensor,
    block_mask: BlockMask,
    scale: float,
    options: dict[str, Any],
) -> QKV:
    """`dq, dk, dv` of one source of keys, laid out like `q, k, v[1, heads, tokens, d]`, without its
    forward.

    `results` are the row's `out`, and `lse` in units of log 2 and contiguous. Probabilities are
    exp(scores - lse), and nothing else is needed of other sources (FlashAttention-2, Dao, 2023).
    """
    rest = (None, lambda score, *place: score, None, block_mask.as_tuple(), scale, options, (), ())
    return torch.ops.higher_order.flex_attention_backward(*qkv, *results, dout, *rest)[:3]


def compiled(*backends: str | Callable) -> tuple[FlexAttention, FlexAttention]:
    """`flex_attention` and `flex_backward` as fused kernels, compiled at the first call by inductor
    or `backends`.

    Lengths are taken as fixed until they change, then as free, so packs of any length need no form
    of their own.
    """
    # one graph or an error: without a fused kernel the scores of all pairs would be made
    if torch._dynamo.config.disable:
        raise ValueError(
            "the attention kernel flex needs torch.compile, which TORCH_COMPILE_DISABLE turns off: "
            "unset it, or choose math"
        )
    forward, backward = backends or ("inductor", "inductor")
    return whole_graph(flex_attention, forward), whole_graph(flex_backward, backward)


@functools.cache
def compiler_problem() -> str | None:
    """Why torch's compiler cannot take `flex_backward`; None when it can.

    Before 2.12 a trace of one block says it. It touches a GPU, which a rank has not chosen yet:
    later releases can.
    """
    if torch.__version__ >= "2.12":
        return None

    def trace(
        x: torch.Tensor,
    ) -> QKV:  # by itself: what `flex_backward` is first compiled for stays its own
        one = torch.ones(1, 1, 1, 1, dtype=torch.int32)
        block = BlockMask.from_kv_blocks(one[0], one)
        return flex_backward((x, x, x), (x, x[..., 0]), x, block, 1.0, {})

    traced = torch.compile(trace, fullgraph=True, backend=lambda graph, inputs: lambda x: (x, x, x))
    try:
        traced(torch.zeros(1, 1, BLOCK, NARROWEST))
    except torch._dynamo.exc.Unsupported:
        return (
            "CUDA needs torch 2.12, whose compiler takes FlexAttention's backward, not "
            f"{torch.__version__}"
        )
    return None


def kernel_options(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """What torch's Triton kernels are told; torch drops what a GPU has not.

    TMA (Hopper's loads from global memory) is taken where it needs fewer registers, and eight warps
    instead of four where a row of four spills most (docs/gpu_results.md).
    """
    narrow = dtype == torch.bfloat16
    warps = {"bwd_num_warps": 8} if narrow and width > 128 else {}
    return warps | {
        # lengths are multiples of a block, which torch finds out for fixed ones alone
        "IS_DIVISIBLE": True,
        "fwd_USE_TMA": narrow and width > 64,
        "bwd_USE_TMA": narrow,
    }


def flash_problem() -> str | None:
    """Why FlexAttention cannot take FlashAttention 4 as its kernel in this environment; None when
    it can.
    """
    try:
        found = find_spec("flash_attn.cute")
    except ImportError:  # no flash_attn at all
        found = None
    return None if found else "FlashAttention 4 is not installed: pip install flash-attn-4"


@dataclass(frozen=True)
class HostMask:
    """A block mask on the host."""

    size: int
    """Tokens of a block's side."""
    blocks: tuple[int, int]
    """Blocks of queries and of keys."""
    content: np.ndarray
    """int32: all arrays one after the other, each from a multiple of `_ALIGNED` on."""
    lengths: tuple[int, ...]
    """Lengths of the columns of `_rule`, then of `_lists` by queries (partial blocks, full blocks)
    and by keys.
    """
    reach: Reach


def padded(length: int, size: int) -> int:
    """Tokens of the whole blocks that hold `length` tokens."""
    return -(-length // size) * size


@once
def host_mask(table: TileTable, size: int) -> HostMask:
    """The mask of a table, padded to whole blocks."""
    cover = block_cover(table, size)
    arrays = [*_columns(table, size)]
    arrays += [*_lists(cover, by_keys=False), *_lists(cover, by_keys=True)]
    starts = _starts([len(x) for x in arrays])
    content = np.zeros(starts[-1], np.int32)
    for x, start in zip(arrays, starts, strict=False):
        content[start : start + len(x)] = x
    return HostMask(
        size, (cover.q_blocks, cover.k_blocks), content, tuple(map(len, arrays)), table.reach
    )


@once
def block_mask(host: HostMask, device: torch.device) -> BlockMask:
    """The mask in FlexAttention's form; its lists hold one int32 for a pair of blocks, not of
    tokens.
    """
    content = to_device(host.content, device)  # one copy to the device for all arrays
    starts = _starts(host.lengths)
    slices = (
        content[start : start + length] for start, length in zip(starts, host.lengths, strict=False)
    )
    arrays = [
        x.clone() for x in slices
    ]  # tensors of their own, as kernels compiled for them expect
    rule = _rule(host.reach, *arrays[:-8])
    lengths = (host.blocks[0] * host.size, host.blocks[1] * host.size)
    (seen, which), (full, full_which), (seen_by, by_whom), (full_by, full_by_whom) = map(
        _list, arrays[-8::2], arrays[-7::2]
    )
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=seen,
        kv_indices=which,
        full_kv_num_blocks=full,
        full_kv_indices=full_which,
        q_num_blocks=seen_by,
        q_indices=by_whom,
        full_q_num_blocks=full_by,
        full_q_indices=full_by_whom,
        BLOCK_SIZE=(host.size, host.size),
        mask_mod=rule,
    )


def _list(count: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's form of a list: counts `[1, 1, rows]`, and blocks `[1, 1, rows, columns]`."""
    blocks = blocks.view(1, 1, len(count), -1)
    torch._dynamo.maybe_mark_dynamic(
        blocks, 3
    )  # else a pack with as many blocks, but other lists, is compiled anew
    return count[None, None], blocks


def _starts(lengths: list[int] | tuple[int, ...]) -> list[int]:
    return [0, *itertools.accumulate(padded(length, _ALIGNED) for length in lengths)]


def _columns(table: TileTable, size: int) -> Iterator[np.ndarray]:
    """What `_rule` asks, in whole blocks of tokens: order and span of queries, order, leave and
    span of keys; of layers with a limited reach the depths of both. Queries and keys of nothing get
    values that none of the other side has.
    """
    q = table.q
    k = table.k
    sides = [
        (np.where(q.leave > 0, q.order, _NOBODY), _NOBODY),
        (q.span, 0),
        (k.order, 0),
        (k.leave, 0),
        (np.where(k.span != 0, k.span, _NOBODY), _NOBODY),
    ]
    if any(table.reach):
        sides += [(q.depth, 0), (k.depth, 0)]
    for x, nobody in sides:
        yield np.pad(x.astype(np.int32), (0, padded(len(x), size) - len(x)), constant_values=nobody)


def _lists(cover: BlockCover, by_keys: bool) -> Iterator[np.ndarray]:
    """Counts of the partial and then of the full blocks that each block of queries sees, or of keys
    is seen by; then `[rows, columns]` of the other side's blocks in rising order, filled up with 0,
    as narrow as the longest row.

    Both have the same columns: before 2.12 torch's kernels stepped through both with the partial
    ones' strides.
    """
    row, column, rows, columns = cover.q_block, cover.k_block, cover.q_blocks, cover.k_blocks
    order = np.arange(len(row))
    if by_keys:
        order = np.argsort(column, kind="stable")
        row, column, rows, columns = column, row, columns, rows
    kinds = [order[cover.full[order] == full] for full in (False, True)]
    counts = [np.bincount(row[chosen], minlength=rows) for chosen in kinds]
    width = min(
        columns, max(2, *(count.max() for count in counts))
    )  # one column would be a compiled form more
    for chosen, count in zip(kinds, counts, strict=True):
        blocks = np.zeros((rows, width), np.int32)
        # the rows of `chosen` ascend: a block's number in its row is its own less that of the row's
        # first
        first = np.cumsum(count) - count
        blocks[row[chosen], np.arange(len(chosen)) - first[row[chosen]]] = column[chosen]
        yield count
        yield blocks.ravel()


def _rule(
    reach: Reach,
    q_order: torch.Tensor,
    q_span: torch.Tensor,
    k_order: torch.Tensor,
    k_leave: torch.Tensor,
    k_span: torch.Tensor,
    *depths: torch.Tensor,
) -> Callable[..., torch.Tensor]:
    """The rule of attention/ops/mask.py for one pair of indices, over int32 tensors on the
    device.
    """

    def rule(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        # no test for padding or for text: `_columns` gave them values that equal none of the other
        # side
        on_path = (k_order[j] <= q_order[i]) & (q_order[i] < k_leave[j])
        return on_path | (k_span[j] == q_span[i])

    if not depths:
        return rule
    q_depth, k_depth = depths
    window, chunk = reach

    def in_window(
        b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        return q_depth[i] - k_depth[j] < window

    def in_chunk(
        b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        return q_depth[i] // chunk == k_depth[j] // chunk

    return and_masks(rule, *[in_window][: bool(window)], *[in_chunk][: bool(chunk)])


def _heads_first(x: torch.Tensor, size: int) -> torch.Tensor:
    """`[n, heads, d]` -> `[1, heads, whole blocks, at least 16]`, filled up with zeros."""
    tokens = padded(len(x), size) - len(x)
    width = max(0, NARROWEST - x.shape[-1])
    if tokens or width:
        x = pad(x, (0, width, 0, 0, 0, tokens))
    x = x.transpose(0, 1).unsqueeze(0)
    # a tower and a decoder, with other heads, are other forms: torch's backward has no form for any
    # number of heads
    torch._dynamo.mark_static(x, [1, 3])
    return x


def _tokens_first(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[1, heads, whole blocks, ...]` -> the tokens and the width of `like[n, heads, ...]`."""
    x = x.squeeze(0).transpose(0, 1)
    return (
        x if x.shape == like.shape else x[tuple(map(slice, like.shape))]
    )  # a slice of all would cost a pass backward


class FlexKernel:
    """A `WholeKernel` for float32 and bfloat16, as FlexAttention adds up in float32.

    `functions` take the place of the compiled `flex_attention` and `flex_backward`, `size` is the
    side of a block, and `whole_backend` is the kernel of a row whose keys are all here (`FLASH`:
    FlashAttention 4, which gives no gradient of the lse); `cap` see `MathKernel`, which then
    differentiates parts.
    """

    def __init__(
        self,
        functions: tuple[FlexAttention, FlexAttention] | None = None,
        size: int = BLOCK,
        whole_backend: Backend = "TRITON",
        cap: float = 0.0,
    ) -> None:
        self._score = (
            {"score_mod": lambda score, *place: cap * torch.tanh(score / cap)} if cap else {}
        )
        self._capped = MathKernel(cap)
        self._forward, self._backward = functions or compiled()
        self._size = size
        self._whole_backend: Backend = whole_backend

    def mask(self, table: TileTable, device: torch.device) -> BlockMask:
        """The block mask of a table: on the device with the first layer that asks, dropped with the
        table.
        """
        return block_mask(host_mask(table, self._size), device)

    def prepare(self, table: TileTable, heads: Heads) -> None:
        if table.num_tiles:
            host_mask(table, self._size)

    def whole(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: TileTable,
        scale: float,
        call: Caller = at_once,
    ) -> torch.Tensor:
        padded = self._heads_first(q, k, v)
        return _tokens_first(
            call(lambda *qkv: self._call(qkv, table, scale, self._whole_backend, None), *padded), q
        )

    def _heads_first(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_heads_first(x, self._size) for x in tensors)

    def _options(self, q: torch.Tensor, backend: Backend) -> dict[str, Any]:
        lend_scratch(q.device)
        return {"BACKEND": backend, **kernel_options(q.dtype, q.shape[-1])}

    def _call(
        self,
        qkv: tuple[torch.Tensor, ...],
        table: TileTable,
        scale: float,
        backend: Backend,
        aux: AuxRequest | None,
    ) -> Any:
        return self._forward(
            *qkv,
            block_mask=self.mask(table, qkv[0].device),
            scale=scale,
            enable_gqa=True,
            kernel_options=self._options(qkv[0], backend),
            return_aux=aux,
            **self._score,
        )

    @torch.no_grad()  # and detached: the compiled function has one form less
    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        if table.num_tiles == 0:
            return
        # TRITON: the same kernel for any number of queries; the default takes a decoding kernel
        # below 128 of them
        heads_first = self._heads_first(*(x.detach() for x in qkv))
        out, aux = self._call(heads_first, table, scale, "TRITON", AuxRequest(lse=True))
        out = _tokens_first(out, qkv[0])
        lse = _tokens_first(aux.lse, qkv[0][..., 0])  # [1, heads, n] -> [n, heads]
        if partial.untouched:
            partial.out.copy_(out)
            partial.lse.copy_(lse)
        else:
            merge_into(partial.out, partial.lse, out, lse)
        partial.untouched = False

    @torch.no_grad()
    def attend_backward(
        self, saved: Saved, kv: KV, table: TileTable, scale: float, grads: QKV
    ) -> None:
        if table.num_tiles == 0:
            return
        if self._score:  # torch 2.13 cannot differentiate a score of a backward of its own
            return self._capped.attend_backward(saved, kv, table, scale, grads)
        *qkv, out, dout = self._heads_first(
            *(x.detach() for x in (saved.q, *kv, saved.out, saved.dout))
        )
        lse = pad(
            saved.lse, (0, 0, 0, out.shape[2] - len(saved.lse)), value=-torch.inf
        )  # what fills up sees nothing
        # [n, heads] -> [1, heads, n]: the kernel works with powers of 2
        lse = (lse / math.log(2)).t().contiguous()[None]
        torch._dynamo.mark_static(lse, 1)
        options = self._options(out, "TRITON")
        of_part = self._backward(
            qkv, (out, lse), dout, self.mask(table, out.device), scale, options
        )
        for total, grad in zip(grads, of_part, strict=True):
            total += _tokens_first(grad, total)


class _Shapes(torch.autograd.Function):
    """Results and gradients of `flex_attention`, of tensors without numbers, and what it saves for
    backward.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> QKV:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _forward_of_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    out, lse = _Shapes.apply(q, k, v)
    return out if options["return_aux"] is None else (out, AuxOutput(lse=lse))


def _backward_of_shapes(qkv: QKV, *rest: Any) -> QKV:
    q, k, v = qkv
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FlexStandIn(FlexKernel):
    """Stand for the kernels of a GPU where memory is measured: the same tensors, which have no
    numbers.

    FlexAttention, FlashAttention and cuDNN's attention save the same: q, k, v, the output and the
    log-sum-exp.
    """

    def __init__(self, cap: float = 0.0) -> None:
        super().__init__((_forward_of_shapes, _backward_of_shapes), cap=cap)

    def mask(self, table: TileTable, device: torch.device) -> Any:
        """Return nothing: a block mask takes some megabytes, and is shared by the layers."""
        return None

    def prepare(self, table: TileTable, heads: Heads) -> None:
        return None

    def _options(self, q: torch.Tensor, backend: Backend) -> dict[str, Any]:
        return {}
