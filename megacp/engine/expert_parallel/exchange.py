"""Rows to experts and back, for autograd: each way's backward is the other one, so both save
nothing but the route.
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
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Send, back: Send) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grads[0]), None, None


@fused
def _sum(slots: torch.Tensor) -> torch.Tensor:
    """`[t, k, h] -> [t, h]`, one slot after the other, fp32 or wider: the same sum on every
    grid.
    """
    total = slots[:, 0].to(accumulation_dtype(slots.dtype))
    for slot in range(1, slots.shape[1]):
        total = total + slots[:, slot]
    return total.to(slots.dtype)


def _ways(route: Route, tokens: int) -> tuple[Send, Send]:
    count = route.chosen.shape[1]

    def there(x: torch.Tensor) -> torch.Tensor:
        return route.spread(x.index_select(0, route.places.index_select(0, route.order // count)))

    def back(rows: torch.Tensor) -> torch.Tensor:
        slots = (
            route.collect(rows)
            .index_select(0, route.slots)
            .view(*route.chosen.shape, rows.shape[1])
        )  # [t, k, h]
        return rows.new_zeros(tokens, rows.shape[1]).index_copy_(0, route.places, _sum(slots))

    return there, back


def to_experts(x: torch.Tensor, route: Route) -> torch.Tensor:
    """`x[t/tp, h]`, padding included, to the rows `[R, h]` of this rank's experts, expert by
    expert.
    """
    return _Way.apply(x, *_ways(route, len(x)))


def to_tokens(rows: torch.Tensor, route: Route, tokens: int) -> torch.Tensor:
    """What experts made of their rows, `[R, h]`, summed for each of a rank's tokens: `[t/tp, h]`, 0
    for padding.
    """
    there, back = _ways(route, tokens)
    return _Way.apply(rows, back, there)


def weights_to_experts(weights: torch.Tensor, route: Route) -> torch.Tensor:
    """`[t, k]` to the weight of each row, `[R, 1]`."""

    def there(x: torch.Tensor) -> torch.Tensor:
        return route.spread(x.flatten().index_select(0, route.order)).unsqueeze(1)

    def back(column: torch.Tensor) -> torch.Tensor:
        return (
            route.collect(column.squeeze(1)).index_select(0, route.slots).view(route.chosen.shape)
        )

    return _Way.apply(weights, there, back)
