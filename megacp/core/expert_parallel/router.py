"""Which experts a token is given to, and by which weights.

Scores are fp32 or wider: in bf16 several of a token are equal. Equal scores are chosen by the number of the expert,
which `topk` does not promise, so a choice is the same on every grid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megacp.core.ops.kernel import accumulation_dtype
from megacp.core.ops.pointwise import FromInputs


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = accumulation_dtype(x.dtype)
    return x.to(wide) @ weight.to(wide).t()  # [t, h] x [h, E]


def _gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx, d_weight = grad @ weight.to(grad.dtype), grad.t() @ x.to(grad.dtype)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x[t, h]` to the scores `[t, E]` of all experts, fp32 or wider; saves no wide copy of x."""
    return FromInputs.apply(_product, _gradients, x, weight)


def choose(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 `[t, count]`: the experts of each token with the highest scores `[t, E]`, in order of their numbers."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values


Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(scores[t, E], chosen[t, k]) -> weights[t, k]`."""


def of_chosen(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Softmax over the chosen experts (Mixtral): as that over all, made to sum to 1 again."""
    return scores.gather(1, chosen).softmax(-1)


def of_all(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Softmax over all experts, as it is (OLMoE)."""
    return scores.softmax(-1).gather(1, chosen)


WEIGHTS: dict[bool, Weigh] = {False: of_chosen, True: of_all}
"""By --moe-router-pre-softmax."""
