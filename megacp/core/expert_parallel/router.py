"""Which experts a token is given to, and by which weights.

Scores are fp32 or wider: in bf16 several of a token are equal. Equal scores are chosen by the number of the expert,
which `topk` does not promise, so a choice is the same on every grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def in_groups(scores: torch.Tensor, groups: int, count: int) -> torch.Tensor:
    """`scores[t, E]`, -inf outside of each token's `count` groups with the highest sums of two scores."""
    parts = scores.unflatten(1, (groups, -1))  # [t, groups, E / groups]
    best = choose(parts.topk(2, sorted=False).values.sum(-1), count)
    closed = torch.ones_like(parts[:, :, 0], dtype=torch.bool).scatter_(1, best, False)  # [t, groups]
    return parts.masked_fill(closed.unsqueeze(2), -torch.inf).flatten(1)


Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(scores[t, E], chosen[t, k]) -> weights[t, k]`."""
LEAST = 1e-20
"""Added to a sum of sigmoids that is divided by, as DeepSeek-V3 has it."""


def of_chosen(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Softmax over the chosen experts (Mixtral): as that over all, made to sum to 1 again."""
    return scores.gather(1, chosen).softmax(-1)


def of_all(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Softmax over all experts, as it is (OLMoE)."""
    return scores.softmax(-1).gather(1, chosen)


def sigmoids(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Sigmoids of the chosen experts, as they are."""
    return scores.gather(1, chosen).sigmoid()


def shares(values: torch.Tensor) -> torch.Tensor:
    """Of the sum of each row."""
    return values / (values.sum(-1, keepdim=True) + LEAST)


def shares_of_chosen(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Sigmoids of the chosen experts over their sum (DeepSeek-V3, GLM-4.5)."""
    return shares(sigmoids(scores, chosen))


def _sigmoid(scores: torch.Tensor) -> torch.Tensor:
    # torch's own gives the last numbers of a tensor other bits: an expert would be chosen by the length of a row
    return 1 / (1 + torch.exp(-scores))


@dataclass(frozen=True)
class ScoreFunction:
    """What becomes of scores `[t, E]`."""

    choice: Callable[[torch.Tensor], torch.Tensor]
    """By what experts are chosen, before a correction."""
    probabilities: Callable[[torch.Tensor], torch.Tensor]
    """`[t, E]`, those of a token sum to 1."""
    weigh: dict[bool, Weigh]
    """Weights of the chosen experts by --moe-router-pre-softmax."""
    corrected: bool = False
    """Whether the choice has a correction."""


SCORES = {
    "softmax": ScoreFunction(
        lambda scores: scores, lambda scores: scores.softmax(-1), {False: of_chosen, True: of_all}
    ),
    "sigmoid": ScoreFunction(
        _sigmoid, lambda scores: shares(scores.sigmoid()), {False: shares_of_chosen, True: sigmoids}, corrected=True
    ),
}
"""By the words of --moe-router-score-function."""
