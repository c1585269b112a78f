"""Rotary position embedding in the half-rotation form (Su et al., 2021; GPT-NeoX and Llama layout).

Angles depend on the position ids, which are permuted together with the tokens, and never on a rank
or a row index. Rotation is therefore exact for any layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megacp.attention.ops.device import fused

_LLAMA3 = (1.0, 4.0)
"""Divisors of the original number of positions that give two wavelengths. A frequency is
fully stretched above the first wavelength, and unchanged below the second.
"""
_YARN = (32.0, 1.0)
"""Bounds on the number of turns within the original positions: above the first bound, a frequency
is unchanged; below the second, it is fully stretched.
"""


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling for long contexts: `none`, `linear` (divides positions), `llama3` or `yarn`."""

    kind: str = "none"
    factor: float = 1.0
    original_max_positions: int = 8192
    rounds: bool = True
    """Whether YaRN's blend begins and ends at integer indices."""

    @property
    def attention_factor(self) -> float:
        """Factor on cosines and sines, and therefore on q and k (YaRN: Peng et al., 2023)."""
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" else 1.0


def _yarn(
    frequency: torch.Tensor, head_dim: int, base: float, scaling: RotaryScaling
) -> torch.Tensor:
    """Return the frequencies of YaRN.

    Frequencies with few turns within the original positions are divided by the factor, and
    frequencies with many turns are unchanged. In between, both are blended according to the index.
    """

    def index(turns: float) -> float:
        """Return the index of the frequency with this number of turns."""
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(base))

    low = index(_YARN[0])
    high = index(_YARN[1])
    if scaling.rounds:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    # [head_dim / 2]: 0 up to low, 1 above high; as in YaRN's code, 0.001 avoids division by 0
    indices = torch.arange(head_dim // 2, dtype=torch.float64)
    slowed = ((indices - low) / (high - low or 0.001)).clamp(0, 1)
    return frequency / scaling.factor * slowed + frequency * (1 - slowed)


def inverse_frequencies(head_dim: int, base: float, scaling: RotaryScaling) -> torch.Tensor:
    """Return the angle per position of each frequency, float64 `[head_dim / 2]`.

    Raise ValueError if the scaling is unknown.
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling.kind == "none":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / frequency  # in tokens
        positions = scaling.original_max_positions
        low, high = _LLAMA3
        # between the bounds, blend from 0 (fully stretched) to 1 (unchanged)
        smooth = (positions / wavelength - low) / (high - low)
        blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        scaled = torch.where(wavelength > positions / low, frequency / scaling.factor, blended)
        return torch.where(wavelength < positions / high, frequency, scaled)
    if scaling.kind == "yarn":
        return _yarn(frequency, head_dim, base, scaling)
    raise ValueError(f"RoPE scaling {scaling.kind} is unknown; choose none, linear, llama3 or yarn")


def rotary_axes(sections: tuple[int, int, int] | None, angles: int) -> list[int]:
    """Return which of three positions (time, row, column) each angle uses.

    `sections` are the numbers of angles per position. They are interleaved as in Qwen3-VL.
    """
    axes = [0] * angles
    for axis in (1, 2):
        for angle in range(axis, min(3 * (sections or (0, 0, 0))[axis], angles), 3):
            axes[angle] = axis
    return axes


def cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `cos, sin [n, 1, r / 2]` times `factor`.

    `positions` are int `[n]`, or `[n, r / 2]` with a position per angle; `frequencies` are
    `[r / 2]` on the same device. Angles are float64 and rounded once, to `dtype`.
    """
    angles = positions.double().reshape(len(positions), 1, -1) * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@fused
def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate by the angles, or in the opposite direction if `sign` is -1.

    Only the first dimensions of a head have angles; the remaining dimensions are unchanged.
    """
    turned, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    # (first, second) -> (first cos - second sin, second cos + first sin)
    whole_cos = torch.cat([cos, cos], -1)  # [n, 1, r/2] -> [n, 1, r]
    whole_sin = torch.cat([sin * -sign, sin * sign], -1)
    turned = torch.cat([second, first], -1).mul_(whole_sin).addcmul_(turned, whole_cos)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class _Rotate(torch.autograd.Function):
    """Rotation whose backward pass rotates the gradient in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # the transpose of a rotation is the opposite rotation, with the same factor
        return _rotate(grads[0], cos, sin, -1), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first r dimensions of `x[n, heads, head_dim]` by r / 2 angles per token.

    Dimension i is paired with i + r / 2. cos and sin may have a common factor, which scales the
    result.
    """
    return _Rotate.apply(x, cos, sin)
