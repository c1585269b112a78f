"""What a transport of context parallelism is: an object with a forward and a backward over plain tensors.

Key property: a transport decides itself what it keeps for backward; most keep `(q, k, v, out, lse)` of this rank's
tokens, and `Kept` is that tuple with names. Rejected: one fixed set of saved tensors, under which heads-for-sequence
would send its queries a second time.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from megacp.context_parallel.plan import AttentionPlan
from megacp.ops.kernel import QKV, Partial, Saved

Tensors = tuple[torch.Tensor, ...]


class Transport(Protocol):
    """Attention over the tokens of a cp axis; tensors are sharded over it by the plan."""

    name: str

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """`q[t, heads, d]`, `k, v[t, groups, d]` -> `out[t, heads, d]` in q's dtype, and what backward needs."""

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """`dq, dk, dv` of this rank's tokens for contiguous `dout[t, heads, d]`, in any dtype at least as wide."""


class Kept(NamedTuple):
    """What attention without recomputing the forward needs: tensors of this rank's tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def with_gradient(self, dout: torch.Tensor) -> Saved:
        """What a kernel's backward takes."""
        return Saved(self.q, self.out, self.lse, dout)


def finished(qkv: QKV, partial: Partial) -> tuple[torch.Tensor, Tensors]:
    """The output of a forward whose parts are all merged, and what to keep of it."""
    out = partial.out.to(qkv[0].dtype)
    return out, Kept(*qkv, out, partial.lse)
