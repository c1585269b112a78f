"""Attention kernels over tile tables equal masked attention by autograd, and so do their merged
parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from megacp.attention.ops import device as compiled
from megacp.attention.ops import pointwise, tile_kernels
from megacp.attention.ops.device import fused, to_device, whole_graph
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.kernel import Kernel, Saved, empty_partial, merge_into
from megacp.attention.ops.mask import Metadata, Reach, allowed, tile_table
from megacp.attention.ops.pointwise import keep_mask, rms_norm, swiglu
from megacp.attention.ops.rotary import rotate
from megacp.attention.ops.tile_kernels import FlashKernel, MathKernel, dense_attention
from tests.reference import attention as reference
from tests.reference.packs import metadata, random_batch


class InBlocksOfFive(MathKernel):
    block = 5


KERNELS = {"flash": FlashKernel(), "math": MathKernel(), "math in blocks of 5": InBlocksOfFive()}
HEADS = [(4, 4), (4, 2), (6, 1)]
CAPS_AND_SINKS = [(0.0, 0), (0.7, 0), (0.7, 1)]

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(params=["calls of their own", "joined"], autouse=True)
def joining(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make calls free, because rows this small would always be joined."""
    if request.param == "calls of their own":
        monkeypatch.setattr(tile_kernels, "CALL", 0)


def draw(n: int, m: int, heads: int, groups: int, seed: int = 0) -> list[torch.Tensor]:
    """Return float64 `q[n, heads, 8]`, `k, v[m, groups, 8]`, `dout[n, heads, 8]`."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(n, heads, 8), (m, groups, 8), (m, groups, 8), (n, heads, 8)]
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


def by_autograd(
    tensors: list[torch.Tensor],
    visible: np.ndarray,
    scale: float,
    cap: float = 0.0,
    *sinks: torch.Tensor,
) -> Tensors:
    """Return out, dq, dk, dv and the sinks' gradient of the dense reference."""
    leaves = [x.clone().requires_grad_() for x in (*tensors[:3], *sinks)]
    out = dense_attention(*leaves[:3], torch.from_numpy(visible), scale, *leaves[3:] or [None], cap)
    return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])


def by_tiles(
    kernel: Kernel, tensors: list[torch.Tensor], sources: list[tuple], scale: float
) -> Tensors:
    """Return out, dq, dk, dv from sources of keys `(indices, table)`, merged forward and summed
    backward.
    """
    q, k, v, dout = tensors
    partial = empty_partial(q)
    for index, table in sources:
        kernel.attend(partial, (q, k[index], v[index]), table, scale)
    saved = Saved(q, partial.out.to(q.dtype), partial.lse, dout)
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for index, table in sources:
        part = (dq, torch.zeros_like(dk[index]), torch.zeros_like(dv[index]))
        kernel.attend_backward(saved, (k[index], v[index]), table, scale, part)
        dk[index], dv[index] = dk[index] + part[1], dv[index] + part[2]
    return partial.out, dq, dk, dv


def pack(seed: int, tokens: int = 40) -> Metadata:
    return metadata(
        random_batch(np.random.default_rng(seed), tokens, branches=True, images=True, padding=True)
    )


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize(("cap", "sinks"), CAPS_AND_SINKS)
def test_the_dense_reference_equals_one_row_at_a_time(
    heads: int, groups: int, cap: float, sinks: int
) -> None:
    meta = pack(1, 20)
    mask = allowed(meta, meta)
    assert not mask.any(1).all(), "a row that sees nothing belongs to the test"
    tensors = draw(20, 20, heads, groups)
    leaves = [
        x.clone().requires_grad_()
        for x in (*tensors[:3], *[torch.linspace(-2, 2, heads).double()] * sinks)
    ]
    out = reference.attention(*leaves[:3], mask, 0.3, *leaves[3:] or [None], cap)
    naive = (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))
    for found, expected in zip(
        by_autograd(tensors, mask, 0.3, cap, *leaves[3:]), naive, strict=True
    ):
        torch.testing.assert_close(
            found, expected, rtol=1e-12, atol=1e-13
        )  # float64, sums of 20 terms


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.slow
def test_a_kernel_over_tiles_equals_the_dense_mask_forward_and_backward(
    name: str, heads: int, groups: int
) -> None:
    for seed in range(4):
        meta = pack(seed)
        tensors = draw(40, 40, heads, groups, seed)
        found = by_tiles(KERNELS[name], tensors, [(np.arange(40), tile_table(meta, meta))], 8**-0.5)
        for got, expected in zip(
            found, by_autograd(tensors, allowed(meta, meta), 8**-0.5), strict=True
        ):
            torch.testing.assert_close(
                got, expected, rtol=1e-12, atol=1e-13
            )  # float64, sums of 40 terms


@pytest.mark.parametrize("reach", [Reach(), Reach(9), Reach(0, 7)], ids=str)
@pytest.mark.parametrize("cap", [0.0, 0.7])
def test_trees_in_windows_and_chunks_are_exact_with_a_cap_and_without(
    reach: Reach, cap: float
) -> None:
    meta = metadata(random_batch(np.random.default_rng(6), 60, images=True, depth=4))
    tensors, kernel = draw(60, 60, 4, 2), MathKernel(cap) if cap else FlashKernel()
    sources = [
        (index, tile_table(meta, meta.take(index), reach))
        for index in np.split(np.arange(60), [11, 12, 45])
    ]
    expected = by_autograd(tensors, allowed(meta, meta, reach), 0.4, cap)
    for got, exact in zip(by_tiles(kernel, tensors, sources, 0.4), expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", KERNELS)
def test_keys_in_several_parts_and_any_order_give_the_same(name: str) -> None:
    meta = pack(5)
    order = np.random.default_rng(0).permutation(40)
    tensors = draw(40, 40, 4, 2)
    parts = [order[:7], order[7:8], order[8:30], order[30:]]
    sources = [(index, tile_table(meta, meta.take(index))) for index in parts]
    found = by_tiles(KERNELS[name], tensors, sources, 0.4)
    for got, expected in zip(found, by_autograd(tensors, allowed(meta, meta), 0.4), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_see_nothing_give_zero_output_lse_minus_infinity_and_zero_gradients(
    name: str,
) -> None:
    meta = Metadata.of_documents(np.array([0, -1, 0, -1, 1]))
    tensors = draw(5, 5, 4, 2)
    partial = empty_partial(tensors[0])
    KERNELS[name].attend(partial, tuple(tensors[:3]), tile_table(meta, meta), 1.0)
    assert (partial.out[[1, 3]] == 0).all() and (partial.lse[[1, 3]] == -torch.inf).all()
    assert partial.out.isfinite().all()
    _, *grads = by_tiles(KERNELS[name], tensors, [(np.arange(5), tile_table(meta, meta))], 1.0)
    for grad in grads:
        assert grad.isfinite().all() and (grad[[1, 3]] == 0).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # fp32: 2^-24 times sums of 300 terms; bf16: inputs and output rounded to 2^-9, gradients of
    # order 1 to 10.
    [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)],
    ids=["fp32", "bf16"],
)
def test_lower_precisions_stay_near_float64(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    meta = metadata(random_batch(np.random.default_rng(3), 300, documents=3, images=True))
    tensors = [x.to(dtype) for x in draw(300, 300, 4, 2)]
    exact = by_autograd([x.double() for x in tensors], allowed(meta, meta), 8**-0.5)
    found = by_tiles(KERNELS[name], tensors, [(np.arange(300), tile_table(meta, meta))], 8**-0.5)
    for got, expected in zip(found, exact, strict=True):
        assert got.dtype == torch.float32, "partial results are held in fp32"
        assert (got.double() - expected).abs().max() < tolerance * expected.abs().max()


def test_merging_parts_in_any_order_is_the_softmax_over_all_of_them() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 12, generator=g, dtype=torch.float64) * 30
    values = torch.randn(12, 5, generator=g, dtype=torch.float64)
    scores[1, :8] = -torch.inf
    scores[2] = -torch.inf
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ values
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        out, lse = (
            torch.zeros(3, 1, 5, dtype=torch.float64),
            torch.full((3, 1), -torch.inf, dtype=torch.float64),
        )
        for part in order:
            index = slice(4 * part, 4 * part + 4)
            part_lse = torch.logsumexp(scores[:, index], -1)
            weights = torch.softmax(scores[:, index], -1).nan_to_num(0.0)
            merge_into(out, lse, (weights @ values[index])[:, None], part_lse[:, None])
        torch.testing.assert_close(out[:, 0], expected, rtol=1e-13, atol=1e-13)
        assert torch.equal(lse[:, 0] == -torch.inf, torch.tensor([False, False, True]))


def test_a_bf16_part_is_merged_in_fp32() -> None:
    out, lse = torch.zeros(2, 1, 4), torch.full((2, 1), -torch.inf)
    for _ in range(64):
        merge_into(out, lse, torch.ones(2, 1, 4, dtype=torch.bfloat16), torch.zeros(2, 1))
    torch.testing.assert_close(out, torch.ones(2, 1, 4), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, torch.full((2, 1), np.log(64.0), dtype=torch.float32))


BITS = {"rtol": 1e-14, "atol": 1e-14}  # float64; a graph may round a sum in another order


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Run chains as graphs on the CPU; the list grows by one for each graph."""
    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        made.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(compiled, "is_compiled", lambda x: True)
    monkeypatch.setattr(pointwise, "is_compiled", lambda x: True)
    monkeypatch.setattr(compiled, "BACKEND", backend)
    yield made
    torch._dynamo.reset()


def differentiated(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, randn(*out.shape, seed=9))]


def merged(n: int) -> list[torch.Tensor]:
    out, lse = randn(n, 3, 4), randn(n, 3, seed=1)
    lse[0] = -torch.inf
    merge_into(out, lse, randn(n, 3, 4, seed=2), randn(n, 3, seed=3))
    return [out, lse]


CASES: dict[str, Callable[[int], list[torch.Tensor]]] = {
    "norm of hidden states": lambda n: differentiated(
        lambda x, w: rms_norm(x, w, 1e-6), randn(n, 8), randn(8)
    ),
    "norm of heads": lambda n: differentiated(
        lambda x, w: rms_norm(x, w, 1e-6), randn(n, 3, 8), randn(8)
    ),
    "swiglu": lambda n: differentiated(swiglu, randn(n, 100)),
    "rotary": lambda n: differentiated(
        lambda x: rotate(x, randn(n, 1, 4), randn(n, 1, 4, seed=1)), randn(n, 3, 8)
    ),
    "bits of dropout": lambda n: [keep_mask(2**63 + 17 * n, torch.arange(n) * 7, 5, 0.3)],
    "merged attention": merged,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_chain_as_one_graph_is_the_chain(
    name: str, graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_is_saved_for_backward_needs_no_graph_of_its_own(graphs: list[int]) -> None:
    """An offloaded tensor may return without requires_grad, which would select another graph with
    other bits.
    """
    twice = fused(lambda x, y: x * 2 + y)
    with torch.no_grad():
        for x in (
            torch.nn.Parameter(torch.zeros(3)),
            torch.zeros(3),
            torch.zeros(3).requires_grad_(),
        ):
            twice(x, x)
    assert len(graphs) == 1


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
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: contexts.append(device) or contextlib.nullcontext()
    )
    to_device(np.arange(3), "cuda:1")
    ((source, device, queued),) = copies
    assert source is pinned[0] and (device, queued) == ("cuda:1", True)
    assert contexts == ["cuda:1"], "a thread of its own would make a context on the first GPU"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    to_device(torch.arange(3), "cuda:1")
    assert len(pinned) == 1 and len(copies) == 2, "what a thread has pinned is not copied again"
