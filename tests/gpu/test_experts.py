"""The grouped products of all experts on a GPU, compared with float64 and with a loop."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megacp.engine.expert_parallel import experts
from megacp.engine.expert_parallel.route import Groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"
    ),
]


@pytest.mark.parametrize("counts", [[5, 0, 250, 1], [0, 0, 0, 256], [64, 64, 64, 64]])
def test_products_and_gradients_are_near_float64(counts: list[int]) -> None:
    draw = torch.Generator("cuda").manual_seed(1)
    x, weight, grad = (
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)
        for shape in ((256, 64), (4 * 48, 64), (256, 48))
    )
    groups, found = Groups(torch.tensor(counts, device="cuda")), []
    with mock.patch.object(experts.F, "grouped_mm", wraps=experts.F.grouped_mm) as kernel:
        for dtype in (torch.bfloat16, torch.float64):
            leaves = [one.to(dtype).requires_grad_() for one in (x, weight)]
            out = experts.matrices_product(*leaves, groups)
            found.append([out, *torch.autograd.grad(out, leaves, grad.to(dtype))])
    assert len(kernel.mock_calls) == 3
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).abs().max() <= 2**-8 * expected.abs().max()
