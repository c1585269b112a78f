"""Does a grid train like one process? Trains both on the same packs in float64 and compares every gradient and update.

The grid runs the `ParallelModel` of a training run, one process runs it with a dense explicit mask. Each rank's shares
are held against the full tensors by global name, copies included; an element that no rank holds counts as wrong. Losses
alone would look right under half of all gradient mistakes, and beside the parameters themselves a missing update is as
small as the learning rate: so what each step added to them is compared too.

Differences are relative: largest error of a tensor over its largest value. Tensors below a thousandth of the model's
largest take that thousandth instead, since their noise comes from the large ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megacp.core.checkpoint.names import boxes_of_slice
from megacp.core.config.run import RunConfig
from megacp.core.data.batch import PackedBatch
from megacp.core.data.images import ImageLoading
from megacp.core.data.loader import step_batches
from megacp.core.data.mock import MockDecoder, MockRules, mock_batch
from megacp.core.data_parallel.layout import ParameterSlice
from megacp.core.distributed.grid import build_grid
from megacp.core.models.build import grid_shape
from megacp.core.optim.lr_schedule import learning_rate
from megacp.core.training.images import image_loading
from megacp.core.training.loss import agree
from megacp.core.training.rows import Rows
from megacp.core.training.sources import Sources, loader_options, open_sources
from megacp.core.training.step import ParallelModel

TOLERANCE = 1e-10
"""Largest relative difference that is rounding: a sum in another order moves 1e-16 of its largest term, depth and
AdamW's division by the second moment leave 1e-14. A lost or doubled gradient differs by 0.5 or more.
"""


@dataclass(frozen=True)
class Box:
    """A box of one global tensor: a rank's share of a gradient or a parameter."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices of the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.values.shape, strict=True))


@dataclass(frozen=True)
class StepTrace:
    """One step on one rank: its slices of the summed gradients before clipping, its parameters and what was added."""

    loss: float
    grad_norm: float
    gradients: tuple[Box, ...]
    parameters: tuple[Box, ...]
    updates: tuple[Box, ...]


@dataclass(frozen=True)
class StepComparison:
    """One step of the grid beside the same step of one process."""

    step: int
    loss: float
    """Of the one process, as is the norm."""
    grad_norm: float
    differences: dict[str, float]
    """The largest relative one of all ranks by kind of value; for tensors the words name the worst one."""

    def beyond(self, tolerance: float = TOLERANCE) -> list[str]:
        """Differences above the tolerance, as words."""
        return [f"{what} by {value:.1e}" for what, value in self.differences.items() if not value <= tolerance]


def microbatches(
    config: RunConfig, packs: MockRules | Sources, step: int, rows: Rows, loading: ImageLoading | None = None
) -> list[PackedBatch]:
    """One rank's microbatches of a step, random or stored, dealt as the loader does; `loading` decodes their images."""
    size = rows.packs
    first = (step - 1) * config.training.global_batch_size
    if isinstance(packs, Sources):
        return step_batches(packs.train, loader_options(config, size), rows.data_rank, first, loading)
    return [
        mock_batch(range(first + number * size, first + (number + 1) * size), packs, loading)
        for number in range(rows.data_rank.index, config.training.global_batch_size // size, rows.data_rank.size)
    ]


def train_rank(
    rank: int, world_size: int, config: RunConfig, rules: MockRules | None, steps: int, strategy: str = "stored"
) -> list[StepTrace]:
    """Train on this rank (a process group of `world_size` ranks exists) and record every step.

    `rules`: of random packs, None takes those of --data-path. `strategy`: how to deal images first, see `ImageLoading`.
    """
    grid = build_grid(grid_shape(config, world_size), rank)
    model = ParallelModel(config, grid)
    packs = rules or open_sources(config)[1]
    if isinstance(packs, Sources):
        decoder = packs.decoder
    else:
        decoder = MockDecoder(packs.images) if packs.images is not None else None
    loading = image_loading(config, grid, model.rows, decoder, strategy)
    traces: list[StepTrace] = []
    before = _boxes(model.parameters.parameters_held())
    for step in range(1, steps + 1):
        batches = microbatches(config, packs, step, model.rows, loading)
        agreed = agree(batches, grid, replica=model.rows.data_rank.index)
        loss = model.gradients(batches, step, agreed.denominator)
        gradients = _boxes(model.parameters.gradient_slices())
        report = model.optimizer.step(learning_rate(step, model.schedule))
        after = _boxes(model.parameters.parameters_held())
        pairs = zip(before, after, strict=True)
        updates = tuple(Box(new.name, new.global_shape, new.offsets, new.values - old.values) for old, new in pairs)
        traces.append(StepTrace(loss, report.grad_norm, gradients, after, updates))
        before = after
    return traces


def _boxes(slices: Iterable[ParameterSlice]) -> tuple[Box, ...]:
    """Copies of the boxes that slices of local parameters hold."""
    return tuple(
        Box(box.name.partition(".")[2], box.global_shape, box.offsets, box.tensor.detach().cpu().numpy().copy())
        for part in slices
        for box in boxes_of_slice("parity", part)
    )


def assemble(boxes: Iterable[Box]) -> dict[str, np.ndarray]:
    """Full tensors by global name; elements that no box holds are NaN."""
    full: dict[str, np.ndarray] = {}
    for box in boxes:
        tensor = full.setdefault(box.name, np.full(box.global_shape, np.nan, box.values.dtype))
        tensor[box.slices] = box.values
    return full


def largest_difference(reference: Mapping[str, np.ndarray], ranks: Sequence[Sequence[Box]]) -> tuple[str, float]:
    """The tensor that is farthest from the full one, and how far; inf for what is missing, unknown, or not finite."""
    errors = dict.fromkeys(reference, 0.0)
    covered = {name: np.zeros(tensor.shape, bool) for name, tensor in reference.items()}
    for box in itertools.chain.from_iterable(ranks):
        if box.name not in reference or box.global_shape != reference[box.name].shape:
            return f"{box.name} (the one process has no tensor of this name and shape)", math.inf
        covered[box.name][box.slices] = True
        error = float(np.abs(box.values - reference[box.name][box.slices]).max(initial=0.0))
        errors[box.name] = max(errors[box.name], error if math.isfinite(error) else math.inf)
    for name, held in covered.items():
        if not held.all():
            return f"{name} ({held.size - np.count_nonzero(held)} elements on no rank)", math.inf
    scales = {name: float(np.abs(tensor).max(initial=0.0)) for name, tensor in reference.items()}
    floor = max(1e-3 * max(scales.values()), np.finfo(np.float64).tiny)
    relative = {name: error / max(scales[name], floor) for name, error in errors.items()}
    worst = max(relative, key=lambda name: relative[name])
    return worst, relative[worst]


def compare(reference: Sequence[StepTrace], ranks: Sequence[Sequence[StepTrace]]) -> list[StepComparison]:
    """Step by step: `reference` of the one process against `ranks[rank]` of the grid."""
    comparisons = []
    for number, expected in enumerate(reference):
        seen = [trace[number] for trace in ranks]
        differences: dict[str, float] = {}
        for what, scalar in (("loss", "loss"), ("gradient norm", "grad_norm")):
            value = getattr(expected, scalar)
            errors = [abs(getattr(trace, scalar) - value) / max(abs(value), 1e-300) for trace in seen]
            differences[what] = max(error if math.isfinite(error) else math.inf for error in errors)
        for kind in ("gradient", "update", "parameter"):
            full = assemble(getattr(expected, f"{kind}s"))
            name, difference = largest_difference(full, [getattr(trace, f"{kind}s") for trace in seen])
            differences[f"{kind} of {name}"] = difference
        comparisons.append(StepComparison(number + 1, expected.loss, expected.grad_norm, differences))
    return comparisons
