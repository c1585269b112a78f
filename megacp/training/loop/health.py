"""The anomaly check: whether the numbers of a step are sound, one decision a step, before its
update.

The decision follows from numbers that all ranks hold and from a state in every checkpoint. So all
ranks decide alike, and a resumed run decides like an uninterrupted one. The rules, in this order:

* Images of too many documents could not be decoded: the run ends.
* A step that learns from no token, or whose loss or gradient is not finite, is skipped.
* A loss or gradient norm far above its running median is logged, the next only far above the one
  logged, or once the median is half or twice what it was.
* Too many skipped steps in a row end the run.

Packs are named after a finding, by all ranks together: a good step pays nothing. A loss belongs to
its microbatch, so the packs of that microbatch are named. A gradient is a sum over ranks: all packs
of the step are named. Weights are checked before they are saved and after they are read.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megacp.distributed.collectives import gather_objects
from megacp.distributed.grid import Axis
from megacp.engine.data_parallel.boxes import TensorBox
from megacp.engine.step.decision import Decision, finite_only
from megacp.storage.wording import listed

IMAGE_DOCUMENTS = 16
"""Documents with images after which their bad share is judged: of fewer, one bad image would be too
large a share.
"""
MOST_LEFT_OUT = 0.5
"""The largest share of documents with images that may be left out."""
LOSS_SPIKE, NORM_SPIKE = 3.0, 10.0
"""A loss or gradient norm above so many times the running median is a spike."""
MAX_SKIPPED_STEPS = 10
"""Steps in a row without an update (not finite, refused, nothing to learn) that end a run, which
then saves nothing.
"""
_WINDOW = 64
"""Updates of the running median."""
KNOWN_UPDATES = 8
"""Updates from which on a running median is compared with."""


class AnomalyError(Exception):
    """The run may not go on, for the reason it says; raised on all ranks alike. Nothing is saved
    after it.
    """


@dataclass(frozen=True)
class StepNumbers:
    """What all ranks know of a step before its update."""

    step: int
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    weight: float = 1.0
    """Sum of the loss weights."""
    image_documents: int = 0
    """Documents with images, those left out included; counted only with --on-bad-image skip."""
    left_out: int = 0
    """Documents left out because of an image."""


class Health:
    """The rules over the steps of one run. `state` is what `Health.state` gave; None for a fresh
    run.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = {**_FRESH, **(state or {})}
        self._losses = deque(map(float, state["losses"]), _WINDOW)
        self._norms = deque(map(float, state["grad_norms"]), _WINDOW)
        self._logged: dict[str, list[float]] = dict(
            state["told"]
        )  # of the last spike: the value and the median
        self.skipped_in_a_row: int = state["skipped_in_a_row"]
        """Steps without an update since the last one with an update."""
        self._image_documents: int = state["image_documents"]
        self._left_out: int = state["left_out"]

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold: JSON numbers, all of them finite."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._norms),
            "told": dict(self._logged),
            "skipped_in_a_row": self.skipped_in_a_row,
            "image_documents": self._image_documents,
            "left_out": self._left_out,
        }

    def check(self, numbers: StepNumbers) -> Decision:
        """Decide on a step, once; the state then counts it."""
        if end := self._bad_images(numbers):
            return Decision(update=False, end=end)
        decision = self._on_numbers(numbers)
        if decision.update:
            self.skipped_in_a_row = 0
            self._losses.append(numbers.loss)
            self._norms.append(numbers.grad_norm)
            return decision
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row < MAX_SKIPPED_STEPS:
            return decision
        steps = f"{numbers.step - self.skipped_in_a_row + 1} to {numbers.step}"
        end = f"no update in {self.skipped_in_a_row} steps in a row, {steps}"
        return Decision(False, decision.finite, decision.findings, end)

    def _on_numbers(self, numbers: StepNumbers) -> Decision:
        if numbers.weight == 0.0:
            why = "no token of the step has a loss weight"
            return Decision(
                update=False,
                findings=(why + (", bad images left out" if numbers.left_out else ""),),
            )
        decision = finite_only(numbers.loss, numbers.grad_norm)
        if not decision.finite:
            return decision
        found = (
            self._spike("loss", numbers.loss, self._losses, LOSS_SPIKE),
            self._spike("gradient norm", numbers.grad_norm, self._norms, NORM_SPIKE),
        )
        return Decision(findings=tuple(text for text in found if text))

    def _spike(self, name: str, value: float, before: deque[float], factor: float) -> str:
        """What is wrong with `value`; empty while too few updates are known."""
        if len(before) < KNOWN_UPDATES:
            return ""
        usual = statistics.median(before)
        if usual <= 0.0 or value <= factor * usual:
            return ""
        last, median = self._logged.get(name, (0.0, 0.0))
        if value <= factor * last and 0.5 * median < usual < 2.0 * median:
            return ""
        self._logged[name] = [value, usual]
        return (
            f"the {name} {value:.4g} is {value / usual:.3g} times the median {usual:.4g} of "
            f"{len(before)} updates"
        )

    def _bad_images(self, numbers: StepNumbers) -> str:
        """Why too many documents lost their images; empty when they did not, or too few were read
        to say.
        """
        self._image_documents += numbers.image_documents
        self._left_out += numbers.left_out
        if self._image_documents < IMAGE_DOCUMENTS:
            return ""
        seen, left_out = self._image_documents, self._left_out
        self._image_documents = self._left_out = 0  # the next ones are counted anew
        if left_out <= MOST_LEFT_OUT * seen:
            return ""
        return (
            f"{left_out} of the last {seen} documents with images were left out: an image could "
            "not be decoded"
        )


_FRESH: dict[str, Any] = {"losses": [], "grad_norms": [], "told": {}}
_FRESH |= {"skipped_in_a_row": 0, "image_documents": 0, "left_out": 0}
_MOST_TENSORS = 4
_MOST_TENSORS = 4
_MOST_TENSORS = 4


def damaged_tensors(boxes: Sequence[TensorBox], world: Axis) -> str:
    """Which tensors hold a number that is not finite, in words equal on all ranks; empty when none
    does. Collective.
    """
    ends = [
        torch.stack(box.tensor.detach().aminmax()) for box in boxes if box.tensor.numel()
    ]  # NaN goes through
    finite = torch.stack([end.isfinite().all() for end in ends]).tolist() if ends else []
    names = [box.name for box in boxes if box.tensor.numel()]
    bad = sorted({name for name, sound in zip(names, finite, strict=True) if not sound})
    found = gather_objects(bad, world)
    ranks = [str(rank) for rank, of_rank in enumerate(found) if of_rank]
    if not ranks:
        return ""
    every = sorted(set().union(*found))
    return f"{listed(every, _MOST_TENSORS)} on rank {', '.join(ranks)}"
