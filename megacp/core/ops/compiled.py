"""Chains of elementwise passes as one CUDA kernel, compiled by torch at the first use; on a CPU they run as they are.

Key property: arithmetic alone is compiled, functions of tensors without autograd, messages or plans, so a graph never
breaks. Every length and layer shares one form: the first dim of tensors is free, widths are constants, which a kernel
can divide by and load many at a time. It is worth it where several passes over large activations become one: norms,
SwiGLU, rotary, dropout's bits, merged parts of attention. `TORCH_COMPILE_DISABLE=1` in the environment runs these one
by one (FlexAttention needs its kernel). Rejected: compiling blocks, which transports and recomputation cut into pieces
anyway; compiling on the CPU, which needs a C++ compiler at run time and gains little.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

FORMS = 64
"""Most compiled forms of one function: dtypes, number of dims, lengths fixed or free make about a dozen. torch's
limit is 8.
"""


def whole_graph(
    function: Callable[Arguments, Result], backend: str | Callable = "inductor"
) -> Callable[Arguments, Result]:
    """The function as one graph, in up to `FORMS` forms; a function that cannot be compiled raises."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        limit: dict[str, Any] = {"recompile_limit": FORMS}  # torch's stubs do not know it
        return torch.compile(function, fullgraph=True, backend=backend, **limit)
    graph = torch.compile(function, fullgraph=True, backend=backend)

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        _raise_limit()
        return graph(*args, **options)

    return call


def _raise_limit() -> None:
    """Before 2.13 torch has one limit for all functions, and 2.12 one for each thread, as autograd's on CUDA."""
    if torch._dynamo.config.recompile_limit != FORMS:
        torch._dynamo.config.recompile_limit = FORMS  # not at each call: what is set leaks and costs


def is_compiled(x: torch.Tensor) -> bool:
    """Whether a chain over this tensor is compiled."""
    return x.device.type == "cuda"


BACKEND: str | Callable = "inductor"
"""The compiler of the graphs."""


def fused(
    function: Callable[Arguments, Result], by_passes: Callable[Arguments, Result] | None = None
) -> Callable[Arguments, Result]:
    """Decorator of a function whose first argument is a tensor: its passes become one kernel where `is_compiled`.

    Elsewhere it runs as it is, or as `by_passes`: the same values with fewer passes, written to memory that a graph
    need not know of.
    """
    as_it_is = by_passes or function

    @functools.cache
    def kernel(backend: str | Callable) -> Callable[Arguments, Result]:
        return whole_graph(function, backend)

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not is_compiled(args[0]):  # type: ignore[arg-type]  # a tensor, says the decorator
            return as_it_is(*args, **options)
        for x in args:
            if isinstance(x, torch.Tensor) and x.dim() > 0:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return kernel(BACKEND)(*args, **options)

    return call
