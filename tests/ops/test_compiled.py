"""Chains that a GPU gets as one kernel: on a CPU their graphs are made and run without a compiler, and do not break."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from megacp.core.ops import device as compiled
from megacp.core.ops import pointwise
from megacp.core.ops.device import fused, to_device, whole_graph
from megacp.core.ops.flex import gradients_of_part
from megacp.core.ops.kernel import merge_into
from megacp.core.ops.pointwise import keep_mask, rms_norm, swiglu
from megacp.core.ops.rotary import rotate

BITS = {"rtol": 1e-14, "atol": 1e-14}  # float64; a graph may round a sum in another order


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Chains run as graphs on the CPU; the list grows by one for each that is made."""
    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        made.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(compiled, "is_compiled", lambda x: True)
    monkeypatch.setattr(pointwise, "is_compiled", lambda x: True)
    monkeypatch.setattr(compiled, "BACKEND", backend)
    yield made
    torch._dynamo.reset()


def differentiated(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, randn(*out.shape, seed=9))]


def merged(n: int) -> list[torch.Tensor]:
    out, lse = randn(n, 3, 4), randn(n, 3, seed=1)
    lse[0] = -torch.inf
    merge_into(out, lse, randn(n, 3, 4, seed=2), randn(n, 3, seed=3))
    return [out, lse]


def of_part(n: int) -> list[torch.Tensor]:
    out, merged, dout = (randn(n, 3, 4, seed=seed) for seed in range(3))
    lse, merged_lse = randn(n, 3, seed=3), randn(n, 3, seed=4)
    lse[0] = merged_lse[0] = -torch.inf
    return list(gradients_of_part(out, lse, merged, merged_lse, dout))


CASES: dict[str, Callable[[int], list[torch.Tensor]]] = {
    "norm of hidden states": lambda n: differentiated(lambda x, w: rms_norm(x, w, 1e-6), randn(n, 8), randn(8)),
    "norm of heads": lambda n: differentiated(lambda x, w: rms_norm(x, w, 1e-6), randn(n, 3, 8), randn(8)),
    "swiglu": lambda n: differentiated(swiglu, randn(n, 100)),
    "rotary": lambda n: differentiated(lambda x: rotate(x, randn(n, 1, 4), randn(n, 1, 4, seed=1)), randn(n, 3, 8)),
    "bits of dropout": lambda n: [keep_mask(2**63 + 17 * n, torch.arange(n) * 7, 5, 0.3)],
    "merged attention": merged,
    "gradients of a part of attention": of_part,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_chain_as_one_graph_is_the_chain(name: str, graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [CASES[name](n) for n in (6, 9, 14)]
    assert graphs
    monkeypatch.setattr(compiled, "is_compiled", lambda x: False)
    monkeypatch.setattr(pointwise, "is_compiled", lambda x: False)
    for mine, expected in zip(found, [CASES[name](n) for n in (6, 9, 14)], strict=True):
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, **BITS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_new_lengths_and_keys_need_no_new_graph(name: str, graphs: list[int]) -> None:
    CASES[name](6)
    before = len(graphs)
    for n in range(7, 40):
        CASES[name](n)
    assert len(graphs) == before


def test_a_chain_on_the_cpu_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "there is no such backend")
    assert fused(lambda x: x + 1)(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_what_breaks_a_graph_is_an_error() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        whole_graph(broken, "eager")(torch.ones(3))
    torch._dynamo.reset()


def test_on_a_cpu_nothing_is_copied() -> None:
    values = np.arange(3)
    tensor = to_device(values, "cpu")
    values[0] = 7
    assert tensor.tolist() == [7, 1, 2] and tensor.dtype == torch.int64


def test_a_device_gets_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    copies: list[tuple[torch.Tensor, object, object]] = []

    def pin(x: torch.Tensor) -> torch.Tensor:
        pinned.append(x.clone())
        return pinned[-1]

    def copy(x: torch.Tensor, device: object, non_blocking: bool = False) -> torch.Tensor:
        copies.append((x, device, non_blocking))
        return x

    contexts: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contexts.append(device) or contextlib.nullcontext())
    to_device(np.arange(3), "cuda:1")
    ((source, device, queued),) = copies
    assert source is pinned[0] and (device, queued) == ("cuda:1", True)
    assert contexts == ["cuda:1"], "a thread of its own would make a context on the first GPU"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    to_device(torch.arange(3), "cuda:1")
    assert len(pinned) == 1 and len(copies) == 2, "what a thread has pinned is not copied again"
