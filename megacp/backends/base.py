"""What a model may ask of a backend: layers, core attention and the vocabulary loss, all bound to one grid.

Key property: a model is written once against this protocol; parameter names and specs are the same for every backend,
so a checkpoint moves between backends unchanged. A norm and what follows it are asked for together, so that a backend
may fuse them. Rejected: layers that look up process groups or options themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import nn

from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.transport import Transport
from megacp.distributed.grid import Axis
from megacp.tensor_parallel.embedding import VocabularyTable

Tower = Literal["vision", "connector"]
AdamW = Callable[[list[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""`(groups, betas, epsilon)`: AdamW over groups of 1-D `params` with their `weight_decay`."""
Remember = Callable[..., torch.Tensor]
"""`remember(function, *inputs)` calls a cheap function and decides how autograd stores its output: as it is, or as a
recipe that makes it again in backward. A fused layer stores what it needs itself and does not ask.
"""


class Backend(Protocol):
    """Factories of layers for one rank of one grid. Sizes are global; `tp` cuts them."""

    name: str
    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    transport: Transport
    """Carries our core attention."""
    token_multiple: int
    """Tokens of a tp rank are a multiple of this."""
    adamw: AdamW | None
    """The fused AdamW of this backend; None leaves the choice to the optimizer."""

    def column_linear(
        self, prefix: str, outputs: Sequence[tuple[str, int]], in_features: int, *, bias: bool, std: float
    ) -> nn.Module:
        """Module of `x[t/tp, h] -> y[t, sum of rows / tp]` holding the global tensors `outputs` (name, rows)."""

    def row_linear(self, name: str, in_features: int, out_features: int, *, bias: bool, std: float) -> nn.Module:
        """Module of `x[t, f/tp] -> y[t/tp, h]`."""

    def norm_column_linear(
        self,
        norm_name: str,
        prefix: str,
        outputs: Sequence[tuple[str, int]],
        in_features: int,
        *,
        epsilon: float,
        bias: bool,
        std: float,
    ) -> nn.Module:
        """`norm` and `column_linear` as one module of `(x[t/tp, h], remember) -> y[t, sum of rows / tp]`."""

    def norm_mlp(
        self,
        norm_name: str,
        prefix: str,
        hidden_size: int,
        ffn_size: int,
        *,
        epsilon: float,
        bias: bool,
        std: float,
        output_std: float,
    ) -> nn.Module:
        """`norm`, the column linear `gate` and `up`, SwiGLU and the row linear `down` (std `output_std`) as one module
        of `(x[t/tp, h], remember) -> [t/tp, h]`; `bias` is that of both linears.
        """

    def norm(self, name: str, size: int, epsilon: float, *, over_heads: bool = False) -> nn.Module:
        """RMSNorm over the last dim; `over_heads` when tp ranks apply it to different heads of the same tokens."""

    def layer_norm(self, name: str, size: int, epsilon: float) -> nn.Module:
        """LayerNorm with a bias over the last dim."""

    def replicated(self, name: str, shape: tuple[int, ...], init: str, std: float = 0.0) -> nn.Parameter:
        """A parameter that every tp rank holds whole; `init` is `normal` (with `std`), `zeros` or `ones`."""

    def tower(self, name: Tower) -> Backend:
        """The same factories for another tower: no sequence parallelism, so activations are replicated over tp at
        its seams, and the learning rate or the freezing that the config gives this tower."""

    def vocabulary(
        self, name: str, vocab_size: int, hidden_size: int, *, std: float, partial_over: tuple[str, ...], counted: bool
    ) -> VocabularyTable:
        """The embedding or head table."""

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        """Core attention `q[t, heads/tp, d]`, `k, v[t, groups/tp, d]` -> `[t, heads/tp, d]`."""

    def prepare(self, plan: AttentionPlan) -> None:
        """Make on the host what `attention` will ask of a plan; called from the loader's threads."""

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
        """Loss per token `[t]` of vocabulary-parallel logits whose first column is global index `first`."""

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which blocks run forward; a block that is computed again in backward opens it again."""

    def warnings(self) -> list[str]:
        """Lines that a person should read, each once: which layers run, and why not others."""
