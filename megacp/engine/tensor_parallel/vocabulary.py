"""The vocabulary-parallel table: an embedding, and a head whose product and loss go over chunks of
tokens.

The global vocabulary keeps its true size, so a checkpoint does not depend on tp. Each rank pads its
rows for fast kernels: those rows are in no checkpoint, never looked up, and masked out of the
softmax.

The loss of a microbatch is `sum(weights * losses) / denominator`, with both known before the
forward. So the forward of a chunk makes its logits, losses and their gradient at once, and from
that the gradients of input and weight: three products, none of them twice, and logits of all tokens
never exist. Backward scales what is there. A whole row is one chunk. The weight gradient of several
chunks is summed in fp32 (float64 for float64 models) and narrowed where it stands, so there is no
second copy. It goes to autograd, because a tied table is used twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megacp.attention.ops.device import fused, is_compiled, on_gpu
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.distributed import collectives
from megacp.distributed.differentiable import reduce_from, reduce_scatter_to
from megacp.distributed.grid import Axis
from megacp.distributed.large_blocks import empty, large_product, zeros
from megacp.engine.data_parallel.parameter import ParameterSpec, TensorSlice
from megacp.engine.layers.table import Tensor
from megacp.engine.tensor_parallel.linear import column_product
from megacp.engine.tensor_parallel.parameters import LinearOptions
from megacp.engine.tensor_parallel.weight_gradients import add_weight_gradient


@dataclass(frozen=True)
class Target:
    """What the head is to predict for `t` tokens, and how much each of them counts."""

    labels: torch.Tensor
    """int64 `[t]`; any id where the weight is 0."""
    weights: torch.Tensor
    """`[t]`."""
    denominator: float


@dataclass(frozen=True)
class TableSpec:
    """A global table."""

    tensor: Tensor
    """`[vocab_size, hidden_size]`."""
    partial_over: tuple[str, ...] = ()
    """Axes over which its gradient is partial: `embedding` where two stages hold a tied table."""
    counted: bool = True
    """Whether the gradient norm counts it: one of two tied copies is counted."""


@fused
def _read(
    logits: torch.Tensor, index: torch.Tensor, elsewhere: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and target logit of each row `[t]`, 0 where another rank has it: one pass,
    without a wide copy.
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    # written out, as torch's compiler then finds the highest and the sum in one loop
    highest = wide.amax(-1, keepdim=True)
    total = (wide - highest).exp().sum(-1, keepdim=True)
    return (highest + total.log())[:, 0], wide.gather(1, index)[:, 0].masked_fill(elsewhere, 0.0)


@fused
def _write_gradient(
    logits: torch.Tensor, local: torch.Tensor, lse: torch.Tensor, scale: torch.Tensor
) -> None:
    """Overwrite logits with `(softmax - 1 at the label) * scale`: one pass. A label elsewhere
    equals no column.
    """
    softmax = torch.exp(logits.to(lse.dtype) - lse[:, None])
    column = torch.arange(logits.shape[1], device=logits.device)
    logits.copy_((softmax - (column == local[:, None]).to(lse.dtype)) * scale[:, None])


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    axis: Axis,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss per token, `[t]` in fp32 or wider, replicated over tp; the logits are overwritten.

    Ranks share two numbers per token, the log-sum-exp and the target logit of their columns, in one
    all-gather. On CUDA logits are read in one compiled pass and become their gradient in another,
    on a CPU exponentials are kept between.

    `logits[t, v]` are this rank's true columns, the first of which is global index `first`;
    `labels[t]` int64 are global indices. With `scale[t]`, as wide, the logits become the gradient
    of `sum(scale * losses)`, else scratch.
    """
    local = labels - first
    elsewhere = (local < 0) | (
        local >= logits.shape[1]
    )  # [t]: the label's column is on another rank, or on none
    index = local.masked_fill(elsewhere, 0)[:, None]  # [t, 1]
    compiled = is_compiled(logits)
    if not logits.shape[1]:  # this rank holds no true row of the vocabulary
        target = logits.new_zeros(labels.shape, dtype=accumulation_dtype(logits.dtype))
        lse = torch.full_like(target, -torch.inf)
    elif compiled:
        lse, target = _read(logits, index, elsewhere)
    else:
        wide = logits.to(
            accumulation_dtype(logits.dtype)
        )  # [t, v]: the logits themselves, or a copy of halves
        target = wide.gather(1, index)[:, 0].masked_fill(
            elsewhere, 0.0
        )  # [t], 0 on the other ranks
        highest = wide.amax(-1)
        lse = (
            highest + wide.sub_(highest[:, None]).exp_().sum(-1).log()
        )  # [t, v] -> [t], of these columns
    shared = collectives.all_gather(
        torch.stack([lse, target])[None], axis
    )  # [1, 2, t] -> [tp, 2, t]
    lse, target = (
        torch.logsumexp(shared[:, 0], 0),
        shared[:, 1].sum(0),
    )  # [tp, t] -> [t], of all columns
    if scale is not None and logits.shape[1] and compiled:
        _write_gradient(logits, local, lse, scale)
    elif scale is not None and logits.shape[1]:
        wide.mul_(
            (scale * torch.exp(highest - lse))[:, None]
        )  # softmax, scaled: the exponentials are there already
        wide.scatter_add_(
            1, index, (-scale).masked_fill(elsewhere, 0.0)[:, None]
        )  # minus 1 at the label, scaled
        if wide is not logits:
            logits.copy_(wide)
    return lse - target


def weighted_loss(losses: torch.Tensor, weights: torch.Tensor, denominator: float) -> torch.Tensor:
    """Scalar `sum(weights[t] * losses[t]) / denominator` over this rank's tokens: partial over dp
    and cp.
    """
    return (losses * weights.to(losses.dtype)).sum() / denominator


class VocabularyTable(nn.Module):
    """This rank's rows of a table: an embedding, an output head, or both when tied.

    Each rank's rows are padded to a multiple of `rows_multiple`.
    """

    def __init__(self, table: TableSpec, rows_multiple: int, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        tensor = table.tensor
        vocab, hidden = tensor.shape
        rows = -(-vocab // (options.tp.size * rows_multiple)) * rows_multiple
        self.first = min(options.tp.rank * rows, vocab)
        self.true_rows = min(rows, vocab - self.first)
        piece = TensorSlice(tensor.name, tensor.shape, (self.first, 0), (self.true_rows, hidden))
        self.weight = options.parameter(
            ParameterSpec.of(tensor, [piece], table.partial_over, table.counted), rows
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 `tokens[t]` -> `x[t/tp, h]` under sequence parallelism, else `x[t, h]`."""
        local, tp = tokens - self.first, self.options.tp
        elsewhere = (local < 0) | (local >= self.true_rows)  # [t]: the row is on another tp rank
        x = F.embedding(
            local.masked_fill(elsewhere, 0), self.weight
        )  # row 0 stands in, [t] -> [t, h]
        if tp.size == 1:
            return x
        x = x.masked_fill(
            elsewhere[:, None], 0.0
        )  # partial over tp: one rank has the row, the others 0
        return reduce_scatter_to(x, tp) if self.options.sequence_parallel else reduce_from(x, tp)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t/tp, h]` or `x[t, h]` -> `[t, true rows of this rank]`."""
        return column_product(x, self.weight, self.options)[:, : self.true_rows]

    def loss(self, x: torch.Tensor, target: Target, chunk_tokens: int) -> torch.Tensor:
        """The scalar loss of `x` as in `logits`, replicated over tp, partial over dp and cp.

        Logits exist for `chunk_tokens` tokens at a time (0: all). Gradients are made where autograd
        records, and only those that are asked for: none for a frozen table, none in evaluation.
        """
        return _ChunkedLoss.apply(
            x, self.weight, target, self, chunk_tokens, torch.is_grad_enabled()
        )


class _ChunkedLoss(torch.autograd.Function):
    """`x[t/tp, h]` sharded or `x[t, h]` replicated, `W[rows, h]` -> the scalar loss, replicated
    over tp.
    """

    @staticmethod
    def forward(ctx, x, weight, target, table, chunk_tokens, with_gradients):  # type: ignore[no-untyped-def]
        tp, sharded = (
            table.options.tp,
            table.options.sequence_parallel and table.options.tp.size > 1,
        )
        x_all = collectives.all_gather(x, tp) if sharded else x  # [t, h]
        for_x, for_weight = (wanted and with_gradients for wanted in ctx.needs_input_grad[:2])
        tokens, wide = x_all.shape[0], accumulation_dtype(x.dtype)
        step = chunk_tokens or max(tokens, 1)
        dx = empty(x_all.shape, x_all) if for_x else None
        d_weight = (
            zeros(weight.shape, weight, wide if tokens > step else None) if for_weight else None
        )
        weights = target.weights.to(wide)
        scale = weights / target.denominator
        losses = torch.empty_like(weights)
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            logits = large_product(x_all[part], weight.t())  # [c, h] x [h, rows] -> [c, rows]
            true = logits[:, : table.true_rows]
            scaled = scale[part] if for_x or for_weight else None
            losses[part] = cross_entropy(true, target.labels[part], table.first, tp, scaled)
            logits[:, table.true_rows :] = 0.0  # padded rows have no gradient
            if dx is not None:
                torch.mm(
                    logits, weight, out=dx[part]
                )  # [c, rows] x [rows, h] -> [c, h], partial over tp
            if d_weight is not None:
                _add_product(d_weight, logits, x_all[part])
            del logits, true  # before those of the next chunk
        if dx is not None:
            dx = (collectives.reduce_scatter if sharded else collectives.all_reduce)(dx, tp)
        ctx.save_for_backward(dx, d_weight)
        ctx.dtype = weight.dtype
        return weighted_loss(losses, weights, target.denominator)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        dx, d_weight = ctx.saved_tensors  # changed in place: torch refuses a second backward
        d_weight = None if d_weight is None else _narrowed(d_weight.mul_(grad), ctx.dtype)
        return None if dx is None else dx.mul_(grad), d_weight, None, None, None, None


def _add_product(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Add `grad^T x` to `total[rows, h]`, for `grad[c, rows]` and `x[c, h]`.

    A CPU's product for a wider total is of some rows at a time: together they are as large as wide
    logits of the chunk, which are gone by now.
    """
    rows = total.shape[0]
    if total.dtype != grad.dtype and not on_gpu(total):
        rows = max(1, grad.numel() * total.element_size() // (x.shape[1] * x.element_size()))
    for part, part_grad in zip(total.split(rows), grad.split(rows, 1), strict=True):
        add_weight_gradient(part, part_grad, x)  # [r, c] x [c, h] -> [r, h]


def _narrowed(total: torch.Tensor, dtype: torch.dtype, block: int = 1 << 22) -> torch.Tensor:
    """`total` in a dtype as wide or narrower, in the first bytes of its own storage."""
    if total.dtype == dtype:
        return total
    flat = total.view(-1)
    narrow = flat.view(dtype)[
        : flat.numel()
    ]  # the same bytes: block i of it ends before block i + 1 of `flat` begins
    for start in range(0, flat.numel(), block):
        narrow[start : start + block] = flat[start : start + block].to(dtype)
    return narrow.view(total.shape)
