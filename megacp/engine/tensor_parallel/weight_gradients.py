"""Accumulation of the weight gradients of linears: immediate or deferred.

With `--gradient-accumulation-fusion`, backward adds the weight gradient directly to the parameter's
`main_grad`, a view of a gradient bucket, so no separate gradient tensor exists. A vocabulary table
may be used twice, so autograd handles its gradient.

With `--pipeline-schedule zero_bubble`, weight gradients are deferred (W in Qi et al., 2023),
because no other stage needs them. Backward keeps the two factors of each product: the layer's input
and the gradient of its output. An input that is sharded over tp stays sharded and is gathered while
the previous product is computed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megacp.attention.ops.device import on_gpu
from megacp.distributed import collectives
from megacp.distributed.grid import Axis

AddGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Function `(total[f, h], dy[t, f], x[t, h])` that adds `dy^T x` to a total of any wider dtype."""


def add_weight_gradient(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Add `grad^T x` to `total[f, h]` with torch, for `grad[t, f]` and `x[t, h]`.

    Product and sum are one fused call, except for a wider total on a CPU.
    """
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), x)
    elif on_gpu(total):
        # writing a narrow product, then reading and adding it would move three times the bytes
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.add_(grad.t() @ x)


@dataclass(frozen=True)
class WeightProduct:
    """A weight gradient `dy^T x` that has not been computed yet."""

    weight: nn.Parameter
    grad: torch.Tensor
    """Gradient of the output, `dy[..., f]`."""
    x: torch.Tensor
    """Input `x[..., h]`, or this rank's part `[t/tp, h]` of it."""
    axis: Axis | None = None
    """Axis over which `x` is sharded; None if it is complete."""


class WeightGradients:
    """Adds each weight gradient to its bucket immediately."""

    deferred = False
    """Whether products wait until `add` is called."""

    def __init__(self, add: AddGradient = add_weight_gradient) -> None:
        self._add = add

    def at_once(self) -> WeightGradients:
        """Return an equivalent sink that does not defer products."""
        return WeightGradients(self._add) if self.deferred else self

    def take(self, product: WeightProduct) -> None:
        """Accept the product for a weight with a `main_grad`, and compute it immediately.

        `x` must be complete, unless products are deferred.
        """
        self.compute(product, product.x, last=True)

    def compute(self, product: WeightProduct, x: torch.Tensor, last: bool) -> None:
        """Add `dy^T x` for the complete `x[..., h]`.

        With `last`, report to the bucket that the gradient is final.
        """
        weight: Any = product.weight  # with the attributes that its bucket sets
        self._add(weight.main_grad, product.grad.flatten(0, -2), x.flatten(0, -2))
        # the bucket reduces the gradient when it learns that it is final
        if last:
            weight.grad_added_to_main_grad = True
            weight.gradient_added(weight)


class DeferredWeightGradients(WeightGradients):
    """Defers products, in one list per backward of a pipeline stage.

    The key of a list is (microbatch, chunk).
    """

    deferred = True

    def __init__(self, add: AddGradient = add_weight_gradient) -> None:
        super().__init__(add)
        self._found: list[WeightProduct]
        self._waiting: dict[tuple[int, int], list[WeightProduct]]
        self.begin()

    def take(self, product: WeightProduct) -> None:
        """Defer a product. It keeps `dy` and `x` alive, but not their autograd graph."""
        # detached, so that the autograd graph of the backward can be freed
        grad = product.grad.detach()
        x = product.x.detach()
        self._found.append(dataclasses.replace(product, grad=grad, x=x))

    def begin(self) -> None:
        """Begin a step; discard the products that a failed step may have left."""
        self._found = []
        self._waiting = {}

    def keep(self, key: tuple[int, int]) -> None:
        """Store the products of the backward that has just ended under `key`."""
        self._waiting[key] = self._found
        self._found = []

    def add(self, key: tuple[int, int], last: bool) -> None:
        """Compute the products stored under `key`.

        With `last`, report to the buckets that the gradients of these weights are final.
        """
        products = deque(self._waiting.pop(key))
        # a weight with several uses is final only after the last of them
        uses = Counter(product.weight for product in products)
        arriving = _start(products[0]) if products else None
        while products:
            x = arriving
            product = products.popleft()
            # gather the next input while this product is computed
            arriving = _start(products[0]) if products else None
            assert x is not None
            uses[product.weight] -= 1
            self.compute(product, x(), last and not uses[product.weight])


def _start(product: WeightProduct) -> Callable[[], torch.Tensor]:
    """Start to gather the input of a product; call the result once to wait for the input."""
    if product.axis is None:
        return lambda: product.x
    return collectives.start_all_gather(product.x, product.axis).take
