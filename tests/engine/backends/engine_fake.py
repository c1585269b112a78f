"""Transformer Engine's Python files on a nonexistent GPU: its kernels return tensors of the right
shape.

They are for whole steps of `megacp.verify.fake_step`, which measure the memory of the real modules.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megacp.engine.backends.transformer_engine import TransformerEngineBackend, package_problem
from megacp.engine.models import build
from tests.engine.backends import engine_layers as layers
from tests.engine.backends import engine_math as math
from tests.engine.backends.engine_math import Call, named
from tests.engine.backends.engine_stub import engine


def demand(*tensors: torch.Tensor) -> None:
    """Require tensors on the device and contiguous."""
    for x in tensors:
        assert x.device.type == "cuda" and x.is_contiguous(), (x.device, x.shape, x.stride())


def fused_attn_fwd(call: Call) -> tuple[Any, ...]:
    """Return the output `[t, heads, d]`, log-sum-exps `[t, heads, 1]` and the state of dropout."""
    q = call["q"]
    demand(*(call[name] for name in (*"qkv", "cu_seqlens_q", "cu_seqlens_kv")))
    lse = q.new_empty((*q.shape[:2], 1), dtype=torch.float32)
    return torch.empty_like(q), [lse, q.new_empty(2, dtype=torch.int64)]


def fused_attn_bwd(call: Call) -> tuple[Any, ...]:
    """Return gradients like `q, k, v`."""
    demand(*(call[name] for name in (*"qkv", "o", "d_o")), *call["aux_ctx_tensors"])
    return *(torch.empty_like(call[name]) for name in "qkv"), None


def general_gemm(call: Call) -> tuple[Any, ...]:
    """Return `[n, m]` for the layouts of `engine_layers.general_gemm`, without a second tensor."""
    a, b, out = call["A"], call["B"], call["out"]
    demand(a, b)
    shape = {
        "TN": (b.shape[0], a.shape[0]),
        "NN": (b.shape[0], a.shape[1]),
        "NT": (b.shape[1], a.shape[1]),
    }
    if out is None:
        out = a.new_empty(shape[call["layout"]], dtype=call["out_dtype"])
    assert out.shape == shape[call["layout"]]
    bias = b.new_empty(b.shape[1]) if call["bias"] is not None and call["grad"] else None
    return out, bias, None, call["extra_output"]


def rmsnorm_fwd(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> tuple[Any, ...]:
    """Return the shapes of `engine_layers.rmsnorm_fwd`."""
    demand(x, weight)
    return torch.empty_like(x), None, x.new_empty(len(x), dtype=torch.float32)


def rmsnorm_bwd(
    dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, *args: Any
) -> Any:
    """Return the shapes of `engine_layers.rmsnorm_bwd`."""
    demand(dy, x, scale, weight)
    return torch.empty_like(x), torch.empty_like(weight)


def half(x: torch.Tensor, places: torch.Tensor, which: int) -> torch.Tensor:
    """Return half of the rows: `[t, ...]` to `[t / 2, ...]`."""
    demand(x, places)
    return x.new_empty((len(x) // 2, *x.shape[1:]))


def written(*tensors: Any) -> None:
    """Return a kernel that writes to its first tensor."""
    demand(*(x for x in tensors if isinstance(x, torch.Tensor) and x.dim() != 2))


STAND_INS = {
    "thd_read_half_tensor": half,
    "thd_out_correction": written,
    "thd_second_half_lse_correction": written,
    "thd_grad_correction": written,
    "thd_copy_valid_tokens_from_per_split_to_rank_local": written,
    "thd_read_second_half_lse": lambda lse, *rest: lse.new_empty((len(lse), lse.shape[1] // 2)),
    "thd_get_partitioned_indices": lambda places, tokens, cp, rank: places.new_empty(tokens // cp),
    "thd_sequence_order_to_cp_rank_order": lambda x, *rest: torch.empty_like(x),
    "thd_cp_rank_order_to_sequence_order": lambda x, *rest: torch.empty_like(x),
    "swiglu": lambda x, quantizer: x.new_empty((len(x), x.shape[1] // 2)),
    "dswiglu": lambda grad, x, quantizer: torch.empty_like(x),
    "multi_tensor_adam": lambda chunk, flag, lists, *rest: demand(
        flag, *(x for one in lists for x in one)
    ),
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    **dict.fromkeys(("layernorm_fwd", "layernorm_bwd"), layers.no_layer_norm),
    "get_fused_attn_backend": math.cudnn_support,
}


@contextmanager
def faked() -> Iterator[None]:
    """Build every model on Transformer Engine's modules, with fake CUDA tensors."""
    with engine(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        package_problem()  # this sets the environment variables that the package reads
        modules = [
            sys.modules[name] for name in (math.EXTENSION, layers.REEXPORTED, layers.RMSNORM)
        ]
        for name, function in STAND_INS.items():
            for module in modules:
                patch.setattr(module, name, function, raising=False)
        for name, function in (
            ("fused_attn_fwd", fused_attn_fwd),
            ("fused_attn_bwd", fused_attn_bwd),
        ):
            for module in (
                sys.modules[one] for one in (math.CONTEXT_PARALLEL, math.BACKENDS, math.FUSED)
            ):
                patch.setattr(module, name, named(getattr(module, name), function))
        for module in (
            sys.modules[one] for one in (layers.LINEAR, layers.NORM_LINEAR, layers.NORM_MLP)
        ):
            patch.setattr(module, "general_gemm", named(module.general_gemm, general_gemm))
        utils = sys.modules[math.UTILS]
        select = utils.get_attention_backend
        plain = lambda parameters: select(dataclasses.replace(parameters, qkv_type=torch.Tensor))  # noqa: E731
        patch.setattr(utils, "get_attention_backend", plain)
        patch.setattr(
            build, "select_backend", lambda config, grid: TransformerEngineBackend(grid, config)
        )
        yield
