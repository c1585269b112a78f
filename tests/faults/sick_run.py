"""`megacp.train` with numbers that go wrong: `python -m tests.faults.sick_run SICKNESS RANK STEP
FLAGS...`.

Key property: the real loop runs; only what one rank's loss or weight is from a step on is changed.
Rejected: a learning rate that makes a run diverge, which does so at another step on every machine.
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
    """`steps`, where `here`: their losses are NaN or 1000 times themselves, or a weight becomes NaN
    after the first.
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
    """A run on the pool's ranks of which rank `where` is sick; its status."""
    with sick(sickness, rank == where, steps):
        return train_on_rank(rank, world_size, flags)


if __name__ == "__main__":
    sickness, where, first, *flags = sys.argv[1:]
    with sick(sickness, os.environ.get("RANK", "0") == where, range(int(first), 10_000)):
        status = main(flags)
    sys.exit(status)
