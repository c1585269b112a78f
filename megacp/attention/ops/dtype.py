"""The dtype in which sums are accumulated."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32
