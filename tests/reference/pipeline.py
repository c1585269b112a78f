"""Slow, obvious references of the pipeline package: try every partition, and train all layers in
one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor


def every_partition(
    layer_costs: Sequence[float], first_extra: float, last_extra: float, num_virtual_stages: int
) -> list[tuple[list[range], list[Fraction]]]:
    """Return all contiguous partitions with at least one layer per part, and the exact cost of each
    part.
    """
    num_layers = len(layer_costs)
    found = []
    for inner in itertools.combinations(range(1, num_layers), num_virtual_stages - 1):
        cuts = [0, *inner, num_layers]
        ranges = [range(begin, end) for begin, end in itertools.pairwise(cuts)]
        costs = [
            sum((Fraction(layer_costs[layer]) for layer in part), Fraction(0)) for part in ranges
        ]
        costs[0] += Fraction(first_extra)
        costs[-1] += Fraction(last_extra)
        found.append((ranges, costs))
    return found


class Part(torch.nn.Module):
    """One virtual stage of a tiny float64 model: x -> tanh(W x + b) + x, with a squared error at
    the end.
    """

    def __init__(
        self, virtual_stage: int, num_virtual_stages: int, width: int, denominator: float
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + virtual_stage)
        self.first = virtual_stage == 0
        self.last = virtual_stage == num_virtual_stages - 1
        self.denominator = denominator
        self.weight = torch.nn.Parameter(
            torch.randn(width, width, generator=generator, dtype=torch.float64) / width
        )
        self.bias = torch.nn.Parameter(torch.randn(width, generator=generator, dtype=torch.float64))

    def forward(self, hidden: Tensor | None, batch: dict[str, Tensor]) -> Tensor:
        """Return hidden states [t, width], or the scalar loss on the last virtual stage."""
        assert (hidden is None) == self.first
        x = batch["input"] if hidden is None else hidden
        y = torch.tanh(x @ self.weight.T + self.bias) + x
        if self.last:
            return ((y - batch["target"]) ** 2).sum() / self.denominator
        return y


def make_batches(lengths: Sequence[int], width: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return one microbatch of random inputs and targets [t, width] float64 for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(length, width, generator=generator, dtype=torch.float64)
            for name in ("input", "target")
        }
        for length in lengths
    ]


def train_in_one_process(
    lengths: Sequence[int], width: int, num_virtual_stages: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Return losses of the microbatches and gradients of every virtual stage, computed in one
    graph.
    """
    parts = [
        Part(v, num_virtual_stages, width, float(sum(lengths))) for v in range(num_virtual_stages)
    ]
    losses = []
    for batch in make_batches(lengths, width):
        x: Tensor | None = None
        for part in parts:
            x = part(x, batch)
        assert x is not None
        x.backward()
        losses.append(x.item())
    return losses, [
        {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        for part in parts
    ]
