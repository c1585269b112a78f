"""The vocabulary-parallel table: an embedding, and an output head that computes the loss in chunks.

The global vocabulary keeps its true size, so checkpoints do not depend on tp. Each rank pads its
rows for fast kernels. Padded rows are not saved in checkpoints, are never looked up, and are
excluded from the softmax.

The loss of a microbatch is `sum(weights * losses) / denominator`. Weights and denominator are known
before the forward pass. For each chunk, it can therefore compute the logits, the losses, the
gradient of the logits, and from this the gradients of input and weight. This needs three products
and no recomputation, and the logits of all tokens never exist at the same time. The backward pass
only scales these gradients. Without chunking, the row is a single chunk. Weight gradients of
several chunks are summed in fp32 (float64 for float64 models) and narrowed in place, without a
second copy. The result is passed to autograd, because a tied table is used twice.
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
    """Labels and loss weights of `t` tokens."""

    labels: torch.Tensor
    """Token ids: int64 `[t]`; arbitrary where the weight is 0."""
    weights: torch.Tensor
    """Loss weights `[t]`."""
    denominator: float
    """Divisor of the weighted sum, the same for the whole step."""


@dataclass(frozen=True)
class TableSpec:
    """Description of a global embedding or output table."""

    tensor: Tensor
    """Description of the tensor `[vocab_size, hidden_size]`."""
    partial_over: tuple[str, ...] = ()
    """Other axes to sum the gradient over: `embedding` if two stages have copies of a tied table.
    """
    counted: bool = True
    """Whether the table counts in the gradient norm; only one of two tied copies counts."""


@fused
def _read(
    logits: torch.Tensor,
    index: torch.Tensor,
    elsewhere: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp and the target logit of each row, both `[t]`.

    The target logit is 0 if it is on another rank. The compiled code reads the logits only once and
    makes no wide copy.
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    # written out so that torch.compile computes maximum and sum in one loop
    highest = wide.amax(-1, keepdim=True)
    total = (wide - highest).exp().sum(-1, keepdim=True)
    lse = (highest + total.log())[:, 0]
    target = wide.gather(1, index)[:, 0].masked_fill(elsewhere, 0.0)
    return lse, target


@fused
def _write_gradient(
    logits: torch.Tensor,
    local: torch.Tensor,
    lse: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """Overwrite the logits with their gradient, `(softmax - one_hot(label)) * scale`, in one pass.

    A label on another rank does not match any local column.
    """
    softmax = torch.exp(logits.to(lse.dtype) - lse[:, None])
    column = torch.arange(logits.shape[1], device=logits.device)
    one_hot = (column == local[:, None]).to(lse.dtype)
    logits.copy_((softmax - one_hot) * scale[:, None])


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    axis: Axis,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss per token, `[t]` in fp32 or wider, replicated over tp.

    `logits[t, v]` are this rank's columns without padding; the first has the global index `first`.
    They are overwritten: with the gradient of `sum(scale * losses)` if `scale[t]` (in the dtype of
    the losses) is given, otherwise with scratch values. `labels[t]` are int64 global indices.

    With one all-gather, ranks share two numbers per token: the log-sum-exp and the target logit of
    their columns. On CUDA, one compiled pass reads the logits and another writes the gradient. On a
    CPU, the exponentials are kept in between.
    """
    local = labels - first
    # [t]: whether the label's column is on another rank or does not exist
    elsewhere = (local < 0) | (local >= logits.shape[1])
    index = local.masked_fill(elsewhere, 0)[:, None]  # [t, 1]
    compiled = is_compiled(logits)
    if not logits.shape[1]:  # this rank has only padded vocabulary rows
        target = logits.new_zeros(labels.shape, dtype=accumulation_dtype(logits.dtype))
        lse = torch.full_like(target, -torch.inf)
    elif compiled:
        lse, target = _read(logits, index, elsewhere)
    else:
        # [t, v]: the logits themselves, or a copy if they are in 16 bits
        wide = logits.to(accumulation_dtype(logits.dtype))
        target = wide.gather(1, index)[:, 0].masked_fill(elsewhere, 0.0)  # [t], 0 on other ranks
        highest = wide.amax(-1)
        wide.sub_(highest[:, None]).exp_()  # in place, because the gradient needs the exponentials
        lse = highest + wide.sum(-1).log()  # [t], over the local columns
    local_terms = torch.stack([lse, target])[None]  # [1, 2, t]
    shared = collectives.all_gather(local_terms, axis)  # [tp, 2, t]
    # combine the ranks: [tp, t] -> [t]
    lse = torch.logsumexp(shared[:, 0], 0)
    target = shared[:, 1].sum(0)
    if scale is not None and logits.shape[1] and compiled:
        _write_gradient(logits, local, lse, scale)
    elif scale is not None and logits.shape[1]:
        # scaled softmax, computed from the exponentials
        wide.mul_((scale * torch.exp(highest - lse))[:, None])
        # subtract the scale at the label
        at_label = (-scale).masked_fill(elsewhere, 0.0)
        wide.scatter_add_(1, index, at_label[:, None])
        if wide is not logits:
            logits.copy_(wide)
    return lse - target


def weighted_loss(losses: torch.Tensor, weights: torch.Tensor, denominator: float) -> torch.Tensor:
    """Return the scalar `sum(weights[t] * losses[t]) / denominator` over this rank's tokens.

    It is not yet summed over dp and cp.
    """
    return (losses * weights.to(losses.dtype)).sum() / denominator


class VocabularyTable(nn.Module):
    """This rank's rows of an embedding, of an output head, or of a tied table for both.

    Each rank pads its rows to a multiple of `rows_multiple`.
    """

    def __init__(self, table: TableSpec, rows_multiple: int, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        tensor = table.tensor
        vocab, hidden = tensor.shape
        # ceil(vocab / tp), rounded up to the multiple
        rows = -(-vocab // (options.tp.size * rows_multiple)) * rows_multiple
        self.first = min(options.tp.rank * rows, vocab)
        self.true_rows = min(rows, vocab - self.first)
        piece = TensorSlice(tensor.name, tensor.shape, (self.first, 0), (self.true_rows, hidden))
        spec = ParameterSpec.of(tensor, [piece], table.partial_over, table.counted)
        self.weight = options.parameter(spec, rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of int64 `tokens[t]`.

        The result is `x[t/tp, h]` with sequence parallelism, otherwise `x[t, h]`.
        """
        local = tokens - self.first
        tp = self.options.tp
        elsewhere = (local < 0) | (local >= self.true_rows)  # [t]: the row is on another tp rank
        # for rows on other ranks, look up row 0 and zero the result below
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)  # [t] -> [t, h]
        if tp.size == 1:
            return x
        x = x.masked_fill(elsewhere[:, None], 0.0)  # to be summed over tp; only one rank is not 0
        return reduce_scatter_to(x, tp) if self.options.sequence_parallel else reduce_from(x, tp)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of `x[t/tp, h]` or `x[t, h]`: `[t, true rows of this rank]`."""
        return column_product(x, self.weight, self.options)[:, : self.true_rows]

    def loss(self, x: torch.Tensor, target: Target, chunk_tokens: int) -> torch.Tensor:
        """Return the scalar loss of `x`, replicated over tp and not yet summed over dp and cp.

        `x` has the same shape as for `logits`. Logits of `chunk_tokens` tokens exist at once (0:
        all tokens). Gradients are computed in the forward pass if they are needed: not for a frozen
        table, and not in evaluation.
        """
        return _ChunkedLoss.apply(
            x, self.weight, target, self, chunk_tokens, torch.is_grad_enabled()
        )


class _ChunkedLoss(torch.autograd.Function):
    """Scalar loss, replicated over tp, of sharded `x[t/tp, h]` or replicated `x[t, h]`.

    The weight consists of this rank's rows `W[rows, h]`, including padding.
    """

    @staticmethod
    def forward(ctx, x, weight, target, table, chunk_tokens, with_gradients):  # type: ignore[no-untyped-def]
        tp = table.options.tp
        sharded = table.options.sequence_parallel and tp.size > 1
        x_all = collectives.all_gather(x, tp) if sharded else x  # [t, h]
        for_x, for_weight = (wanted and with_gradients for wanted in ctx.needs_input_grad[:2])
        tokens = x_all.shape[0]
        wide = accumulation_dtype(x.dtype)
        step = chunk_tokens or max(tokens, 1)
        dx = empty(x_all.shape, x_all) if for_x else None
        d_weight = None
        if for_weight:
            # sum several chunks in the wide dtype
            d_weight = zeros(weight.shape, weight, wide if tokens > step else None)
        weights = target.weights.to(wide)
        scale = weights / target.denominator
        losses = torch.empty_like(weights)
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            logits = large_product(x_all[part], weight.t())  # [c, h] x [h, rows] -> [c, rows]
            true = logits[:, : table.true_rows]
            scaled = scale[part] if for_x or for_weight else None
            # overwrites the logits with their gradient
            losses[part] = cross_entropy(true, target.labels[part], table.first, tp, scaled)
            logits[:, table.true_rows :] = 0.0  # padded rows have no gradient
            if dx is not None:
                # [c, rows] x [rows, h] -> [c, h], to be summed over tp
                torch.mm(logits, weight, out=dx[part])
            if d_weight is not None:
                _add_product(d_weight, logits, x_all[part])
            del logits, true  # free them before the next chunk allocates its logits
        if dx is not None:
            dx = (collectives.reduce_scatter if sharded else collectives.all_reduce)(dx, tp)
        ctx.save_for_backward(dx, d_weight)
        ctx.dtype = weight.dtype
        return weighted_loss(losses, weights, target.denominator)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        # scaled in place, so torch refuses a second backward pass
        dx, d_weight = ctx.saved_tensors
        if d_weight is not None:
            d_weight = _narrowed(d_weight.mul_(grad), ctx.dtype)
        return None if dx is None else dx.mul_(grad), d_weight, None, None, None, None


def _add_product(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Add `grad^T x` to `total[rows, h]`, for `grad[c, rows]` and `x[c, h]`.

    On a CPU, the product for a wider total is computed in groups of rows, so that the temporary is
    at most as large as the chunk's wide logits, which have been freed by now.
    """
    rows = total.shape[0]
    if total.dtype != grad.dtype and not on_gpu(total):
        wide_logits = grad.numel() * total.element_size()  # bytes
        rows = max(1, wide_logits // (x.shape[1] * x.element_size()))
    for part, part_grad in zip(total.split(rows), grad.split(rows, 1), strict=True):
        add_weight_gradient(part, part_grad, x)  # [r, c] x [c, h] -> [r, h]


def _narrowed(total: torch.Tensor, dtype: torch.dtype, block: int = 1 << 22) -> torch.Tensor:
    """Convert `total` to a dtype that is not wider, in place; return the converted tensor."""
    if total.dtype == dtype:
        return total
    flat = total.view(-1)
    # the same bytes: block i of `narrow` ends before block i + 1 of `flat` begins
    narrow = flat.view(dtype)[: flat.numel()]
    for start in range(0, flat.numel(), block):
        narrow[start : start + block] = flat[start : start + block].to(dtype)
    return narrow.view(total.shape)
