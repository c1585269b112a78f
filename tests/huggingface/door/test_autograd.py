"""A block beside autograd, recomputation and the compiler: the same gradients, one plan, nothing kept.

The reference is the same layers on one process.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacp.core.context_parallel.attention import TRANSPORTS
from megacp.core.distributed.grid import single_axis
from megacp.huggingface.door.context import context_parallel
from megacp.huggingface.door.loop import sum_gradients
from megacp.huggingface.door.transformers import attention
from tests.huggingface.door.test_context import DIM, axis_of, tensors, transport_on
from tests.ranks import grid, run_ranks

WAYS = {"kept": None, "recomputed": False, "reentrant": True}


class Layers(torch.nn.Module):
    """Two layers of attention with a skip, to be recomputed or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(DIM, 3 * DIM).double() for _ in range(2))

    def layer(self, number: int, x: Tensor) -> Tensor:
        q, k, v = self.projections[number](x).chunk(3, -1)
        return x + attention(self, q, k, v, None, is_causal=True)[0].transpose(1, 2)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        for number in range(2):
            layer = functools.partial(self.layer, number)
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        return x


def gradients_of(model: Layers) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def layers_on_ranks(rank: int, world_size: int) -> dict[str, dict[str, list[Tensor]]]:
    """Gradients by transport and by the way into autograd."""
    axis, found = axis_of(4), {}
    whole = tensors(24)[0]
    for transport in TRANSPORTS:
        model, ways = Layers(), {}
        parameters = list(model.parameters())
        with context_parallel(
            axis,
            model=model,
            buffers=[whole],
            buffer_seq_dims=[2],
            transport=transport_on(transport, axis),
            document_ids=torch.arange(24) // 7,
        ) as context:
            x = whole.clone().requires_grad_()  # reentrant recomputation wants an input with a gradient
            for way, reentrant in WAYS.items():
                model(x, reentrant).square().sum().backward()
                ways[way] = gradients_of(model)
            ways["grad"] = list(torch.autograd.grad(model(x, False).square().sum(), parameters))
            assert len(context.plans) == 1, "planned again in a later layer"
        for p, grad in zip(parameters, ways["kept"], strict=True):
            p.grad = grad.clone()
        sum_gradients(parameters, axis)
        ways["summed"] = gradients_of(model)
        found[transport] = ways
    return found


@pytest.mark.slow
def test_recomputed_layers_have_the_gradients_of_one_process_and_the_plan_is_made_once() -> None:
    """float64, 24 tokens."""
    whole, model = tensors(24)[0], Layers()
    with context_parallel(
        single_axis("cp"), model=model, buffers=[whole], buffer_seq_dims=[2], document_ids=torch.arange(24) // 7
    ):
        model(whole).square().sum().backward()
    expected = gradients_of(model)
    results = run_ranks(layers_on_ranks, 4)
    for transport, way in itertools.product(TRANSPORTS, (*WAYS, "grad")):
        parts = [result[transport][way] for result in results]
        for want, found in zip(expected, zip(*parts, strict=True), strict=True):
            torch.testing.assert_close(sum(found), want, rtol=1e-11, atol=1e-11, msg=f"{transport}, {way}")
    for result, transport in itertools.product(results, TRANSPORTS):
        torch.testing.assert_close(result[transport]["summed"], expected, rtol=1e-11, atol=1e-11)


def compiled_on_ranks(rank: int, world_size: int) -> tuple[list[list[Tensor]], int]:
    """Gradients of a model in a block, plain and compiled, and the functions that the compiler took up."""
    whole, model = tensors(24)[0], Layers()
    found = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for called in (model, torch.compile(model, backend="eager")):
        with context_parallel(grid(cp=world_size).cp, model=model, buffers=[whole], buffer_seq_dims=[2]):
            called(whole).square().sum().backward()
        found.append(gradients_of(model))
    return found, torch._dynamo.utils.counters["frames"]["total"]


@pytest.mark.slow
def test_a_compiled_model_trains_in_a_block_as_a_plain_one_does() -> None:
    """A compiler that traces plans and messages ends in an error, or takes a hundred functions."""
    for (plain, compiled), functions in run_ranks(compiled_on_ranks, 2):
        torch.testing.assert_close(compiled, plain, rtol=1e-12, atol=1e-12)  # float64, the same operations
        assert functions < 20, functions


def test_a_block_is_freed_when_it_is_let_go_and_a_layer_recomputed_behind_it_is_noticed() -> None:
    whole, model = tensors(24)[0], Layers()
    gc.disable()
    try:
        with context_parallel(single_axis("cp"), model=model, buffers=[whole], buffer_seq_dims=[2]) as context:
            loss = model(whole.clone(), False).sum()
            held = weakref.ref(context)
        del context
        assert held() is None
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="call backward inside"):
        loss.backward()
