"""Reference math for Transformer Engine's linears, norms, MLP and FusedAdam, in addition to its
attention.

Modules, autograd functions and communication are the real ones; only products, norms, SwiGLU and
the update are replaced by torch. The placeholder that accompanies a fused weight gradient is NaN,
so that any use of it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.engine.backends.engine_math import Call, emulated, named
from tests.engine.backends.engine_stub import NEWEST

LINEAR = "transformer_engine.pytorch.module.linear"
NORM_LINEAR = "transformer_engine.pytorch.module.layernorm_linear"
NORM_MLP = "transformer_engine.pytorch.module.layernorm_mlp"
EXTENSION = "transformer_engine_torch"
REEXPORTED = "transformer_engine.pytorch.cpp_extensions"
RMSNORM = "transformer_engine.pytorch.ops.basic.rmsnorm"
ADAM = "transformer_engine.pytorch.optimizers.fused_adam"
UTILITIES = "transformer_engine.pytorch.utils"
CONSTANTS = "transformer_engine.pytorch.constants"


def general_gemm(call: Call) -> tuple[Any, ...]:
    """Compute `TN`: `B A^T`, `NN`: `B A`, or `NT`: `B^T A`.

    A bias is added; in backward its gradient is returned.
    """
    a, b, bias = call["A"], call["B"], call["bias"]
    assert not call["gelu"] and call["ub"] is None
    result = {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[
        call["layout"]
    ]()
    bias_gradient = None
    if bias is not None:
        if call["grad"]:
            bias_gradient = b.sum(0)
        else:
            result = result + bias
    out = call["out"]
    if out is not None:
        result = out.add_(result) if call["accumulate"] else out.copy_(result)
    return result, bias_gradient, None, call["extra_output"]


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, *args: Any
) -> tuple[Any, ...]:
    """Return the norm of `x[n, h]`, None, and the scale of each row.

    The last argument adds 1 to the weight.
    """
    scale = torch.rsqrt(x.square().mean(-1) + epsilon)
    return x * scale[:, None] * (weight + args[-1]), None, scale


def rmsnorm_bwd(
    dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `x[n, h]` and of the weight."""
    normed, wide = x * scale[:, None], dy * (weight + args[-1])
    dx = (wide - normed * (wide * normed).mean(-1, keepdim=True)) * scale[:, None]
    return dx, (dy * normed).sum(0)


def swiglu(x: torch.Tensor, quantizer: None) -> torch.Tensor:
    """Return `[n, f]` for `[n, 2f]`, gated by the first half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def geglu(x: torch.Tensor, quantizer: None) -> torch.Tensor:
    """Return the same with the tanh approximation, which the package's GELU uses."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def backward_of(
    function: Any, grad: torch.Tensor, x: torch.Tensor, quantizer: None
) -> torch.Tensor:
    """Return the gradient `[n, 2f]` of a gate's input."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf, None), leaf, grad)[0]


def multi_tensor_adam(
    chunk: int,
    flag: torch.Tensor,
    lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    correct: int,
    decay: float,
) -> None:
    """Apply AdamW with decoupled decay to lists of gradients, parameters and moments."""
    assert mode == 1 and correct == 1 and flag.dtype == torch.int32 and len(lists) == 4 and lists[0]
    # common/multi_tensor/multi_tensor_apply.cuh: after a tensor without a chunk, the kernel for the
    # tensors before it is not launched
    assert all(
        x.numel() > 0 and x.is_contiguous() and x.dtype == torch.float32
        for some in lists
        for x in some
    )
    for grad, parameter, first, second in zip(*lists, strict=True):
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(epsilon)
        parameter.sub_(lr * (first / (1 - beta1**step) / root + decay * parameter))


class OnCpu:
    """`torch` for a file that allocates its scratch tensors on CUDA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, values: Any, **options: Any) -> torch.Tensor:
        """Create the tensor on an available device."""
        return torch.tensor(values, **{**options, "device": "cpu"})


class EmptyIsNan:
    """`torch` for a file whose empty tensors must be filled before they are read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *sizes: Any, **options: Any) -> torch.Tensor:
        """Return a tensor of NaN."""
        return torch.empty(*sizes, **options).fill_(torch.nan)


def no_layer_norm(*args: Any) -> None:
    """Replace the other entries in the package's tables of norms."""
    raise AssertionError("LayerNorm is native")


@contextmanager
def emulated_layers(release: str = NEWEST) -> Iterator[Any]:
    """Provide a `transformer_engine.pytorch` that trains on the CPU."""
    with emulated(release) as te, pytest.MonkeyPatch.context() as patch:
        norm, adam, extension = (sys.modules[name] for name in (RMSNORM, ADAM, EXTENSION))
        for module in (sys.modules[name] for name in (LINEAR, NORM_LINEAR, NORM_MLP)):
            patch.setattr(module, "general_gemm", named(module.general_gemm, general_gemm))
        for module in (sys.modules[name] for name in (LINEAR, NORM_LINEAR)):
            patch.setattr(
                module,
                "get_dummy_wgrad",
                lambda shape, dtype, zero=False: torch.full(shape, torch.nan, dtype=dtype),
            )
        patch.setattr(sys.modules[NORM_MLP], "torch", EmptyIsNan())
        for module in (extension, sys.modules[REEXPORTED]):
            for name in ("layernorm_fwd", "layernorm_bwd"):
                patch.setattr(module, name, no_layer_norm, raising=False)
            for function in (rmsnorm_fwd, rmsnorm_bwd):
                patch.setattr(module, function.__name__, function, raising=False)
        for function in (swiglu, geglu, multi_tensor_adam):
            patch.setattr(extension, function.__name__, function, raising=False)
        for function in (swiglu, geglu):
            patch.setattr(
                extension, f"d{function.__name__}", partial(backward_of, function), raising=False
            )
        patch.setattr(sys.modules[UTILITIES], "_empty_tensor", lambda: torch.empty(0))
        patch.setattr(norm, "rmsnorm_fwd", rmsnorm_fwd)
        patch.setattr(norm, "rmsnorm_bwd", rmsnorm_bwd)
        patch.setitem(sys.modules[CONSTANTS].TE_DType, torch.float64, 4)
        patch.setattr(adam, "torch", OnCpu())
        yield te
