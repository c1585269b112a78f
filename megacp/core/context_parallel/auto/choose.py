"""`--cp-comm-type auto` and `--cp-layout auto`: the way that is predicted to be fastest on this machine for these rows.

Key property: the choice is made once, before the model is built, from counts of the run's first rows and from measured
constants that all ranks share. It stands in the config from then on, as if it had been a flag. Rejected: timing whole
steps of every candidate, which takes minutes where there are dozens, and varies with the load of the machine.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.auto import calibration_file
from megacp.core.context_parallel.auto.calibrate import Setup, measure
from megacp.core.context_parallel.auto.counts import rank_work
from megacp.core.context_parallel.auto.predict import (
    Candidate,
    Machine,
    PassSeconds,
    Predictor,
    candidates,
    choose,
    link_names,
)
from megacp.core.context_parallel.layout import select_layout
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.shard import padded_row
from megacp.core.context_parallel.sizes import attention_sizes
from megacp.core.data.batch import PackedBatch
from megacp.core.distributed.collectives import gather_objects
from megacp.core.distributed.grid import ProcessGrid
from megacp.core.ops.kernels import kernel_name, select_kernel

_SHOWN = 4
"""Candidates in the heading of a run."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    chosen: Candidate
    predicted: dict[Candidate, PassSeconds]
    """For one layer and row, the mean over the rows that were looked at; the default comes first."""
    notes: tuple[str, ...]
    """Where the constants come from."""

    def lines(self) -> list[str]:
        """For the heading of a run."""
        default = next(iter(self.predicted))
        order = sorted(self.predicted, key=lambda candidate: self.predicted[candidate].total)
        shown = [*order[:_SHOWN], *(way for way in (self.chosen, default) if way not in order[:_SHOWN])]
        figures = [
            f"{way}{' (default)' if way == default else ''} {1e3 * self.predicted[way].total:.3g} ms" for way in shown
        ]
        return [
            f"context parallelism: {self.chosen}, chosen among {len(order)}; predicted seconds of core attention for a "
            f"layer and row: {'; '.join(dict.fromkeys(figures))}",
            *(f"context parallelism: {note}" for note in self.notes),
        ]

    def compared(self, measured: PassSeconds) -> str:
        """How good the prediction was."""
        predicted = self.predicted[self.chosen]
        return (
            f"core attention of a layer and row: predicted {1e3 * predicted.total:.3g} ms "
            f"({1e3 * predicted.forward:.3g} forward), measured {1e3 * measured.total:.3g} ms "
            f"({1e3 * measured.forward:.3g} forward) on the slowest rank"
        )

    def figures(self, measured: PassSeconds) -> dict[str, float]:
        """The same for a log file: seconds by name."""
        both = {"predicted": self.predicted[self.chosen], "measured": measured}
        return {f"{kind}_{name}": value for kind, seconds in both.items() for name, value in vars(seconds).items()}


def is_auto(config: RunConfig) -> bool:
    """Whether something is left to choose."""
    return "auto" in (config.parallel.cp_comm_type, config.parallel.cp_layout)


def refuse_auto(config: RunConfig, tool: str) -> None:
    """Raise ValueError for a tool that wants to know what it runs."""
    if is_auto(config):
        raise ValueError(
            f"{tool} needs one transport and one layout, --cp-comm-type auto and --cp-layout auto leave them to the "
            f"start of a run: name them (a run with auto tells what it chose)"
        )


def resolved(config: RunConfig, way: Candidate) -> RunConfig:
    """The config as if `way` had been given by flags."""
    return with_values(
        config,
        {
            "cp_comm_type": way.comm_type,
            "cp_layout": way.layout,
            "hierarchical_context_parallel_sizes": way.hierarchy,
            "cp_exchange_stages": way.stages,
            "cp_calibration": None,
        },
    )


def resolve_auto(
    config: RunConfig, grid: ProcessGrid, first_rows: Callable[[], Sequence[PackedBatch]]
) -> tuple[RunConfig, Choice | None]:
    """The config with transport and layout chosen for rows like `first_rows()`, which are the same on every rank.

    Collective over the world. None where nothing had to be chosen: no auto, or one cp rank.
    """
    if not is_auto(config):
        return config, None
    sizes = attention_sizes(config, 0)
    ways = candidates(config.parallel, sizes.heads)
    if grid.cp.size == 1:
        return resolved(config, ways[0]), None
    machine, notes = _machine(config, grid)
    begin = time.perf_counter()
    rows = first_rows()
    predicted = predict(config, grid, rows, machine, ways)
    chosen = choose({way: seconds.total for way, seconds in predicted.items()})
    agreed: Candidate = gather_objects(chosen, grid.world)[0]  # rank 0's, should two machines ever round differently
    looked = f"{len(rows)} rows looked at in {time.perf_counter() - begin:.1f} s"
    return resolved(config, agreed), Choice(agreed, predicted, (*notes, looked))


def predict(
    config: RunConfig, grid: ProcessGrid, rows: Sequence[PackedBatch], machine: Machine, ways: Sequence[Candidate]
) -> dict[Candidate, PassSeconds]:
    """Seconds of one layer for every candidate, in their order: the mean over `rows`. Collective over cp."""
    cp, sizes, kernel = grid.cp, attention_sizes(config, 0), _setup(config, grid).kernel
    tp = grid.tp.size if config.parallel.sequence_parallel else 1
    found: dict[Candidate, list[PassSeconds]] = {way: [] for way in ways}
    for name in dict.fromkeys(way.layout for way in ways):
        layout, of_layout = select_layout(name), [way for way in ways if way.layout == name]
        for row in rows:
            _, metadata = padded_row(row, layout, cp.size, tp)
            plan = AttentionPlan(layout.deal(metadata, cp.size), metadata, cp.rank)
            predictor = Predictor(machine, sizes, gather_objects(rank_work(plan, sizes, kernel, of_layout), cp))
            for way in of_layout:
                found[way].append(predictor.seconds(way))
    return {
        way: PassSeconds(sum(s.forward for s in seconds) / len(rows), sum(s.backward for s in seconds) / len(rows))
        for way, seconds in found.items()
    }


def _setup(config: RunConfig, grid: ProcessGrid) -> Setup:
    sizes, dtype = attention_sizes(config, 0), config.training.dtype
    kernel = select_kernel(kernel_name(config.training.attention_kernel, grid.device.type, dtype), grid.device)
    shapes = (sizes.heads, sizes.groups, sizes.dim)
    return Setup(kernel, *shapes, getattr(torch, dtype), grid.device, grid.cp, grid.world)


def _machine(config: RunConfig, grid: ProcessGrid) -> tuple[Machine, list[str]]:
    """The constants, equal on all ranks: from rank 0's file, else measured and put there; and how that went."""
    setup = _setup(config, grid)
    given = config.parallel.cp_calibration
    path = Path(given) if given else calibration_file.default_path()
    key, links = machine_key(setup, grid), link_names(grid.cp.size, setup.heads)
    mine = calibration_file.read(path, key, links) if grid.rank == 0 else (None, "")
    machine, wrong = gather_objects(mine, grid.world)[0]
    if machine is not None:
        return machine, [f"attention and messages as measured before ({path})"]
    begin = time.perf_counter()
    machine = measure(setup)
    seconds = time.perf_counter() - begin
    unwritten = calibration_file.write(path, key, machine) if grid.rank == 0 else ""
    notes = [wrong, f"attention and messages measured in {seconds:.1f} s ({path})", unwritten]
    return machine, [note for note in notes if note]


def machine_key(setup: Setup, grid: ProcessGrid) -> str:
    """Names everything that the constants depend on. All ranks call it together."""
    device = setup.device.type
    spread = max(gather_objects(len({*gather_objects(platform.node(), grid.cp)}), grid.world))
    name = torch.cuda.get_device_name(setup.device) if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    shape = grid.shape
    parts = {
        "device": f"{device} {name}",
        "threads": torch.get_num_threads(),
        "backend": grid.cp.backend,
        "ranks": f"tp {shape.tp} cp {shape.cp} dp {shape.dp} pp {shape.pp}",
        "machines of a cp group": spread,
        "kernel": type(setup.kernel).__name__,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "heads": f"{setup.heads}/{setup.groups} of {setup.dim}",
        "torch": torch.__version__,
    }
    return ", ".join(f"{part} {value}" for part, value in parts.items())
