"""The CUDA kernel: torch's FlexAttention with a block mask that is built from the tile table.

There is one fused call per source of keys, for any number of tiles. Empty blocks cost nothing, and
full blocks skip the mask. In partial blocks, the GPU evaluates the rule from a few integers per
token.

If all keys of a row are local, FlexAttention differentiates the call. If a call is one of several,
only FlexAttention's backward pass runs, starting from the merged `(out, lse)`. It needs no other
data from the other sources.

Tokens are padded to whole blocks, so that the kernel need not check where a row ends. These checks
would exceed the available registers.
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
"""`flex_attention` or `flex_backward`, compiled or not, or a function with the same arguments.

Results are differentiable. A row without keys has out 0, lse -inf and gradient 0.
"""

Results = tuple[torch.Tensor, torch.Tensor]
Backend = Literal["TRITON", "FLASH"]

NARROWEST = 16
"""Narrowest head that FlexAttention accepts on CUDA. Narrower heads are padded with zeros, which do
not change any product.
"""

_NOBODY = np.iinfo(np.int32).min
"""A value that no token of the other side has."""
_ALIGNED = 32
"""Arrays begin at a multiple of this number of elements (128 bytes)."""


def flex_backward(
    qkv: QKV,
    results: Results,
    dout: torch.Tensor,
    block_mask: BlockMask,
    scale: float,
    options: dict[str, Any],
) -> QKV:
    """Return `dq, dk, dv` for one source of keys without running the forward pass.

    The gradients have the shapes of `q, k, v[1, heads, tokens, d]`. `results` are the row's merged
    `out` and its `lse`, contiguous and in units of log 2. Probabilities are exp(scores - lse), so
    no other data from the other sources is needed (FlashAttention-2, Dao, 2023).
    """
    rest = (None, lambda score, *place: score, None, block_mask.as_tuple(), scale, options, (), ())
    return torch.ops.higher_order.flex_attention_backward(*qkv, *results, dout, *rest)[:3]


def compiled(*backends: str | Callable) -> tuple[FlexAttention, FlexAttention]:
    """Return `flex_attention` and `flex_backward` as fused kernels, compiled at the first call.

    `backends` are the two compilers (default: inductor for both). Lengths are treated as static
    until they change and as dynamic afterwards, so packs of different lengths share a compiled
    form.

    Raise ValueError if torch.compile is disabled.
    """
    # without a fused kernel, the scores of all pairs would be materialised
    if torch._dynamo.config.disable:
        raise ValueError(
            "the attention kernel flex needs torch.compile, which TORCH_COMPILE_DISABLE turns off: "
            "unset it, or choose math"
        )
    forward, backward = backends or ("inductor", "inductor")
    return whole_graph(flex_attention, forward), whole_graph(flex_backward, backward)


@functools.cache
def compiler_problem() -> str | None:
    """Return the reason why torch's compiler cannot compile `flex_backward`, or None.

    torch 2.12 and newer always can compile it. For older releases, one block is traced. The trace
    uses a GPU, which a rank has not chosen yet at this point, so newer releases are not traced.
    """
    if torch.__version__ >= "2.12":
        return None

    # a separate function, so that the compiled forms of `flex_backward` are not affected
    def trace(x: torch.Tensor) -> QKV:
        one = torch.ones(1, 1, 1, 1, dtype=torch.int32)
        block = BlockMask.from_kv_blocks(one[0], one)
        return flex_backward((x, x, x), (x, x[..., 0]), x, block, 1.0, {})

    traced = torch.compile(trace, fullgraph=True, backend=lambda graph, inputs: lambda x: (x, x, x))
    try:
        traced(torch.zeros(1, 1, BLOCK, NARROWEST))
    except torch._dynamo.exc.Unsupported:
        return (
            "FlexAttention on CUDA needs torch 2.12 or newer, whose compiler supports its backward "
            f"pass; this is torch {torch.__version__}"
        )
    return None


def kernel_options(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """Return options for torch's Triton kernels; torch drops options that a GPU does not support.

    TMA (Hopper's loads from global memory) is used where it needs fewer registers. Eight warps
    replace four for the widths where four warps spill the most registers (docs/gpu_results.md).
    """
    narrow = dtype == torch.bfloat16
    warps = {"bwd_num_warps": 8} if narrow and width > 128 else {}
    return warps | {
        # lengths are multiples of a block; torch would detect this only for static lengths
        "IS_DIVISIBLE": True,
        "fwd_USE_TMA": narrow and width > 64,
        "bwd_USE_TMA": narrow,
    }


def flash_problem() -> str | None:
    """Return the reason why FlashAttention 4 cannot be FlexAttention's kernel, or None."""
    try:
        found = find_spec("flash_attn.cute")
    except ImportError:  # flash_attn itself is not installed
        found = None
    return None if found else "FlashAttention 4 is not installed: pip install flash-attn-4"


@dataclass(frozen=True)
class HostMask:
    """A block mask on the host."""

    size: int
    """Tokens along each side of a block."""
    blocks: tuple[int, int]
    """Number of query blocks and key blocks."""
    content: np.ndarray
    """int32: all arrays concatenated, each starting at a multiple of `_ALIGNED`."""
    lengths: tuple[int, ...]
    """Lengths of the arrays: the columns of `_rule`, then `_lists` by queries (partial blocks, full
    blocks), then `_lists` by keys.
    """
    reach: Reach


def padded(length: int, size: int) -> int:
    """Return `length` rounded up to a whole number of blocks, in tokens."""
    return -(-length // size) * size


@once
def host_mask(table: TileTable, size: int) -> HostMask:
    """Return the mask of a table, padded to whole blocks."""
    cover = block_cover(table, size)
    arrays = [*_columns(table, size)]
    arrays += [*_lists(cover, by_keys=False), *_lists(cover, by_keys=True)]
    # one buffer for all arrays, so that a single copy moves them to a device
    starts = _starts([len(x) for x in arrays])
    content = np.zeros(starts[-1], np.int32)
    for x, start in zip(arrays, starts, strict=False):
        content[start : start + len(x)] = x
    blocks = (cover.q_blocks, cover.k_blocks)
    return HostMask(size, blocks, content, tuple(map(len, arrays)), table.reach)


@once
def block_mask(host: HostMask, device: torch.device) -> BlockMask:
    """Return the mask in FlexAttention's format.

    Its lists contain one int32 per pair of blocks, not per pair of tokens.
    """
    content = to_device(host.content, device)  # one copy for all arrays
    arrays = []
    for start, length in zip(_starts(host.lengths), host.lengths, strict=False):
        # clone, because the compiled kernels do not expect views
        arrays.append(content[start : start + length].clone())
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
    """Return a list in FlexAttention's format.

    Counts are `[1, 1, rows]`, and blocks are `[1, 1, rows, columns]`.
    """
    blocks = blocks.view(1, 1, len(count), -1)
    # otherwise, lists of a different width would trigger a compilation
    torch._dynamo.maybe_mark_dynamic(blocks, 3)
    return count[None, None], blocks


def _starts(lengths: list[int] | tuple[int, ...]) -> list[int]:
    """Return where each array of a buffer starts, and the length of the buffer."""
    return [0, *itertools.accumulate(padded(length, _ALIGNED) for length in lengths)]


def _columns(table: TileTable, size: int) -> Iterator[np.ndarray]:
    """Yield the int32 columns that `_rule` reads, padded to whole blocks of tokens.

    The columns are order and span of queries, then order, leave and span of keys. For layers with a
    limited reach, the depths of queries and keys follow. Padding gets values that no token of the
    other side has.
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
    """Yield counts and lists of the partial blocks, then counts and lists of the full blocks.

    Counts are `[rows]`: the number of key blocks per query block, or the number of query blocks per
    key block if `by_keys`. Lists are `[rows, columns]`, flattened: the
    numbers of these blocks in ascending order, padded with 0 to the length of the longest row.

    Both lists have the same width, because torch's kernels before 2.12 use the strides of the
    partial list for both.
    """
    row = cover.q_block
    rows = cover.q_blocks
    column = cover.k_block
    columns = cover.k_blocks
    order = np.arange(len(row))
    if by_keys:
        order = np.argsort(column, kind="stable")
        row, column = column, row
        rows, columns = columns, rows
    kinds = [order[cover.full[order] == full] for full in (False, True)]
    counts = [np.bincount(row[chosen], minlength=rows) for chosen in kinds]
    # at least two columns: a single column would need another compiled form
    width = min(columns, max(2, *(count.max() for count in counts)))
    for chosen, count in zip(kinds, counts, strict=True):
        blocks = np.zeros((rows, width), np.int32)
        # rows of `chosen` ascend, so a block's column is its distance from the first block of its
        # row
        first = np.cumsum(count) - count
        place = np.arange(len(chosen)) - first[row[chosen]]
        blocks[row[chosen], place] = column[chosen]
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
    """Return the rule of attention/ops/mask.py for one pair of indices.

    The columns are int32 tensors on the device.
    """

    def rule(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        # padding and text need no test: `_columns` gave them values that match no token of the
        # other side
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

    masks = [rule]
    if window:
        masks.append(in_window)
    if chunk:
        masks.append(in_chunk)
    return and_masks(*masks)


def _heads_first(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return `[n, heads, d]` as `[1, heads, whole blocks, at least 16]`, padded with zeros."""
    tokens = padded(len(x), size) - len(x)
    width = max(0, NARROWEST - x.shape[-1])
    if tokens or width:
        x = pad(x, (0, width, 0, 0, 0, tokens))
    x = x.transpose(0, 1).unsqueeze(0)
    # a vision tower and a decoder have different heads and get separate compiled forms, because
    # torch's backward pass does not support a dynamic number of heads
    torch._dynamo.mark_static(x, [1, 3])
    return x


def _tokens_first(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `[1, heads, whole blocks, ...]` cut to the shape of `like[n, heads, ...]`."""
    x = x.squeeze(0).transpose(0, 1)
    if x.shape == like.shape:  # slicing would cost another copy in the backward pass
        return x
    return x[tuple(map(slice, like.shape))]


class FlexKernel:
    """A `WholeKernel` for float32 and bfloat16; FlexAttention accumulates in float32.

    `functions` replace the compiled `flex_attention` and `flex_backward`. `size` is the side length
    of a block. `whole_backend` is the kernel for rows whose keys are all local; `FLASH` is
    FlashAttention 4, which has no gradient for the lse. With a `cap` (see `MathKernel`), MathKernel
    computes the gradients for a single source of keys.
    """

    def __init__(
        self,
        functions: tuple[FlexAttention, FlexAttention] | None = None,
        size: int = BLOCK,
        whole_backend: Backend = "TRITON",
        cap: float = 0.0,
    ) -> None:
        # options of the call that apply the cap to scores; empty without a cap
        self._score = (
            {"score_mod": lambda score, *place: cap * torch.tanh(score / cap)} if cap else {}
        )
        self._capped = MathKernel(cap)
        self._forward, self._backward = functions or compiled()
        self._size = size
        self._whole_backend: Backend = whole_backend

    def mask(self, table: TileTable, device: torch.device) -> BlockMask:
        """Return the block mask of a table on the device.

        The first layer that needs the mask builds it. The mask is freed together with the table.
        """
        return block_mask(host_mask(table, self._size), device)

    def prepare(self, table: TileTable, heads: Heads) -> None:
        """Build the host mask of the table; see `Kernel.prepare`."""
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
        """Attend to all keys of a row; see `WholeKernel.whole`."""
        padded = self._heads_first(q, k, v)
        return _tokens_first(
            call(lambda *qkv: self._call(qkv, table, scale, self._whole_backend, None), *padded), q
        )

    def _heads_first(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors in FlexAttention's format; see the function of this name above."""
        return tuple(_heads_first(x, self._size) for x in tensors)

    def _options(self, q: torch.Tensor, backend: Backend) -> dict[str, Any]:
        """Return the kernel options for q, and give this thread scratch memory for Triton."""
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
        """Run the forward kernel on padded tensors."""
        return self._forward(
            *qkv,
            block_mask=self.mask(table, qkv[0].device),
            scale=scale,
            enable_gqa=True,
            kernel_options=self._options(qkv[0], backend),
            return_aux=aux,
            **self._score,
        )

    @torch.no_grad()  # together with detach(), this saves one compiled form
    def attend(self, partial: Partial, qkv: QKV, table: TileTable, scale: float) -> None:
        """Merge one source of keys into `partial`; see `Kernel.attend`."""
        if table.num_tiles == 0:
            return
        # TRITON uses the same kernel for any number of queries; the default switches to a decoding
        # kernel for fewer than 128
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
        """Add the gradients of one source of keys; see `Kernel.attend_backward`."""
        if table.num_tiles == 0:
            return
        if self._score:  # torch 2.13 cannot differentiate a score_mod in a separate call
            return self._capped.attend_backward(saved, kv, table, scale, grads)
        *qkv, out, dout = self._heads_first(
            *(x.detach() for x in (saved.q, *kv, saved.out, saved.dout))
        )
        # padding tokens attend to no key
        padding = out.shape[2] - len(saved.lse)
        lse = pad(saved.lse, (0, 0, 0, padding), value=-torch.inf)
        # [n, heads] -> [1, heads, n]; the kernel uses powers of 2
        lse = (lse / math.log(2)).t().contiguous()[None]
        torch._dynamo.mark_static(lse, 1)
        options = self._options(out, "TRITON")
        of_part = self._backward(
            qkv, (out, lse), dout, self.mask(table, out.device), scale, options
        )
        for total, grad in zip(grads, of_part, strict=True):
            total += _tokens_first(grad, total)


class _Shapes(torch.autograd.Function):
    """`flex_attention` for tensors without data: returns results and gradients of the right shapes,
    and saves the same tensors for the backward pass.
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
    """Replace `flex_attention` for tensors without data."""
    out, lse = _Shapes.apply(q, k, v)
    return out if options["return_aux"] is None else (out, AuxOutput(lse=lse))


def _backward_of_shapes(qkv: QKV, *rest: Any) -> QKV:
    """Replace `flex_backward` for tensors without data."""
    q, k, v = qkv
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FlexStandIn(FlexKernel):
    """Stand-in for all GPU kernels when memory is estimated; its tensors have no data.

    FlexAttention, FlashAttention and cuDNN's attention save the same tensors: q, k, v, the output
    and the log-sum-exp.
    """

    def __init__(self, cap: float = 0.0) -> None:
        super().__init__((_forward_of_shapes, _backward_of_shapes), cap=cap)

    def mask(self, table: TileTable, device: torch.device) -> Any:
        """Return None: a block mask takes only a few megabytes and is shared by all layers."""
        return None

    def prepare(self, table: TileTable, heads: Heads) -> None:
        """Do nothing: no mask is needed."""
        return None

    def _options(self, q: torch.Tensor, backend: Backend) -> dict[str, Any]:
        """Return no options, because no kernel runs."""
        return {}
