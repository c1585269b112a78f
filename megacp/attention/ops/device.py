"""Device-specific code: asynchronous copies to a GPU, and elementwise chains as single kernels.

`@fused` compiles only arithmetic: functions of tensors without autograd, messages or plans, so that
a graph never breaks. On a CPU, the functions run uncompiled, because compilation would need a C++
compiler at run time.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

COMPILED_FORMS = 64
"""Maximum number of compiled forms of one function. The combinations of dtype, number of dims, and
static or dynamic length add up to about a dozen; torch's default limit is 8.
"""
BACKEND: str | Callable = "inductor"
"""The `torch.compile` backend for all graphs."""


def to_device(values: np.ndarray | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on the device without waiting for the copy.

    Dtype and shape stay the same. On a CPU, the tensor shares memory with `values`.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if torch.device(device).type == "cpu":
        return tensor
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a copy of a host tensor in pinned memory, from which `device` can copy directly.

    For devices other than GPUs, and for pinned tensors, return the tensor itself.
    """
    if torch.device(device).type != "cuda" or tensor.is_pinned():
        return tensor
    # a new thread starts with the machine's first GPU and would create a context there
    with torch.cuda.device(device):
        return tensor.pin_memory()


class HostCopy:
    """An asynchronous copy of a tensor to the host.

    The copy starts immediately; only reading `values` waits for it.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._host = x
        self._done = None
        if x.is_cuda:
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host = host.copy_(x, non_blocking=True)
            self._done = torch.cuda.current_stream(x.device).record_event()

    @property
    def values(self) -> torch.Tensor:
        """The host tensor, after the copy is complete."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def whole_graph(
    function: Callable[Arguments, Result], backend: str | Callable = "inductor"
) -> Callable[Arguments, Result]:
    """Return the function compiled as a single graph, in up to `COMPILED_FORMS` forms.

    A function that cannot be compiled raises an error when it is called.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        # torch's type stubs lack this argument
        limit: dict[str, Any] = {"recompile_limit": COMPILED_FORMS}
        return torch.compile(function, fullgraph=True, backend=backend, **limit)
    graph = torch.compile(function, fullgraph=True, backend=backend)

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        # before 2.13, torch's limit is global; in 2.12 it is per thread, and autograd uses its own
        # threads on CUDA. Set it only when it differs, because each assignment leaks and is slow
        if torch._dynamo.config.recompile_limit != COMPILED_FORMS:
            torch._dynamo.config.recompile_limit = COMPILED_FORMS
        return graph(*args, **options)

    return call


def lend_scratch(device: torch.device) -> None:
    """Provide memory for the TMA descriptors of Triton kernels launched from this thread.

    Triton stores the allocator in a ContextVar, which is unset in every new thread. Since 2.13,
    torch sets it only when a kernel is launched for the first time. A recomputation launches the
    kernel again in autograd's thread, where the allocator is still unset.
    """
    triton = sys.modules.get("triton")  # imported before any kernel is launched
    if triton is not None:
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
        )


STAND_IN = "meta"
"""Device type of tensors that have shapes but no data. They represent tensors of a GPU: a dry run
computes with them to estimate the memory of a step.
"""


def on_gpu(x: torch.Tensor) -> bool:
    """Return whether the tensor is on a GPU or represents a GPU tensor."""
    return x.device.type in ("cuda", STAND_IN)


def is_compiled(x: torch.Tensor) -> bool:
    """Return whether an elementwise chain over this tensor is compiled into one kernel."""
    return on_gpu(x)


def dense_attention_of_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the output of unmasked attention as a GPU would compute it, for tensors without data.

    q, k and v are `[n, heads, tokens, d]`. Operators differ in the tensors that they save, so this
    function uses the one that `scaled_dot_product_attention` chooses on a GPU.
    """
    if q.dtype == torch.bfloat16:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, None, True, scale=scale)[0]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager in which matrix products keep the dtypes of their inputs."""
    return torch.autocast("cuda" if device.type == STAND_IN else device.type, enabled=False)


RunChain = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`run(function, args, options)` returns the result of `function`."""


def _run(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(*args, **options)


CHAINS: ContextVar[RunChain] = ContextVar("CHAINS", default=_run)
"""Function that runs chains on `STAND_IN` tensors. A memory estimate replaces it, because a single
kernel has no intermediate tensors.
"""


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function of tensors that runs as one compiled kernel where `is_compiled`.

    Used as a decorator. The first argument of the function must be a tensor.
    """

    @functools.cache
    def kernel(backend: str | Callable) -> Callable[Arguments, Result]:
        return whole_graph(function, backend)

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        first: torch.Tensor = args[0]  # type: ignore[assignment]  # required by this decorator
        if first.device.type == STAND_IN:
            return CHAINS.get()(function, args, options)
        if not is_compiled(first):
            return function(*args, **options)
        # detach: parameters and tensors that require gradients would need separate compiled forms
        if not torch.is_grad_enabled():
            args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)  # type: ignore[assignment]
        for x in args:
            if isinstance(x, torch.Tensor) and x.dim() > 0:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return kernel(BACKEND)(*args, **options)

    return call
