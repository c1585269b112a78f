"""torch's `fully_shard` on one `Axis`: plain sums, and collectives that are ours, so they are counted.

A sharded parameter is cut by rows, `ceil(rows / ranks)` to a rank, so its local part is one stretch of the row-major
parameter; the last ranks may hold less, or nothing. torch's own collectives would divide by factors that gloo refuses,
and its 2-D mesh would reduce over replicas once a microbatch instead of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as FSDPModule  # for rooms that do not import torch.distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megacp.core.distributed.collectives import Pending, gather_into, reduce_scatter_into
from megacp.core.distributed.grid import Axis


@functools.cache
def _mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


class _Arriving(dist.Work):
    """What torch waits for before it reads gathered parameters."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: Any = None) -> bool:
        self._pending.wait()
        return True


class _Collective:
    """What torch calls, with buffers that it gets from here too."""

    def __init__(self, start: Callable[[torch.Tensor, torch.Tensor], dist.Work | None]) -> None:
        self._start = start

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory of the device."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *unused: Any, **named: Any
    ) -> dist.Work | None:
        return self._start(output_tensor, input_tensor)


def shard_module(module: nn.Module, axis: Axis, compute: torch.dtype, wide: torch.dtype) -> FSDPModule:
    """Shard the parameters of `module` that no sharded module inside it holds: gathered before it runs, freed after.

    They keep the dtype in which they come; the module computes in `compute`, gradients are summed in `wide`.
    """
    device = next(module.parameters()).device.type
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide, cast_forward_inputs=False)
    # the new class of the module keeps its parameters' names and order
    assert axis.group is not None, "an axis of one rank has nothing to shard over"
    fully_shard(module, mesh=_mesh(axis.group, device), mp_policy=policy)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if own_parameters(module):
        gather = _Collective(lambda out, x: _Arriving(gather_into(out, x, axis)))
        scatter = _Collective(lambda out, x: reduce_scatter_into(out, x, axis))
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # its base is private to torch
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # likewise
    return module


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are not in a sharded module inside it, by name."""
    inner = tuple(f"{name}." for name, part in module.named_modules() if name and isinstance(part, FSDPModule))
    return {name: p for name, p in module.named_parameters() if not name.startswith(inner)}


def shard_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that torch shards (a DTensor), in its memory; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def local_part(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter or gradient, flat `[n]`, a view."""
    return shard_of(x.detach()).view(-1)
