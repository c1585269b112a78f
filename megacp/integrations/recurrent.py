"""Replacement of functions that transformers layers with a state or a short convolution call.

A layer calls its convolution and its state rule (gated delta, Mamba-2) as global functions of the
module that defines it. While a block is open, these names refer to functions that reset the state
between documents and receive it from the rank with the preceding tokens. Without its CUDA packages,
the library's own functions carry the state from one packed document into the next.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.state_transport import move_states
from megacp.attention.context_parallel.states import short_convolution
from megacp.attention.ops.recurrence import gated_delta_rule, state_space_dual
from megacp.distributed.grid import Axis
from megacp.integrations.model_rules import refuse, stock_model

# The type of `ContextParallel.along`, which applies a function to rows in the plan's order.
Along = Callable[..., torch.Tensor]


def _convolution(
    along: Along,
    axis: Axis,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return `x[B, C, s]` convolved with `weight[C, taps]`, like `causal_conv1d_fn`."""

    def of_rows(plan: AttentionPlan, rows: torch.Tensor) -> torch.Tensor:
        return short_convolution(rows.to(weight.dtype), weight, plan, axis)

    if activation not in (None, "silu", "swish"):
        refuse(f"a convolution followed by {activation} is not supported, only silu or swish")
    out = along(of_rows, x.transpose(1, 2))  # [B, s, C]
    if bias is not None:
        out = out + bias
    if activation is not None:
        out = F.silu(out)
    return out.to(x.dtype).transpose(1, 2)  # [B, s, C] -> [B, C, s]


def _delta_rule(
    along: Along,
    axis: Axis,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Return the result of `torch_chunk_gated_delta_rule`, and None for the final state.

    Shapes: `query, key[B, s, groups, K]`, `value[B, s, heads, V]`, `g, beta[B, s, heads]`.
    """

    def of_rows(plan: AttentionPlan, *rows: torch.Tensor) -> torch.Tensor:
        return move_states(gated_delta_rule, plan, axis, *rows)

    if more.get("initial_state") is not None or more.get("output_final_state"):
        refuse("a cache of states (use_cache) cannot be sharded")
    if not more.get("use_qk_l2norm_in_kernel"):
        refuse("the gated delta rule is supported only with normalised queries and keys")
    return along(of_rows, query, key, value, g, beta), None


def _state_space(
    along: Along,
    axis: Axis,
    x: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Return the result of `mamba2_chunk_scan`.

    Shapes: `x[B, s, heads, V]`, `dt[B, s, heads]`, `rate[heads]` and `b, c[B, s, groups, K]`. The
    library calls `rate`, `b` and `c` A, B and C. D, if given, scales x before it is added to the
    output.
    """
    if more.get("initial_states") is not None or more.get("return_final_states"):
        refuse("a cache of states (use_cache) cannot be sharded")
    if more.get("z") is not None:
        refuse("Mamba-2 with the gate inside the rule is not supported")
    bias = more.get("dt_bias")
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if more.get("dt_softplus"):
        dt = F.softplus(dt)
    # the step size of each token, [B, s, heads]
    dt = dt.clamp(*more.get("dt_limit", (0.0, None))).to(rate.dtype)

    def of_rows(plan: AttentionPlan, *rows: torch.Tensor) -> torch.Tensor:
        return move_states(state_space_dual, plan, axis, *rows)

    # Mamba-2 as linear attention: C is the query, B the key, x * dt the value, rate * dt the decay.
    read = along(of_rows, c, b, x * dt.unsqueeze(-1).to(x.dtype), rate * dt)
    passed = more.get("D")
    if passed is None:
        return read
    return read + passed.unsqueeze(-1) * x


def _not_fused(along: Along, axis: Axis, *_: Any, **__: Any) -> None:
    """Return None in place of `mamba2_split_conv1d_scan_combined`, a whole layer in one call.

    None makes the layer call the separate functions above.
    """


# Replacements by the name of the function in the library's modules.
_OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}


@contextlib.contextmanager
def ours_in(model: torch.nn.Module, along: Along, axis: Axis) -> Iterator[None]:
    """Replace the library's functions in the modules that define the layers of `model`.

    In the context, the model also runs without a cache. All changes are undone at the end.
    """
    # namespace of each Python module, and its original functions
    stock: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for name in dict.fromkeys(type(layer).__module__ for layer in model.modules()):
        home = vars(sys.modules[name])
        found = {function: home[function] for function in _OURS if function in home}
        if found:
            stock.append((home, found))
    if not stock:
        yield
        return
    # Older versions of transformers store the functions as attributes of the layers.
    kept = {name.removeprefix("torch_") for name in _OURS}
    if any(kept & vars(layer).keys() for layer in model.modules()):
        refuse(
            "this version of transformers stores recurrent functions in each layer, where they "
            "cannot be replaced: install transformers 5.21 or newer"
        )
    # Replace the functions that the layers look up, and restore them when the block ends.
    for home, found in stock:
        for function in found:
            ours = functools.partial(_OURS[function], along, axis)
            home[function] = torch.compiler.disable(ours)
    decoder = stock_model(model).get_decoder()
    hook = decoder.register_forward_pre_hook(_without_cache, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        for home, found in stock:
            home.update(found)


def _without_cache(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with the cache disabled; configs enable it even for training."""
    return args, {**kwargs, "use_cache": False}
