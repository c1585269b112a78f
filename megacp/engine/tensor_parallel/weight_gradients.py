"""Where the weight gradients of linears go: to autograd, to a gradient bucket at once, or there
when there is time.

With `--gradient-accumulation-fusion` backward adds the weight gradient straight to the parameter's
`main_grad`, its part of a gradient bucket, so it never exists beside it. A vocabulary table may be
used twice and stays with autograd.

With `--pipeline-schedule zero_bubble` weight gradients are deferred (W of Qi et al., 2023), because
no other stage needs them. Backward keeps the two factors of each product: the layer's input and the
gradient of its output. An input that tensor-parallel ranks share is kept as this rank's part, and
gathered under the product before it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megacp.attention.ops.device import on_gpu
from megacp.distributed import collectives
from megacp.distributed.grid import Axis

AddGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`(total[f, h], dy[t, f], x[t, h])`: add `dy^T x` to the total, which may be wider."""


def add_weight_gradient(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """`AddGradient` in torch: one fused product and sum; a CPU adds halves to a wider total in two
    passes.
    """
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), x)
    elif on_gpu(
        total
    ):  # a narrow product in memory, read again and added, takes three times the bytes
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.add_(grad.t() @ x)


@dataclass(frozen=True)
class WeightProduct:
    """A weight gradient `dy^T x` that is still to be computed."""

    weight: nn.Parameter
    grad: torch.Tensor
    """`dy[..., f]`."""
    x: torch.Tensor
    """`x[..., h]`, or this rank's part `[t/tp, h]` of it."""
    axis: Axis | None = None
    """Where `x` is a part: the ranks that have the others."""


class WeightGradients:
    """Adds weight gradients to their part of a bucket, as each is found."""

    deferred = False
    """Whether products wait until they are asked for."""

    def __init__(self, add: AddGradient = add_weight_gradient) -> None:
        self._add = add

    def at_once(self) -> WeightGradients:
        """The same without waiting."""
        return WeightGradients(self._add) if self.deferred else self

    def take(self, product: WeightProduct) -> None:
        """Deal with the gradient of a weight that has a `main_grad`; `x` is whole unless they
        wait.
        """
        self.compute(product, product.x, last=True)

    def compute(self, product: WeightProduct, x: torch.Tensor, last: bool) -> None:
        """Add `dy^T x` of the whole `x[..., h]`; `last`: the bucket hears that the gradient is
        final.
        """
        weight: torch.Tensor = product.weight
        self._add(weight.main_grad, product.grad.flatten(0, -2), x.flatten(0, -2))  # type: ignore[attr-defined]  # ours
        if last:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # likewise
            weight.gradient_added(weight)  # type: ignore[attr-defined]  # likewise


class DeferredWeightGradients(WeightGradients):
    """Defers them, a list for each backward of a pipeline stage. A key is (microbatch, chunk)."""

    deferred = True

    def __init__(self, add: AddGradient = add_weight_gradient) -> None:
        super().__init__(add)
        self._found: list[WeightProduct]
        self._waiting: dict[tuple[int, int], list[WeightProduct]]
        self.begin()

    def take(self, product: WeightProduct) -> None:
        """Defer a product; it keeps `dy` and `x`, and nothing of the graph behind them."""
        self._found.append(
            dataclasses.replace(product, grad=product.grad.detach(), x=product.x.detach())
        )

    def begin(self) -> None:
        """A step begins; what one that failed has left is dropped."""
        self._found, self._waiting = [], {}

    def keep(self, key: tuple[int, int]) -> None:
        """Name the products of the backward that has just ended."""
        self._waiting[key], self._found = self._found, []

    def add(self, key: tuple[int, int], last: bool) -> None:
        """Compute what waits under a name. `last`: buckets hear that the gradients of these weights
        are final.
        """
        products = deque(self._waiting.pop(key))
        uses = Counter(product.weight for product in products)
        arriving = _start(products[0]) if products else None
        while products:
            x, product = arriving, products.popleft()
            arriving = _start(products[0]) if products else None  # on its way under this product
            assert x is not None
            uses[product.weight] -= 1
            self.compute(product, x(), last and not uses[product.weight])


def _start(product: WeightProduct) -> Callable[[], torch.Tensor]:
    """Start to gather the input of a product; the result waits for it and is asked once."""
    if product.axis is None:
        return lambda: product.x
    return collectives.start_all_gather(product.x, product.axis).take
