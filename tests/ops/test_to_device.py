"""Copies to a device."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from megacp.core.ops.to_device import to_device


def test_on_a_cpu_nothing_is_copied() -> None:
    values = np.arange(3)
    tensor = to_device(values, "cpu")
    values[0] = 7
    assert tensor.tolist() == [7, 1, 2] and tensor.dtype == torch.int64


def test_a_device_gets_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a copy from pageable memory, for which the host waits whatever `non_blocking` says."""
    pinned: list[torch.Tensor] = []
    copies: list[tuple[torch.Tensor, object, object]] = []

    def pin(x: torch.Tensor) -> torch.Tensor:
        pinned.append(x.clone())
        return pinned[-1]

    def copy(x: torch.Tensor, device: object, non_blocking: bool = False) -> torch.Tensor:
        copies.append((x, device, non_blocking))
        return x

    contexts: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contexts.append(device) or contextlib.nullcontext())
    to_device(np.arange(3), "cuda:1")
    ((source, device, queued),) = copies
    assert source is pinned[0] and (device, queued) == ("cuda:1", True)
    assert contexts == ["cuda:1"], "a thread of its own would make a context on the first GPU"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    to_device(torch.arange(3), "cuda:1")
    assert len(pinned) == 1 and len(copies) == 2, "what a thread has pinned is not copied again"
