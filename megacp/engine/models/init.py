"""Initial weights that do not depend on the grid.

Each slab of rows in a global tensor has a separate seed, so value (i, j) is a function of (seed,
name, i, j). With one generator per rank, every grid would start with a different model. A rank
draws only the slabs that overlap its rows, and skips tensors whose values will be loaded.
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
"""Number of rows drawn from one seed."""


Draw = Callable[..., torch.Tensor]
"""Function `(*shape, generator=...)` that draws random numbers, which are then multiplied by `std`.
"""


def _uniform(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Draw uniformly distributed values with mean 0 and variance 1."""
    values = torch.rand(*shape, generator=generator)
    return (2.0 * values - 1.0) * math.sqrt(3.0)


def _log_rate(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Draw logarithms of rates that are uniformly distributed between 0.01 and 16."""
    return torch.log(0.01 + 15.99 * torch.rand(*shape, generator=generator))


def _step(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Draw inverse softplus values of steps that are log-uniform between 0.001 and 0.1.

    This is the range of Gu and Dao, 2023. With larger steps, a state forgets inputs immediately.
    """
    steps = 10.0 ** (2 * torch.rand(*shape, generator=generator) - 3)
    return torch.log(torch.expm1(steps))


DRAWS: dict[str, Draw] = {
    "normal": torch.randn,
    "uniform": _uniform,
    "log_rate": _log_rate,
    "step": _step,
}
"""Distributions, by the words of `ParameterSpec.init`."""

Drawn = Callable[[str], bool]
"""Function that returns whether to draw the tensor with this name; False if its values are loaded
later.
"""
ALL: Drawn = lambda name: True  # noqa: E731


def _drawn(box: TensorBox, name: str, seed: int, spec: ParameterSpec) -> torch.Tensor:
    """Return the random values for a box, which is this rank's part of a global tensor."""
    shape = box.tensor.shape
    # global rows [begin, stop) and columns of the box
    begin = box.offsets[0]
    stop = begin + shape[0]
    columns = tuple(
        slice(offset, offset + size)
        for offset, size in zip(box.offsets[1:], shape[1:], strict=True)
    )
    values = torch.empty(shape)
    # all slabs that overlap these rows
    for index in range(begin // SLAB, -(-stop // SLAB)):
        first = index * SLAB
        rows = min(SLAB, box.global_shape[0] - first)  # the last slab may be shorter
        # a stable hash, because Python's `hash` differs between processes
        key = f"{seed}/{name}/{index}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        # [rows, all columns]
        slab = DRAWS[spec.init](rows, *box.global_shape[1:], generator=generator)
        # global rows of the overlap
        low = max(begin, first)
        high = min(stop, first + rows)
        values[low - begin : high - begin] = slab[(slice(low - first, high - first), *columns)]
    return values * spec.std


def unsharded(parameter: nn.Parameter) -> ParameterSlice:
    """Return an unsharded parameter as a single slice."""
    return ParameterSlice(
        spec_of(parameter), tuple(parameter.shape), 0, parameter.detach().view(-1)
    )


@torch.no_grad()
def initialise(
    parts: Iterable[ParameterSlice], dtype: torch.dtype, seed: int, drawn: Drawn = ALL
) -> None:
    """Initialise parameter slices with random numbers, ones or zeros, according to their specs.

    The global weights are the same on any grid. Random numbers are rounded to the model's `dtype`,
    even in wider master weights. Tensors for which `drawn` is False become 0.
    """
    for part in parts:
        # padding rows are not in any box, so they stay 0
        part.values.fill_(1.0 if part.spec.init == "ones" else 0.0)
        if part.spec.init not in DRAWS:
            continue
        for box in boxes_of_slice(MODEL, part):
            name = box.name.removeprefix(f"{MODEL}.")
            if drawn(name):
                box.tensor.copy_(_drawn(box, name, seed, part.spec).to(dtype))
