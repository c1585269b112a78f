"""Rotary position embedding in the half-rotation form (Su et al., 2021; GPT-NeoX and Llama layout).

Angles come from the position ids that travel with the tokens, never from a rank or a row index, so
any layout is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megacp.attention.ops.device import fused

_LLAMA3 = (1.0, 4.0)
"""Wavelengths above original positions / the first are stretched fully, those below them / the
second left alone.
"""
_YARN = (32.0, 1.0)
"""Turns over the original positions above which a frequency is left alone, and below which it is
stretched fully.
"""


@dataclass(frozen=True)
class RotaryScaling:
    """How frequencies are stretched for long contexts: `none`, `linear` (positions are divided),
    `llama3`, `yarn`.
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_positions: int = 8192
    rounds: bool = True
    """Whether YaRN's blend begins and ends at whole indices."""

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines, and so of q and k (YaRN: Peng et al., 2023)."""
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" else 1.0


def _yarn(
    frequency: torch.Tensor, head_dim: int, base: float, scaling: RotaryScaling
) -> torch.Tensor:
    """Frequencies divided by the factor where few turns fit the original positions, blended by
    index towards those that turn often.
    """

    def index(
        turns: float,
    ) -> float:  # of the frequency that turns so often over the original positions
        return (
            head_dim
            * math.log(scaling.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(base))
        )

    ends = index(_YARN[0]), index(_YARN[1])
    if scaling.rounds:
        ends = math.floor(ends[0]), math.ceil(ends[1])
    low, high = max(ends[0], 0), min(ends[1], head_dim - 1)
    # [head_dim / 2]: 0 up to low, 1 from high on; 0.001 where both are one index, as in YaRN's own
    # code
    slowed = (
        (torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)
    ).clamp(0, 1)
    return frequency / scaling.factor * slowed + frequency * (1 - slowed)


def inverse_frequencies(head_dim: int, base: float, scaling: RotaryScaling) -> torch.Tensor:
    """Angles per position, float64 `[head_dim / 2]`. Raises ValueError for an unknown scaling."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling.kind == "none":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / frequency  # in tokens
        positions = scaling.original_max_positions
        low, high = _LLAMA3
        # between the bounds: 0 where the wave is longest, fully stretched, 1 where it is shortest
        smooth = (positions / wavelength - low) / (high - low)
        blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        scaled = torch.where(wavelength > positions / low, frequency / scaling.factor, blended)
        return torch.where(wavelength < positions / high, frequency, scaled)
    if scaling.kind == "yarn":
        return _yarn(frequency, head_dim, base, scaling)
    raise ValueError(f"RoPE scaling {scaling.kind} is unknown; choose none, linear, llama3 or yarn")


def rotary_axes(sections: tuple[int, int, int] | None, angles: int) -> list[int]:
    """Which of three positions (time, row, column) each angle turns by: interleaved as Qwen3-VL has
    them.
    """
    axes = [0] * angles
    for axis in (1, 2):
        for angle in range(axis, min(3 * (sections or (0, 0, 0))[axis], angles), 3):
            axes[angle] = axis
    return axes


def cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cos, sin [n, 1, r / 2]` times `factor`, of int `positions[n]`, or `[n, r / 2]` where each
    angle has its own, and `frequencies[r / 2]` on one device; float64, rounded once.
    """
    angles = positions.double().reshape(len(positions), 1, -1) * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@fused
def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate by the angles, or back by them when `sign` is -1: over whole heads, as angles are a
    head's share of x.
    """
    turned, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    # (first, second) -> (first cos - second sin, second cos + first sin)
    whole_cos = torch.cat([cos, cos], -1)  # [n, 1, r/2] -> [n, 1, r]
    whole_sin = torch.cat([sin * -sign, sin * sign], -1)
    turned = torch.cat([second, first], -1).mul_(whole_sin).addcmul_(turned, whole_cos)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return (
            _rotate(grads[0], cos, sin, -1),
            None,
            None,
        )  # the transpose turns the other way, by the same factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first r dimensions of `x[n, heads, head_dim]` by r / 2 angles of each token: i
    pairs with i + r / 2.

    cos and sin may have a common factor, which scales the result.
    """
    return _Rotate.apply(x, cos, sin)
