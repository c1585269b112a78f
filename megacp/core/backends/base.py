"""The protocol of a backend: layers, core attention and the vocabulary loss, all bound to one grid.

A model is written once against it. Parameter names and specs are the same for every backend, so a checkpoint moves
between backends unchanged. A norm and the linear behind it are asked for together, so a backend may fuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.transport import Transport
from megacp.core.distributed.grid import Axis
from megacp.core.tensor_parallel.embedding import TableSpec, VocabularyTable
from megacp.core.tensor_parallel.linear import LinearSpec
from megacp.core.tensor_parallel.weight_gradients import DeferredWeightGradients

Tower = Literal["vision", "connector"]
AdamW = Callable[[list[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""`(groups, betas, epsilon)`: AdamW over groups of 1-D `params` with their `weight_decay`."""
Save = Callable[..., torch.Tensor]
"""`save(function, *inputs)` calls a cheap function and decides how autograd stores its output: as it is, or as a
recipe that makes it again in backward. A fused layer stores what it needs itself and does not ask.
"""


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dim, of this width; its tensors are `{name}.weight` and, of a LayerNorm, `{name}.bias`."""

    name: str
    size: int
    epsilon: float


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
    deferred: DeferredWeightGradients | None
    """Weight gradients that wait for the pipeline's schedule; None where none do."""

    def column_linear(self, linear: LinearSpec) -> nn.Module:
        """Module of `x[t/tp, h] -> y[t, f/tp]`, each tensor cut by rows."""

    def row_linear(self, linear: LinearSpec) -> nn.Module:
        """Module of `x[t, f/tp] -> y[t/tp, h]`, the one tensor cut by columns."""

    def norm_column_linear(self, norm: NormSpec | None, linear: LinearSpec) -> nn.Module:
        """`norm` (None: none) and `column_linear` as one module of `(x[t/tp, h], save) -> y[t, f/tp]`."""

    def norm_mlp(self, norm: NormSpec | None, gate_up: LinearSpec, down: LinearSpec) -> nn.Module:
        """`norm` (None: none), column linear, SwiGLU and row linear as one module of `(x[t/tp, h], save) ->
        [t/tp, h]`.

        Both linears have biases, or neither.
        """

    def norm(self, norm: NormSpec, *, over_heads: bool = False) -> nn.Module:
        """RMSNorm over the last dim; `over_heads` when tp ranks apply it to different heads of the same tokens."""

    def column_norm(self, norm: NormSpec) -> nn.Module:
        """RMSNorm of `y[t, f/tp]`, what a column linear gives: over the columns of all tp ranks together."""

    def layer_norm(self, norm: NormSpec) -> nn.Module:
        """LayerNorm with a bias over the last dim."""

    def replicated(self, name: str, shape: tuple[int, ...], init: str, std: float = 0.0) -> nn.Parameter:
        """A parameter that every tp rank holds whole; `init` is `normal` (with `std`), `zeros` or `ones`."""

    def tower(self, name: Tower) -> Backend:
        """The same factories for another tower: no sequence parallelism, so activations are replicated over tp at
        its seams, and the learning rate or the freezing that the config gives this tower."""

    def vocabulary(self, table: TableSpec) -> VocabularyTable:
        """The embedding or head table."""

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        """Core attention `q[t, heads/tp, d]`, `k, v[t, groups/tp, d]` -> `[t, heads/tp, d]`."""

    def prepare(self, plan: AttentionPlan) -> None:
        """Make on the host what `attention` will ask of a plan; called from the loader's threads."""

    def cross_entropy(
        self, logits: torch.Tensor, labels: torch.Tensor, first: int, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Loss per token `[t]` of vocabulary-parallel logits whose first column is global index `first`: a
        `LossKernel`, which overwrites the logits.
        """

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which blocks run forward; a block that is computed again in backward opens it again."""

    def warnings(self) -> list[str]:
        """Lines that a person should read, each once: which layers run, and why not others."""
