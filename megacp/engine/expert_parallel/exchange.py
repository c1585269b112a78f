"""Differentiable exchange of rows between tokens and experts.

The backward pass of each direction is the other direction, so both save only the route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megacp.attention.ops.device import fused
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.engine.expert_parallel.route import Route

Send = Callable[[torch.Tensor], torch.Tensor]


class _Way(torch.autograd.Function):
    """Apply `there` in the forward pass and `back` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Send, back: Send) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grads[0]), None, None


@fused
def _sum(slots: torch.Tensor) -> torch.Tensor:
    """Sum `slots[t, k, h]` over k in fp32 or wider; return `[t, h]`.

    Slots are added in order, so the sum has the same bits on every grid.
    """
    total = slots[:, 0].to(accumulation_dtype(slots.dtype))
    for slot in range(1, slots.shape[1]):
        total = total + slots[:, slot]
    return total.to(slots.dtype)


def _ways(route: Route, tokens: int) -> tuple[Send, Send]:
    """Return functions that send token rows to experts, and expert rows back to `tokens` tokens."""
    count = route.chosen.shape[1]

    def there(x: torch.Tensor) -> torch.Tensor:  # [t/tp, h] -> [R, h]
        token = route.places.index_select(0, route.order // count)  # [t k]
        return route.spread(x.index_select(0, token))

    def back(rows: torch.Tensor) -> torch.Tensor:  # [R, h] -> [t/tp, h]
        slots = route.collect(rows).index_select(0, route.slots)
        # h is explicit, because view could not infer it without tokens
        slots = slots.view(*route.chosen.shape, rows.shape[1])  # [t, k, h]
        out = rows.new_zeros(tokens, rows.shape[1])  # padding tokens stay 0
        return out.index_copy_(0, route.places, _sum(slots))

    return there, back


def to_experts(x: torch.Tensor, route: Route) -> torch.Tensor:
    """Send `x[t/tp, h]`, which includes padding, to the experts of each token.

    Return the rows `[R, h]` for this rank's experts, sorted by expert.
    """
    return _Way.apply(x, *_ways(route, len(x)))


def to_tokens(rows: torch.Tensor, route: Route, tokens: int) -> torch.Tensor:
    """Send the expert outputs `rows[R, h]` back, and sum them per token.

    Return `[tokens, h]`, where `tokens` is this rank's t/tp and rows of padding are 0.
    """
    there, back = _ways(route, tokens)
    return _Way.apply(rows, back, there)


def weights_to_experts(weights: torch.Tensor, route: Route) -> torch.Tensor:
    """Send routing `weights[t, k]` to the experts; return the weight of each row, `[R, 1]`."""

    def there(x: torch.Tensor) -> torch.Tensor:
        return route.spread(x.flatten().index_select(0, route.order)).unsqueeze(1)

    def back(column: torch.Tensor) -> torch.Tensor:
        slots = route.collect(column.squeeze(1)).index_select(0, route.slots)
        return slots.view(route.chosen.shape)

    return _Way.apply(weights, there, back)
