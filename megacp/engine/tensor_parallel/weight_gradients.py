"""Immediate or deferred accumulation of linear layers' weight gradients.

With `--gradient-accumulation-fusion`, the backward pass adds a weight gradient directly to the
parameter's `main_grad`, a view of a gradient bucket, so there is no separate gradient tensor. A
vocabulary table may be used twice, so autograd handles its gradient.

With `--pipeline-schedule zero_bubble`, weight gradients are deferred (W in Qi et al., 2023),
because no other stage needs them. The backward pass keeps the two factors of each product: the
layer's input and the gradient of its output. An input that is sharded over tp stays sharded, and is
gathered while the previous product is computed.
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
"""Function `(total[f, h], dy[t, f], x[t, h])` that adds `dy^T x` to `total`, which may be wider."""


def add_weight_gradient(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Add `grad^T x` to `total[f, h]` with torch, for `grad[t, f]` and `x[t, h]`.

    Product and sum are one fused call, unless the total is wider and on a CPU.
    """
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), x)
    elif on_gpu(total):
        # writing a narrow product and then adding it would move three times as many bytes
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.add_(grad.t() @ x)


@dataclass(frozen=True)
class WeightProduct:
    """A weight gradient `dy^T x` that is still to be computed."""

    weight: nn.Parameter
    grad: torch.Tensor
    """Gradient of the output, `dy[..., f]`."""
    x: torch.Tensor
    """Input `x[..., h]`, or this rank's shard `[t/tp, h]` of it."""
    axis: Axis | None = None
    """Axis over which `x` is sharded; None if it is complete."""


class WeightGradients:
    """Adds each weight gradient to its bucket immediately."""

    deferred = False
    """Whether products are computed only when `add` is called."""

    def __init__(self, add: AddGradient = add_weight_gradient) -> None:
        self._add = add

    def at_once(self) -> WeightGradients:
        """Return an equivalent receiver that does not defer products."""
        return WeightGradients(self._add) if self.deferred else self

    def take(self, product: WeightProduct) -> None:
        """Accept the product for a weight that has a `main_grad`, and compute it immediately.

        `x` must be complete unless products are deferred.
        """
        self.compute(product, product.x, last=True)

    def compute(self, product: WeightProduct, x: torch.Tensor, last: bool) -> None:
        """Add `dy^T x` for the complete `x[..., h]` to the weight's bucket.

        With `last`, notify the bucket that the gradient is final.
        """
        weight: Any = product.weight  # Any: the bucket sets attributes on it
        self._add(weight.main_grad, product.grad.flatten(0, -2), x.flatten(0, -2))
        # this notification lets the bucket reduce the gradient
        if last:
            weight.grad_added_to_main_grad = True
            weight.gradient_added(weight)


class DeferredWeightGradients(WeightGradients):
    """Defers products, in one list per backward pass of a pipeline stage.

    A list's key is (microbatch, chunk).
    """

    deferred = True

    def __init__(self, add: AddGradient = add_weight_gradient) -> None:
        super().__init__(add)
        self._found: list[WeightProduct]
        self._waiting: dict[tuple[int, int], list[WeightProduct]]
        self.begin()

    def take(self, product: WeightProduct) -> None:
        """Defer a product. It keeps `dy` and `x` alive, but not their autograd graph."""
        # detach the tensors so that the autograd graph can be freed
        grad = product.grad.detach()
        x = product.x.detach()
        self._found.append(dataclasses.replace(product, grad=grad, x=x))

    def begin(self) -> None:
        """Begin a step, and discard products that a failed step may have left."""
        self._found = []
        self._waiting = {}

    def keep(self, key: tuple[int, int]) -> None:
        """Store the products of the backward pass that has just ended under `key`."""
        self._waiting[key] = self._found
        self._found = []

    def add(self, key: tuple[int, int], last: bool) -> None:
        """Compute the products stored under `key`.

        With `last`, notify the buckets that the gradients of these weights are final.
        """
        products = deque(self._waiting.pop(key))
        # the gradient of a weight with several uses is final only after the last use
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
    """Start to gather a product's input; return a function that waits for it (to call once)."""
    if product.axis is None:
        return lambda: product.x
    return collectives.start_all_gather(product.x, product.axis).take
