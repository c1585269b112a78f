"""Run torch's ring attention on CPUs: a patch for torchtitan and Accelerate.

`torch.distributed.tensor.experimental._context_parallel` lists the CUDA kernels by name and rejects
the CPU kernel, although its ring works with any kernel that returns a log-sum-exp. The patch adds
the CPU's flash attention kernel and its backward kernel to the table of handlers. The ring itself
is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2  # the dimension in [batch, heads, sequence, width]


def allow_cpu_kernel() -> None:
    """Add the CPU kernel to torch's table. Call this function once per process."""
    ring.custom_ops[_FORWARD] = _forward
    ring.custom_ops[_BACKWARD] = _backward


def _wrapped(local: torch.Tensor, like: DTensor) -> DTensor:
    """Wrap a local result as torch's handler does: sharded along the sequence, like the queries."""
    shape = list(local.shape)
    shape[_SEQUENCE] *= like.device_mesh.size()
    meta = TensorMeta(torch.Size(shape), local.stride(), local.dtype)
    return DTensor(
        local, DTensorSpec(like.device_mesh, (Shard(_SEQUENCE),), meta), requires_grad=False
    )


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    query, key, value, *rest = args
    dropout, causal = (*rest, 0.0, False)[:2] if len(rest) < 2 else rest
    results = ring._templated_ring_attention(
        query.device_mesh.get_group(),
        _SEQUENCE,
        op,
        query=query._local_tensor,
        key=key._local_tensor,
        value=value._local_tensor,
        is_causal=causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
    )
    return tuple(_wrapped(result, query) for result in results)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    grad, query, key, value, out, lse, dropout, causal = args
    results = ring._templated_ring_attention_backward(
        query.device_mesh.get_group(),
        _SEQUENCE,
        op,
        grad_out=grad._local_tensor,
        grad_out_name="grad_out",
        query=query._local_tensor,
        key=key._local_tensor,
        value=value._local_tensor,
        out=out._local_tensor,
        logsumexp=lse._local_tensor,
        is_causal=causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
    )
    return tuple(_wrapped(result, query) for result in results)
