"""torch's `fully_shard` on one `Axis`: plain sums, and collectives that are ours, so they are
counted.

A sharded parameter is cut by rows, `ceil(rows / ranks)` to a rank, so its local part is one stretch
of the row-major parameter; the last ranks may hold less, or nothing. torch's own collectives would
divide by factors that gloo refuses, and its 2-D mesh would reduce over replicas once a microbatch
instead of a step.
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
"""torch's type under a name of ours, for files that do not import torch.distributed."""


@functools.cache
def _mesh(group: dist.ProcessGroup, device_type: str) -> FSDPMeshInfo:
    return FSDPMeshInfo(DeviceMesh.from_group(group, device_type), shard_mesh_dim=0)


def with_group(axis: Axis) -> Axis:
    """The axis with a process group, which torch asks also of one rank. Every rank calls it for the
    same axes.
    """
    return (
        axis
        if axis.group is not None
        else dataclasses.replace(axis, group=new_group(axis.global_ranks))
    )


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

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Uninitialised memory of the device."""
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
    """Shard the parameters of `module` that no sharded module inside it holds, each over its own of
    `axes`: gathered before it runs, freed after. All axes have a process group; `others` is that of
    a module without parameters.

    They keep the dtype in which they come; the module computes in `compute`, gradients are summed
    in `wide`.
    """
    device = next(module.parameters()).device.type
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide, cast_forward_inputs=False)
    by_group = {axis.group: axis for axis in (*axes.values(), others)}

    def placed(parameter: nn.Parameter) -> Any:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            ShardPlacementResult,
        )  # torch 2.12

        return ShardPlacementResult(Shard(0), _mesh(axes[parameter].group, device))

    place = placed if len(by_group) > 1 else None
    # the new class of the module keeps its parameters' names and order
    fully_shard(
        module, mesh=_mesh(others.group, device).mesh, mp_policy=policy, shard_placement_fn=place
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if place is None:
        module.set_custom_all_gather(_gathering(others))  # type: ignore[arg-type]  # it has the methods
        module.set_custom_reduce_scatter(_scattering(others))  # type: ignore[arg-type]  # likewise
        return module
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    for of_group in groups:  # torch's setters know one group alone
        axis = by_group[of_group.mesh_info.shard_process_group]
        of_group._all_gather_comm = _gathering(axis)
        of_group._reduce_scatter_comm = _scattering(axis)
    return module


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are not in a sharded module inside it, by name."""
    inner = tuple(
        f"{name}." for name, part in module.named_modules() if name and isinstance(part, FSDPModule)
    )
    return {name: p for name, p in module.named_parameters() if not name.startswith(inner)}


def shard_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that torch shards (a DTensor), in its memory; any other tensor
    as it is.
    """
    return x.to_local() if isinstance(x, DTensor) else x


def local_part(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter or gradient, flat `[n]`, a view."""
    return shard_of(x.detach()).view(-1)
