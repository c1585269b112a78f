"""Replacement of functions in transformers layers that have a state or a short convolution.

A layer calls the convolution and the state rule (gated delta, Mamba-2) of its own module by name.
While a block is open, these names refer to functions that know the documents and the rank of the
previous tokens. The library's own functions, without its CUDA packages, continue from one packed
document to the next.
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

# The type of `ContextParallel.along`, which runs a function on rows in the plan's order.
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
    """Replace `causal_conv1d_fn`: convolve `x[B, C, s]` with `weight[C, taps]`."""

    def of_rows(plan: AttentionPlan, rows: torch.Tensor) -> torch.Tensor:
        return short_convolution(rows.to(weight.dtype), weight, plan, axis)

    if activation not in (None, "silu", "swish"):
        refuse(f"a convolution followed by {activation} is not supported")
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
    """Replace `torch_chunk_gated_delta_rule`.

    Shapes: `query, key[B, s, groups, K]`, `value[B, s, heads, V]`, `g, beta[B, s, heads]`.
    """

    def of_rows(plan: AttentionPlan, *rows: torch.Tensor) -> torch.Tensor:
        return move_states(gated_delta_rule, plan, axis, *rows)

    if more.get("initial_state") is not None or more.get("output_final_state"):
        refuse("a cache of states (use_cache) cannot be sharded")
    if not more.get("use_qk_l2norm_in_kernel"):
        refuse("a gated delta rule without normalised queries and keys is not supported")
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
    """Replace `mamba2_chunk_scan`.

    Shapes: `x[B, s, heads, V]`, `dt[B, s, heads]`, `rate[heads]` and `b, c[B, s, groups, K]` (A, B
    and C in the library). D is the share of x that is added to the output.
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

    # Mamba-2 as linear attention: C reads, B writes, x * dt is the value, and rate * dt the decay.
    read = along(of_rows, c, b, x * dt.unsqueeze(-1).to(x.dtype), rate * dt)
    passed = more.get("D")
    if passed is None:
        return read
    return read + passed.unsqueeze(-1) * x


def _not_fused(along: Along, axis: Axis, *_: Any, **__: Any) -> None:
    """Replace `mamba2_split_conv1d_scan_combined`, a whole layer in one call.

    None makes the layer call the separate functions above.
    """


# Names of functions in the library's modules, and our replacements.
_OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}


@contextlib.contextmanager
def ours_in(model: torch.nn.Module, along: Along, axis: Axis) -> Iterator[None]:
    """Replace the functions in the library's modules that define layers of `model`.

    The model also runs without a cache. Everything is restored at the end.
    """
    stock: list[tuple[dict[str, Any], dict[str, Any]]] = []  # a module's names, and the original
    for name in dict.fromkeys(type(layer).__module__ for layer in model.modules()):
        home = vars(sys.modules[name])
        found = {function: home[function] for function in _OURS if function in home}
        if found:
            stock.append((home, found))
    if not stock:
        yield
        return
    # Older versions copied the functions to attributes of the layers.
    kept = {name.removeprefix("torch_") for name in _OURS}
    if any(kept & vars(layer).keys() for layer in model.modules()):
        refuse(
            "this version of transformers stores the functions in each layer, where they cannot be "
            "replaced: install 5.21 or newer"
        )
    # Replace the names that the layers look up, and restore them when the block ends.
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
    """Switch the cache off: configs enable it in training too."""
    return args, {**kwargs, "use_cache": False}
