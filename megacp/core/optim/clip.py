"""The global gradient norm over the shards of all ranks, each parameter counted once.

Squares are summed in the gradients' dtype over 4,096 elements, from there on in float64: a sum is no less exact for a
large model, and no float64 copy of gradients is made. Values above 2e17 overflow in float32; their step is skipped,
as that of a non-finite one. Replicas (a parameter replicated over tp, the second tied embedding) contribute `0 * sum`:
zero normally, but NaN or inf still reaches the norm on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.grid import Axis

_ROW = 4096
"""Elements of a partial sum."""


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of 1-D `x` as a float64 scalar on its device."""
    whole = len(x) // _ROW * _ROW
    norms = torch.linalg.vector_norm(x[:whole].view(-1, _ROW), dim=1)  # [rows], one pass over the gradients
    rest = torch.linalg.vector_norm(x[whole:]).reshape(1)
    return torch.cat([norms, rest]).double().square().sum()


def global_norm(shards: Iterable[tuple[torch.Tensor, bool]], world: Axis, device: torch.device | str = "cpu") -> float:
    """L2 norm of all gradients; `shards` are (slice, counted) of this rank, all on `device`, `world` spans all ranks of
    the grid.

    The same float on every rank; inf or NaN when any rank holds a non-finite value.
    """
    sums = [sum_of_squares(shard) * (1.0 if counted else 0.0) for shard, counted in shards]
    # a stage whose towers are all frozen has no gradient, and adds nothing
    total = torch.stack(sums).sum().reshape(1) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    return all_reduce(total, world).sqrt().item()


def clip_scale(norm: float, clip_grad: float) -> float:
    """The factor that brings gradients of this norm to at most `clip_grad`; 1 when that is 0 (off)."""
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0
