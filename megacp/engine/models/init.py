"""Initial weights that do not depend on the grid: every slab of a global tensor is drawn from its
own seed.

Value (i, j) of a global tensor is a function of (seed, name, i, j) alone; a rank draws only the
slabs of rows it holds, and none of a tensor that is read from a file next. One generator per rank
would make another model on every grid.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from megacp.engine.data_parallel.boxes import MODEL, TensorBox, boxes_of_slice
from megacp.engine.data_parallel.parameter import ParameterSpec, spec_of
from megacp.engine.data_parallel.shards import ParameterSlice

SLAB = 64
"""Rows drawn from one seed."""


Draw = Callable[..., torch.Tensor]
"""`(*shape, generator=...)`: numbers that a spec's `std` scales."""


DRAWS: dict[str, Draw] = {
    "normal": torch.randn,
    "uniform": lambda *shape, generator: (
        (2.0 * torch.rand(*shape, generator=generator) - 1.0) * math.sqrt(3.0)
    ),
    "log_rate": lambda *shape, generator: torch.log(
        0.01 + 15.99 * torch.rand(*shape, generator=generator)
    ),
    # the inverse of softplus, of steps between 0.001 and 0.1 (Gu and Dao, 2023): larger ones forget
    # at once
    "step": lambda *shape, generator: torch.log(
        torch.expm1(10.0 ** (2 * torch.rand(*shape, generator=generator) - 3))
    ),
}
"""Draws by the name in `ParameterSpec.init`."""

Drawn = Callable[[str], bool]
"""Whether the initial values of a tensor are wanted, by its name."""
ALL: Drawn = lambda name: True  # noqa: E731


def _drawn(box: TensorBox, name: str, seed: int, spec: ParameterSpec) -> torch.Tensor:
    shape, begin = box.tensor.shape, box.offsets[0]
    stop, values = begin + shape[0], torch.empty(shape)
    inner = tuple(
        slice(o, o + n) for o, n in zip(box.offsets[1:], shape[1:], strict=True)
    )  # columns here
    for index in range(begin // SLAB, -(-stop // SLAB)):  # slabs that overlap rows [begin, stop)
        first = index * SLAB
        rows = min(SLAB, box.global_shape[0] - first)  # the last slab is short
        digest = hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        slab = DRAWS[spec.init](
            rows, *box.global_shape[1:], generator=generator
        )  # [rows, all columns]
        low, high = max(begin, first), min(stop, first + rows)  # global rows of the overlap
        values[low - begin : high - begin] = slab[(slice(low - first, high - first), *inner)]
    return values * spec.std


def unsharded(parameter: nn.Parameter) -> ParameterSlice:
    """All of a parameter that is not sharded."""
    return ParameterSlice(
        spec_of(parameter), tuple(parameter.shape), 0, parameter.detach().view(-1)
    )


@torch.no_grad()
def initialise(
    parts: Iterable[ParameterSlice], dtype: torch.dtype, seed: int, drawn: Drawn = ALL
) -> None:
    """Fill parts of parameters from their specs: drawn, ones or zeros; the same global weights on
    any grid.

    Numbers are rounded to the `dtype` of the model; tensors that are not `drawn` get zeros.
    """
    for part in parts:
        part.values.fill_(
            1.0 if part.spec.init == "ones" else 0.0
        )  # rows outside every piece stay 0
        for box in boxes_of_slice(MODEL, part) if part.spec.init in DRAWS else ():
            if drawn(name := box.name.removeprefix(f"{MODEL}.")):
                box.tensor.copy_(_drawn(box, name, seed, part.spec).to(dtype))
