"""`megacp.train` with bad numbers: `python -m tests.faults.sick_run SICKNESS RANK STEP FLAGS...`.

The real loop runs; only one rank's loss or weight is changed, from a given step on. A learning rate
that diverges would do so at another step on every machine.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megacp.engine.models.language import OutputHead
from megacp.engine.step.step import ParallelModel, StepResult
from megacp.train import main
from tests.training.runs import train_on_rank

SICKNESSES = ("nan loss", "nan loss once", "nan weight", "spike")


@contextmanager
def sick(sickness: str, here: bool, steps: Sequence[int]) -> Iterator[None]:
    """Make losses of `steps` NaN or 1000 times as large, or a weight NaN after the first of them, if
    `here`.
    """
    real_loss, real_train = OutputHead.forward, ParallelModel.train
    now = {"step": 0}

    def loss(*arguments: Any) -> torch.Tensor:
        value = real_loss(*arguments)
        if not here or now["step"] not in steps or sickness == "nan weight":
            return value
        return value * (1000.0 if sickness == "spike" else math.nan)

    def train(self: ParallelModel, batches: Any, step: int, *rest: Any) -> StepResult:
        now["step"] = step
        result = real_train(self, batches, step, *rest)
        if here and sickness == "nan weight" and step == steps[0]:
            self.parameters.buckets[0].parameter_shard[0] = math.nan
            self.optimizer.reset_masters()
        return result

    OutputHead.forward, ParallelModel.train = loss, train  # type: ignore[method-assign]
    try:
        yield
    finally:
        OutputHead.forward, ParallelModel.train = real_loss, real_train  # type: ignore[method-assign]


def train_sick(
    rank: int,
    world_size: int,
    flags: Sequence[str],
    sickness: str,
    where: int,
    steps: Sequence[int],
) -> int:
    """Train on the pool's ranks with a sick rank `where`; return its status."""
    with sick(sickness, rank == where, steps):
        return train_on_rank(rank, world_size, flags)


if __name__ == "__main__":
    sickness, where, first, *flags = sys.argv[1:]
    with sick(sickness, os.environ.get("RANK", "0") == where, range(int(first), 10_000)):
        status = main(flags)
    sys.exit(status)
