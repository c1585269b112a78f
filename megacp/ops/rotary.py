"""Rotary position embedding in the half-rotation form (Su et al., 2021; GPT-NeoX and Llama layout).

Key property: angles come from the position ids that travel with the tokens, never from a rank or a row index, so any
layout is exact. Rejected: a cached table indexed by place, which assumes one document per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megacp.ops.compiled import fused


@dataclass(frozen=True)
class RotaryScaling:
    """How frequencies are stretched for long contexts: `none`, `linear` (position interpolation) or `llama3`."""

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def inverse_frequencies(head_dim: int, base: float, scaling: RotaryScaling) -> torch.Tensor:
    """Angles per position, float64 `[head_dim / 2]`. Raises ValueError for an unknown scaling."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling.kind == "none":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / frequency
        longest = scaling.original_max_positions / scaling.low_freq_factor
        shortest = scaling.original_max_positions / scaling.high_freq_factor
        span = scaling.high_freq_factor - scaling.low_freq_factor
        smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / span
        blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        scaled = torch.where(wavelength > longest, frequency / scaling.factor, blended)
        return torch.where(wavelength < shortest, frequency, scaled)
    raise ValueError(f"--rope-scaling {scaling.kind} is unknown; choose none, linear or llama3")


def cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cos, sin [n, 1, head_dim / 2]` of int `positions[n]` and `frequencies` on one device; float64, rounded once."""
    angles = positions.double()[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotation_formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate by the angles, or back by them when `sign` is -1."""
    first, second = x.chunk(2, -1)
    turned = (first * cos).addcmul_(second, sin, value=-sign), (second * cos).addcmul_(first, sin, value=sign)
    return torch.cat(turned, -1)


def _rotation_by_passes(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """The same products over whole heads: angles are a head's share of x, and short inner loops cost more than them."""
    first, second = x.chunk(2, -1)
    whole_cos, whole_sin = (
        torch.cat([cos, cos], -1),
        torch.cat([sin * -sign, sin * sign], -1),
    )  # [n, 1, d/2] -> [n, 1, d]
    return torch.cat([second, first], -1).mul_(whole_sin).addcmul_(x, whole_cos)


_rotate = fused(_rotation_formula, _rotation_by_passes)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None  # a rotation's transpose turns the other way


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x[n, heads, head_dim]` by the angles of each token: dimension i pairs with i + head_dim / 2."""
    return _Rotate.apply(x, cos, sin)
