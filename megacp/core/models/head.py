"""The output head: final norm, vocabulary table, and the loss or the logits of the tokens."""

from __future__ import annotations

import torch
from torch import nn

from megacp.core.tensor_parallel.chunked_loss import LossKernel, Target
from megacp.core.tensor_parallel.embedding import VocabularyTable


class OutputHead(nn.Module):
    """`table` may be the embedding's; the loss has logits for `chunk_tokens` tokens at a time (0: all)."""

    def __init__(self, norm: nn.Module, table: VocabularyTable, kernel: LossKernel, chunk_tokens: int) -> None:
        super().__init__()
        self.norm, self.table = norm, table
        self.kernel, self.chunk_tokens = kernel, chunk_tokens

    def forward(self, hidden: torch.Tensor, target: Target) -> torch.Tensor:
        """This rank's share of the loss of `hidden[t/tp, h]`, a scalar in fp32 or wider, replicated over tp."""
        return self.table.loss(self.norm(hidden), target, self.kernel, self.chunk_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden[t/tp, h]` -> `[t, true vocabulary rows of this rank]`."""
        return self.table.logits(self.norm(hidden))
