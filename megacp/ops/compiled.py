"""Chains of elementwise passes as one CUDA kernel, compiled by torch at the first use; on a CPU the same lines as they
are.

Key property: what is compiled is the arithmetic alone, a function of tensors with nothing of autograd, messages or
plans in it, so a graph never breaks and every length and layer shares one form. It pays where several passes over large
activations become one: norms, SwiGLU, rotary, dropout's bits, merged parts of attention. `TORCH_COMPILE_DISABLE=1` in
the environment runs them one by one. Rejected: compiling blocks, which transports and recomputation cut into pieces
anyway; compiling on the CPU, which needs a C++ compiler at run time and gains little there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

FORMS = 64
"""Most compiled forms of one function: dtypes, number of dims, lengths fixed or free make about a dozen, torch's own
limit is 8.
"""


def whole_graph(
    function: Callable[Arguments, Result], backend: str | Callable = "inductor", dynamic: bool | None = None
) -> Callable[Arguments, Result]:
    """The function as one graph, in up to `FORMS` forms; what cannot be compiled raises, it does not run slowly.

    `dynamic`: True takes lengths as free from the beginning, None from the second length on.
    """
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)

    @functools.wraps(function)
    def within_forms(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        with torch._dynamo.config.patch(recompile_limit=FORMS):
            return compiled(*args, **options)

    return within_forms


def pays(x: torch.Tensor) -> bool:
    """Whether a chain over this tensor is compiled."""
    return x.device.type == "cuda"


BACKEND: str | Callable = "inductor"
"""Who makes kernels of the graphs."""


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator of a function whose first argument is a tensor: its passes become one kernel where that `pays`."""

    @functools.cache
    def kernel(backend: str | Callable) -> Callable[Arguments, Result]:
        return whole_graph(function, backend, dynamic=True)

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        return (kernel(BACKEND) if pays(args[0]) else function)(*args, **options)  # type: ignore[arg-type]

    return call
