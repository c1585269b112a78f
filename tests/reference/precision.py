"""transformers in float64 throughout. By default it computes norms, softmax and rotary angles in
float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def float32_is_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the library's internal float32 computations in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
