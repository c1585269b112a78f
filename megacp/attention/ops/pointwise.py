"""RMSNorm, SwiGLU and dropout: elementwise chains with a backward of their own that save as little
as they can.

RMSNorm (Zhang and Sennrich, 2019) saves its input and one scale per row; the composite of torch's
operators would keep three copies of the activations. Its statistics are fp32 or wider in any model
dtype, as in Llama, Qwen3 and Molmo2. SwiGLU (Shazeer, 2020) saves its input, in which gate and up
projection are one tensor from the fused linear on.

Dropout's mask is a function of (key, token, column), without generator state: the same bits on any
grid, and when a block is computed again. Ranks of a cp or tp group draw other bits because they
hold other tokens.
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
    """The result, and the scale of each row `[..., 1]`."""
    wide = x.to(accumulation_dtype(x.dtype))
    length = torch.linalg.vector_norm(
        wide, dim=-1, keepdim=True
    )  # a reduction: the squares are never stored
    scale = torch.rsqrt(length.square() / x.shape[-1] + epsilon)
    # each as its library rounds: around 0 once at the end, otherwise before the weight too
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
    """`d_weight = (grad * x)^T scale`, and `dx = grad * weight * scale - x * ((grad * x) weight) *
    scale^3 / h`.
    """
    wide, wide_x, wide_weight = (t.to(scale.dtype) for t in (grad, x, weight))
    wide_weight = wide_weight + 1 if zero_centered else wide_weight
    product = wide * wide_x
    d_weight = product.flatten(0, -2).t() @ scale.flatten()  # [h, n] x [n] -> [h]
    inward = (product @ wide_weight).unsqueeze(-1) * scale**3 / x.shape[-1]  # [..., 1]
    dx = (wide * wide_weight).mul_(scale).addcmul_(wide_x, inward, value=-1)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


class FromInputs(torch.autograd.Function):
    """`forward(*inputs)`, which saves only them; `backward(grad, *inputs)` gives the gradients of
    all.
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
    """`x[..., h] / sqrt(mean(x^2) + epsilon) * weight[h]`, or `* (1 + weight)`, which rounds once;
    same dtype as x.
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
    """Gradients of the normed x and of the gate."""
    wide = grad.to(scale.dtype)
    wide_gate = gate.to(scale.dtype)
    normed = x.to(scale.dtype) * scale * weight
    d_gate = torch.ops.aten.silu_backward(wide * normed, wide_gate)
    return wide * F.silu(wide_gate), d_gate.to(gate.dtype)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        out, scale = _norm(x, weight, epsilon, False)
        ctx.save_for_backward(x, gate, weight, scale)  # the normed x is made again in backward
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
    """`rms_norm(x) * silu(gate)`, all of `[..., h]`; saves the two and a scale per row."""
    return _GatedNorm.apply(x, gate, weight, epsilon)


@fused
def _open(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


@fused
def _open_backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    part = torch.sigmoid(gate)
    return grad * part, torch.ops.aten.sigmoid_backward(grad * x, part).sum_to_size(gate.shape)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(gate)`, a gate of each element or each row; saves the two."""
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
    """Gradient; on a CPU written to the halves of the result: a quarter of `_swiglu_backward`'s
    time, 5 % of a step.

    A graph cannot write so: its halves are no dense tensors.
    """
    if is_compiled(grad):
        return (_swiglu_backward(grad, gate_up),)
    gate, up = gate_up.chunk(2, -1)
    result = empty(gate_up.shape, gate_up)
    for_gate, for_up = result.chunk(2, -1)
    torch.mul(
        grad, up, out=for_gate
    )  # of silu(gate), from which the next line makes that of gate in place
    torch.ops.aten.silu_backward.grad_input(for_gate, gate, grad_input=for_gate)
    torch.ops.aten.silu.out(gate, out=for_up).mul_(grad)
    return (result,)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`: `[..., 2f] -> [..., f]`, gate first."""
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
    """`gelu(gate) * up` by GELU's tanh approximation: `[..., 2f] -> [..., f]`, gate first (Shazeer,
    2020).
    """
    return FromInputs.apply(_geglu, _geglu_backward, gate_up)


_STEEP, _LIMIT = 1.702, 7.0


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
    d_gate = (
        grad
        * (up.clamp(-_LIMIT, _LIMIT) + 1)
        * part
        * (1 + _STEEP * near * (1 - part))
        * (gate <= _LIMIT)
    )
    return (torch.cat([d_gate, grad * near * part * (up.abs() <= _LIMIT)], -1),)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate sigmoid(1.702 gate) (1 + up)` of a gate up to 7 and an up within 7: `[..., 2f] -> [...,
    f]`, gate first.
    """
    return FromInputs.apply(_clamped, _clamped_backward, gate_up)


ACTIVATIONS = {"swiglu": swiglu, "geglu": geglu, "clamped_swiglu": clamped_swiglu}
"""Activations by name; the names are those of Transformer Engine."""


_MASK32 = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 (Appleby), on int64 tensors holding 32-bit values."""
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
    """`keep_mask` from the halves of the key; they are tensors, as a number would make a compiled
    form for each key.
    """
    rows = _mix((token_names * 0x9E3779B1 + low) & _MASK32)  # [n], of the low halves
    rows = _mix(
        (rows + (token_names >> 32) * 0x85EBCA77 + high) & _MASK32
    )  # a pack's number is in both
    bits = _mix(
        (rows[:, None] + column[None] * 0x27D4EB2F) & _MASK32
    )  # [n, 1] + [1, columns] -> [n, columns]
    return bits >= least


def keep_mask(
    key: int, token_names: torch.Tensor, columns: int, probability: float, first: int = 0
) -> torch.Tensor:
    """Bool `[n, columns]`, False with `probability`; `token_names[n]` int64 names each token within
    its microbatch.

    `first`: the number of the first column here, where tp ranks hold parts of a row.
    """
    low, high = (token_names.new_full((), half) for half in (key & _MASK32, key >> 32 & _MASK32))
    column = torch.arange(first, first + columns, device=token_names.device)
    # hashes are even over [0, 2^32): so large a share of them is below
    return _kept(token_names, low, high, column, int(probability * 2**32))


def dropout(
    x: torch.Tensor, key: int, token_names: torch.Tensor, probability: float, first: int = 0
) -> torch.Tensor:
    """`x[n, h]` with elements zeroed with `probability` and the rest scaled by `1 / (1 -
    probability)`.
    """
    if probability == 0.0:
        return x
    return x * keep_mask(key, token_names, x.shape[-1], probability, first) / (1.0 - probability)
