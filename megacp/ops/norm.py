"""RMSNorm (Zhang and Sennrich, 2019) that saves its input and one scale per row, nothing else.

Key property: statistics in fp32 or wider whatever the model dtype, as Llama, Qwen3 and Molmo2 do. Rejected: the
composite torch form, whose autograd keeps three copies of the activations.
"""

from __future__ import annotations

import torch

from megacp.ops.attention import accumulation_dtype


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon):  # type: ignore[no-untyped-def]
        wide = x.to(accumulation_dtype(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        d_weight = (wide * normed).flatten(0, -2).sum(0)  # [..., h] -> [h]
        wide = wide * weight.to(scale.dtype)
        dx = scale * (wide - normed * (wide * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype), d_weight.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x[..., h] / sqrt(mean(x^2) + epsilon) * weight[h]`, same dtype as x."""
    return _RMSNorm.apply(x, weight, epsilon)
