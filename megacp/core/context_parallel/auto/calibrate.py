"""What attention and messages cost on the real device and the real cp axis, measured in about a second.

Key property: all ranks measure at the same time, because cores, memory and links are shared so in training. Probes take
turns, so a slow moment of the machine slows one sample of each, and medians count. Of each constant the slowest rank's
counts, so all ranks hold the same numbers. Rejected: vendors' figures, which know neither a kernel's cost on small
tiles nor a network's latency.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megacp.core.context_parallel.auto.counts import table_work
from megacp.core.context_parallel.auto.predict import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SHIFT,
    KernelCost,
    Line,
    Machine,
    inner_sizes,
    link_name,
)
from megacp.core.distributed.collectives import all_gather, all_to_all, barrier, gather_objects, reduce_scatter
from megacp.core.distributed.grid import Axis, split_axis
from megacp.core.distributed.p2p import start_shift
from megacp.core.ops.calls import Widths
from megacp.core.ops.kernel import Kernel, Partial, Saved, accumulation_dtype
from megacp.core.ops.mask import Metadata, TileTable, tile_table

_ROUNDS = 7
_SMALL_MESSAGE = 4096
"""Bytes: bound by latency everywhere."""
_SMALL_TILE = 16
"""Queries, keys: bound by the call everywhere."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the large probes: bound by throughput, but quick."""

    tokens: int
    """Queries and keys of the large tile."""
    width: int
    """Most of heads x width of a head that a tile uses."""
    message: int
    """Bytes of the large message."""


_ON_CPU, _ON_ACCELERATOR = Scale(320, 512, 1 << 20), Scale(4096, 8192, 1 << 24)


@dataclass(frozen=True)
class Setup:
    """What is measured: a kernel with the shapes of a layer on one tensor rank, and a cp axis of at least two ranks."""

    kernel: Kernel
    heads: int
    groups: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    cp: Axis
    world: Axis

    @property
    def scale(self) -> Scale:
        """Of the probes."""
        return _ON_CPU if self.device.type == "cpu" else _ON_ACCELERATOR

    def ones(self, elements: int) -> torch.Tensor:
        """A message of so many fp32 elements."""
        return torch.ones(elements, device=self.device)


Probe = tuple[Callable[[], object], int]
"""What is timed, and its calls in one sample. All ranks time the same probes in the same order."""


def measure(setup: Setup) -> Machine:
    """All constants; collective over the world, and the same on all ranks. Makes process groups for hierarchies."""
    tile, links = _Tile(setup), _links(setup)
    seconds = _medians(setup, tile.probes() | {"copy": _copy_probe(setup)} | _message_probes(setup, links))
    forward, backward = tile.costs(seconds)
    mine = Machine(
        forward=forward,
        backward=backward,
        copy=seconds["copy"] / setup.scale.message,
        overlap=_overlap(setup, tile, seconds),
        links={name: _line(setup, seconds[f"{name} small"], seconds[f"{name} large"]) for name in links},
    )
    return slowest(gather_objects(mine, setup.world))


def slowest(machines: Sequence[Machine]) -> Machine:
    """Of every constant the worst one."""

    def most(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Mapping):
            return {name: most([value[name] for value in values]) for name in first}
        return max(values)

    worst = most([dataclasses.asdict(machine) for machine in machines])
    forward, backward = KernelCost(**worst["forward"]), KernelCost(**worst["backward"])
    links = {name: Line(**line) for name, line in worst["links"].items()}
    return Machine(forward, backward, worst["copy"], min(machine.overlap for machine in machines), links)


def _medians(setup: Setup, probes: Mapping[str, Probe]) -> dict[str, float]:
    """Seconds of one call of each probe: the median over rounds in which the probes take turns."""
    wait = torch.cuda.synchronize if setup.device.type == "cuda" else lambda: None
    samples: dict[str, list[float]] = {name: [] for name in probes}
    for number in range(_ROUNDS + 1):
        barrier(setup.world)
        for name, (action, calls) in probes.items():
            wait()
            begin = time.perf_counter()
            for _ in range(calls if number else 1):  # the first round warms up
                action()
            wait()
            samples[name].append((time.perf_counter() - begin) / calls)
    return {name: statistics.median(values[1:]) for name, values in samples.items()}


def _one_tile(queries: int, keys: int) -> TileTable:
    """Every query sees every key."""

    def side(count: int, first: int) -> Metadata:
        zeros = np.zeros(count, np.int64)
        return Metadata(zeros, zeros, zeros, np.arange(count) + first)

    return tile_table(side(queries, keys), side(keys, 0))


class _Tile:
    """Attention over three tables of one tile, for three unknown costs.

    A tiny tile is all call, a thin one has many queries and few keys, a large one is all pairs.
    """

    CALLS = {"tiny": 8, "thin": 2, "large": 1}

    def __init__(self, setup: Setup) -> None:
        self.kernel, self.dim, large = setup.kernel, setup.dim, setup.scale.tokens
        per_group = setup.heads // setup.groups
        self.groups = max(1, min(setup.groups, setup.scale.width // (per_group * setup.dim)))
        self.heads = self.groups * per_group
        self.qkv_and_dout = [
            torch.randn(large, count, setup.dim, device=setup.device).to(setup.dtype)
            for count in (self.heads, self.groups, self.groups, self.heads)
        ]
        wide = accumulation_dtype(setup.dtype)
        self.out, self.dq, self.dk, self.dv = (
            torch.zeros(large, count, setup.dim, dtype=wide, device=setup.device)
            for count in (self.heads, self.heads, self.groups, self.groups)
        )
        self.lse = torch.zeros(large, self.heads, dtype=wide, device=setup.device)
        sizes = {"tiny": (_SMALL_TILE, _SMALL_TILE), "thin": (large, _SMALL_TILE), "large": (large, large)}
        self.tables = {name: _one_tile(*size) for name, size in sizes.items()}

    def passes(self, table: TileTable) -> tuple[Callable[[], object], Callable[[], object]]:
        """The forward and the backward over `table`, of the first queries and the first keys."""
        n, m, scale = table.queries, table.keys, self.dim**-0.5
        q, k, v, dout = (x[:size] for x, size in zip(self.qkv_and_dout, (n, m, m, n), strict=True))
        partial = Partial(self.out[:n], self.lse[:n], untouched=False)
        saved = Saved(q, self.out[:n].to(q.dtype), self.lse[:n], dout)
        grads = (self.dq[:n], self.dk[:m], self.dv[:m])
        return (
            lambda: self.kernel.attend(partial, (q, k, v), table, scale),
            lambda: self.kernel.attend_backward(saved, (k, v), table, scale, grads),
        )

    def probes(self) -> dict[str, Probe]:
        """Both passes of every table."""
        return {
            f"{name} {direction}": (action, self.CALLS[name])
            for name, table in self.tables.items()
            for direction, action in zip(("forward", "backward"), self.passes(table), strict=True)
        }

    def costs(self, seconds: Mapping[str, float]) -> list[KernelCost]:
        """Solves `pairs * pair + rows * row + calls * call = seconds` for both passes; no cost comes out negative."""
        width = self.heads * self.dim
        widths = Widths(width, self.groups * self.dim)
        works = [table_work(table, widths, self.kernel) for table in self.tables.values()]
        counts = np.array([[work.pairs * width, work.rows * width, work.calls] for work in works], float)  # [3, 3]
        found = []
        for direction in ("forward", "backward"):
            measured = np.array([seconds[f"{name} {direction}"] for name in self.tables])
            pair, row, call = (float(value) for value in np.linalg.solve(counts, measured))
            pair = pair if pair > 0 else float(measured[2] / counts[2, 0])  # noise: as if the large tile were all pairs
            found.append(KernelCost(pair, max(0.0, row), call if call > 0 else float(measured[0])))
        return found


@dataclass(frozen=True)
class Collective:
    """A collective whose argument has `blocks` equal blocks, and which sends a block to each of `peers` ranks."""

    peers: int
    blocks: int
    send: Callable[[torch.Tensor], object]


def _links(setup: Setup) -> dict[str, Collective]:
    """Every collective that a transport may use, by the name of its link."""
    cp = setup.cp
    links = {
        ALL_GATHER: Collective(cp.size - 1, 1, lambda x: all_gather(x, cp)),
        REDUCE_SCATTER: Collective(cp.size - 1, cp.size, lambda x: reduce_scatter(x, cp)),
        link_name(SHIFT, 1): _shift(cp),
        link_name(ALL_TO_ALL, cp.size): _swap(cp),
    }
    for inner in inner_sizes(cp.size, setup.heads):
        if inner < cp.size:
            near, far = split_axis(cp, inner)
            links |= {link_name(SHIFT, inner): _shift(far), link_name(ALL_TO_ALL, inner): _swap(near)}
    return links


def _shift(axis: Axis) -> Collective:
    return Collective(1, 1, lambda x: start_shift(x, axis).wait())


def _swap(axis: Axis) -> Collective:
    return Collective(axis.size - 1, axis.size, lambda x: all_to_all(x, axis))


def _message_probes(setup: Setup, links: Mapping[str, Collective]) -> dict[str, Probe]:
    """Each link with a small and a large message; a rank sends the same bytes in all, to however many peers."""
    sizes = {"small": _SMALL_MESSAGE, "large": setup.scale.message}
    return {
        f"{name} {size}": (functools.partial(link.send, setup.ones(max(1, count // 4 // link.peers) * link.blocks)), 1)
        for name, link in links.items()
        for size, count in sizes.items()
    }


def _line(setup: Setup, small: float, large: float) -> Line:
    """Through two messages."""
    per_byte = max(0.0, large - small) / (setup.scale.message - _SMALL_MESSAGE)
    return Line(max(0.0, small - per_byte * _SMALL_MESSAGE), per_byte)


def _copy_probe(setup: Setup) -> Probe:
    """Rows of a large message put into another order."""
    x = setup.ones(setup.scale.message // 4).view(-1, 256)
    order = torch.arange(len(x), device=setup.device).flip(0)
    return lambda: x.index_select(0, order), 2


def _overlap(setup: Setup, tile: _Tile, seconds: Mapping[str, float]) -> float:
    """A large shift beside about as much attention, against each alone."""
    attend, _ = tile.passes(tile.tables["thin"])
    repeats = min(100, max(1, round(seconds[f"{link_name(SHIFT, 1)} large"] / seconds["thin forward"])))
    x = setup.ones(setup.scale.message // 4)

    def work() -> None:
        for _ in range(repeats):
            attend()

    def both() -> None:
        shift = start_shift(x, setup.cp)
        work()
        shift.wait()

    alone: dict[str, Probe] = {"message": (lambda: start_shift(x, setup.cp).wait(), 1), "work": (work, 1)}
    found = _medians(setup, alone | {"both": (both, 1)})
    hidden = found["message"] + found["work"] - found["both"]
    return min(1.0, max(0.0, hidden / min(found["message"], found["work"])))
