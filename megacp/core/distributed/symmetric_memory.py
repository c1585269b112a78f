"""Products with the messages around them in pieces: torch's symmetric memory, on CUDA alone.

Key property: a gathered product begins with the rows that are here and takes those of other ranks as they arrive; a
product whose sum is scattered sends each rank's rows as they are done. Copies go through memory that the GPUs of a node
map for one another, so ranks of the axis share a node with NVLink. The functions take the place of
`megacp.core.tensor_parallel.linear.Plain` under `--async-tensor-parallel`. Nothing here ran on a GPU yet; tests run
torch's own fallback of the two operators, which is their definition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megacp.core.distributed.collectives import Pending
from megacp.core.distributed.grid import Axis


def _operators() -> Any:
    """`torch.ops.symm_mem`, which this module of torch defines."""
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem


def _group_name(axis: Axis) -> str:
    assert isinstance(axis.group, dist.ProcessGroup), axis
    return axis.group.group_name


class SymmetricMemory:
    """See `Products`."""

    def gather_product(self, x: torch.Tensor, b: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Products.gather_product`."""
        axis.traffic.add("all_gather", x.numel() * x.element_size() * (axis.size - 1))
        whole, (y,) = _operators().fused_all_gather_matmul(x.contiguous(), [b], 0, _group_name(axis))
        return whole, y

    def product_scatter(self, a: torch.Tensor, b: torch.Tensor, axis: Axis) -> Pending:
        """See `Products.product_scatter`."""
        rows, columns = a.shape[0] // axis.size, b.shape[1]
        axis.traffic.add("reduce_scatter", rows * columns * a.element_size() * (axis.size - 1))
        found = _operators().fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, _group_name(axis))
        return Pending(None, lambda: found)
