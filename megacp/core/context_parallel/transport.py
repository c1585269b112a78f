"""What a transport of context parallelism is, and the loop of those that bring keys to queries.

Key property: a transport is an object with a forward and a backward over plain tensors. It decides itself what it keeps
for backward. Rejected: one fixed set of saved tensors, under which heads-for-sequence would send its queries twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Protocol

import torch

from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.sizes import AttentionSizes
from megacp.core.large_blocks import zeros
from megacp.core.ops.calls import Widths
from megacp.core.ops.kernel import QKV, Kernel, Saved, accumulation_dtype, empty_partial
from megacp.core.ops.mask import TileTable

Tensors = tuple[torch.Tensor, ...]

Visit = tuple[torch.Tensor, torch.Tensor, TileTable]
"""Keys and values `[m, groups, d]`, and the tiles between this rank's queries and them."""
Visits = Generator[Visit, torch.Tensor | None, torch.Tensor | None]
"""Yields every `Visit`. In backward it is sent the gradient `dkv[m, 2, groups, d]` of each visit, and returns the
gradient of this rank's keys and values, `[t, 2, groups, d]`. In forward both are None."""


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan, float], torch.Tensor]
"""Differentiable attention: `q[t, heads, d]`, `k, v[t, groups, d]`, plan, scale -> `out[t, heads, d]`."""


class Transport(Protocol):
    """Attention over the tokens of a cp axis; tensors are sharded over it by the plan.

    One with a kernel that autograd differentiates has `attend: Attend` besides, which is then called instead.
    """

    name: str

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """`q[t, heads, d]`, `k, v[t, groups, d]` -> `out[t, heads, d]` in q's dtype, and what backward needs."""
        ...

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """`dq, dk, dv` of this rank's tokens for `dout[t, heads, d]` whose last dim is dense, in any dtype at least as
        wide.
        """
        ...

    def prepare(self, plan: AttentionPlan, sizes: AttentionSizes) -> None:
        """Make on the host what the layers of a plan need; called from the loader's threads."""
        ...


class KeysToQueries(ABC):
    """Queries stay on their rank, keys and values visit it: the loop over the visits, which `visits` brings.

    Forward keeps `(q, k, v, out, lse)` of this rank's tokens; keys of other ranks travel again in backward.
    """

    name: str
    kernel: Kernel

    @abstractmethod
    def visits(self, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> Visits:
        """All keys that this rank's queries see, for its own `k, v[t, groups, d]`; called once in each pass."""

    @abstractmethod
    def tables(self, plan: AttentionPlan) -> list[TileTable]:
        """What this rank's queries see of the keys of each visit."""

    def prepare(self, plan: AttentionPlan, sizes: AttentionSizes) -> None:
        """See `Transport.prepare`."""
        for table in self.tables(plan):
            self.kernel.prepare(table, Widths(*sizes.widths))

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        q, k, v = qkv
        partial = empty_partial(q)
        for keys, values, table in self.visits(k, v, plan):
            self.kernel.attend(partial, (q, keys, values), table, scale)
        out = partial.out.to(q.dtype)
        return out, (q, k, v, out, partial.lse)

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        q, k, v, out, lse = kept
        saved, wide = Saved(q, out, lse, dout), accumulation_dtype(q.dtype)
        dq, dkv = zeros(q.shape, q, wide), None
        visits = self.visits(k, v, plan)
        while True:
            try:
                keys, values, table = visits.send(dkv)
            except StopIteration as end:
                dk, dv = end.value.unbind(1)  # [t, 2, groups, d] -> [t, groups, d] twice
                return dq, dk, dv
            dkv = zeros((len(keys), 2, *keys.shape[1:]), keys, wide)
            dk, dv = dkv.unbind(1)
            self.kernel.attend_backward(saved, (keys, values), table, scale, (dq, dk, dv))
