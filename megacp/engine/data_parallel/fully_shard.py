"""torch's `fully_shard` for `Axis` objects, with plain sums and megacp's collectives.

megacp's collectives count the traffic, and torch's would divide by factors that gloo rejects. A
parameter is sharded by rows, with `ceil(rows / ranks)` rows per rank, so the local part is a
contiguous piece of the row-major parameter. The last ranks may have fewer rows, or none. torch's
2-D mesh is not used because it reduces over replicas once per microbatch instead of once per step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from megacp.distributed.collectives import Pending, gather_into, reduce_scatter_into
from megacp.distributed.grid import Axis, new_group

FullyShardedModule = FSDPModule
"""Alias of torch's type for files that do not import torch.distributed."""


@functools.cache
def _mesh(group: dist.ProcessGroup, device_type: str) -> FSDPMeshInfo:
    return FSDPMeshInfo(DeviceMesh.from_group(group, device_type), shard_mesh_dim=0)


def with_group(axis: Axis) -> Axis:
    """Return the axis with a process group, which torch needs even for a single rank.

    Collective: every rank must call this function for the same axes in the same order.
    """
    if axis.group is not None:
        return axis
    return dataclasses.replace(axis, group=new_group(axis.global_ranks))


class _Arriving(dist.Work):
    """Adapter from `Pending` to the work handle with which torch waits for gathered parameters."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: Any = None) -> bool:
        self._pending.wait()
        return True


class _Collective:
    """A collective with the interface that torch expects; it also allocates torch's buffers."""

    def __init__(self, start: Callable[[torch.Tensor, torch.Tensor], dist.Work | None]) -> None:
        self._start = start

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *unused: Any, **named: Any
    ) -> dist.Work | None:
        return self._start(output_tensor, input_tensor)


def _gathering(axis: Axis) -> _Collective:
    return _Collective(lambda out, x: _Arriving(gather_into(out, x, axis)))


def _scattering(axis: Axis) -> _Collective:
    return _Collective(lambda out, x: reduce_scatter_into(out, x, axis))


def shard_module(
    module: nn.Module,
    axes: Mapping[nn.Parameter, Axis],
    others: Axis,
    compute: torch.dtype,
    wide: torch.dtype,
) -> FSDPModule:
    """Shard the parameters of `module` except those of sharded modules inside it, and return it.

    Each parameter is sharded over its axis in `axes`, gathered before the module runs, and freed
    afterwards. All axes need a process group. A module without parameters uses `others`. Parameters
    keep their dtype. The module computes in `compute` and sums gradients in `wide`.
    """
    device = next(module.parameters()).device.type
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide, cast_forward_inputs=False)
    by_group = {axis.group: axis for axis in (*axes.values(), others)}
    # experts have a different group from the other parameters of their module

    def placed(parameter: nn.Parameter) -> Any:
        # a private class of torch 2.12, so import it only if it is needed
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

        return ShardPlacementResult(Shard(0), _mesh(axes[parameter].group, device))

    place = placed if len(by_group) > 1 else None
    # fully_shard changes the class of the module, but not the names and order of its parameters
    mesh = _mesh(others.group, device).mesh
    fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=place)
    assert isinstance(module, FSDPModule)
    # the loss is already divided by the step's denominator, so gradients are summed, not averaged
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if place is None:
        # _Collective implements the expected types without inheriting from them
        module.set_custom_all_gather(_gathering(others))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_scattering(others))  # type: ignore[arg-type]
        return module
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    for of_group in groups:  # torch's setters support only a single group
        axis = by_group[of_group.mesh_info.shard_process_group]
        of_group._all_gather_comm = _gathering(axis)
        of_group._reduce_scatter_comm = _scattering(axis)
    return module


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by name, except those of sharded modules inside it."""
    inner = []  # name prefixes of the sharded modules
    for name, part in module.named_modules():
        if name and isinstance(part, FSDPModule):
            inner.append(f"{name}.")
    prefixes = tuple(inner)
    return {name: p for name, p in module.named_parameters() if not name.startswith(prefixes)}


def shard_of(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, as a view; return other tensors unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded parameter or gradient as a flat view `[n]`."""
    return shard_of(x.detach()).view(-1)
