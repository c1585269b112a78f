"""What differs between devices: arrays that travel to a GPU, and chains of elementwise passes that
become one kernel.

`@fused` compiles only arithmetic: functions of tensors without autograd, messages or plans, so a
graph never breaks. On a CPU the functions run as they are, since compiling there needs a C++
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
"""Most compiled forms of one function: dtypes, number of dims, lengths fixed or free make about a
dozen; torch's limit is 8."""
BACKEND: str | Callable = "inductor"
"""The compiler of the graphs."""


def to_device(values: np.ndarray | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the values' dtype and shape, without waiting for the copy; on a CPU it shares
    their memory.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if torch.device(device).type == "cpu":
        return tensor
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host in memory that `device` copies from; in other threads than the first, of
    its context.
    """
    if torch.device(device).type != "cuda" or tensor.is_pinned():
        return tensor
    with torch.cuda.device(
        device
    ):  # a new thread's device is the first of the machine, which would get a context
        return tensor.pin_memory()


class HostCopy:
    """A tensor on its way to the host: the copy begins at once, and only who asks for `values`
    waits for it.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._host, self._done = x, None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(
                x, non_blocking=True
            )
            self._done = torch.cuda.current_stream(x.device).record_event()

    @property
    def values(self) -> torch.Tensor:
        """The tensor of the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def whole_graph(
    function: Callable[Arguments, Result], backend: str | Callable = "inductor"
) -> Callable[Arguments, Result]:
    """The function as one graph, in up to `COMPILED_FORMS` forms; a function that cannot be
    compiled raises.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        limit: dict[str, Any] = {"recompile_limit": COMPILED_FORMS}  # torch's stubs do not know it
        return torch.compile(function, fullgraph=True, backend=backend, **limit)
    graph = torch.compile(function, fullgraph=True, backend=backend)

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        # before 2.13 torch has one limit for all functions, and 2.12 one for each thread, as
        # autograd's on CUDA
        if torch._dynamo.config.recompile_limit != COMPILED_FORMS:
            torch._dynamo.config.recompile_limit = (
                COMPILED_FORMS  # not at each call: what is set leaks and costs
            )
        return graph(*args, **options)

    return call


def lend_scratch(device: torch.device) -> None:
    """Give the Triton kernels that this thread launches memory for their TMA descriptors.

    Triton keeps the allocator in a ContextVar, which is unset in every new thread. From 2.13 on
    torch sets it only at the first launch of a kernel, and a recomputation is a later launch, in
    autograd's thread.
    """
    triton = sys.modules.get("triton")  # there before anything is launched
    if triton is not None:
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
        )


STAND_IN = "meta"
"""The device type of tensors that have shapes but no numbers. They stand for tensors of a GPU: a
dry run computes with them to see how much memory a step takes."""


def on_gpu(x: torch.Tensor) -> bool:
    """Return whether the tensor is on a GPU, or stands for one that is."""
    return x.device.type in ("cuda", STAND_IN)


def is_compiled(x: torch.Tensor) -> bool:
    """Return whether a chain over this tensor becomes one kernel."""
    return on_gpu(x)


def dense_attention_of_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the shape of `scaled_dot_product_attention` without a mask, by the kernel that torch
    chooses on a GPU.

    q, k and v are `[n, heads, tokens, d]` without numbers.
    """
    if q.dtype == torch.bfloat16:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)[
        0
    ]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products keep the dtypes of their inputs."""
    return torch.autocast("cuda" if device.type == STAND_IN else device.type, enabled=False)


RunChain = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`(function, args, options)`: what `function` returns."""


def _run(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(*args, **options)


CHAINS: ContextVar[RunChain] = ContextVar("CHAINS", default=_run)
"""Runs a chain over `STAND_IN` tensors. Whoever measures memory sets it: one kernel has no
intermediate tensors.
"""


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator of a function whose first argument is a tensor: its passes become one kernel where
    `is_compiled`.
    """

    @functools.cache
    def kernel(backend: str | Callable) -> Callable[Arguments, Result]:
        return whole_graph(function, backend)

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        first: torch.Tensor = args[0]  # type: ignore[assignment]  # a tensor, says the decorator
        if first.device.type == STAND_IN:
            return CHAINS.get()(function, args, options)
        if not is_compiled(first):
            return function(*args, **options)
        if (
            not torch.is_grad_enabled()
        ):  # else a parameter, and what needs a gradient, are forms of their own
            args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)  # type: ignore[assignment]
        for x in args:
            if isinstance(x, torch.Tensor) and x.dim() > 0:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return kernel(BACKEND)(*args, **options)

    return call
