"""Products beside the messages of tensor parallelism: what linears ask for, and how collectives do it."""

from __future__ import annotations

from typing import Protocol

import torch

from megacp.core.distributed import collectives
from megacp.core.distributed.collectives import Pending
from megacp.core.distributed.grid import Axis
from megacp.core.large_blocks import product


class Products(Protocol):
    """Two products with rows that the ranks of an axis share."""

    def gather_product(self, x: torch.Tensor, b: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
        """`x[n, h]` of each rank, `b[h, f]` -> `X[size * n, h]`, blocks in axis order, and `X b [size * n, f]`."""

    def product_scatter(self, a: torch.Tensor, b: torch.Tensor, axis: Axis) -> Pending:
        """`a[size * n, f]`, `b[f, h]` of each rank -> this rank's block `[n, h]` of the sum of all `a b`."""


class Plain:
    """A product after its gather; a reduce-scatter after its product, under way when the call returns."""

    def gather_product(self, x: torch.Tensor, b: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Products.gather_product`."""
        whole = collectives.all_gather(x, axis)
        return whole, product(whole, b)

    def product_scatter(self, a: torch.Tensor, b: torch.Tensor, axis: Axis) -> Pending:
        """See `Products.product_scatter`."""
        return collectives.start_reduce_scatter(product(a, b), axis)


PLAIN: Products = Plain()
"""Of all linears but those of `--async-tensor-parallel`."""
