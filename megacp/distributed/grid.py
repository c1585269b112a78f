"""The DP x TP x PP x CP grid of processes: a `GridShape` with process groups, as frozen axes.

A layer that communicates sees one `Axis`.
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
    """One direction of the grid as seen by this rank: whom a communicating leaf talks to."""

    name: str
    size: int
    rank: int
    global_ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    backend: str = "none"
    traffic: Counter[str] = field(default_factory=Counter, compare=False, repr=False)
    """Payload bytes that this rank has sent over it, by collective."""
    parts: dict[int, tuple[Axis, Axis]] = field(default_factory=dict, compare=False, repr=False)
    """What `split_axis` has made of it, by the ranks of an inner part."""
    local: LocalChannel | None = field(default=None, compare=False, repr=False)
    """Messages of CPU tensors where all ranks of a gloo axis are on one machine and can read each
    other.
    """


@dataclass(frozen=True)
class HostGroup:
    """A gloo group of all ranks with a timeout of its own, for ranks that read or write files
    (checkpoints).
    """

    group: dist.ProcessGroup
    seconds: float
    """How long its ranks wait for one another."""


@dataclass(frozen=True)
class WorldAxis(Axis):
    """The axis over all ranks of a grid."""

    host: HostGroup | None = field(default=None, compare=False, repr=False)
    """None: ranks wait for a slow file as long as for any other message."""


def single_axis(name: str, global_rank: int = 0) -> Axis:
    """An axis of one rank: every collective on it is the identity and needs no process group."""
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
        return self.axes["tp",]

    @property
    def cp(self) -> Axis:
        return self.axes["cp",]

    @property
    def dp(self) -> Axis:
        return self.axes["dp",]

    @property
    def pp(self) -> Axis:
        return self.axes["pp",]

    @property
    def ep(self) -> Axis:
        """The ranks that share the experts of a layer."""
        return self._of_experts("ep")

    @property
    def edp(self) -> Axis:
        """The ranks that hold the same experts."""
        return self._of_experts("edp")

    def _of_experts(self, name: str) -> Axis:
        assert self.shape.ep or self.world.size == 1, (
            "the grid was made for a model without experts"
        )
        return self.axes.get((name,), self.world)

    def over(self, *names: str) -> Axis:
        """The axis spanning several directions, for example `over("dp", "cp")` for gradients."""
        return self.axes[tuple(name for name in AXES if name in names)]

    def pipeline_channel(self, direction: str, source_stage: int) -> Axis:
        """The pp ranks on a process group reserved for messages of one direction sent by
        `source_stage`.

        With two stages and virtual stages the next and the previous peer are one rank; a group per
        direction and parity of the sender keeps every ordered pair of ranks to one kind of message,
        first in first out.
        """
        return self.channels[direction, source_stage % 2]

    def in_steps(self) -> list[Axis]:
        """The axes with collectives in a step. Others meet late or never, and a communicator of
        NCCL takes 100 MiB and more; channels have their own way to meet (`open_channels`).
        """
        ep, edp = ([self.ep], [self.edp]) if self.shape.ep else ([], [])
        return [self.tp, self.cp, *ep, self.over("dp", "cp"), *edp, self.embedding, self.world]

    def all_axes(self) -> list[Axis]:
        """Every distinct axis, for reports of traffic."""
        return [*self.axes.values(), self.embedding, *self.channels.values(), self.world]


def connect(axes: Sequence[Axis], device: torch.device) -> None:
    """Let all ranks of every axis meet once; all ranks call it with axes in one order.

    NCCL makes a group's connections at its first collective and may wait for the device meanwhile,
    beside messages under way for ever.
    """
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
    """Create this rank's axes; every rank calls it once, in the same order.

    `file_timeout`: how long ranks wait while one of them reads or writes files (checkpoints); None:
    as for other messages. One rank needs no process group. ValueError if the world does not have
    the grid's number of ranks.
    """
    have = dist.get_world_size() if dist.is_initialized() else 1
    if shape.world_size > 1 and have != shape.world_size:
        raise ValueError(
            f"the grid tp {shape.tp} x cp {shape.cp} x dp {shape.dp} x pp {shape.pp} needs "
            f"{shape.world_size} ranks, "
            f"the world has {have}; change --nproc or the parallel sizes"
        )
    near = _near(rank)

    def axis(name: str, members: tuple[int, ...]) -> Axis:
        return _axis(name, members, rank, near, timeout)

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
    kinds = itertools.product(("forward", "backward"), (0, 1))
    channels = {(direction, parity): axis(f"pp_{direction}", stages) for direction, parity in kinds}
    if len(stages) > 1 and rank not in ends:
        # torch names a locally synchronised group after how many this rank has made: all ranks must
        # make equally many.
        new_group((rank,), timeout)
    embedding = (
        axis("embedding", ends)
        if rank in ends and len(stages) > 1
        else single_axis("embedding", rank)
    )
    everyone = tuple(range(shape.world_size))
    all_ranks = _axis(
        "world", everyone, rank, near, timeout, dist.group.WORLD if shape.world_size > 1 else None
    )
    host = None
    if file_timeout is not None and all_ranks.size > 1:
        host = HostGroup(new_group(everyone, file_timeout, "gloo"), file_timeout.total_seconds())
    if shape.ep:
        for name, members in zip(("ep", "edp"), shape.experts(rank), strict=True):
            # an axis of the same ranks lends its group, on all ranks or on none
            lender = next(
                (one for one in (*axes.values(), all_ranks) if one.global_ranks == members), None
            )
            if lender is None:
                axes[name,] = axis(name, members)
            else:
                axes[name,] = dataclasses.replace(lender, name=name, traffic=Counter())
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
    """The axis over some global ranks, with a process group of its own where none is given."""
    if len(members) == 1:
        return single_axis(name, rank)
    group = group or new_group(members, timeout)
    local = (
        near.channel(name, members, timeout or datetime.timedelta(minutes=10))
        if near is not None
        else None
    )
    return Axis(
        name,
        len(members),
        members.index(rank),
        members,
        group,
        dist.get_backend(group),
        local=local,
    )


def axis_of_mesh(mesh: DeviceMesh) -> Axis:
    """The axis over one dimension of a torch DeviceMesh, such as `mesh["cp"]`, on the mesh's own
    process group.

    All ranks of the world must call it alike. Raises ValueError for a mesh of several dimensions.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"an axis is one dimension of a mesh, this one has {mesh.mesh_dim_names}: give "
            "mesh['cp']"
        )
    name, rank = (mesh.mesh_dim_names or ("mesh",))[0], dist.get_rank()
    near, group = (
        _near(rank),
        mesh.get_group(),
    )  # the world meets before anything that not all ranks do
    return _axis(name, tuple(dist.get_process_group_ranks(group)), rank, near, None, group)


def _near(rank: int) -> SameHost | None:
    """The ranks of this machine, once found; every rank of the world calls it alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() != "gloo":
        return None
    return _met(dist.group.WORLD, rank)


@functools.cache
def _met(world: dist.ProcessGroup, rank: int) -> SameHost | None:
    def gather(value: object) -> list[object]:
        values: list[object] = [None] * dist.get_world_size(world)
        dist.all_gather_object(values, value, group=world)
        return values

    return same_host.connect_host(rank, gather)


def split_axis(axis: Axis, inner: int) -> tuple[Axis, Axis]:
    """Two axes out of one: `inner` neighbouring ranks, and the ranks at the same place of each such
    group.

    `inner` divides the axis. Makes process groups once: all ranks of the world must call it alike.
    """
    if inner in axis.parts:
        return axis.parts[inner]
    first, rank = axis.rank // inner * inner, axis.global_ranks[axis.rank]
    near = axis.local.host if axis.local is not None else None
    timeout = datetime.timedelta(seconds=axis.local.seconds) if axis.local is not None else None

    def part(name: str, members: tuple[int, ...]) -> Axis:
        """A part of the axis, whose traffic counts as that of the whole."""
        return dataclasses.replace(
            _axis(f"{axis.name}_{name}", members, rank, near, timeout), traffic=axis.traffic
        )

    inside, across = (
        axis.global_ranks[first : first + inner],
        axis.global_ranks[axis.rank % inner :: inner],
    )
    axis.parts[inner] = (part("inner", inside), part("outer", across))
    return axis.parts[inner]


def new_group(
    members: Sequence[int], timeout: datetime.timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """The process group of an axis over some global ranks, and only they call it; None: torch's
    timeout, its backend.

    torch names such a group after how many its rank has made, so all ranks of a world must make
    equally many.
    """
    return dist.new_group(list(members), timeout, backend, use_local_synchronization=True)
