"""The loss of a head in one process, by torch in float64, and a measurement of peak memory."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megacp.distributed.large_blocks import BLOCKS


def head_loss(
    x: Tensor, table: Tensor, labels: Tensor, weights: Tensor, denominator: float
) -> Tensor:
    """Return the scalar loss of `x[t, h]` and `table[vocabulary, h]`.

    A token of weight 0 is left out, and its label may be any number.
    """
    counted = weights != 0
    terms = torch.nn.functional.cross_entropy(
        x[counted] @ table.t(), labels[counted], reduction="none"
    )
    return (terms * weights[counted].double()).sum() / denominator


def head_gradients(
    x: Tensor, table: Tensor, labels: Tensor, weights: Tensor, denominator: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients `dx[t, h]`, `d_table[vocabulary, h]`."""
    x, table = (value.detach().double().requires_grad_() for value in (x, table))
    loss = head_loss(x, table, labels, weights, denominator)
    return loss.detach(), *torch.autograd.grad(loss, (x, table))


def peak_bytes_of(work: Callable[[], object]) -> int:
    """Return the peak number of bytes, relative to the bytes allocated before.

    It includes tensors that operations allocate and free internally.
    """
    with (
        mock.patch.object(BLOCKS, "active", False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace,
    ):
        kept = work()
    del kept
    events = [
        event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
