"""The DP x TP x PP x CP grid of processes: a `GridShape` with process groups, as frozen axes.

A layer that communicates needs only one `Axis`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacp.distributed import same_host
from megacp.distributed.same_host import LocalChannel, SameHost
from megacp.distributed.shape import AXES, GridShape


@dataclass(frozen=True)
class Axis:
    """One direction of the grid, from the perspective of this rank."""

    name: str
    size: int
    rank: int
    global_ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    backend: str = "none"
    traffic: Counter[str] = field(default_factory=Counter, compare=False, repr=False)
    """Payload bytes that this rank has sent on the axis, per collective."""
    parts: dict[int, tuple[Axis, Axis]] = field(default_factory=dict, compare=False, repr=False)
    """Results of `split_axis`, keyed by the number of inner ranks."""
    local: LocalChannel | None = field(default=None, compare=False, repr=False)
    """Channel for CPU tensors, if all ranks of a gloo axis are on one machine and can read each
    other's memory.
    """


@dataclass(frozen=True)
class HostGroup:
    """A gloo group of all ranks with a separate timeout, for reading and writing files
    (checkpoints).
    """

    group: dist.ProcessGroup
    seconds: float
    """Timeout of the group."""


@dataclass(frozen=True)
class WorldAxis(Axis):
    """The axis with all ranks of a grid."""

    host: HostGroup | None = field(default=None, compare=False, repr=False)
    """Host group of the grid, or None if slow files have the same timeout as other messages."""


def single_axis(name: str, global_rank: int = 0) -> Axis:
    """Return an axis of one rank; its collectives do nothing and need no process group."""
    return Axis(name, 1, 0, (global_rank,))


@dataclass(frozen=True)
class ProcessGrid:
    """This rank's view of the grid: one frozen `Axis` per direction."""

    shape: GridShape
    rank: int
    device: torch.device
    axes: Mapping[tuple[str, ...], Axis] = field(repr=False)
    embedding: Axis = field(repr=False)
    channels: Mapping[tuple[str, int], Axis] = field(repr=False)
    world: WorldAxis = field(repr=False)

    @property
    def tp(self) -> Axis:
        """The tensor-parallel axis."""
        return self.axes["tp",]

    @property
    def cp(self) -> Axis:
        """The context-parallel axis."""
        return self.axes["cp",]

    @property
    def dp(self) -> Axis:
        """The data-parallel axis."""
        return self.axes["dp",]

    @property
    def pp(self) -> Axis:
        """The pipeline-parallel axis."""
        return self.axes["pp",]

    @property
    def ep(self) -> Axis:
        """The expert-parallel axis: ranks among which a layer's experts are divided."""
        return self._of_experts("ep")

    @property
    def edp(self) -> Axis:
        """The expert-data-parallel axis: ranks with the same experts."""
        return self._of_experts("edp")

    def _of_experts(self, name: str) -> Axis:
        """Return an expert axis, or the world axis if there is a single rank."""
        assert self.shape.ep or self.world.size == 1, (
            "the grid was built for a model without experts"
        )
        return self.axes.get((name,), self.world)

    def over(self, *names: str) -> Axis:
        """Return the axis over several directions, for example `over("dp", "cp")` for gradients."""
        return self.axes[tuple(name for name in AXES if name in names)]

    def pipeline_channel(self, direction: str, source_stage: int) -> Axis:
        """Return the pp axis for messages that `source_stage` sends in one direction.

        `direction` is `forward` or `backward`. With two stages and virtual stages, the next and the
        previous peer are the same rank. Each direction, and each parity of the sending
        stage, has a separate process group. Every ordered pair of ranks in a group therefore
        exchanges only one kind of message, in the order of sending.
        """
        return self.channels[direction, source_stage % 2]

    def in_steps(self) -> list[Axis]:
        """Return the axes that have collectives in a training step.

        Other axes are used late or never, and each NCCL communicator takes 100 MiB or more.
        Channels are connected separately (`open_channels`).
        """
        # all ranks connect the axes in this order
        axes = [self.tp, self.cp]
        if self.shape.ep:
            axes.append(self.ep)
        axes.append(self.over("dp", "cp"))
        if self.shape.ep:
            axes.append(self.edp)
        return [*axes, self.embedding, self.world]

    def all_axes(self) -> list[Axis]:
        """Return every distinct axis, for traffic reports."""
        return [*self.axes.values(), self.embedding, *self.channels.values(), self.world]


def connect(axes: Sequence[Axis], device: torch.device) -> None:
    """Connect the ranks of every axis; all ranks must pass the axes in the same order.

    NCCL connects a group during its first collective and may wait for the device. If messages are
    in flight at that time, it may wait forever.
    """
    # any collective connects a group; this one is the smallest
    for axis in axes:
        if axis.group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=axis.group)


def build_grid(
    shape: GridShape,
    rank: int,
    device: torch.device | str = "cpu",
    timeout: datetime.timedelta = datetime.timedelta(minutes=10),
    file_timeout: datetime.timedelta | None = None,
) -> ProcessGrid:
    """Build this rank's axes; every rank must call this function once, in the same order.

    `file_timeout` applies while a rank reads or writes files (checkpoints); None means the timeout
    of other messages. A single rank needs no process group.

    Raise ValueError if the number of ranks differs from the size of the grid.
    """
    have = dist.get_world_size() if dist.is_initialized() else 1
    if shape.world_size > 1 and have != shape.world_size:
        raise ValueError(
            f"the grid tp {shape.tp} x cp {shape.cp} x dp {shape.dp} x pp {shape.pp} needs "
            f"{shape.world_size} ranks, but there are {have}; change --nproc or the parallel sizes"
        )
    # a collective of the whole world, so it comes before groups that only some ranks create
    near = _near(rank)

    def axis(name: str, members: tuple[int, ...]) -> Axis:
        """Return the axis of some global ranks, with a new process group."""
        return _axis(name, members, rank, near, timeout)

    # single directions, gradients (cp and dp), and fp8 statistics (tp and cp)
    combinations: list[tuple[str, ...]] = [
        ("tp",),
        ("cp",),
        ("dp",),
        ("pp",),
        ("cp", "dp"),
        ("tp", "cp"),
    ]
    axes = {names: axis("_".join(names), shape.members(rank, names)) for names in combinations}
    stages = axes["pp",].global_ranks
    ends = (stages[0], stages[-1])
    # four channels: by direction, and by parity of the sending stage
    kinds = itertools.product(("forward", "backward"), (0, 1))
    channels = {(direction, parity): axis(f"pp_{direction}", stages) for direction, parity in kinds}
    # the first and the last stage share the embedding of tied models
    if len(stages) > 1 and rank in ends:
        embedding = axis("embedding", ends)
    else:
        embedding = single_axis("embedding", rank)
        if len(stages) > 1:
            # the name of a locally synchronised group contains the number of groups that this rank
            # has created, so all ranks must create the same number
            new_group((rank,), timeout)
    everyone = tuple(range(shape.world_size))
    world_group = dist.group.WORLD if shape.world_size > 1 else None
    all_ranks = _axis("world", everyone, rank, near, timeout, world_group)
    # a separate group, because files may take longer than messages
    host = None
    if file_timeout is not None and all_ranks.size > 1:
        host = HostGroup(new_group(everyone, file_timeout, "gloo"), file_timeout.total_seconds())
    if shape.ep:
        for name, members in zip(("ep", "edp"), shape.experts(rank), strict=True):
            # reuse the group of an axis with the same ranks; all ranks decide alike
            existing = (*axes.values(), all_ranks)
            lender = next((one for one in existing if one.global_ranks == members), None)
            if lender is None:
                axes[name,] = axis(name, members)
            else:
                axes[name,] = dataclasses.replace(lender, name=name, traffic=Counter())
    # the same axis with the host group added
    world = WorldAxis(
        all_ranks.name,
        all_ranks.size,
        all_ranks.rank,
        all_ranks.global_ranks,
        all_ranks.group,
        all_ranks.backend,
        parts=all_ranks.parts,
        local=all_ranks.local,
        host=host,
    )
    return ProcessGrid(shape, rank, torch.device(device), axes, embedding, channels, world)


def _axis(
    name: str,
    members: tuple[int, ...],
    rank: int,
    near: SameHost | None,
    timeout: datetime.timedelta | None,
    group: dist.ProcessGroup | None = None,
) -> Axis:
    """Return the axis of some global ranks, with a new process group if none is given."""
    if len(members) == 1:
        return single_axis(name, rank)
    group = group or new_group(members, timeout)
    local = None
    if near is not None:
        local = near.channel(name, members, timeout or datetime.timedelta(minutes=10))
    place = members.index(rank)
    backend = dist.get_backend(group)
    return Axis(name, len(members), place, members, group, backend, local=local)


def axis_of_mesh(mesh: DeviceMesh) -> Axis:
    """Return the axis for a one-dimensional torch DeviceMesh, such as `mesh["cp"]`.

    The axis uses the process group of the mesh. All ranks of the world must make the same call.
    Raise ValueError if the mesh has several dimensions.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"an axis is one dimension of a mesh, but this mesh has {mesh.mesh_dim_names}: pass "
            "a submesh such as mesh['cp']"
        )
    name = (mesh.mesh_dim_names or ("mesh",))[0]
    rank = dist.get_rank()
    # first the collective of the whole world, then calls that only some ranks make
    near = _near(rank)
    group = mesh.get_group()
    members = tuple(dist.get_process_group_ranks(group))
    return _axis(name, members, rank, near, None, group)


def _near(rank: int) -> SameHost | None:
    """Return the connections to ranks on this machine, or None if messages do not use gloo.

    Every rank of the world must make the same call.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() != "gloo":
        return None
    return _met(dist.group.WORLD, rank)


@functools.cache
def _met(world: dist.ProcessGroup, rank: int) -> SameHost | None:
    """Return the connections of `_near`, which the first call for a world establishes."""

    def gather(value: object) -> list[object]:
        values: list[object] = [None] * dist.get_world_size(world)
        dist.all_gather_object(values, value, group=world)
        return values

    return same_host.connect_host(rank, gather)


def split_axis(axis: Axis, inner: int) -> tuple[Axis, Axis]:
    """Split an axis into two: `inner` neighbouring ranks, and the ranks at the same position in
    each such group.

    `inner` must divide the size of the axis. The first call creates process groups, so all ranks of
    the world must make the same call.
    """
    if inner in axis.parts:
        return axis.parts[inner]
    first = axis.rank // inner * inner
    rank = axis.global_ranks[axis.rank]
    near = None
    timeout = None
    if axis.local is not None:
        near = axis.local.host
        timeout = datetime.timedelta(seconds=axis.local.seconds)

    def part(name: str, members: tuple[int, ...]) -> Axis:
        """Return a part of the axis; its traffic is counted with the whole axis."""
        whole_name = f"{axis.name}_{name}"
        new = _axis(whole_name, members, rank, near, timeout)
        return dataclasses.replace(new, traffic=axis.traffic)

    inside = axis.global_ranks[first : first + inner]
    across = axis.global_ranks[axis.rank % inner :: inner]
    axis.parts[inner] = (part("inner", inside), part("outer", across))
    return axis.parts[inner]


def new_group(
    members: Sequence[int], timeout: datetime.timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Create the process group of some global ranks; only these ranks call this function.

    If None, `timeout` and `backend` are torch's defaults. The name of such a group contains the
    number of groups that its rank has created, so all ranks of a world must create the same number.
    """
    return dist.new_group(list(members), timeout, backend, use_local_synchronization=True)
