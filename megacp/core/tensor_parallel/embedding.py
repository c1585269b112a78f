"""The vocabulary-parallel embedding, and the table that a tied or untied head multiplies with.

The global vocabulary keeps its true size, so a checkpoint does not depend on tp. Each rank pads its rows for fast
kernels: those rows are in no checkpoint, never looked up, and masked out of the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megacp.core.distributed.differentiable import reduce_from, reduce_scatter_to
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice
from megacp.core.tensor_parallel.chunked_loss import LossKernel, LossOptions, Target, chunked_loss
from megacp.core.tensor_parallel.linear import LinearOptions, column_product


@dataclass(frozen=True)
class TableSpec:
    """A global table `[vocab_size, hidden_size]`."""

    name: str
    vocab_size: int
    hidden_size: int
    std: float
    partial_over: tuple[str, ...] = ()
    """Axes over which its gradient is partial: `embedding` where two stages hold a tied table."""
    counted: bool = True
    """Whether the gradient norm counts it: one of two tied copies is counted."""


class VocabularyTable(nn.Module):
    """This rank's rows of a table: an embedding, an output head, or both when tied.

    Each rank's rows are padded to a multiple of `rows_multiple`.
    """

    def __init__(self, table: TableSpec, rows_multiple: int, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        vocab, hidden = table.vocab_size, table.hidden_size
        rows = -(-vocab // (options.tp.size * rows_multiple)) * rows_multiple
        self.first = min(options.tp.rank * rows, vocab)
        self.true_rows = min(rows, vocab - self.first)
        piece = TensorSlice(table.name, (vocab, hidden), (self.first, 0), (self.true_rows, hidden))
        spec = ParameterSpec((piece,), "normal", table.std, partial_over=table.partial_over, counted=table.counted)
        self.weight = options.parameter(spec, rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 `tokens[t]` -> `x[t/tp, h]` under sequence parallelism, else `x[t, h]`."""
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.true_rows)  # [t]: the row is on another tp rank
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)  # row 0 stands in, [t] -> [t, h]
        if self.options.tp.size == 1:
            return x
        x = x.masked_fill(elsewhere[:, None], 0.0)  # partial over tp: one rank has the row, the others 0
        return (
            reduce_scatter_to(x, self.options.tp) if self.options.sequence_parallel else reduce_from(x, self.options.tp)
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t/tp, h]` or `x[t, h]` -> `[t, true rows of this rank]`."""
        return column_product(x, self.weight, self.options)[:, : self.true_rows]

    def loss(self, x: torch.Tensor, target: Target, kernel: LossKernel, chunk_tokens: int) -> torch.Tensor:
        """The scalar loss of `x` as in `logits`, whose logits exist for `chunk_tokens` tokens at a time (0: all)."""
        o = self.options
        options = LossOptions(o.tp, o.sequence_parallel, self.first, self.true_rows, kernel, chunk_tokens)
        return chunked_loss(x, self.weight, target, options)
