"""RMSNorm (Zhang and Sennrich, 2019) that saves its input and one scale per row, nothing else; and LayerNorm.

Key property: statistics are fp32 or wider in any model dtype, as in Llama, Qwen3 and Molmo2. Rejected: the composite
torch form of RMSNorm, whose autograd keeps three copies of the activations (torch's LayerNorm does not).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megacp.core.large_blocks import empty
from megacp.core.ops.compiled import fused
from megacp.core.ops.kernel import accumulation_dtype


def _formula(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the scale of each row `[..., 1]`."""
    wide = x.to(accumulation_dtype(x.dtype))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(length.square() / x.shape[-1] + epsilon)
    return (wide * scale).to(x.dtype).mul_(weight), scale


def _by_passes(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in the memory of its result where that is as wide."""
    wide = x.to(accumulation_dtype(x.dtype))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(length.square() / x.shape[-1] + epsilon)
    return torch.mul(wide, scale, out=empty(x.shape, wide)).to(x.dtype).mul_(weight), scale


_norm = fused(_formula, _by_passes)


def _backward_formula(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = x.to(scale.dtype) * scale
    wide, wide_weight = grad.to(scale.dtype), weight.to(scale.dtype)
    product = wide * normed
    d_weight = product.flatten(0, -2).sum(0)  # [..., h] -> [h]
    mean = (product @ wide_weight).unsqueeze(-1) / x.shape[-1]  # of grad * weight * normed, [..., 1]
    dx = (wide * wide_weight).addcmul_(normed, mean, value=-1).mul_(scale)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


def _backward_by_passes(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula with its two sums as products of a matrix and a vector, in the memory of one result.

    `d_weight = (grad * x)^T scale`, and `dx = grad * weight * scale - x * ((grad * x) weight) * scale^3 / h`.
    """
    wide, wide_x, wide_weight = (t.to(scale.dtype) for t in (grad, x, weight))
    product = torch.mul(wide, wide_x, out=empty(x.shape, wide))
    d_weight = product.flatten(0, -2).t() @ scale.flatten()  # [h, n] x [n] -> [h]
    inward = (product @ wide_weight).unsqueeze(-1) * scale**3 / x.shape[-1]  # [..., 1]
    dx = torch.mul(wide, wide_weight, out=product).mul_(scale).addcmul_(wide_x, inward, value=-1)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


_norm_backward = fused(_backward_formula, _backward_by_passes)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        out, scale = _norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *_norm_backward(*grads, *ctx.saved_tensors), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x[..., h] / sqrt(mean(x^2) + epsilon) * weight[h]`, same dtype as x."""
    return _RMSNorm.apply(x, weight, epsilon)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`(x[..., h] - mean) / sqrt(variance + epsilon) * weight[h] + bias[h]` (Ba et al., 2016), same dtype as x."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)
