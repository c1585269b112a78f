"""What attention and messages cost on the real device and the real cp axis, measured in about a second.

Key property: all ranks measure at the same time, because that is how they run: cores, memory and links are shared in
the measurement as in training. The probes take turns, so a slow moment of the machine slows a sample of each; medians
count, and of each constant the slowest rank's, so all ranks hold the same numbers. Rejected: vendors' figures, which
know neither a kernel's cost on small tiles nor a network's latency.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megacp.context_parallel.auto.counts import grain_of, table_work
from megacp.context_parallel.auto.predict import (
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
from megacp.distributed.collectives import all_gather, all_to_all, barrier, gather_objects, reduce_scatter
from megacp.distributed.grid import Axis, split_axis
from megacp.distributed.p2p import start_shift
from megacp.ops.kernel import Kernel, Partial, Saved, accumulation_dtype
from megacp.ops.mask import Metadata, TileTable, tile_table

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


_SCALES = {"cpu": Scale(320, 512, 1 << 20)}
_SCALE_OF_ACCELERATORS = Scale(4096, 8192, 1 << 24)


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
        return _SCALES.get(self.device.type, _SCALE_OF_ACCELERATORS)


@dataclass(frozen=True)
class Probe:
    """Something to be timed. All ranks time the same ones in the same order; only a probe without messages may differ
    between ranks in what one call is.
    """

    action: Callable[[], object]
    calls: int = 1
    """Calls of one sample."""


def measure(setup: Setup) -> Machine:
    """All constants; collective over the world, and the same on all ranks. Makes process groups for hierarchies."""
    tile = _Tile(setup)
    links = _links(setup)
    seconds = _medians(setup, _kernel_probes(tile) | {"copy": _copy_probe(setup)} | _message_probes(setup, links))
    forward, backward = _kernel_costs(tile, seconds)
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

    def kernel(costs: Sequence[KernelCost]) -> KernelCost:
        return KernelCost(max(c.pair for c in costs), max(c.row for c in costs), max(c.call for c in costs))

    def line(lines: Sequence[Line]) -> Line:
        return Line(max(x.latency for x in lines), max(x.per_byte for x in lines))

    return Machine(
        forward=kernel([machine.forward for machine in machines]),
        backward=kernel([machine.backward for machine in machines]),
        copy=max(machine.copy for machine in machines),
        overlap=min(machine.overlap for machine in machines),
        links={name: line([machine.links[name] for machine in machines]) for name in machines[0].links},
    )


def _medians(setup: Setup, probes: Mapping[str, Probe]) -> dict[str, float]:
    """Seconds of one call of each probe: the median over rounds in which the probes take turns."""
    wait = torch.cuda.synchronize if setup.device.type == "cuda" else lambda: None
    samples: dict[str, list[float]] = {name: [] for name in probes}
    for number in range(_ROUNDS + 1):
        barrier(setup.world)
        for name, probe in probes.items():
            wait()
            begin = time.perf_counter()
            for _ in range(probe.calls if number else 1):  # the first round warms up
                probe.action()
            wait()
            samples[name].append((time.perf_counter() - begin) / probe.calls)
    return {name: statistics.median(values[1:]) for name, values in samples.items()}


class _Tile:
    """Tensors for attention over tables of one tile."""

    def __init__(self, setup: Setup) -> None:
        self.kernel, self.scale = setup.kernel, setup.scale
        per_group = setup.heads // setup.groups
        groups = max(1, min(setup.groups, self.scale.width // (per_group * setup.dim)))
        self.groups, self.heads, self.dim = groups, groups * per_group, setup.dim
        q, k, v, dout = (
            torch.randn(self.scale.tokens, count, setup.dim, device=setup.device).to(setup.dtype)
            for count in (self.heads, groups, groups, self.heads)
        )
        self.qkv, self.dout = (q, k, v), dout
        wide = accumulation_dtype(setup.dtype)
        self.grads = (torch.zeros_like(q, dtype=wide), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide))
        self.out = torch.zeros_like(q, dtype=wide)
        self.lse = torch.zeros(q.shape[:2], dtype=wide, device=setup.device)

    def passes(self, table: TileTable) -> tuple[Callable[[], None], Callable[[], None]]:
        """The forward and the backward over `table`, whose sides are the first tokens."""
        n, m, scale = table.queries, table.keys, self.dim**-0.5
        q, k, v = self.qkv[0][:n], self.qkv[1][:m], self.qkv[2][:m]
        dq, dk, dv = self.grads[0][:n], self.grads[1][:m], self.grads[2][:m]
        partial = Partial(self.out[:n], self.lse[:n], untouched=False)
        saved = Saved(q, self.out[:n].to(q.dtype), self.lse[:n], self.dout[:n])
        return (
            lambda: self.kernel.attend(partial, (q, k, v), table, scale),
            lambda: self.kernel.attend_backward(saved, (k, v), table, scale, (dq, dk, dv)),
        )


def _table(queries: int, keys: int) -> TileTable:
    """One tile: every query sees every key."""

    def side(count: int, first: int) -> Metadata:
        zeros = np.zeros(count, np.int64)
        return Metadata(zeros, zeros, zeros, np.arange(count) + first)

    return tile_table(side(queries, keys), side(keys, 0))


def _tables(tile: _Tile) -> dict[str, TileTable]:
    """Three tiles for three unknowns: a tiny one is all call, a thin one has many queries and few keys, a large one is
    all pairs.
    """
    large = tile.scale.tokens
    return {"tiny": _table(_SMALL_TILE, _SMALL_TILE), "thin": _table(large, _SMALL_TILE), "large": _table(large, large)}


def _kernel_probes(tile: _Tile) -> dict[str, Probe]:
    calls = {"tiny": 8, "thin": 2, "large": 1}
    return {
        f"{name} {direction}": Probe(action, calls[name])
        for name, table in _tables(tile).items()
        for direction, action in zip(("forward", "backward"), tile.passes(table), strict=True)
    }


def _kernel_costs(tile: _Tile, seconds: Mapping[str, float]) -> list[KernelCost]:
    """Solves `pairs * pair + rows * row + calls * call = seconds` for both passes; noise may make no cost negative."""
    tables, width = _tables(tile), tile.heads * tile.dim
    works = [table_work(table, tile.groups * tile.dim, grain_of(tile.kernel)) for table in tables.values()]
    counts = np.array([[work.pairs * width, work.rows * width, work.calls] for work in works], float)
    found = []
    for direction in ("forward", "backward"):
        measured = np.array([seconds[f"{name} {direction}"] for name in tables])
        pair, row, call = (float(value) for value in np.linalg.solve(counts, measured))
        pair = pair if pair > 0 else float(measured[2] / counts[2, 0])
        found.append(KernelCost(pair, max(0.0, row), call if call > 0 else float(measured[0])))
    return found


@dataclass(frozen=True)
class Link:
    """A collective whose argument has `blocks` equal blocks, and which sends a block to each of `peers` ranks."""

    peers: int
    blocks: int
    send: Callable[[torch.Tensor], object]


def _links(setup: Setup) -> dict[str, Link]:
    """Every collective that a transport may use, by the name of its link."""
    cp = setup.cp
    links = {
        ALL_GATHER: Link(cp.size - 1, 1, lambda x: all_gather(x, cp)),
        REDUCE_SCATTER: Link(cp.size - 1, cp.size, lambda x: reduce_scatter(x, cp)),
        link_name(SHIFT, 1): _shift(cp),
        link_name(ALL_TO_ALL, cp.size): _swap(cp),
    }
    for inner in inner_sizes(cp.size, setup.heads):
        if inner < cp.size:
            near, far = split_axis(cp, inner)
            links |= {link_name(SHIFT, inner): _shift(far), link_name(ALL_TO_ALL, inner): _swap(near)}
    return links


def _shift(axis: Axis) -> Link:
    return Link(1, 1, lambda x: start_shift(x, axis).wait())


def _swap(axis: Axis) -> Link:
    return Link(axis.size - 1, axis.size, lambda x: all_to_all(x, axis))


def _message_probes(setup: Setup, links: Mapping[str, Link]) -> dict[str, Probe]:
    """Each link with a small and a large message; a rank sends the same bytes in all, to however many peers."""
    probes = {}
    for name, link in links.items():
        for size, count in (("small", _SMALL_MESSAGE), ("large", setup.scale.message)):
            x = torch.ones(max(1, count // 4 // link.peers) * link.blocks, device=setup.device)
            probes[f"{name} {size}"] = Probe(lambda x=x, send=link.send: send(x))
    return probes


def _line(setup: Setup, small: float, large: float) -> Line:
    """Through two messages."""
    per_byte = max(0.0, large - small) / (setup.scale.message - _SMALL_MESSAGE)
    return Line(max(0.0, small - per_byte * _SMALL_MESSAGE), per_byte)


def _copy_probe(setup: Setup) -> Probe:
    """Rows of a large message put into another order."""
    x = torch.ones(setup.scale.message // 1024, 256, device=setup.device)
    order = torch.arange(len(x), device=setup.device).flip(0)
    return Probe(lambda: x[order], 2)


def _overlap(setup: Setup, tile: _Tile, seconds: Mapping[str, float]) -> float:
    """A large shift beside about as much attention, against each alone."""
    message, (attend, _) = seconds[f"{link_name(SHIFT, 1)} large"], tile.passes(_tables(tile)["thin"])
    repeats = min(100, max(1, round(message / seconds["thin forward"])))
    x = torch.ones(setup.scale.message // 4, device=setup.device)

    def work() -> None:
        for _ in range(repeats):
            attend()

    def both() -> None:
        shift = start_shift(x, setup.cp)
        work()
        shift.wait()

    alone = {"message": Probe(lambda: start_shift(x, setup.cp).wait()), "work": Probe(work)}
    found = _medians(setup, alone | {"both": Probe(both)})
    hidden = found["message"] + found["work"] - found["both"]
    return min(1.0, max(0.0, hidden / min(found["message"], found["work"])))
