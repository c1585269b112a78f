"""The vocabulary-parallel embedding, and the table that a tied or untied head multiplies with.

Key property: the global vocabulary keeps its true size; each rank pads its rows for fast kernels and those rows are in
no checkpoint, never looked up and masked out of the softmax, so a checkpoint does not depend on tp. Rejected: a padded
global vocabulary (Megatron), whose size changes with tp.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megacp.distributed.differentiable import reduce_from, reduce_scatter_to
from megacp.distributed.parameter import ParameterSpec, Piece
from megacp.tensor_parallel.linear import LinearOptions, column_product


class VocabularyTable(nn.Module):
    """This rank's rows of a global `[vocab, h]` table: an embedding, an output head, or both when tied."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        rows_multiple: int,
        std: float,
        partial_over: tuple[str, ...] = (),
        counted: bool = True,
        options: LinearOptions,
    ) -> None:
        super().__init__()
        self.options = options
        rows = -(-vocab_size // options.tp.size)
        rows = -(-rows // rows_multiple) * rows_multiple
        self.first = min(options.tp.rank * rows, vocab_size)
        self.true_rows = min(rows, vocab_size - self.first)
        piece = Piece(name, (vocab_size, hidden_size), (self.first, 0), (self.true_rows, hidden_size))
        spec = ParameterSpec((piece,), "normal", std, partial_over=partial_over, counted=counted)
        self.weight = options.attach(options.empty(rows, hidden_size), spec)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 `tokens[t]` -> `x[t/tp, h]` under sequence parallelism, else `x[t, h]`."""
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.true_rows)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        if self.options.tp.size == 1:
            return x
        x = x.masked_fill(elsewhere[:, None], 0.0)  # [t, h], partial over tp: one rank holds each row
        return (
            reduce_scatter_to(x, self.options.tp) if self.options.sequence_parallel else reduce_from(x, self.options.tp)
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`x[t/tp, h]` or `x[t, h]` -> `[t, true rows of this rank]`."""
        return column_product(x, self.weight, self.options)[:, : self.true_rows]
