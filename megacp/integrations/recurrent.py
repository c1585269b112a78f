"""Layers of transformers with a state or a short convolution, in a block: their functions become
ours.

A layer calls the convolution and the rule of its state (gated delta, Mamba-2) of its own module by
name. While the block is open these names are those of functions that know which document a token
belongs to and which rank has the tokens before it. The library's own, without its CUDA packages,
would go on from one packed document to the next.
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

Along = Callable[..., torch.Tensor]
"""`ContextParallel.along`."""


def _convolution(
    along: Along,
    axis: Axis,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """`causal_conv1d_fn`: `x[B, C, s]` by `weight[C, taps]`."""

    def of_rows(plan: AttentionPlan, rows: torch.Tensor) -> torch.Tensor:
        return short_convolution(rows.to(weight.dtype), weight, plan, axis)

    if activation not in (None, "silu", "swish"):
        refuse(f"a convolution with {activation} behind it is not supported")
    out = along(of_rows, x.transpose(1, 2))
    out = out if bias is None else out + bias
    return (out if activation is None else F.silu(out)).to(x.dtype).transpose(1, 2)


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
    """`torch_chunk_gated_delta_rule`: `query, key[B, s, groups, K]`, `value[B, s, heads, V]`, rates
    `[B, s, heads]`.
    """

    def of_rows(plan: AttentionPlan, *rows: torch.Tensor) -> torch.Tensor:
        return move_states(gated_delta_rule, plan, axis, *rows)

    if more.get("initial_state") is not None or more.get("output_final_state"):
        refuse("a cache of states (use_cache) is not sharded")
    if not more.get("use_qk_l2norm_in_kernel"):
        refuse("a gated delta rule without normed queries and keys is not supported")
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
    """`mamba2_chunk_scan`: `x[B, s, heads, V]`, `dt[B, s, heads]`, `rate[heads]`, `b, c[B, s,
    groups, K]`, which the library calls A, B and C; its D is a share of x that is passed on.
    """
    if more.get("initial_states") is not None or more.get("return_final_states"):
        refuse("a cache of states (use_cache) is not sharded")
    if more.get("z") is not None:
        refuse("Mamba-2 with its gate inside the rule is not supported")
    if (bias := more.get("dt_bias")) is not None:
        dt = dt + bias.to(dt.dtype)
    if more.get("dt_softplus"):
        dt = F.softplus(dt)
    dt = dt.clamp(*more.get("dt_limit", (0.0, None))).to(rate.dtype)

    def of_rows(plan: AttentionPlan, *rows: torch.Tensor) -> torch.Tensor:
        return move_states(state_space_dual, plan, axis, *rows)

    read = along(of_rows, c, b, x * dt.unsqueeze(-1).to(x.dtype), rate * dt)
    passed = more.get("D")
    return read if passed is None else read + passed.unsqueeze(-1) * x


def _not_fused(along: Along, axis: Axis, *_: Any, **__: Any) -> None:
    """`mamba2_split_conv1d_scan_combined`, which does all of a layer at once: None sends it to the
    functions above.
    """


_OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}


@contextlib.contextmanager
def ours_in(model: torch.nn.Module, along: Along, axis: Axis) -> Iterator[None]:
    """Give the library's modules that hold layers of `model` our functions instead of theirs, and
    no cache.
    """
    layers = {
        type(layer).__module__: vars(sys.modules[type(layer).__module__])
        for layer in model.modules()
    }
    stock = [
        (home, found)
        for home in layers.values()
        if (found := {n: home[n] for n in _OURS if n in home})
    ]
    if not stock:
        yield
        return
    kept = {name.removeprefix("torch_") for name in _OURS}
    if any(kept & vars(layer).keys() for layer in model.modules()):
        refuse(
            "this transformers keeps its functions in each layer, where they cannot be replaced: take 5.21 or newer"
        )
    for home, found in stock:
        home.update(
            {n: torch.compiler.disable(functools.partial(_OURS[n], along, axis)) for n in found}
        )
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
    """A config has use_cache also in training."""
    return args, {**kwargs, "use_cache": False}
