"""transformers in float64 throughout: it computes norms, softmax and rotary angles in float32
whatever the dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def float32_is_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the library's own float32 computations are in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
