"""Initial weights that do not depend on the grid: every slab of a global tensor is drawn from its own seed.

Value (i, j) of a global tensor is a function of (seed, name, i, j) alone; a rank draws only the slabs of rows it holds.
One generator per rank would make another model on every grid.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from megacp.core.distributed.parameter import ParameterSpec, TensorSlice, spec_of

SLAB = 64
"""Rows drawn from one seed."""


Draw = Callable[..., torch.Tensor]
"""`(*shape, generator=...)`: numbers that a spec's `std` scales."""


DRAWS: dict[str, Draw] = {
    "normal": torch.randn,
    "uniform": lambda *shape, generator: (2.0 * torch.rand(*shape, generator=generator) - 1.0) * math.sqrt(3.0),
    "log_rate": lambda *shape, generator: torch.log(0.01 + 15.99 * torch.rand(*shape, generator=generator)),
    # the inverse of softplus, of steps between 0.001 and 0.1 (Gu and Dao, 2023): larger ones forget at once
    "step": lambda *shape, generator: torch.log(torch.expm1(10.0 ** (2 * torch.rand(*shape, generator=generator) - 3))),
}
"""Draws by the name in `ParameterSpec.init`."""


def _drawn(piece: TensorSlice, seed: int, spec: ParameterSpec) -> torch.Tensor:
    begin, stop = piece.offsets[0], piece.offsets[0] + piece.shape[0]
    box = torch.empty(piece.shape)
    inner = tuple(slice(o, o + n) for o, n in zip(piece.offsets[1:], piece.shape[1:], strict=True))  # columns here
    for index in range(begin // SLAB, -(-stop // SLAB)):  # slabs that overlap rows [begin, stop)
        first = index * SLAB
        rows = min(SLAB, piece.global_shape[0] - first)  # the last slab is short
        digest = hashlib.blake2b(f"{seed}/{piece.name}/{index}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        slab = DRAWS[spec.init](rows, *piece.global_shape[1:], generator=generator)  # [rows, all columns]
        low, high = max(begin, first), min(stop, first + rows)  # global rows of the overlap
        box[low - begin : high - begin] = slab[(slice(low - first, high - first), *inner)]
    return box * spec.std


def _fill(parameter: nn.Parameter, spec: ParameterSpec, seed: int) -> None:
    parameter.fill_(1.0 if spec.init == "ones" else 0.0)  # rows outside every piece stay 0
    if spec.init in DRAWS:
        for piece in spec.pieces:
            piece.of(parameter).copy_(_drawn(piece, seed, spec))


@torch.no_grad()
def initialise(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Fill every parameter from its spec: drawn, ones or zeros; the same global weights on any grid."""
    for parameter in parameters:
        _fill(parameter, spec_of(parameter), seed)
