"""Does a grid train like one process? Runs both on the same random packs and compares every gradient and parameter.

The grid runs the `ParallelModel` of a training run, one process runs it with a dense explicit mask. Each rank's shares
are held against the full tensors by global name, copies included; an element that no rank holds counts as wrong. Losses
alone would look right under half of all gradient mistakes.

Differences are relative: largest error of a tensor over its largest value. Tensors below a thousandth of the model's
largest take that thousandth instead, since their noise comes from the large ones.

Key property: each update, the parameters after a step minus those before, is held against the update of the one
process. Beside the parameters themselves a missing or wrong update is as small as the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megacp.core.checkpoint.names import boxes_of_slice
from megacp.core.config.run import RunConfig
from megacp.core.context_parallel.choose import resolve_auto
from megacp.core.data.batch import PackedBatch
from megacp.core.data.images import ImageLoading
from megacp.core.data.loader import DataRank, step_batches
from megacp.core.data.mock import MockDecoder, MockRules, mock_batch
from megacp.core.data_parallel.layout import ParameterSlice
from megacp.core.distributed.grid import build_grid, single_axis
from megacp.core.models.build import grid_shape
from megacp.core.optim.lr_schedule import learning_rate
from megacp.core.training.images import image_loading
from megacp.core.training.loss import agree
from megacp.core.training.rows import Rows
from megacp.core.training.sources import Sources, loader_options, open_sources
from megacp.core.training.step import ParallelModel

TOLERANCES = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 0.25}
"""Largest relative difference that is rounding.

float64: a sum in another order moves 1e-16 of its largest term; depth and AdamW's division by the second moment leave
1e-14, and 1e-12 with an epsilon of 1e-8. float32 and bfloat16 round at 6e-8 and 4e-3 instead of 1e-16; the largest
differences measured on the named models are 5e-5 and 6e-2. A lost or doubled gradient differs by 0.5 or more.
"""
_FLOOR = 1e-3


@dataclass(frozen=True)
class Box:
    """A box of one global tensor: a rank's share of a gradient or a parameter."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray
    rounding: np.ndarray | float = 0.0
    """What may be missing of each value, or too much, by the rounding of what it was computed from."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices of the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.values.shape, strict=True))


@dataclass(frozen=True)
class StepTrace:
    """One step on one rank."""

    loss: float
    grad_norm: float
    gradients: tuple[Box, ...]
    """Its slices of the summed gradients, before clipping."""
    before: tuple[Box, ...]
    """All its parameters before the update."""
    parameters: tuple[Box, ...]
    """The same after it."""
    spacing: float
    """Distance from 1 to the next number of the parameters' dtype."""

    @property
    def updates(self) -> list[Box]:
        """What the step added to the parameters. Old and new value round by half a spacing, on both sides compared."""
        found = []
        for old, new in zip(self.before, self.parameters, strict=True):
            rounding = 2 * self.spacing * np.maximum(np.abs(old.values), np.abs(new.values))
            found.append(Box(new.name, new.global_shape, new.offsets, new.values - old.values, rounding))
        return found


@dataclass(frozen=True)
class Difference:
    """The largest relative difference over some tensors, and in which one it is."""

    value: float
    name: str


@dataclass(frozen=True)
class StepComparison:
    """One step of the grid beside the same step of one process; differences are relative, the largest of all ranks."""

    step: int
    loss: float
    """Of the one process."""
    loss_difference: float
    grad_norm: float
    grad_norm_difference: float
    gradient: Difference
    update: Difference
    parameter: Difference

    def beyond(self, tolerance: float) -> list[str]:
        """Differences above the tolerance, as words."""
        figures = {
            "the loss": self.loss_difference,
            "the gradient norm": self.grad_norm_difference,
            f"the gradient of {self.gradient.name}": self.gradient.value,
            f"the update of {self.update.name}": self.update.value,
            f"the parameter {self.parameter.name}": self.parameter.value,
        }
        return [f"{what} by {value:.1e}" for what, value in figures.items() if not value <= tolerance]


def microbatches(
    config: RunConfig, packs: MockRules | Sources, step: int, rows: Rows, loading: ImageLoading | None = None
) -> list[PackedBatch]:
    """One rank's microbatches of a step, random or stored, dealt as the loader does; `loading` decodes their images."""
    size = rows.packs
    if isinstance(packs, Sources):
        consumed = (step - 1) * config.training.global_batch_size
        return step_batches(packs.train, loader_options(config, size), rows.data_rank, consumed, loading)
    count = config.training.global_batch_size // size
    first = (step - 1) * config.training.global_batch_size
    return [
        mock_batch(range(first + number * size, first + (number + 1) * size), packs, loading)
        for number in range(rows.data_rank.index, count, rows.data_rank.size)
    ]


def train_rank(
    rank: int, world_size: int, config: RunConfig, rules: MockRules | None, steps: int, strategy: str = "stored"
) -> list[StepTrace]:
    """Train on this rank (a process group of `world_size` ranks exists) and record every step.

    `rules`: of random packs; None takes those of --data-path.
    `strategy`: the first way to try of dealing images to ranks, see `ImageLoading`.
    """
    grid = build_grid(grid_shape(config, world_size), rank)
    model = ParallelModel(config, grid)
    packs = open_sources(config)[1] if rules is None else rules
    decoder = packs.decoder if isinstance(packs, Sources) else mock_decoder(packs)
    loading = image_loading(config, grid, model.rows, decoder, strategy)
    spacing = torch.finfo(getattr(torch, config.training.dtype)).eps
    traces: list[StepTrace] = []
    before = _boxes(model.parameters.parameters_held())
    for step in range(1, steps + 1):
        batches = microbatches(config, packs, step, model.rows, loading)
        agreed = agree(batches, grid, replica=model.rows.data_rank.index)
        loss = model.gradients(batches, step, agreed.denominator)
        gradients = _boxes(model.parameters.gradient_slices())
        report = model.optimizer.step(learning_rate(step, model.schedule))
        after = _boxes(model.parameters.parameters_held())
        traces.append(StepTrace(loss, report.grad_norm, gradients, before, after, spacing))
        before = after
    return traces


def mock_decoder(rules: MockRules) -> MockDecoder | None:
    """The decoder that draws the images of random packs; None where they have none."""
    return MockDecoder(rules.images) if rules.images is not None else None


def chosen_way(config: RunConfig, rules: MockRules | None) -> tuple[RunConfig, str | None]:
    """The config with its `auto` resolved as a run does, for the first rows, and what was chosen."""

    def rows() -> list[PackedBatch]:
        packs = open_sources(config)[1] if rules is None else rules
        whole = Rows(single_axis("cp"), DataRank(), config.training.micro_batch_size)
        return microbatches(config, packs, 1, whole)

    return resolve_auto(config, rows)


def _boxes(slices: Iterable[ParameterSlice]) -> tuple[Box, ...]:
    """Copies of the boxes that slices of local parameters hold, as float32 or float64."""
    boxes = []
    for part in slices:
        for box in boxes_of_slice("parity", part):
            wide = box.tensor.detach().to(torch.promote_types(box.tensor.dtype, torch.float32))
            name = box.name.partition(".")[2]
            boxes.append(Box(name, box.global_shape, box.offsets, wide.cpu().numpy().copy()))
    return tuple(boxes)


def assemble(boxes: Iterable[Box]) -> dict[str, np.ndarray]:
    """Full tensors by global name; elements that no box holds are NaN."""
    full: dict[str, np.ndarray] = {}
    for box in boxes:
        tensor = full.setdefault(box.name, np.full(box.global_shape, np.nan, box.values.dtype))
        tensor[box.slices] = box.values
    return full


def largest_difference(reference: Mapping[str, np.ndarray], ranks: Sequence[Sequence[Box]]) -> Difference:
    """How far the boxes of all ranks are from the full tensors; inf for what is missing, unknown, or not finite."""
    errors = dict.fromkeys(reference, 0.0)
    covered = {name: np.zeros(tensor.shape, bool) for name, tensor in reference.items()}
    for box in (box for boxes in ranks for box in boxes):
        if box.name not in reference or box.global_shape != reference[box.name].shape:
            return Difference(math.inf, f"{box.name} (the one process has no tensor of this name and shape)")
        covered[box.name][box.slices] = True
        distance = np.abs(box.values - reference[box.name][box.slices])
        error = float((distance - box.rounding).max(initial=0.0))
        errors[box.name] = max(errors[box.name], error if math.isfinite(error) else math.inf)
    for name, held in covered.items():
        if not held.all():
            return Difference(math.inf, f"{name} ({held.size - np.count_nonzero(held)} elements on no rank)")
    scales = {name: float(np.abs(tensor).max(initial=0.0)) for name, tensor in reference.items()}
    floor = max(_FLOOR * max(scales.values()), np.finfo(np.float64).tiny)
    relative = {name: error / max(scales[name], floor) for name, error in errors.items()}
    worst = max(relative, key=lambda name: relative[name])
    return Difference(relative[worst], worst)


def _relative(values: Iterable[float], expected: float) -> float:
    largest = max(abs(value - expected) for value in values)
    return largest / max(abs(expected), np.finfo(np.float64).tiny) if math.isfinite(largest) else math.inf


def compare(reference: Sequence[StepTrace], ranks: Sequence[Sequence[StepTrace]]) -> list[StepComparison]:
    """Step by step: `reference` of the one process against `ranks[rank]` of the grid."""
    comparisons = []
    for number, expected in enumerate(reference):
        seen = [trace[number] for trace in ranks]
        comparisons.append(
            StepComparison(
                step=number + 1,
                loss=expected.loss,
                loss_difference=_relative((trace.loss for trace in seen), expected.loss),
                grad_norm=expected.grad_norm,
                grad_norm_difference=_relative((trace.grad_norm for trace in seen), expected.grad_norm),
                gradient=largest_difference(assemble(expected.gradients), [trace.gradients for trace in seen]),
                update=largest_difference(assemble(expected.updates), [trace.updates for trace in seen]),
                parameter=largest_difference(assemble(expected.parameters), [trace.parameters for trace in seen]),
            )
        )
    return comparisons
