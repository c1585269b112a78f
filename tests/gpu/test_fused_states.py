"""flash-linear-attention's real kernel, compared with float64 on the CPU: run `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megacp.attention.context_parallel.fused_states import (
    chunk_places,
    flash_linear_attention,
    fused_recur,
)
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.states import recur
from megacp.attention.ops.recurrence import gated_delta_rule
from megacp.distributed.grid import single_axis
from tests.reference.fused import chunk_gated_delta_rule
from tests.reference.packs import metadata, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"
    ),
    # warnings of compilers and optional dependencies are not errors
    pytest.mark.filterwarnings("default"),
]
LENGTHS, GROUPS, HEADS, WIDTH = (70, 3, 200, 27), 2, 4, 64


@pytest.fixture(scope="module")
def kernel() -> Any:
    found = flash_linear_attention()
    if found is None:
        pytest.skip("fla is not installed (extra: fla)")
    return found


def inputs_of(tokens: int, values: int) -> list[torch.Tensor]:
    """Return q, k, v and beta in bfloat16, and the log of the decay in float32."""
    g = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(tokens, GROUPS, WIDTH, generator=g).bfloat16() for _ in range(2))
    v = torch.randn(tokens, HEADS, values, generator=g).bfloat16()
    decay, beta = (torch.rand(tokens, HEADS, generator=g) for _ in range(2))
    return [q, k, v, -0.3 * decay, beta.bfloat16()]


def near(kernel: Any, exact: Any, leaves: Sequence[torch.Tensor]) -> None:
    """Compare results and gradients of `kernel(*leaves)` on the device with `exact` on the CPU."""
    here = [x.double().requires_grad_() for x in leaves]
    there = [x.cuda().requires_grad_() for x in leaves]
    want, got = exact(*here), kernel(*there)
    wanted = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double() for x in want
    ]
    want += torch.autograd.grad(want, here, wanted)
    got += torch.autograd.grad(got, there, [d.to(x) for d, x in zip(wanted, got, strict=True)])
    # inputs and products are rounded to 2^-9
    for place, (x, y) in enumerate(zip(got, want, strict=True)):
        assert (x.cpu().double() - y).abs().max() <= 4e-2 * y.abs().max(), place


@pytest.mark.parametrize("values", [WIDTH, 2 * WIDTH])
def test_sequences_with_first_and_final_states_are_near_float64(kernel: Any, values: int) -> None:
    """States may be as wide as the values, or as wide as the values and a map together."""
    bounds, chunks = (
        torch.tensor([0, *LENGTHS]).cumsum(0),
        torch.from_numpy(chunk_places(np.array(LENGTHS))),
    )

    def called(function: Any) -> Any:
        def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return function(
                *(x.unsqueeze(0) for x in leaves[:5]),
                initial_state=leaves[5],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=bounds.to(leaves[0].device),
                chunk_indices=chunks.to(leaves[0].device),
            )

        return call

    first = torch.randn(
        len(LENGTHS), HEADS, WIDTH, values, generator=torch.Generator().manual_seed(2)
    )
    near(called(kernel), called(chunk_gated_delta_rule), [*inputs_of(sum(LENGTHS), values), first])


def test_trees_and_padding_are_near_float64(kernel: Any) -> None:
    meta = metadata(random_batch(np.random.default_rng(0), 300, branches=True, padding=True))
    plan, axis = AttentionPlan(np.arange(300)[None], meta, 0, np.arange(300)), single_axis("cp")
    near(
        lambda *leaves: (fused_recur(kernel, plan, axis, *leaves),),
        lambda *leaves: (recur(gated_delta_rule, plan, axis, *leaves),),
        inputs_of(300, WIDTH),
    )
