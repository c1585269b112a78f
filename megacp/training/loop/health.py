"""Anomaly check: decide once per step, before the update, whether the step's numbers are sound.

The decision depends only on numbers that are equal on all ranks and on state in the checkpoint.
Therefore, all ranks make the same decision, as does a resumed run. The rules apply in this order:

* If images of too many documents could not be decoded, the run ends.
* A step is skipped if it has no loss tokens, or if its loss or gradient is not finite.
* A loss or gradient norm far above its running median is logged. After that, another is logged only
  if it is far above the last logged value, or if the median has halved or doubled.
* Too many skipped steps in a row end the run.

After a finding, the ranks together determine the suspicious packs; a good step has no extra cost. A
bad loss belongs to one microbatch, so only its packs are listed. A gradient is a sum across ranks,
so all packs of the step are listed. Weights are checked before they are saved and after they are
loaded.
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
"""Minimum number of documents with images before the dropped fraction is checked. With fewer
documents, a single bad image would already be a large fraction.
"""
MOST_LEFT_OUT = 0.5
"""Largest fraction of documents with images that may be dropped."""
LOSS_SPIKE, NORM_SPIKE = 3.0, 10.0
"""A loss or gradient norm above this multiple of its running median is a spike."""
MAX_SKIPPED_STEPS = 10
"""Number of consecutive steps without an update that ends a run. The run then saves no checkpoint.
"""
_WINDOW = 64
"""Number of updates in the running median."""
KNOWN_UPDATES = 8
"""Number of updates before values are compared with the running median."""


class AnomalyError(Exception):
    """Error that ends the run; all ranks raise it together, and nothing is saved afterwards."""


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a step that are equal on all ranks before the update."""

    step: int
    loss: float
    grad_norm: float
    """Global gradient norm before clipping."""
    weight: float = 1.0
    """Sum of the loss weights."""
    image_documents: int = 0
    """Number of documents with images, including dropped ones; only with --on-bad-image skip."""
    left_out: int = 0
    """Number of documents dropped because of a bad image."""


class Health:
    """The rules, applied to the steps of one run.

    `state` is the result of `Health.state` from a checkpoint; None for a new run.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = {**_FRESH, **(state or {})}  # older checkpoints may lack a value
        self._losses = deque(map(float, state["losses"]), _WINDOW)
        self._norms = deque(map(float, state["grad_norms"]), _WINDOW)
        # [value, median] of the last logged spike, by name
        self._logged: dict[str, list[float]] = dict(state["told"])
        self.skipped_in_a_row: int = state["skipped_in_a_row"]
        """Number of steps since the last update."""
        self._image_documents: int = state["image_documents"]
        self._left_out: int = state["left_out"]

    def state(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint, as finite JSON numbers."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._norms),
            "told": dict(self._logged),
            "skipped_in_a_row": self.skipped_in_a_row,
            "image_documents": self._image_documents,
            "left_out": self._left_out,
        }

    def check(self, numbers: StepNumbers) -> Decision:
        """Return the decision on a step, and add the step to the state. Call it once per step."""
        end = self._bad_images(numbers)
        if end:
            return Decision(update=False, end=end)
        decision = self._on_numbers(numbers)
        # Skipped steps are excluded from the medians, which a NaN would spoil.
        if decision.update:
            self.skipped_in_a_row = 0
            self._losses.append(numbers.loss)
            self._norms.append(numbers.grad_norm)
            return decision
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row < MAX_SKIPPED_STEPS:
            return decision
        first = numbers.step - self.skipped_in_a_row + 1
        end = f"no update in {self.skipped_in_a_row} steps in a row, {first} to {numbers.step}"
        return Decision(False, decision.finite, decision.findings, end)

    def _on_numbers(self, numbers: StepNumbers) -> Decision:
        """Return the decision based on the loss weights, the loss and the gradient norm."""
        if numbers.weight == 0.0:
            finding = "no token of the step has a loss weight"
            if numbers.left_out:
                finding += ", after documents with bad images were dropped"
            return Decision(update=False, findings=(finding,))
        decision = finite_only(numbers.loss, numbers.grad_norm)
        if not decision.finite:
            return decision
        # Spikes are only logged; gradient clipping limits their updates.
        found = (
            self._spike("loss", numbers.loss, self._losses, LOSS_SPIKE),
            self._spike("gradient norm", numbers.grad_norm, self._norms, NORM_SPIKE),
        )
        return Decision(findings=tuple(text for text in found if text))

    def _spike(self, name: str, value: float, before: deque[float], factor: float) -> str:
        """Return a finding if `value` is a spike, or ""; also "" if there were too few updates."""
        if len(before) < KNOWN_UPDATES:
            return ""
        usual = statistics.median(before)
        if usual <= 0.0 or value <= factor * usual:
            return ""
        # Log a lasting high level only once, unless it rises further or the median adapts to it.
        last, median = self._logged.get(name, (0.0, 0.0))
        if value <= factor * last and 0.5 * median < usual < 2.0 * median:
            return ""
        self._logged[name] = [value, usual]
        return (
            f"the {name} {value:.4g} is {value / usual:.3g} times the median {usual:.4g} of "
            f"{len(before)} updates"
        )

    def _bad_images(self, numbers: StepNumbers) -> str:
        """Return a message if too many documents were dropped because of bad images, or "".

        The fraction is checked once per window of at least `IMAGE_DOCUMENTS` documents.
        """
        self._image_documents += numbers.image_documents
        self._left_out += numbers.left_out
        if self._image_documents < IMAGE_DOCUMENTS:
            return ""
        seen = self._image_documents
        left_out = self._left_out
        self._image_documents = self._left_out = 0  # start the next window
        if left_out <= MOST_LEFT_OUT * seen:
            return ""
        return (
            f"{left_out} of the last {seen} documents with images were dropped because an image "
            "could not be decoded"
        )


_FRESH: dict[str, Any] = {
    "losses": [],
    "grad_norms": [],
    "told": {},
    "skipped_in_a_row": 0,
    "image_documents": 0,
    "left_out": 0,
}
_MOST_TENSORS = 4


def damaged_tensors(boxes: Sequence[TensorBox], world: Axis) -> str:
    """Return text with the names and ranks of tensors that are not finite. Collective.

    The text is equal on all ranks, and "" if all tensors are finite.
    """
    filled = [box for box in boxes if box.tensor.numel()]  # aminmax does not accept empty tensors
    # NaN and inf both appear in the minimum or the maximum
    ends = [torch.stack(box.tensor.detach().aminmax()) for box in filled]
    # one transfer to the CPU for all tensors
    finite = torch.stack([end.isfinite().all() for end in ends]).tolist() if ends else []
    bad = sorted({box.name for box, sound in zip(filled, finite, strict=True) if not sound})
    # a rank has only its own shard of a tensor
    found = gather_objects(bad, world)
    ranks = [str(rank) for rank, of_rank in enumerate(found) if of_rank]
    if not ranks:
        return ""
    every = sorted(set().union(*found))
    return f"{listed(every, _MOST_TENSORS)} on rank {', '.join(ranks)}"
