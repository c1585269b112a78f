"""Column- and row-parallel linears against one product: values and gradients, with and without sequence parallelism."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megacp.core.distributed.collectives import all_gather, all_reduce
from megacp.core.distributed.differentiable import copy_to, gather_from, slice_of
from megacp.core.distributed.grid import Axis
from megacp.core.distributed.parameter import spec_of
from megacp.core.tensor_parallel.linear import ColumnParallelLinear, LinearOptions, LinearSpec, RowParallelLinear
from tests.ranks import grid, run_ranks
from tests.reference.sharding import Pieces, assemble, fill, pieces_of

TOKENS, WIDTH, OUTPUTS, OUT = 8, 6, [("q", 16), ("k", 8), ("v", 4)], 10

CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of a few dozen terms


def options_of(tp: Axis, sequence_parallel: bool) -> LinearOptions:
    return LinearOptions(tp, sequence_parallel and tp.size > 1, torch.float64, torch.device("cpu"))


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def global_tensors(bias: bool) -> dict[str, Tensor]:
    """Weights and biases of both layers; the row layer takes the column layer's outputs."""
    wide = sum(rows for _, rows in OUTPUTS)
    tensors = {f"a.{name}.weight": randn(rows, WIDTH, seed=i) for i, (name, rows) in enumerate(OUTPUTS)}
    tensors["b.out.weight"] = randn(OUT, wide, seed=10)
    if bias:
        tensors |= {f"a.{name}.bias": randn(rows, seed=20 + i) for i, (name, rows) in enumerate(OUTPUTS)}
        tensors["b.out.bias"] = randn(OUT, seed=30)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def one_process(bias: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of x, and gradients by name, of `row(tanh(column(x)))`."""
    tensors, x = global_tensors(bias), randn(TOKENS, WIDTH, seed=40).requires_grad_()
    weight = torch.cat([tensors[f"a.{name}.weight"] for name, _ in OUTPUTS])
    hidden = x @ weight.t()
    if bias:
        hidden = hidden + torch.cat([tensors[f"a.{name}.bias"] for name, _ in OUTPUTS])
    y = torch.tanh(hidden) @ tensors["b.out.weight"].t() + (tensors["b.out.bias"] if bias else 0.0)
    grads = torch.autograd.grad(y, [x, *tensors.values()], randn(TOKENS, OUT, seed=41))
    return y.detach(), grads[0], dict(zip(tensors, grads[1:], strict=True))


def permuted_columns(tensor: Tensor, size: int) -> Tensor:
    """Row-layer weight columns ordered as ranks hold the fused outputs: each rank has its q, then k, then v."""
    starts = np.cumsum([0] + [rows for _, rows in OUTPUTS])
    order = [
        np.arange(start + rank * rows // size, start + (rank + 1) * rows // size)
        for rank in range(size)
        for start, (_, rows) in zip(starts, OUTPUTS, strict=False)
    ]
    return tensor[:, np.concatenate(order)]


def on_ranks(rank: int, world_size: int, bias: bool, sequence_parallel: bool) -> tuple[Tensor, Tensor, Pieces]:
    tp = grid(tp=world_size).tp
    options = options_of(tp, sequence_parallel)
    column = ColumnParallelLinear(LinearSpec("a", OUTPUTS, WIDTH, bias, 0.02), options)
    row = RowParallelLinear(LinearSpec("b", (("out", OUT),), sum(n for _, n in OUTPUTS), bias, 0.02), options)
    tensors = {name: tensor.detach() for name, tensor in global_tensors(bias).items()}
    tensors["b.out.weight"] = permuted_columns(tensors["b.out.weight"], world_size)
    module = torch.nn.ModuleList([column, row])
    fill(module, tensors)
    x, v = randn(TOKENS, WIDTH, seed=40), randn(TOKENS, OUT, seed=41)
    if sequence_parallel:
        x, v = slice_of(x, tp), slice_of(v, tp)
    x.requires_grad_()
    y = row(torch.tanh(column(x)))
    parameters = list(module.parameters())
    dx, *grads = torch.autograd.grad(y, [x, *parameters], v)
    summed = {
        parameter: all_reduce(grad, tp) if spec_of(parameter).partial_over == ("tp",) else grad
        for parameter, grad in zip(parameters, grads, strict=True)
    }
    if sequence_parallel:
        y, dx = all_gather(y.detach(), tp), all_gather(dx, tp)
    return y.detach(), dx, pieces_of(module, summed)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_column_then_row_equals_one_process(world_size: int, sequence_parallel: bool, bias: bool) -> None:
    """Catches a missing or doubled reduction of dx or of a bias, and a fused weight cut across its tensors."""
    arguments = (bias, sequence_parallel)
    results = [on_ranks(0, 1, *arguments)] if world_size == 1 else run_ranks(on_ranks, world_size, *arguments)
    y, dx, grads = one_process(bias)
    for out, d_input, _ in results:
        torch.testing.assert_close(out, y, **CLOSE)
        torch.testing.assert_close(d_input, dx, **CLOSE)
    found = assemble(pieces for _, _, pieces in results)
    grads["b.out.weight"] = permuted_columns(grads["b.out.weight"], world_size)
    assert found.keys() == grads.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(torch.from_numpy(gradient), grads[name], **CLOSE, msg=name)


def saved_bytes(rank: int, world_size: int, sequence_parallel: bool) -> int:
    tp = grid(tp=world_size).tp
    column = ColumnParallelLinear(LinearSpec("a", (("w", 8),), 64, False, 0.1), options_of(tp, sequence_parallel))
    x = torch.ones(128 // (world_size if sequence_parallel else 1), 64, dtype=torch.float64, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, torch.nn.Parameter) and t.data_ptr() != column.weight.data_ptr():
            saved[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = column(x)
    y.sum().backward()
    return sum(saved.values())


def test_sequence_parallelism_saves_the_shard_not_the_gathered_input() -> None:
    assert run_ranks(saved_bytes, 2, False) == [128 * 64 * 8] * 2
    assert run_ranks(saved_bytes, 2, True) == [64 * 64 * 8] * 2


def test_a_replicated_parameter_is_counted_once() -> None:
    def specs(rank: int) -> list[bool]:
        tp = Axis("tp", 2, rank, (0, 1), group=object())  # type: ignore[arg-type]
        row = RowParallelLinear(LinearSpec("b", (("out", 4),), 4, True, 0.1), options_of(tp, True))
        assert row.bias is not None and spec_of(row.bias).partial_over == ("tp",)
        assert spec_of(row.weight).partial_over == () and not spec_of(row.bias).weight_decay
        return [spec_of(parameter).counted for parameter in (row.weight, row.bias)]

    assert specs(0) == [True, True] and specs(1) == [True, False]


def test_rows_that_do_not_divide_are_an_error_with_the_numbers() -> None:
    tp = Axis("tp", 4, 0, (0, 1, 2, 3), group=object())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="v: 6 rows over tp 4"):
        ColumnParallelLinear(LinearSpec("a", (("v", 6),), 4, False, 0.1), options_of(tp, True))
    with pytest.raises(AssertionError, match="b.out: 6 columns over tp 4"):
        RowParallelLinear(LinearSpec("b", (("out", 4),), 6, False, 0.1), options_of(tp, True))


def gathered_products(rank: int, world_size: int) -> None:
    """Two consumers of one gathered input: `gather_from` of the shard equals `copy_to` of the whole."""
    tp = grid(tp=world_size).tp
    x, weight = randn(8, 3, seed=1), randn(5, 3, seed=2 + rank)
    whole, shard = x.clone().requires_grad_(), slice_of(x, tp).clone().requires_grad_()
    for y in (copy_to(whole, tp) @ weight.t(), gather_from(shard, tp) @ weight.t()):
        y.square().sum().backward()
    assert whole.grad is not None and shard.grad is not None
    torch.testing.assert_close(slice_of(whole.grad, tp), shard.grad, **CLOSE)


def test_the_two_ways_into_a_column_product_have_the_same_gradient() -> None:
    run_ranks(gathered_products, 2)
