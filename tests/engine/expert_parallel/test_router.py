"""Ties between equal router rows are resolved by expert index, for any column order and any number
of tokens.

The reference sums each score with `math.fsum`, which rounds once, so equal rows have equal scores.
Different rows in these tests have clearly different scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch

from megacp.engine.config.model import ModelConfig
from megacp.engine.expert_parallel import layer
from megacp.engine.expert_parallel.layer import MixtureOfExperts
from megacp.engine.expert_parallel.router import choose, first_of_equals, logits, without_noise
from megacp.engine.models.build import build_chunks
from tests.ranks import grid
from tests.reference.decoder import chosen_for
from tests.reference.training import Values, config_of

HIDDEN, TOKENS = 24, 17
COPIES: dict[str, Callable[[int], list[int]]] = {
    "doubled": lambda experts: [place // 2 for place in range(experts)],
    "repeated": lambda experts: [place % max(1, experts // 2) for place in range(experts)],
    "all alike": lambda experts: [0] * experts,
}
"""For each expert, the index of its row among some different rows."""
FUNCTIONS: dict[str, Values] = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True},
    "biased": {"moe_router_bias": True},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid, biased": {"moe_router_score_function": "sigmoid", "moe_router_bias": True},
}


ALIKE = [
    [0, 1, 2, 3, 4, 5, 0, 1, 2],
    [0, 1, 2, 1, 0, 2, 2, 1, 0],
    [3, 3, 3, 0, 1, 2, 0, 1, 5],
    [0, 1, 0, 1, 2, 3, 2, 3],
    [4, 0, 1, 2, 3, 2, 1, 0, 3, 4],
]
"""Groups of equal rows: in the same order, in a different order, and with other rows between them.
"""


def layer_of(values: Values, of: list[int]) -> MixtureOfExperts:
    """Return a layer whose experts have the rows, biases and corrections with the numbers `of`."""
    base: Values = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "moe_ffn_hidden_size": 8,
        "num_experts": len(of),
    }
    (chunk,) = build_chunks(config_of({**base, **values, "moe_router_topk": len(of)}, {}), grid())
    (found,) = (module for module in chunk.modules() if isinstance(module, MixtureOfExperts))
    draw = torch.Generator().manual_seed(len(of))
    rows = torch.randn(len(of), HIDDEN, generator=draw, dtype=torch.float64)
    values_of = torch.randn(2, len(of), generator=draw, dtype=torch.float64)
    with torch.no_grad():
        found.router.copy_(rows[of])
        if found.router_bias is not None:
            found.router_bias.copy_(values_of[0, of])
        if found.balance.correction is not None:
            found.balance.correction.copy_(values_of[1, of] / 8)
    return found


def exact_scores(found: MixtureOfExperts, x: torch.Tensor) -> list[list[float]]:
    """Return the exact values by which the experts of each token are chosen."""
    rows = found.router.detach().tolist()
    table = [
        [math.fsum(a * b for a, b in zip(token, row, strict=True)) for row in rows]
        for token in x.tolist()
    ]
    if found.router_bias is not None:
        biases = found.router_bias.tolist()
        table = [
            [score + bias for score, bias in zip(scores, biases, strict=True)] for scores in table
        ]
    if found.balance.correction is not None:
        corrections = found.balance.correction.tolist()
        table = [
            [
                1 / (1 + math.exp(-score)) + correction
                for score, correction in zip(scores, corrections, strict=True)
            ]
            for scores in table
        ]
    return table


def assert_chosen_by_number(
    values: Values, of: list[int], counts: Iterable[int], groups: int = 1, opened: int = 1
) -> None:
    """Check every number of chosen experts in `counts`, within the best `opened` of `groups`."""
    found = layer_of(values, of)
    x = torch.randn(
        TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=found.router.dtype
    )
    table = exact_scores(found, x)
    found.groups = groups, opened
    for count in counts:
        found.count = count
        model = ModelConfig(
            num_experts=len(of),
            moe_router_topk=count,
            moe_router_num_groups=groups,
            moe_router_group_topk=opened,
        )
        wanted = [sorted(chosen_for(scores, model)) for scores in table]
        for tokens in (TOKENS, 5):  # different sizes of the product, as on cp ranks
            parts = [found._choose(logits(part, found.router).detach()) for part in x.split(tokens)]
            assert torch.cat(parts).tolist() == wanted, f"{tokens} tokens at a time"


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_equal_rows_are_chosen_by_the_number_of_the_expert(
    dtype: str, function: str, copies: str
) -> None:
    values = {**FUNCTIONS[function], "dtype": dtype}
    for experts in (3, 6):
        assert_chosen_by_number(values, COPIES[copies](experts), range(1, experts + 1))
    for experts in (13, 24):
        assert_chosen_by_number(values, COPIES[copies](experts), (1, 2, 5, 8))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("of", ALIKE)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_equal_groups_are_chosen_by_number(dtype: str, of: list[int], biased: bool) -> None:
    values: Values = {
        "moe_router_score_function": "sigmoid",
        "moe_router_bias": biased,
        "dtype": dtype,
    }
    groups = 3 if len(of) == 9 else 4 if len(of) == 8 else 2
    for opened in range(1, groups + 1):
        assert_chosen_by_number(
            values, of, range(1, opened * len(of) // groups + 1), groups, opened
        )


def test_a_product_alone_does_not_give_equal_rows_equal_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the tests above would prove nothing on this machine."""
    monkeypatch.setattr(layer, "first_of_equals", lambda weight: torch.arange(len(weight)))
    with pytest.raises(AssertionError, match="at a time"):
        for experts in (6, 7, 13, 33):
            assert_chosen_by_number({"dtype": "float32"}, COPIES["repeated"](experts), (1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exactly_equal_rows_are_found(dtype: torch.dtype) -> None:
    """Compare with a loop for short mantissas, permutations, signs of zero, rows that differ in the
    last bit, and odd widths.
    """
    for width in (1, 3, 4, 7, 32):
        draw = torch.Generator().manual_seed(width)
        drawn = torch.randn(5, width, generator=draw)
        nearly = drawn[:1].to(dtype).clone()
        nearly[0, -1] = torch.nextafter(nearly[0, -1], nearly.new_tensor(9.0))
        rows = [
            *(
                drawn[[0, 1, 0, 2, 1, 0]],
                drawn.flip(1),
                torch.eye(width),
                2 * torch.eye(width),
                -torch.eye(width),
            ),
            *(
                torch.zeros(2, width),
                -torch.zeros(2, width),
                torch.eye(width),
                drawn[[4, 0]],
                -drawn,
            ),
        ]
        weight = torch.cat([nearly, *(part.to(dtype) for part in rows), nearly])
        wanted = [
            next(
                other for other, row in enumerate(weight) if torch.equal(row, mine)
            )  # 0.0 equals -0.0
            for mine in weight
        ]
        assert first_of_equals(weight).tolist() == wanted


def test_scores_that_only_rounding_separates_are_equal_in_float64() -> None:
    """This holds at any rounding boundary and for chains of such scores; all other scores keep
    their order.
    """
    draw = torch.Generator().manual_seed(1)
    apart = torch.linspace(-3, 3, 7, dtype=torch.float64)  # 0 is included
    of = torch.randint(0, 7, (500, 16), generator=draw)
    noise = (torch.rand(500, 16, generator=draw, dtype=torch.float64) - 0.5) * 1e-14
    scores = apart[of] + noise
    found = without_noise(scores)
    assert (found - apart[of]).abs().max() < 1e-14
    assert torch.equal(found.unsqueeze(2) == found.unsqueeze(1), of.unsqueeze(2) == of.unsqueeze(1))
    for count in (1, 3, 15, 16):
        assert torch.equal(choose(scores, count), choose(apart[of], count))


def test_scores_of_float64_keep_their_order_if_they_differ_clearly() -> None:
    draw = torch.Generator().manual_seed(1)
    scores = torch.randn(500, 16, generator=draw, dtype=torch.float64) * 10.0 ** torch.linspace(
        -4, 2, 16
    )
    scores[:, 3] = -torch.inf  # like in a closed group
    assert torch.equal(without_noise(scores), scores)
    step = torch.tensor(
        [[1.0, 1.0 + 1e-9, 1.0 - 1e-9, -torch.inf, -torch.inf]], dtype=torch.float64
    )
    assert torch.equal(without_noise(step), step)
    assert choose(step, 1).tolist() == [[1]] and choose(step.float(), 1).tolist() == [[0]]


def test_rows_with_one_fingerprint_are_not_taken_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megacp.engine.expert_parallel.router._fingerprints",
        lambda weight: torch.zeros(len(weight)),
    )
    weight = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])
    assert first_of_equals(weight).tolist() == [0, 1, 0]
