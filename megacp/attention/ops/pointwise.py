"""RMSNorm, gated activations and dropout: elementwise chains whose backward passes are written by
hand to save few tensors.

RMSNorm (Zhang and Sennrich, 2019) saves its input and one scale per row; torch's operators would
save three copies of the activations. Its statistics are fp32 or wider for any model dtype, as in
Llama, Qwen3 and Molmo2. SwiGLU (Shazeer, 2020) saves only its input, the output of the fused
gate and up projection.

The dropout mask is a function of (key, token, column) without generator state. Its bits are the
same on any grid and when a block is recomputed. Ranks of a cp or tp group draw different bits
because they have different tokens or columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megacp.attention.ops.device import fused, is_compiled
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.distributed.large_blocks import empty

Pass = Callable[..., Any]


@fused
def _norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and the scale of each row `[..., 1]`."""
    wide = x.to(accumulation_dtype(x.dtype))
    # vector_norm is a reduction, so the squares are never stored
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(length.square() / x.shape[-1] + epsilon)
    # round like the original libraries: zero-centered norms once at the end, other norms also
    # before the weight
    if zero_centered:
        return (wide * scale).mul_(weight.to(wide.dtype) + 1).to(x.dtype), scale
    return (wide * scale).to(x.dtype).mul_(weight), scale


@fused
def _norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `dx` and `d_weight`.

    `d_weight = (grad * x)^T scale`, and
    `dx = grad * weight * scale - x * ((grad * x) weight) * scale^3 / h`.
    """
    wide, wide_x, wide_weight = (t.to(scale.dtype) for t in (grad, x, weight))
    wide_weight = wide_weight + 1 if zero_centered else wide_weight
    product = wide * wide_x
    d_weight = product.flatten(0, -2).t() @ scale.flatten()  # [h, n] x [n] -> [h]
    inward = (product @ wide_weight).unsqueeze(-1) * scale**3 / x.shape[-1]  # [..., 1]
    dx = (wide * wide_weight).mul_(scale).addcmul_(wide_x, inward, value=-1)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


class FromInputs(torch.autograd.Function):
    """Apply `forward(*inputs)` and save only the inputs.

    `backward(grad, *inputs)` returns the gradients of all inputs.
    """

    @staticmethod
    def forward(ctx: Any, forward: Pass, backward: Pass, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = backward
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.gradients(grads[0], *ctx.saved_tensors)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one scale per row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, zero_centered: bool
    ) -> torch.Tensor:
        out, scale = _norm(x, weight, epsilon, zero_centered)
        ctx.save_for_backward(x, weight, scale)
        ctx.zero_centered = zero_centered
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        return *_norm_backward(grads[0], x, weight, scale, ctx.zero_centered), None, None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, zero_centered: bool = False
) -> torch.Tensor:
    """Return `x[..., h] / sqrt(mean(x^2) + epsilon) * weight[h]` in the dtype of x.

    If `zero_centered`, the factor is `1 + weight`, and the result is rounded only once.
    """
    return _RMSNorm.apply(x, weight, epsilon, zero_centered)


@fused
def _gate_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the normalised x and of the gate."""
    wide = grad.to(scale.dtype)
    wide_gate = gate.to(scale.dtype)
    normed = x.to(scale.dtype) * scale * weight
    d_gate = torch.ops.aten.silu_backward(wide * normed, wide_gate)
    return wide * F.silu(wide_gate), d_gate.to(gate.dtype)


class _GatedNorm(torch.autograd.Function):
    """RMSNorm times a SiLU gate; the backward pass recomputes the normalised input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        out, scale = _norm(x, weight, epsilon, False)
        ctx.save_for_backward(x, gate, weight, scale)
        return out.mul_(F.silu(gate))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, scale = ctx.saved_tensors
        d_normed, d_gate = _gate_backward(grads[0], x, gate, weight, scale)
        dx, d_weight = _norm_backward(d_normed, x, weight, scale, False)
        return dx, d_gate, d_weight, None


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Return `rms_norm(x) * silu(gate)`, all `[..., h]`; saves x, gate and a scale per row."""
    return _GatedNorm.apply(x, gate, weight, epsilon)


@fused
def _open(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


@fused
def _open_backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    part = torch.sigmoid(gate)
    d_gate = torch.ops.aten.sigmoid_backward(grad * x, part)
    # a gate with one value per row was broadcast, so its gradient is summed over the row
    return grad * part, d_gate.sum_to_size(gate.shape)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return `x * sigmoid(gate)` for one gate per element or per row; saves x and gate."""
    return FromInputs.apply(_open, _open_backward, x, gate)


@fused
def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(empty(gate.shape, gate).copy_(gate), inplace=True).mul_(up)


@fused
def _swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)], -1)


def _swiglu_gradient(grad: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the gradient of `gate_up`, in place on a CPU.

    On a CPU, writing into the halves of the result takes a quarter of the time of
    `_swiglu_backward`, which saves 5 % of the time of a step. A compiled graph cannot write into
    the halves because they are not dense tensors.
    """
    if is_compiled(grad):
        return (_swiglu_backward(grad, gate_up),)
    gate, up = gate_up.chunk(2, -1)
    result = empty(gate_up.shape, gate_up)
    for_gate, for_up = result.chunk(2, -1)
    # gradient of silu(gate), which the next line turns into the gradient of gate in place
    torch.mul(grad, up, out=for_gate)
    torch.ops.aten.silu_backward.grad_input(for_gate, gate, grad_input=for_gate)
    torch.ops.aten.silu.out(gate, out=for_up).mul_(grad)
    return (result,)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`: `[..., 2f] -> [..., f]`, gate first."""
    return FromInputs.apply(_swiglu, _swiglu_gradient, gate_up)


@fused
def _geglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@fused
def _geglu_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor]:
    gate, up = gate_up.chunk(2, -1)
    d_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
    return (torch.cat([d_gate, F.gelu(gate, approximate="tanh").mul_(grad)], -1),)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up` with GELU's tanh approximation (Shazeer, 2020).

    `[..., 2f] -> [..., f]`, gate first.
    """
    return FromInputs.apply(_geglu, _geglu_backward, gate_up)


# constants of gpt-oss: slope of the sigmoid, and bound on gate and up
_STEEP = 1.702
_LIMIT = 7.0


@fused
def _clamped(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=_LIMIT)
    return torch.sigmoid(_STEEP * gate).mul_(gate).mul_(up.clamp(-_LIMIT, _LIMIT) + 1)


@fused
def _clamped_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor]:
    gate, up = gate_up.chunk(2, -1)
    near = gate.clamp(max=_LIMIT)
    part = torch.sigmoid(_STEEP * near)
    d_gate = grad * (up.clamp(-_LIMIT, _LIMIT) + 1) * part * (1 + _STEEP * near * (1 - part))
    # clamped values get no gradient
    gate_inside = gate <= _LIMIT
    up_inside = up.abs() <= _LIMIT
    return (torch.cat([d_gate * gate_inside, grad * near * part * up_inside], -1),)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gate sigmoid(1.702 gate) (1 + up)` with gate clamped to 7 and up to [-7, 7].

    `[..., 2f] -> [..., f]`, gate first.
    """
    return FromInputs.apply(_clamped, _clamped_backward, gate_up)


ACTIVATIONS = {"swiglu": swiglu, "geglu": geglu, "clamped_swiglu": clamped_swiglu}
"""Activations by name, as in Transformer Engine."""


_MASK32 = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3's 32-bit finaliser (Appleby) of int64 tensors with 32-bit values."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _MASK32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MASK32
    return x ^ (x >> 16)


@fused
def _kept(
    token_names: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    column: torch.Tensor,
    least: int,
) -> torch.Tensor:
    """Return `keep_mask` from the two halves of the key.

    The halves are tensors, because Python numbers would need a compiled form for each key.
    """
    # hash the low half of each token's name, then the high half; [n]
    rows = _mix((token_names * 0x9E3779B1 + low) & _MASK32)
    rows = _mix((rows + (token_names >> 32) * 0x85EBCA77 + high) & _MASK32)
    # [n, 1] + [1, columns] -> [n, columns]
    bits = _mix((rows[:, None] + column[None] * 0x27D4EB2F) & _MASK32)
    return bits >= least


def keep_mask(
    key: int, token_names: torch.Tensor, columns: int, probability: float, first: int = 0
) -> torch.Tensor:
    """Return a bool mask `[n, columns]` that is False with `probability`.

    `token_names[n]` are int64 and unique within a microbatch. `first` is the number of the first
    local column if rows are divided among tp ranks.
    """
    low = token_names.new_full((), key & _MASK32)
    high = token_names.new_full((), key >> 32 & _MASK32)
    column = torch.arange(first, first + columns, device=token_names.device)
    # hashes are uniform over [0, 2^32), so this share of them is below the bound
    return _kept(token_names, low, high, column, int(probability * 2**32))


def dropout(
    x: torch.Tensor, key: int, token_names: torch.Tensor, probability: float, first: int = 0
) -> torch.Tensor:
    """Return `x[n, h]` with random elements set to 0 and the remaining elements scaled up.

    Elements are dropped with `probability` and scaled by `1 / (1 - probability)`; see `keep_mask`.
    """
    if probability == 0.0:
        return x
    return x * keep_mask(key, token_names, x.shape[-1], probability, first) / (1.0 - probability)
