"""Which experts a token is given to, and by which weights.

Scores are fp32 or wider: in bf16 several scores of a token would be equal. Equal scores are chosen
by the number of the expert, which `topk` does not promise.

A matrix product does not give equal rows of the router equal scores: the order of its sums depends
on the place of a column and on the number of tokens, and so on the grid. `first_of_equals` finds
equal rows, and all of them are chosen by the score of the first. So experts with equal rows, biases
and corrections are chosen by their numbers, exactly, on every grid and in every dtype.

Training keeps rows equal only up to rounding. In float64, in which grids are compared, scores that
differ by rounding are therefore taken for equal too (`without_noise`). In fp32 and bf16 they are
not: there the hidden states of two grids differ as much as clearly different scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.pointwise import FromInputs


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = accumulation_dtype(x.dtype)
    return x.to(wide) @ weight.to(wide).t()  # [t, h] x [h, E]


def _gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, d_weight = grad @ weight.to(grad.dtype), grad.t() @ x.to(grad.dtype)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x[t, h]` to the scores `[t, E]` of all experts, fp32 or wider; saves no wide copy of x."""
    return FromInputs.apply(_product, _gradients, x, weight)


def _fingerprints(weight: torch.Tensor) -> torch.Tensor:
    """Return an int64 `[E]` for the rows of `weight[E, h]`, the same for equal rows: sums of
    integers have no order.
    """
    positive = weight + 0.0  # -0.0 equals 0.0, but has other bits
    if positive.shape[1] * positive.element_size() % 8 > 0:
        positive = positive.double()
    bits = positive.contiguous().view(torch.int64)  # [E, n], several narrow elements in each
    bits ^= bits >> 32  # short mantissas end in zeros, which a product would only shift
    # one pseudo-random odd factor a column (Knuth's multiplicative hash, mixed)
    factors = torch.arange(1, bits.shape[1] + 1, device=bits.device) * -0x61C8864680B583EB
    factors = (factors ^ (factors >> 29)) * -0x40A7B892E31B1A47 | 1
    return bits.mul_(factors).sum(1)


def first_of_equals(weight: torch.Tensor) -> torch.Tensor:
    """Return int64 `[E]`: for each row of `weight[E, h]` the number of the first row that equals
    it, often its own.

    The host does not wait for the device. The cost is that of a few tokens: every weight is read
    some times.
    """
    found = _fingerprints(weight)
    first = (
        (found.unsqueeze(1) == found).to(torch.uint8).argmax(1)
    )  # of [E, E]; the first of several ones
    are_equal = (weight == weight.index_select(0, first)).all(1)  # not only their fingerprints
    return torch.where(are_equal, first, torch.arange(len(weight), device=weight.device))


NOISE = 2.0**-32
"""Scores of a token are equal in float64 if they differ by less than this part of the largest: 10^5
times what sums in another order leave, and less than a float32 can hold."""


def without_noise(scores: torch.Tensor) -> torch.Tensor:
    """Return `scores[t, E]` with one value for those that only rounding separates: the highest of
    them.

    They are neighbours in order. Rounding to fewer bits would not do: a boundary may lie between
    any two numbers.
    """
    values, order = scores.sort(-1, descending=True)
    largest = (
        scores.abs().masked_fill(scores.isinf(), 0.0).amax(-1, keepdim=True)
    )  # closed groups have -inf
    gaps = values[:, :-1] - values[:, 1:]  # [t, E - 1]; NaN between two -inf, which are equal
    places = torch.arange(1, scores.shape[1], device=scores.device)
    # a clear gap begins a run of equal scores, and each score takes the value at the beginning of
    # its run
    begins = torch.where(gaps > NOISE * largest, places, 0).cummax(-1).values
    begins = torch.cat([torch.zeros_like(order[:, :1]), begins], -1)  # [t, E]
    return torch.empty_like(scores).scatter_(-1, order, values.gather(-1, begins))


def choose(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 `[t, count]`: the experts of each token with the highest scores `[t, E]`, in order of
    their numbers.
    """
    if scores.dtype == torch.float64:
        scores = without_noise(scores)
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values


def in_groups(scores: torch.Tensor, groups: int, count: int) -> torch.Tensor:
    """`scores[t, E]`, -inf outside of each token's `count` groups with the highest sums of two
    scores.
    """
    parts = scores.unflatten(1, (groups, -1))  # [t, groups, E / groups]
    best = choose(parts.topk(2, sorted=False).values.sum(-1), count)
    closed = torch.ones_like(parts[:, :, 0], dtype=torch.bool).scatter_(
        1, best, False
    )  # [t, groups]
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
    # torch's own gives the last numbers of a tensor other bits: an expert would be chosen by the
    # length of a row
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
        _sigmoid,
        lambda scores: shares(scores.sigmoid()),
        {False: shares_of_chosen, True: sigmoids},
        corrected=True,
    ),
}
"""By the words of --moe-router-score-function."""
