"""The router chooses experts for each token and computes the weights of their outputs.

Scores are computed in fp32 or wider, because bf16 rounding would make several scores of a token
equal. Ties go to the expert with the lower index. `topk` is not used because it does not guarantee
any order for ties.

A matrix product may give different scores to equal rows of the router, because its summation order
depends on the column index and on the number of tokens, and therefore on the grid.
`first_of_equals` finds equal rows, and the choice uses the score of the first one for all of them.
Experts with equal rows, biases and corrections are therefore ordered by index on every grid and in
every dtype.

During training, such rows stay equal only up to rounding. In float64, the dtype for comparing
grids, `without_noise` therefore treats scores as equal if they differ only by rounding. In fp32 and
bf16 this would not help, because hidden states on different grids differ by as much as clearly
different scores do.
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
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = grad @ weight.to(grad.dtype)  # [t, E] x [E, h]
    d_weight = grad.t() @ x.to(grad.dtype)  # [E, t] x [t, h]
    return dx.to(x.dtype), d_weight.to(weight.dtype)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the scores `[t, E]` of all experts for `x[t, h]`, in fp32 or wider.

    The backward pass needs only `x` and `weight`, so no wide copy of `x` is saved.
    """
    return FromInputs.apply(_product, _gradients, x, weight)


def _fingerprints(weight: torch.Tensor) -> torch.Tensor:
    """Return an int64 hash of each row of `weight[E, h]`, `[E]`; equal rows have equal hashes.

    The hash is an integer sum, which does not depend on the summation order.
    """
    positive = weight + 0.0  # -0.0 equals 0.0 but has different bits
    if positive.shape[1] * positive.element_size() % 8 > 0:
        positive = positive.double()
    bits = positive.contiguous().view(
        torch.int64
    )  # [E, n], with several narrow elements in each int64
    bits ^= bits >> 32  # short mantissas end in zeros, which multiplication would only shift
    # one pseudo-random odd factor per column (Knuth's multiplicative hash, mixed)
    factors = torch.arange(1, bits.shape[1] + 1, device=bits.device) * -0x61C8864680B583EB
    factors = (factors ^ (factors >> 29)) * -0x40A7B892E31B1A47 | 1
    return bits.mul_(factors).sum(1)


def first_of_equals(weight: torch.Tensor) -> torch.Tensor:
    """Return int64 `[E]`: for each row of `weight[E, h]`, the index of the first equal row.

    A row that equals no earlier row gets its own index. The host does not wait for the device. The
    cost is about that of routing a few tokens, because every weight is read a few times.
    """
    found = _fingerprints(weight)
    same_hash = (found.unsqueeze(1) == found).to(torch.uint8)  # [E, E]
    first = same_hash.argmax(1)  # argmax returns the first of equal maxima
    # rows with the same hash may still differ
    are_equal = (weight == weight.index_select(0, first)).all(1)
    own = torch.arange(len(weight), device=weight.device)
    return torch.where(are_equal, first, own)


NOISE = 2.0**-32
"""Relative difference up to which two float64 scores of a token are considered equal.

It is 10^5 times the error caused by a different summation order, and below float32 resolution."""


def without_noise(scores: torch.Tensor) -> torch.Tensor:
    """Return `scores[t, E]` without rounding differences.

    Scores that differ only by rounding, which are adjacent in sorted order, all get the highest
    value among them. Rounding to fewer bits would not work, because two nearly equal scores can be
    on different sides of a rounding boundary.
    """
    values, order = scores.sort(-1, descending=True)
    magnitudes = scores.abs().masked_fill(scores.isinf(), 0.0)  # closed groups have -inf
    largest = magnitudes.amax(-1, keepdim=True)  # [t, 1]
    gaps = values[:, :-1] - values[:, 1:]  # [t, E - 1]; NaN between two -inf
    places = torch.arange(1, scores.shape[1], device=scores.device)
    # each clear gap starts a run of equal scores, whose first value all scores of the run get
    begins = torch.where(gaps > NOISE * largest, places, 0).cummax(-1).values
    begins = torch.cat([torch.zeros_like(order[:, :1]), begins], -1)  # [t, E]
    return torch.empty_like(scores).scatter_(-1, order, values.gather(-1, begins))


def choose(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return int64 `[t, count]`: for each token, the experts with the highest `scores[t, E]`.

    A token's experts are sorted by index.
    """
    if scores.dtype == torch.float64:
        scores = without_noise(scores)
    # a stable sort resolves ties in favour of the lower index
    ranking = scores.argsort(dim=-1, descending=True, stable=True)
    return ranking[:, :count].sort(-1).values


def in_groups(scores: torch.Tensor, groups: int, count: int) -> torch.Tensor:
    """Return `scores[t, E]` with -inf outside each token's `count` best expert groups.

    A group's score is the sum of its two highest scores (DeepSeek-V3).
    """
    parts = scores.unflatten(1, (groups, -1))  # [t, groups, E / groups]
    best = choose(parts.topk(2, sorted=False).values.sum(-1), count)  # [t, count]
    closed = torch.ones_like(parts[:, :, 0], dtype=torch.bool)  # [t, groups]
    closed = closed.scatter_(1, best, False)
    return parts.masked_fill(closed.unsqueeze(2), -torch.inf).flatten(1)


Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from `scores[t, E]` and `chosen[t, k]` to expert weights `[t, k]`."""
LEAST = 1e-20
"""Constant added to a sum of sigmoids before it is used as a divisor (DeepSeek-V3)."""


def of_chosen(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the softmax `[t, k]` over the chosen experts (Mixtral).

    It equals the softmax over all experts, renormalised to a sum of 1.
    """
    return scores.gather(1, chosen).softmax(-1)


def of_all(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the chosen experts' values `[t, k]` of the softmax over all experts (OLMoE)."""
    return scores.softmax(-1).gather(1, chosen)


def sigmoids(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the chosen experts' sigmoids `[t, k]`, not normalised."""
    return scores.gather(1, chosen).sigmoid()


def shares(values: torch.Tensor) -> torch.Tensor:
    """Return `values[t, n]` with each row divided by its sum."""
    return values / (values.sum(-1, keepdim=True) + LEAST)


def shares_of_chosen(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the chosen experts' sigmoids `[t, k]`, divided by their sum.

    DeepSeek-V3 and GLM-4.5 use these weights.
    """
    return shares(sigmoids(scores, chosen))


def _sigmoid(scores: torch.Tensor) -> torch.Tensor:
    # torch.sigmoid rounds the last elements of a tensor differently, so the choice of experts would
    # depend on the row length
    return 1 / (1 + torch.exp(-scores))


@dataclass(frozen=True)
class ScoreFunction:
    """Functions of scores `[t, E]` for one `--moe-router-score-function`."""

    choice: Callable[[torch.Tensor], torch.Tensor]
    """Function that returns the values `[t, E]` for choosing experts, before any correction."""
    probabilities: Callable[[torch.Tensor], torch.Tensor]
    """Function that returns probabilities `[t, E]`, which sum to 1 for each token."""
    weigh: dict[bool, Weigh]
    """Functions that return the chosen experts' weights, by `--moe-router-pre-softmax`."""
    corrected: bool = False
    """Whether a correction is added to the values before experts are chosen."""


_SOFTMAX = ScoreFunction(
    choice=lambda scores: scores,
    probabilities=lambda scores: scores.softmax(-1),
    weigh={False: of_chosen, True: of_all},
)
_SIGMOID = ScoreFunction(
    choice=_sigmoid,
    probabilities=lambda scores: shares(scores.sigmoid()),
    weigh={False: shares_of_chosen, True: sigmoids},
    corrected=True,
)
SCORES = {"softmax": _SOFTMAX, "sigmoid": _SIGMOID}
"""Score functions, by `--moe-router-score-function`."""
