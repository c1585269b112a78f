"""Run one rank of another trainer: each JSON line on standard input requests a step, and a line on
standard output contains the result.

Every script in this folder runs in the interpreter of `tools/benchmark.py --peers-python`, with one
process per rank, and does not import megacp. `serve` creates the gloo group, builds the trainer,
and times its steps between two barriers, as bench/steps.py does. Standard output contains only
results; library messages go to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

IGNORED = -100
"""Label of a token that has nothing to predict."""


@dataclass(frozen=True)
class Work:
    """The input of every trainer: sizes, weights, tokens, and this rank's position in the grid."""

    rank: int
    world_size: int
    axes: dict[str, int]
    """Sizes of dp, tp, pp and cp."""
    options: dict[str, Any]
    """Options of this trainer on this grid."""
    adamw: dict[str, float]
    """lr, beta1, beta2, eps, weight_decay and clip_grad."""
    weights: Path
    """The Hugging Face folder of a Llama."""
    sequences: int
    """Number of sequences per step, on all ranks together."""
    length: int
    """Number of tokens per sequence."""
    before: int
    """Peak memory of the process before the model is built, in bytes."""

    @property
    def data_rank(self) -> int:
        """This rank's position along dp, the only axis that divides the sequences.

        No grid of the comparison combines dp with another axis.
        """
        return self.rank if self.axes["dp"] > 1 else 0

    def optimizer(self, parameters: Any) -> torch.optim.AdamW:
        """Return torch's fused AdamW, the fastest implementation on CPUs."""
        values = self.adamw
        betas = (values["beta1"], values["beta2"])
        decay = values["weight_decay"]
        return torch.optim.AdamW(parameters, values["lr"], betas, values["eps"], decay, fused=True)

    def microbatches(
        self, tokens: torch.Tensor, labels: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this data-parallel rank's microbatches of one sequence each, as in megacp."""
        mine = self.sequences // self.axes["dp"]
        part = slice(self.data_rank * mine, (self.data_rank + 1) * mine)
        return list(zip(tokens[part].split(1), labels[part].split(1), strict=True))


Train = Callable[[torch.Tensor, torch.Tensor], float | None]
"""A function that trains one step on tokens and labels [sequences, length] and returns the loss, or
None on ranks that do not have it.
"""


def token_loss(logits: torch.Tensor, labels: torch.Tensor, denominator: float) -> torch.Tensor:
    """Return the loss summed over this rank's labels, divided by the step's denominator."""
    total = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total / denominator


def summed(loss: float, world_size: int) -> float:
    """Return the sum of all ranks' losses."""
    total = torch.tensor([loss], dtype=torch.float64)
    if world_size > 1:
        dist.all_reduce(total)
    return total.item()


def plain_sums(model: torch.nn.Module) -> None:
    """Make `fully_shard` sum gradients, because gloo lacks the scaled sums for averages."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def serve(build: Callable[[Work], Train]) -> None:
    """Build the trainer, then train one step for each input line until the input ends."""
    # Reserve standard output for results, and redirect all other output to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        work, tokens, labels = _given()
        torch.ones(8).sum()  # starts threads and allocators before the memory measurement
        train = build(work)
        answer(ready=True)
        for line in sys.stdin:
            step = json.loads(line)["step"]
            answer(**_measured(train, tokens[step], labels[step], work.before))
    except BaseException:
        answer(error=traceback.format_exc())
        raise


def _given() -> tuple[Work, torch.Tensor, torch.Tensor]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    said = json.loads(arguments.work.read_text(encoding="utf-8"))
    world_size = said["world_size"]
    os.environ |= {
        "RANK": str(arguments.rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(arguments.rank),
    }
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    torch.set_num_threads(1)
    # A file replaces torchrun's TCP store, because the parent starts the ranks.
    store = dist.FileStore(arguments.store, world_size)
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=world_size)
    with np.load(said["tokens"]) as arrays:
        tokens, labels = (torch.from_numpy(arrays[name]) for name in ("tokens", "labels"))
    work = Work(
        rank=arguments.rank,
        world_size=world_size,
        axes=said["axes"],
        options=said["options"],
        adamw=said["adamw"],
        weights=Path(said["weights"]),
        sequences=tokens.shape[1],
        length=tokens.shape[2],
        before=peak_bytes(),
    )
    return work, tokens, labels


def _measured(
    train: Train, tokens: torch.Tensor, labels: torch.Tensor, before: int
) -> dict[str, Any]:
    dist.barrier()
    # Time from barrier to barrier, which includes waiting for slower ranks.
    wall, cpu = time.perf_counter(), time.process_time()
    loss = train(tokens, labels)
    dist.barrier()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "wall": wall,
        "cpu": cpu,
        "tokens": tokens.numel(),
        "loss": loss,
        "memory": peak_bytes() - before,
    }
