"""Column- and row-parallel linears compared with one product: values and gradients, with and
without sequence parallelism.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megacp.distributed.collectives import all_gather, all_reduce
from megacp.distributed.differentiable import slice_of
from megacp.distributed.grid import Axis
from megacp.engine.backends import apex
from megacp.engine.backends.select import backend_problems, select_backend
from megacp.engine.config.model import PairSize
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.layers import table
from megacp.engine.layers.table import Linear
from megacp.engine.step.step import ParallelModel
from megacp.engine.tensor_parallel.linear import (
    ColumnNorm,
    ColumnParallelLinear,
    LinearSpec,
    RowParallelLinear,
    product,
)
from megacp.engine.tensor_parallel.lora import ColumnPairs, DropoutNames, LoraSpec, RowPair, adapted
from megacp.engine.tensor_parallel.parameters import LinearOptions
from megacp.engine.tensor_parallel.weight_gradients import (
    DeferredWeightGradients,
    WeightGradients,
    WeightProduct,
    add_weight_gradient,
)
from megacp.training.data.mock import MockRules, mock_batch
from megacp.verify.cases import MODELS
from tests.ranks import grid, run_ranks
from tests.reference.sharding import Pieces, assemble, fill, pieces_of
from tests.reference.training import config_of as config_of_values

TOKENS, WIDTH, OUTPUTS, OUT = 8, 6, [("q", 16), ("k", 8), ("v", 4)], 10

CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of a few dozen terms


def options_of(tp: Axis, sequence_parallel: bool) -> LinearOptions:
    return LinearOptions(tp, sequence_parallel and tp.size > 1, torch.float64, torch.device("cpu"))


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def global_tensors() -> dict[str, Tensor]:
    """Return weights and biases of both layers; the row layer uses the column layer's outputs."""
    wide = sum(rows for _, rows in OUTPUTS)
    tensors = {
        f"a.{name}.weight": randn(rows, WIDTH, seed=i) for i, (name, rows) in enumerate(OUTPUTS)
    }
    tensors |= {
        f"a.{name}.bias": randn(rows, seed=20 + i) for i, (name, rows) in enumerate(OUTPUTS)
    }
    tensors |= {"b.out.weight": randn(OUT, wide, seed=10), "b.out.bias": randn(OUT, seed=30)}
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def one_process() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the output, the gradient of x, and gradients by name, for `row(tanh(column(x)))`."""
    tensors, x = global_tensors(), randn(TOKENS, WIDTH, seed=40).requires_grad_()
    weight = torch.cat([tensors[f"a.{name}.weight"] for name, _ in OUTPUTS])
    hidden = x @ weight.t() + torch.cat([tensors[f"a.{name}.bias"] for name, _ in OUTPUTS])
    y = torch.tanh(hidden) @ tensors["b.out.weight"].t() + tensors["b.out.bias"]
    grads = torch.autograd.grad(y, [x, *tensors.values()], randn(TOKENS, OUT, seed=41))
    return y.detach(), grads[0], dict(zip(tensors, grads[1:], strict=True))


def permuted_columns(tensor: Tensor, size: int) -> Tensor:
    """Reorder the row layer's weight columns like the fused outputs of the ranks.

    Each rank has its q, then k, then v.
    """
    starts = np.cumsum([0] + [rows for _, rows in OUTPUTS])
    order = [
        np.arange(start + rank * rows // size, start + (rank + 1) * rows // size)
        for rank in range(size)
        for start, (_, rows) in zip(starts, OUTPUTS, strict=False)
    ]
    return tensor[:, np.concatenate(order)]


def on_ranks(rank: int, world_size: int, sequence_parallel: bool) -> tuple[Tensor, Tensor, Pieces]:
    tp = grid(tp=world_size).tp
    options = options_of(tp, sequence_parallel)
    column = ColumnParallelLinear(
        LinearSpec("a", {n: Linear(WIDTH, rows, 0.02, True) for n, rows in OUTPUTS}), options
    )
    last = Linear(sum(n for _, n in OUTPUTS), OUT, 0.02, True, "columns")
    row = RowParallelLinear(LinearSpec("b", {"out": last}), options)
    tensors = {name: tensor.detach() for name, tensor in global_tensors().items()}
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


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_then_row_equals_one_process(world_size: int, sequence_parallel: bool) -> None:
    """This catches a missing or repeated reduction of dx or of a bias, and a fused weight that is
    split across its tensors.
    """
    results = run_ranks(on_ranks, world_size, sequence_parallel)
    y, dx, grads = one_process()
    for out, d_input, _ in results:
        torch.testing.assert_close(out, y, **CLOSE)
        torch.testing.assert_close(d_input, dx, **CLOSE)
    found = assemble(pieces for _, _, pieces in results)
    grads["b.out.weight"] = permuted_columns(grads["b.out.weight"], world_size)
    assert found.keys() == grads.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(torch.from_numpy(gradient), grads[name], **CLOSE, msg=name)


def test_a_replicated_parameter_is_counted_once() -> None:
    def specs(rank: int) -> list[bool]:
        tp = Axis("tp", 2, rank, (0, 1), group=object())  # type: ignore[arg-type]
        row = RowParallelLinear(
            LinearSpec("b", {"out": Linear(4, 4, 0.1, True, "columns")}), options_of(tp, True)
        )
        assert row.bias is not None and spec_of(row.bias).partial_over == ("tp",)
        assert spec_of(row.weight).partial_over == () and not spec_of(row.bias).weight_decay
        return [spec_of(parameter).counted for parameter in (row.weight, row.bias)]

    assert specs(0) == [True, True] and specs(1) == [True, False]


def normed(rank: int, world_size: int) -> list[Tensor]:
    """Return output and gradients of a norm over columns that are sharded over the ranks."""
    tp = grid(tp=world_size).tp
    norm = ColumnNorm(table.Tensor("n.weight", (6,), "rows", "ones"), 1e-3, options_of(tp, False))
    fill(norm, {"n.weight": randn(6, seed=3)})
    x, v = (
        randn(5, 6, seed=seed).chunk(world_size, 1)[rank].clone().requires_grad_()
        for seed in (1, 2)
    )
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, norm.weight], v)]


def test_a_norm_over_columns_equals_one_process() -> None:
    x, weight = randn(5, 6, seed=1).requires_grad_(), randn(6, seed=3).requires_grad_()
    y = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    expected = [y.detach(), *torch.autograd.grad(y, [x, weight], randn(5, 6, seed=2))]
    for found, one in zip(zip(*run_ranks(normed, 2), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(found, -1), one, **CLOSE)


PAIRS = LoraSpec(
    {
        "a.q": PairSize(3, 7.5),
        "a.k": PairSize(3, 7.5, "q"),
        "a.v": PairSize(2, 8.0),
        "b.out": PairSize(3, 7.5),
    }
)
RANKS = {"q": 3, "k": 3, "v": 2}
FROZEN = {f"a.{name}.weight": randn(rows, WIDTH, seed=i) for i, (name, rows) in enumerate(OUTPUTS)}
FROZEN["b.out.weight"] = randn(OUT, 8, seed=3)
LOW = {
    f"a.{name}.lora_{m}.weight": randn(*shape, seed=8)
    for name, rows in OUTPUTS
    for m, shape in (("A", (RANKS[name], WIDTH)), ("B", (rows, RANKS[name])))
}
LOW |= {"b.out.lora_A.weight": randn(3, 8, seed=9), "b.out.lora_B.weight": randn(OUT, 3, seed=10)}


def low_rank(
    rank: int, world_size: int, parallel: bool, dropout: float
) -> tuple[list[Tensor], list[Tensor], Pieces]:
    """Return outputs and input gradients of a column- and a row-parallel linear with LoRA pairs,
    and the pairs' gradients.
    """
    tp = grid(tp=world_size).tp
    options = dataclasses.replace(options_of(tp, parallel), trained=False)
    outputs = {name: Linear(WIDTH, rows, 0.1) for name, rows in OUTPUTS}
    specs = LinearSpec("a", outputs), LinearSpec("b", {"out": Linear(8, OUT, 0.1, cut="columns")})
    lora = dataclasses.replace(PAIRS, dropout=dropout)
    column = adapted(ColumnParallelLinear(specs[0], options), specs[0], ColumnPairs, lora, options)
    row = adapted(RowParallelLinear(specs[1], options), specs[1], RowPair, lora, options)
    module = torch.nn.ModuleList([column, row])
    fill(module, FROZEN | LOW)

    def own(x: Tensor) -> Tensor:
        return slice_of(x, tp) if parallel else x

    for linear in (column, row):
        linear.names = DropoutNames(7, own(torch.arange(TOKENS)), torch.arange(TOKENS))
    x, wide = (
        own(randn(TOKENS, WIDTH, seed=40)).clone(),
        randn(TOKENS, 8, seed=41).chunk(world_size, 1)[rank].clone(),
    )
    upstream = [
        x.chunk(world_size, 1)[rank]
        for x in randn(TOKENS, 28, seed=42).split([n for _, n in OUTPUTS], 1)
    ]
    trained = [p for p in module.parameters() if p.requires_grad]
    y, z = column(x.requires_grad_()), row(wide.requires_grad_())
    dx, dwide, *grads = torch.autograd.grad(
        [y, z], [x, wide, *trained], [torch.cat(upstream, 1), own(randn(TOKENS, OUT, seed=43))]
    )
    summed = {
        p: all_reduce(g, tp) if spec_of(p).partial_over == ("tp",) else g
        for p, g in zip(trained, grads, strict=True)
    }
    frozen = {p: torch.zeros_like(p) for p in module.parameters() if not p.requires_grad}
    whole = [all_gather(t.contiguous(), tp) if parallel else t for t in (z.detach(), dx)]
    columns = [
        all_gather(t.t().contiguous(), tp).t()
        for t in (*y.detach().split([n // world_size for _, n in OUTPUTS], 1), dwide)
    ]
    return whole, columns, pieces_of(module, summed | frozen)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_low_rank_pairs_equal_one_process(parallel: bool, dropout: float) -> None:
    one = low_rank(0, 1, False, dropout)
    if not dropout:
        x, delta = (
            randn(TOKENS, WIDTH, seed=40),
            LOW["a.q.lora_B.weight"] @ LOW["a.q.lora_A.weight"],
        )
        torch.testing.assert_close(one[1][0], x @ (FROZEN["a.q.weight"] + 2.5 * delta).t(), **CLOSE)
        delta = LOW["a.k.lora_B.weight"] @ LOW["a.q.lora_A.weight"]  # q and k share A
        torch.testing.assert_close(one[1][1], x @ (FROZEN["a.k.weight"] + 2.5 * delta).t(), **CLOSE)
        delta = (
            LOW["a.v.lora_B.weight"] @ LOW["a.v.lora_A.weight"]
        )  # the A matrix of another linear, with another scale, in the same product
        torch.testing.assert_close(one[1][2], x @ (FROZEN["a.v.weight"] + 4.0 * delta).t(), **CLOSE)
        wide, delta = (
            randn(TOKENS, 8, seed=41),
            LOW["b.out.lora_B.weight"] @ LOW["b.out.lora_A.weight"],
        )
        torch.testing.assert_close(
            one[0][0], wide @ (FROZEN["b.out.weight"] + 2.5 * delta).t(), **CLOSE
        )
    results = run_ranks(low_rank, 2, parallel, dropout)
    for whole, columns, _ in results:
        torch.testing.assert_close([*whole, *columns], [*one[0], *one[1]], **CLOSE)
    found, expected = assemble(pieces for *_, pieces in results), assemble([one[2]])
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], **CLOSE, err_msg=name)


SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 64,
    "seq_length": 64,
    "add_qkv_bias": True,
    "add_mlp_bias": True,
    "dtype": "float64",
    "ddp_bucket_size": 2000,
}
MICROBATCHES = 5


def config_of(shape: dict[str, int], settings: dict[str, Any]) -> RunConfig:
    chunks = {"num_virtual_stages_per_pipeline_rank": shape.get("chunks", 1)}
    return config_of_values({**SIZES, **chunks, **settings}, shape)


def gradients(
    rank: int, world: int, shape: dict[str, int], settings: dict[str, Any]
) -> tuple[float, list[np.ndarray]]:
    """Return loss and summed gradients for microbatches of several lengths, after running the same
    step twice.

    The gradients are this rank's slices.
    """
    model = ParallelModel(
        config_of(shape, settings), grid(**{k: n for k, n in shape.items() if k != "chunks"})
    )
    first = (rank // (shape.get("tp", 1) * shape.get("cp", 1))) % shape.get("dp", 1) * MICROBATCHES
    batches = [
        mock_batch([first + i], MockRules(SIZES["vocab_size"], 64 + 32 * (i % 3), mask="mixed"))
        for i in range(MICROBATCHES)
    ]
    for _ in range(2):  # the second step starts with the state that the first step has left
        model.parameters.zero()
        loss = model.gradients(batches, 1, 100.0)
    return loss, [
        model.parameters.grad_shard(i).numpy().copy() for i in range(len(model.parameters.shards))
    ]


def assert_same(shape: dict[str, int], settings: dict[str, Any], change: dict[str, Any]) -> None:
    """In float64, with the same products, only the order of two sums differs."""
    world = int(np.prod([n for name, n in shape.items() if name != "chunks"], dtype=int))
    plain, other = (
        run_ranks(gradients, world, shape, {**settings, **more}) for more in ({}, change)
    )
    for (loss, expected), (found_loss, found) in zip(plain, other, strict=True):
        assert found_loss == loss
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ({}, {"recompute_granularity": "selective"}),
        ({"tp": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": False, "mlp_chunk_tokens": 10}),
        ({"dp": 2}, {"recompute_granularity": "full"}),
        ({"pp": 2}, {"recompute_granularity": "selective", "mlp_chunk_tokens": 10}),
    ],
)
def test_fused_gradients_are_those_of_autograd(
    shape: dict[str, int], settings: dict[str, Any]
) -> None:
    assert_same(shape, settings, {"gradient_accumulation_fusion": True})


def test_a_tied_table_that_is_used_twice_stays_with_autograd() -> None:
    """Its first gradient would otherwise be treated as its last."""
    assert_same(
        {}, {"untie_embeddings_and_output_weights": False}, {"gradient_accumulation_fusion": True}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ({"pp": 4}, {"recompute_granularity": "selective"}),
        ({"pp": 2, "chunks": 2}, {"recompute_granularity": "full"}),
        ({"pp": 2, "tp": 2}, {"sequence_parallel": False, "hidden_dropout": 0.1}),
        ({"pp": 2, "cp": 2}, {"cp_comm_type": "a2a"}),
        ({"pp": 2, "dp": 2}, {}),
        ({"pp": 3}, {"activation_offload": 1.0}),
        ({"pp": 2}, {"qk_layernorm": "head", "norm_position": "after"}),
    ],
)
def test_deferred_gradients_are_those_of_1f1b(
    shape: dict[str, int], settings: dict[str, Any]
) -> None:
    assert_same(shape, {"num_layers": 4, **settings}, {"pipeline_schedule": "zero_bubble"})


def fused_launches(rank: int, world: int) -> list[int]:
    """Return the buckets whose reduction has started before `finish`, without and with fusion."""
    found = []
    for fused in (False, True):
        model = ParallelModel(
            config_of({}, {"gradient_accumulation_fusion": fused}), grid(dp=world)
        )
        batch = mock_batch([rank], MockRules(SIZES["vocab_size"], SIZES["seq_length"]))
        finish, pending = model.parameters.finish, model.parameters

        def counted(finish: Any = finish, pending: Any = pending) -> None:
            found.append(len(pending._pending))
            finish()

        model.parameters.finish = counted  # type: ignore[method-assign]
        model.gradients([batch], 1, 1.0)
    return found


def test_buckets_are_reduced_during_backward_as_before() -> None:
    for without, with_fusion in run_ranks(fused_launches, 2):
        assert with_fusion == without > 4


def test_halves_are_added_to_a_float32_total() -> None:
    grad, x = torch.randn(6, 4, dtype=torch.bfloat16), torch.randn(6, 3, dtype=torch.bfloat16)
    total = torch.ones(4, 3)
    add_weight_gradient(total, grad, x)
    torch.testing.assert_close(total, 1 + (grad.t() @ x).float(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (2, 5, 3)])
def test_a_weight_in_a_bucket_or_not_takes_any_number_of_rows(shape: tuple[int, ...]) -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(shape, requires_grad=True)
    product(x, weight, WeightGradients()).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().flatten(0, -2).sum(0).expand(4, 3))
    weight.main_grad, weight.gradient_added = torch.zeros(4, 3), lambda _: None  # type: ignore[attr-defined]
    y = product(x, weight, WeightGradients())
    assert torch.equal(y, x @ weight.t())
    y.sum().backward()
    torch.testing.assert_close(weight.main_grad, weight.grad)  # type: ignore[attr-defined]
    assert x.grad is not None and x.grad.shape == shape


class Kernel:
    """Replace apex's extension."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        assert x.is_contiguous() and grad.is_contiguous()
        total.add_((grad.t() @ x).float())


def test_apexes_kernel_gets_its_arguments_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for status in ("absent", "impostor", "nvidia"):
        monkeypatch.setattr(apex, "apex_status", lambda status=status: status)
        assert apex.weight_gradient_kernel() is None
    monkeypatch.setattr(apex, "find_spec", lambda name: object())
    monkeypatch.setattr(apex, "import_module", lambda name: Kernel)
    add = apex.weight_gradient_kernel()
    assert add is not None
    total, grad, x = torch.zeros(4, 3), torch.randn(4, 6).t(), torch.randn(6, 3)
    add(total, grad, x)
    torch.testing.assert_close(total, grad.t() @ x)


def sinks(rank: int, world: int) -> list[bool]:
    """Return whether gradients are deferred: by the backend, and by its vision tower."""
    values = {
        **MODELS["tiny_vlm"],
        "pipeline_model_parallel_size": world,
        "pipeline_schedule": "zero_bubble",
    }
    backend = select_backend(with_values(RunConfig(), values), grid(pp=world))
    options = (backend.options, backend.tower("vision").options)  # type: ignore[attr-defined]
    return [option.weight_gradients.deferred for option in options]


def test_nothing_waits_where_nobody_is_waited_for() -> None:
    assert run_ranks(sinks, 2) == [[False, False], [True, False]]


def products(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the gradient of a weight over two microbatches with inputs sharded over tp.

    It is computed with deferred products and by autograd.
    """
    tp = grid(tp=world).tp
    generator = torch.Generator().manual_seed(rank)
    weight = torch.nn.Parameter(
        torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    )
    inputs = [torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(2)]
    for x in inputs:
        product(x, weight, None, tp, "gather").square().sum().backward()
    expected = weight.grad
    assert expected is not None
    weight.grad, told = None, []
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    weight.gradient_added = lambda weight: told.append(len(told))  # type: ignore[attr-defined]
    later = DeferredWeightGradients()
    for number, x in enumerate(inputs):
        product(x, weight, later, tp, "gather").square().sum().backward()
        assert weight.grad is None
        later.keep((number, 0))
    assert not weight.main_grad.any()  # type: ignore[attr-defined]
    later.add((0, 0), last=False)
    assert not told
    later.add((1, 0), last=True)
    return weight.main_grad.detach(), expected, told  # type: ignore[attr-defined]


def test_an_input_that_tp_ranks_share_is_gathered_when_its_product_comes() -> None:
    for found, expected, told in run_ranks(products, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert told == [0]


def test_a_weight_with_several_products_is_told_once_after_the_last() -> None:
    weight, told = torch.nn.Parameter(torch.zeros(2, 2)), []
    weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
    weight.gradient_added = lambda weight: told.append(weight.main_grad.sum().item())  # type: ignore[attr-defined]
    later = DeferredWeightGradients()
    for _ in range(3):
        later.take(WeightProduct(weight, torch.ones(1, 2), torch.ones(1, 2)))
    later.keep((0, 0))
    later.add((0, 0), last=True)
    assert told == [12.0]


def test_transformer_engines_layers_are_refused_by_name() -> None:
    asked = {
        "transformer_impl": "transformer_engine",
        "dtype": "bfloat16",
        "pipeline_schedule": "zero_bubble",
    }
    (reason,) = backend_problems(config_of({"pp": 2}, asked), None)
    assert (
        "--pipeline-schedule zero_bubble defers weight gradients, which only native layers support"
        in reason
    )
