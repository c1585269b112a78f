"""The stopwatch around a transport: it changes nothing, and counts only while it runs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megacp.core.context_parallel.attention import core_attention, select_transport
from megacp.core.context_parallel.auto.predict import PassSeconds
from megacp.core.context_parallel.auto.stopwatch import Stopwatch
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.distributed.grid import single_axis
from megacp.core.ops.mask import Metadata

CPU = torch.device("cpu")


class SlowTransport:
    """Dense attention that takes one second forward and three back, by its own clock."""

    name = "slow"

    def __init__(self) -> None:
        self.clock = 0.0
        self._inside = select_transport("p2p", "dense", single_axis("cp"), CPU)

    def forward(self, *arguments):  # type: ignore[no-untyped-def]
        self.clock += 1.0
        return self._inside.forward(*arguments)

    def backward(self, *arguments):  # type: ignore[no-untyped-def]
        self.clock += 3.0
        return self._inside.backward(*arguments)


def attend(transport: object) -> list[torch.Tensor]:
    zeros = np.zeros(6, np.int64)
    plan = AttentionPlan(np.arange(6)[None], Metadata(zeros, zeros, zeros, np.arange(6)), 0)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(6, 2, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    out = core_attention(*leaves, transport=transport, plan=plan, scale=0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def test_a_stopped_watch_counts_nothing_and_a_running_one_the_mean_of_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Would catch a validation that is counted, forward and backward swapped, and a sum over layers."""
    slow, world = SlowTransport(), single_axis("world")
    monkeypatch.setattr("megacp.core.monitor.timers.time", SimpleNamespace(perf_counter=lambda: slow.clock))
    watch = Stopwatch(slow, CPU)
    assert watch.name == "slow"
    expected = attend(SlowTransport())
    assert all(map(torch.equal, attend(watch), expected))
    assert watch.slowest(world) == PassSeconds(0.0, 0.0)
    watch.running = True
    for _ in range(3):
        assert all(map(torch.equal, attend(watch), expected))
    watch.running = False
    attend(watch)
    assert watch.slowest(world) == PassSeconds(1.0, 3.0)
    watch.forget()
    assert watch.slowest(world) == PassSeconds(0.0, 0.0)


class OneCall(SlowTransport):
    """Differentiated by autograd."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> torch.Tensor:
        return 2 * q + 3 * k + 4 * v


def test_a_stopped_watch_leaves_a_transport_to_autograd() -> None:
    """Would catch attention that is computed again in every backward of a run, because it was once measured."""
    watch = Stopwatch(OneCall(), CPU)
    assert [grad.unique().tolist() for grad in attend(watch)[1:]] == [[2.0], [3.0], [4.0]]
    watch.running = True
    assert all(map(torch.equal, attend(watch), attend(SlowTransport())))
