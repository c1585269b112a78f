"""Rotary embedding, norm, activations and dropout equal naive formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megacp.attention.ops.pointwise import (
    clamped_swiglu,
    dropout,
    geglu,
    keep_mask,
    rms_norm,
    swiglu,
)
from megacp.attention.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies, rotate
from tests.reference import attention as reference

CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # float64, a handful of operations each


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def test_rotary_turns_pairs_half_a_head_apart_by_the_tokens_own_position() -> None:
    x, positions = randn(6, 2, 8), torch.tensor([0, 5, 1, 1, 4000, 0])
    cos, sin = cos_sin(positions, inverse_frequencies(8, 500.0, RotaryScaling()), torch.float64)
    found = rotate(x, cos, sin)
    for i, position in enumerate(positions.tolist()):
        for head in range(2):
            torch.testing.assert_close(
                found[i, head], reference.rotate(x[i, head], position, 500.0), **CLOSE
            )


def llama3_by_the_formula(head_dim: int, base: float, s: RotaryScaling) -> list[float]:
    """Return the rule of the Llama 3.1 release, one frequency at a time."""
    scaled = []
    for i in range(0, head_dim, 2):
        frequency = 1.0 / base ** (i / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < s.original_max_positions / 4.0:
            scaled.append(frequency)
        elif wavelength > s.original_max_positions:
            scaled.append(frequency / s.factor)
        else:
            smooth = s.original_max_positions / wavelength - 1.0
            smooth /= 4.0 - 1.0
            scaled.append((1 - smooth) * frequency / s.factor + smooth * frequency)
    return scaled


@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_scaling_equals_the_published_rule_in_all_three_bands(original: int) -> None:
    scaling = RotaryScaling("llama3", 8.0, original)
    found = inverse_frequencies(128, 500_000.0, scaling)
    expected = torch.tensor(llama3_by_the_formula(128, 500_000.0, scaling), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    ratio = inverse_frequencies(128, 500_000.0, RotaryScaling()) / found
    assert (ratio == 1).any() and (ratio > 7.99).any() and ((ratio > 1.01) & (ratio < 7.9)).any()


def test_linear_scaling_divides_positions_and_unknown_scaling_is_refused() -> None:
    plain = cos_sin(
        torch.tensor([5]), inverse_frequencies(8, 100.0, RotaryScaling()), torch.float64
    )
    scaled = cos_sin(
        torch.tensor([20]),
        inverse_frequencies(8, 100.0, RotaryScaling("linear", 4.0)),
        torch.float64,
    )
    torch.testing.assert_close(plain, scaled, **CLOSE)
    with pytest.raises(ValueError, match="RoPE scaling dynamic is unknown"):
        inverse_frequencies(8, 100.0, RotaryScaling("dynamic"))


def test_angles_of_far_positions_are_rounded_once() -> None:
    """Computed in fp32, an angle of 131,071 radians is off by 4e-3."""
    cos, _ = cos_sin(
        torch.tensor([131_071]), inverse_frequencies(2, 10000.0, RotaryScaling()), torch.float32
    )
    assert abs(cos.item() - math.cos(131_071)) < 1e-7


def gradients_agree(function: object, naive: object, *inputs: torch.Tensor) -> None:
    """Check value and gradients of `function` against its naive twin by autograd, with a strided
    gradient.
    """
    results = []
    for f in (function, naive):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = f(*leaves)
        v = randn(*out.shape[::-1], seed=9).permute(*range(out.dim())[::-1])
        results.append((out.detach(), *torch.autograd.grad(out, leaves, v)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def naive_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * weight


def test_rms_norm_equals_its_formula_over_rows_and_over_heads() -> None:
    for shape in ((5, 8), (5, 3, 8)):
        gradients_agree(
            lambda x, w: rms_norm(x, w, 1e-3), naive_norm, randn(*shape), randn(8, seed=1)
        )
        around_one = randn(*shape), randn(8, seed=1)
        gradients_agree(
            lambda x, w: rms_norm(x, w, 1e-3, True), lambda x, w: naive_norm(x, 1 + w), *around_one
        )
    strided = randn(5, 24).split(8, -1)[1].unflatten(-1, (2, 4))
    torch.testing.assert_close(
        rms_norm(strided, torch.ones(4).double(), 1e-3), naive_norm(strided, 1.0), **CLOSE
    )


def test_rms_norm_of_bf16_takes_its_statistics_in_fp32() -> None:
    x, weight = randn(4, 4096, dtype=torch.bfloat16), randn(4096, seed=1, dtype=torch.bfloat16)
    exact = naive_norm(x.double(), weight.double())
    found = rms_norm(x, weight, 1e-3)
    assert found.dtype == torch.bfloat16
    assert (
        found.double() - exact
    ).abs().max() < 2**-7 * exact.abs().max()  # two roundings to 8 bits


def test_swiglu_equals_its_formula() -> None:
    gradients_agree(
        swiglu, lambda x: x[..., :6] / (1 + torch.exp(-x[..., :6])) * x[..., 6:], randn(4, 12)
    )


def test_geglu_equals_its_formula() -> None:
    def naive(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return (
            0.5 * gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
        )

    gradients_agree(geglu, naive, randn(4, 12))


def test_a_clamped_swiglu_equals_its_formula() -> None:
    def naive(x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.where(x > 7, 7, x)[:, :6], torch.where(x.abs() > 7, 7 * x.sign(), x)[:, 6:]
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)

    gradients_agree(clamped_swiglu, naive, 8 * randn(4, 12))


def test_rotate_equals_autograd_of_its_formula() -> None:
    cos, sin = cos_sin(
        torch.arange(5), inverse_frequencies(8, 100.0, RotaryScaling()), torch.float64
    )
    both, both_sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    gradients_agree(
        lambda x: rotate(x, cos, sin),
        lambda x: x * both + torch.cat([-x[..., 4:], x[..., :4]], -1) * both_sin,
        randn(5, 2, 8),
    )


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_drops_at_its_rate_in_every_row_and_column(probability: float) -> None:
    keep = keep_mask(1234567890123456789, torch.arange(2000), 512, probability)
    sigma = math.sqrt(probability * (1 - probability))
    assert abs((~keep).double().mean() - probability) < 5 * sigma / 1000  # 1,024,000 draws
    for dim, draws in ((0, 2000), (1, 512)):
        assert ((~keep).double().mean(dim) - probability).abs().max() < 6 * sigma / math.sqrt(draws)


def test_dropout_masks_belong_to_tokens_not_to_ranks_or_rows() -> None:
    """Any cut or order of the tokens draws the same bits; cp peers have other tokens, so their
    masks differ.
    """
    x = randn(64, 32)
    whole = dropout(x, 42, torch.arange(64), 0.3)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for part in order.chunk(4):
        assert torch.equal(dropout(x[part], 42, part, 0.3), whole[part])
    columns = [
        dropout(part, 42, torch.arange(64), 0.3, first)
        for first, part in zip((0, 16), x.chunk(2, 1), strict=True)
    ]
    assert torch.equal(torch.cat(columns, 1), whole), (
        "tp ranks that hold other columns draw their own bits"
    )
    halves = [keep_mask(42, part, 32, 0.3) for part in torch.arange(64).chunk(2)]
    assert not torch.equal(*halves)
    assert torch.equal(whole, dropout(x, 42, torch.arange(64), 0.3)), (
        "recomputation draws the same bits"
    )


def test_dropout_keeps_the_mean_scales_the_gradient_and_is_nothing_at_zero() -> None:
    x = torch.ones(500, 400, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 1, torch.arange(500), 0.25)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75} and abs(out.mean() - 1) < 0.01
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out.detach())
    assert dropout(x, 1, torch.arange(500), 0.0) is x
