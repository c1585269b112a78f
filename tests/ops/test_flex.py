"""The FlexAttention kernel: its block mask, its backward from merged results, and the real function where it runs.

On the CPU all but the fused GPU kernel is proven: the block mask is read the way that kernel reads it, by a dense
attention that is differentiated in float64; and torch's own `flex_attention` is run uncompiled, forward and backward.
The last tests need a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megacp.context_parallel.attention import core_attention
from megacp.context_parallel.local import LocalAttention
from megacp.context_parallel.plan import AttentionPlan
from megacp.distributed import launch
from megacp.distributed.grid import single_axis
from megacp.ops import flex
from megacp.ops.kernel import Kernel, Saved, empty_partial
from megacp.ops.kernels import kernel_name, select_kernel
from megacp.ops.mask import Metadata, TileTable, allowed, tile_table
from megacp.ops.tile_kernels import MathKernel
from megacp.train import REFUSED, main
from tests.ops.test_kernels import HEADS, by_autograd, by_tiles, draw, pack
from tests.reference.packs import metadata, random_batch

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-12, "atol": 1e-13}  # float64, sums of some 40 terms of order 1

uncompiled = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
"""The real function on the CPU is meant to be uncompiled here."""


def read(mask: BlockMask, by_keys: bool = False) -> np.ndarray:
    """bool `[queries, keys]` as the GPU kernel reads a block mask: listed blocks alone, the rule in partial ones alone.

    Its forward and dq walk the key blocks of each query block, dk and dv the query blocks of each key block.
    """
    queries, keys = mask.seq_lengths
    block_q, block_k = mask.BLOCK_SIZE
    side = "q" if by_keys else "kv"
    found = np.zeros((queries, keys), bool)
    for prefix in ("", "full_"):
        counts, indices = (getattr(mask, f"{prefix}{side}_{name}") for name in ("num_blocks", "indices"))
        for line, count in enumerate(counts[0, 0].tolist()):
            listed = indices[0, 0, line, :count].tolist()
            assert listed == sorted(set(listed)), "blocks of a line are listed once and in order"
            for other in listed:
                i, j = (other, line) if by_keys else (line, other)
                rows = torch.arange(i * block_q, min((i + 1) * block_q, queries))[:, None]
                columns = torch.arange(j * block_k, min((j + 1) * block_k, keys))[None]
                block = found[rows.numpy(), columns.numpy()]
                assert not block.any(), "a block is listed as full and as partial"
                if prefix:
                    assert block.shape == (block_q, block_k), "a full block may not stick out"
                    found[rows.numpy(), columns.numpy()] = True
                else:
                    zero = torch.zeros((), dtype=torch.int32)
                    found[rows.numpy(), columns.numpy()] = mask.mask_mod(zero, zero, rows, columns).numpy()
    return found


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """An `Attention` of plain torch, differentiated by autograd, that knows of the mask what the GPU kernel reads."""
    visible = torch.from_numpy(read(mask))
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    nothing = ~visible.any(1)
    scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    scores = scores.masked_fill(nothing[:, None], 0.0)
    out = torch.softmax(scores, -1).masked_fill(nothing[:, None], 0.0) @ values
    return out, torch.logsumexp(scores, -1).masked_fill(nothing, -torch.inf)


def split(meta: Metadata, *cuts: int, seed: int = 0) -> list[tuple[np.ndarray, TileTable]]:
    """Sources of keys `(indices, table)` of a pack: its tokens in random order, cut into parts."""
    parts = np.split(np.random.default_rng(seed).permutation(len(meta)), cuts)
    return [(index, tile_table(meta, meta.take(index))) for index in parts]


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8, 16]), st.booleans())
def test_a_block_mask_read_from_either_side_is_exactly_the_mask(seed: int, size: int, permuted: bool) -> None:
    """Would catch a block of the wrong kind, one left out, and a rule that differs between the host and the device."""
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(2, 60))
    flags = dict(zip(("branches", "images", "padding"), rng.random(3) < 0.7, strict=True))
    meta = metadata(random_batch(rng, tokens, documents=int(rng.integers(1, min(tokens, 5) + 1)), **flags))
    order = rng.permutation(tokens) if permuted else np.arange(tokens)
    q, k = meta.take(order[: rng.integers(1, tokens + 1)]), meta.take(order[rng.integers(0, tokens) :])
    mask = flex.block_mask(tile_table(q, k), CPU, size)
    assert mask.seq_lengths == (len(q), len(k)) and mask.BLOCK_SIZE == (size, size)
    for by_keys in (False, True):
        assert np.array_equal(read(mask, by_keys), allowed(q, k))


def test_padding_and_text_are_no_document_and_no_span_of_their_own() -> None:
    """Would catch -1 == -1 and 0 == 0 in the rule on the device."""
    padding = Metadata(np.array([-1, 0, -1, 0]), np.zeros(4, int), np.array([-1, 0, 0, 0]), np.arange(4))
    mask = flex.block_mask(tile_table(padding, padding), CPU)
    assert read(mask).nonzero()[0].tolist() == [1, 3, 3] and read(mask).nonzero()[1].tolist() == [1, 1, 3]


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("size", [4, 16, 128])
def test_forward_and_backward_equal_the_dense_mask(heads: int, groups: int, size: int) -> None:
    kernel = flex.FlexKernel(dense, size)
    for seed in range(4):
        meta = pack(seed)
        tensors = draw(40, 40, heads, groups, seed)
        found = by_tiles(kernel, tensors, [(np.arange(40), tile_table(meta, meta))], 8**-0.5)
        for got, expected in zip(found, by_autograd(tensors, allowed(meta, meta), 8**-0.5), strict=True):
            torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_backward_from_the_merged_result_is_exact_for_keys_in_several_parts(seed: int) -> None:
    """Would catch a part that is weighted wrongly, or the gradient of its lse left out: each alone is off by far."""
    meta, tensors = pack(seed + 5), draw(40, 40, 4, 2, seed)
    expected = by_autograd(tensors, allowed(meta, meta), 0.4)
    for cuts in ((7, 8, 30), (20,), (1, 2, 3, 39)):
        found = by_tiles(flex.FlexKernel(dense, 8), tensors, split(meta, *cuts, seed=seed), 0.4)
        for got, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(got, exact, **EXACT)


@pytest.mark.slow
@uncompiled
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (6, 1, 16), (2, 2, 8)])
def test_the_real_function_computes_the_parts(heads: int, groups: int, width: int) -> None:
    """Would catch an lse to the base 2, a scale or grouping misread, rows that see nothing not merged as such."""
    meta = pack(3)
    q, k, v = (torch.cat([x, -x], -1)[..., :width] for x in draw(40, 40, heads, groups)[:3])
    kernel = flex.FlexKernel(flex.with_lse(flex_attention), 8)
    partial, reference = empty_partial(q), empty_partial(q)
    for index, table in split(meta, 11, 25):
        kernel.attend(partial, (q, k[index], v[index]), table, 0.3)
        MathKernel().attend(reference, (q, k[index], v[index]), table, 0.3)
    assert (reference.lse == -torch.inf).any() and torch.isfinite(partial.out).all()
    torch.testing.assert_close(partial.out, reference.out, **EXACT)
    torch.testing.assert_close(partial.lse, reference.lse, **EXACT)


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift torch's refusal of gradients on the CPU: uncompiled, the function has a backward; it is only not offered."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.slow
@uncompiled
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_the_real_function_takes_the_gradients_of_both_results(backward_on_cpu: None, heads: int, groups: int) -> None:
    """Would catch a gradient of the lse in other units than torch expects."""
    meta, tensors = pack(5), draw(40, 40, heads, groups)
    expected = by_autograd(tensors, allowed(meta, meta), 0.4)
    kernel = flex.FlexKernel(flex.with_lse(flex_attention), 8)
    for got, exact in zip(by_tiles(kernel, tensors, split(meta, 7, 30), 0.4), expected, strict=True):
        torch.testing.assert_close(got, exact, **EXACT)


@pytest.mark.slow
@uncompiled
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # fp32: 2^-24 times sums of 40 terms; bf16: parts, their gradients and results rounded to 2^-9, as `flash` does
    [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)],
    ids=["fp32", "bf16"],
)
def test_lower_precisions_stay_near_float64_with_sums_in_float32(
    backward_on_cpu: None, dtype: torch.dtype, tolerance: float
) -> None:
    meta = pack(5)
    tensors = [x.to(dtype) for x in draw(40, 40, 4, 2)]
    exact = by_autograd([x.double() for x in tensors], allowed(meta, meta), 8**-0.5)
    found = by_tiles(flex.FlexKernel(flex.with_lse(flex_attention), 8), tensors, split(meta, 7, 30), 8**-0.5)
    for got, expected in zip(found, exact, strict=True):
        assert got.dtype == torch.float32
        assert (got.double() - expected).abs().max() < tolerance * expected.abs().max()


def test_rows_that_see_nothing_give_zero_output_lse_minus_infinity_and_zero_gradients() -> None:
    meta = Metadata(np.array([0, -1, 0, -1, 1]), np.zeros(5, int), np.zeros(5, int), np.arange(5))
    tensors = draw(5, 5, 4, 2)
    for sources in ([(np.arange(5), tile_table(meta, meta))], split(meta, 1, 3)):
        _, *grads = by_tiles(flex.FlexKernel(dense), tensors, sources, 1.0)
        for grad in grads:
            assert grad.isfinite().all() and (grad[[1, 3]] == 0).all()
        partial = empty_partial(tensors[0])
        for index, table in sources:
            flex.FlexKernel(dense).attend(partial, (tensors[0], tensors[1][index], tensors[2][index]), table, 1.0)
        assert (partial.out[[1, 3]] == 0).all() and (partial.lse[[1, 3]] == -torch.inf).all()


def test_a_source_that_nobody_sees_costs_no_call_and_changes_nothing() -> None:
    def never(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("called")

    meta, (q, k, v, dout) = pack(1), draw(40, 40, 4, 2)
    nobody = Metadata(*[np.full(40, -1)] * 3, np.arange(40))
    kernel, partial = flex.FlexKernel(never), empty_partial(q)
    for keys, table in ((40, tile_table(nobody, meta)), (0, tile_table(meta, meta.take(np.arange(0))))):
        kernel.attend(partial, (q, k[:keys], v[:keys]), table, 1.0)
        kernel.attend_backward(Saved(q, partial.out, partial.lse, dout), (k[:keys], v[:keys]), table, 1.0, (q, k, v))
    assert partial.untouched and (partial.out == 0).all()


def test_strided_keys_are_read_and_gradients_are_added_to_views() -> None:
    meta = pack(2)
    table, (q, k, v, dout) = tile_table(meta, meta), draw(40, 40, 4, 2)
    expected = by_autograd([q, k, v, dout], allowed(meta, meta), 0.5)
    both = torch.cat([k, v], -1)
    keys, values = both.chunk(2, -1)
    assert not keys.is_contiguous()
    kernel, partial = flex.FlexKernel(dense, 16), empty_partial(q)
    kernel.attend(partial, (q, keys, values), table, 0.5)
    torch.testing.assert_close(partial.out, expected[0], **EXACT)
    dq, dkv = torch.ones_like(q), torch.ones_like(both)
    saved = Saved(q, partial.out, partial.lse, dout)
    kernel.attend_backward(saved, (keys, values), table, 0.5, (dq, *dkv.chunk(2, -1)))
    for got, exact in zip((dq, *dkv.chunk(2, -1)), expected[1:], strict=True):
        torch.testing.assert_close(got - 1, exact, rtol=1e-12, atol=1e-12)


def test_a_layer_is_differentiated_through_the_kernel() -> None:
    """Would catch a backward that works when called but not inside autograd's own, where no graph is recorded."""
    meta = pack(4)
    tensors = draw(40, 40, 4, 2)
    plan = AttentionPlan(np.arange(40)[None], meta, 0, np.arange(40))
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    transport = LocalAttention(single_axis("cp"), flex.FlexKernel(dense, 8))
    out = core_attention(q, k, v, transport=transport, plan=plan, scale=0.3)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3]))
    for got, exact in zip(found, by_autograd(tensors, allowed(meta, meta), 0.3), strict=True):
        torch.testing.assert_close(got, exact, **EXACT)


def test_the_block_mask_of_a_table_is_built_once_and_dropped_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch planning in every layer, and masks that pile up from pack to pack."""
    built: list[TileTable] = []
    cover = flex.block_cover
    monkeypatch.setattr(flex, "block_cover", lambda table, size: built.append(len(table.q)) or cover(table, size))
    meta, kernel = pack(1), flex.FlexKernel(dense)
    tables = [tile_table(meta, meta), tile_table(meta, meta)]
    for _ in range(3):
        for table in tables:
            by_tiles(kernel, draw(40, 40, 4, 2), [(np.arange(40), table)], 0.3)
    assert len(built) == 2 and len(kernel._masks) == 2
    del table, tables
    gc.collect()
    assert len(kernel._masks) == 0


class Compilations:
    """A compiler that runs the captured graph as it is, and counts how often it was asked."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.number += 1
        return graph.forward


@pytest.mark.slow
def test_packs_of_any_length_share_a_few_compiled_forms() -> None:
    """Would catch a value of the pack that is compiled in: training then compiles at every step, and stops at the
    limit.
    """
    compiler = Compilations()
    kernel = flex.FlexKernel(flex.compiled(compiler))
    rng = np.random.default_rng(0)
    numbers = []
    for tokens in [512, 512, *rng.integers(257, 900, 8).tolist()]:
        meta = metadata(random_batch(rng, tokens, branches=True, images=True, padding=True))
        q, k, v, _ = (x.float() for x in draw(tokens, tokens, 2, 1, tokens))
        partial = empty_partial(q)
        kernel.attend(partial, (q, k, v), tile_table(meta, meta), 0.3)
        numbers.append(compiler.number)
    assert numbers == [1, 1] + [2] * 8, "one form for the first length and one for all others"


def test_auto_means_the_fastest_kernel_that_is_exact_and_others_are_refused() -> None:
    found = {(d, t): kernel_name("auto", d, t) for d in ("cpu", "cuda", "xpu") for t in ("bfloat16", "float64")}
    assert found == {
        ("cpu", "bfloat16"): "flash",
        ("cpu", "float64"): "flash",
        ("cuda", "bfloat16"): "flex",
        ("cuda", "float64"): "math",
        ("xpu", "bfloat16"): "math",
        ("xpu", "float64"): "math",
    }
    assert kernel_name("dense", "cpu") == "dense" and kernel_name("math", "cuda", "float64") == "math"
    assert isinstance(select_kernel("auto", torch.device("cuda")), flex.FlexKernel)
    with pytest.raises(ValueError, match="--attention-kernel flex runs on CUDA, this run is on cpu; choose auto or"):
        select_kernel("flex", CPU)
    with pytest.raises(ValueError, match="--attention-kernel flash runs on the CPU, this run is on cuda"):
        kernel_name("flash", "cuda")
    with pytest.raises(ValueError, match="--attention-kernel flex adds up in float32, this run has --dtype float64"):
        kernel_name("flex", "cuda", "float64")


def test_a_kernel_for_another_device_is_refused_before_the_run_starts_with_all_other_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(launch, "device_type", lambda world: "cpu")
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("the run has started"))
    assert main(["--attention-kernel", "flex", "--vocab-size", "101", "--lr", "1e-4", "--min-lr", "1e-3"]) == REFUSED
    told = capsys.readouterr().err
    assert "--attention-kernel flex runs on CUDA, this run is on cpu" in told and "--min-lr 0.001" in told


def test_flex_is_refused_where_nothing_is_compiled() -> None:
    """Would catch the scores of all pairs, which the operator makes without its kernel."""
    with torch._dynamo.config.patch(disable=True), pytest.raises(ValueError, match="TORCH_COMPILE_DISABLE turns off"):
        flex.compiled()


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
    pytest.mark.filterwarnings("default"),  # compilers warn as they like
]


def errors(kernel: Kernel, tensors: list[torch.Tensor], meta: Metadata, cuts: list[int]) -> list[float]:
    """Errors of out, dq, dk, dv over the largest exact value of each: all keys at once, then in random order in parts.

    `tensors` are on the CPU in any dtype, the kernel runs on the GPU, the exact values are float64 on the CPU.
    """
    scale = tensors[0].shape[-1] ** -0.5
    exact = by_autograd([x.double() for x in tensors], allowed(meta, meta), scale)
    on_gpu, found = [x.cuda() for x in tensors], []
    for sources in ([(np.arange(len(meta)), tile_table(meta, meta))], split(meta, *cuts)):
        for got, expected in zip(by_tiles(kernel, on_gpu, sources, scale), exact, strict=True):
            assert got.dtype == torch.float32, "partial results are held in fp32"
            error = (got.cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
            found.append(error.item())
    return found


class TestOnAGpu:
    """The fused kernel itself, against float64 on the CPU."""

    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def forget_compiled_forms(self) -> None:
        """The limit on compiled forms is for one model, not for all models of this file."""
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("dtype", "heads", "groups", "width"),
        [
            (torch.bfloat16, 4, 2, 64),
            (torch.bfloat16, 6, 1, 128),
            (torch.bfloat16, 2, 2, 80),
            (torch.float32, 4, 2, 64),
            (torch.float32, 4, 4, 8),
        ],
    )
    def test_forward_and_backward_are_near_float64(
        self, dtype: torch.dtype, heads: int, groups: int, width: int
    ) -> None:
        """Documents, branches, spans and padding, in packs of one block and of several, cut by the end and not."""
        # fp32: 2^-24 times sums of 700 terms, and an approximate exp2; bf16: inputs, weights and parts rounded to 2^-9
        tolerance = 2e-5 if dtype == torch.float32 else 4e-2
        kernel = select_kernel("auto", torch.device("cuda"))
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        for tokens, documents in ((768, 2), (700, 5), (100, 3), (2, 1)):
            batch = random_batch(rng, tokens, documents=documents, branches=True, images=True, padding=documents > 2)
            meta = metadata(batch)
            full = flex.block_mask(tile_table(meta, meta), CPU).full_kv_num_blocks.sum()
            assert full > 0 or tokens < 768, "full blocks belong to the test"
            shapes = [(tokens, heads), (tokens, groups), (tokens, groups), (tokens, heads)]
            tensors = [torch.randn(*shape, width, generator=generator).to(dtype) for shape in shapes]
            cuts = [1, *sorted(rng.integers(1, tokens + 1, 2).tolist())]  # the first part has one key
            found = errors(kernel, tensors, meta, cuts)
            assert all(error < tolerance for error in found), (tokens, found)  # `max` passes over a NaN

    def test_rows_that_see_nothing_give_zero_and_lse_minus_infinity(self) -> None:
        """In a block without any key, and beside rows that see some."""
        document = np.repeat([0, -1, 1, -1], [100, 200, 20, 60])
        meta = Metadata(document, np.zeros(380, int), np.zeros(380, int), np.arange(380))
        tensors = tuple(torch.randn(380, 2, 32, device="cuda") for _ in range(3))
        partial = empty_partial(tensors[0])
        select_kernel("flex", torch.device("cuda")).attend(partial, tensors, tile_table(meta, meta), 0.2)
        nothing = torch.from_numpy(document < 0)
        assert torch.equal((partial.lse == -torch.inf).cpu(), nothing[:, None].expand(-1, 2))
        assert (partial.out.cpu()[nothing] == 0).all() and partial.out.isfinite().all()

    def test_packs_of_any_length_share_a_few_compiled_forms(self) -> None:
        """As on the CPU, with the guards of the real compiler and the backward."""
        torch._dynamo.utils.counters.clear()
        kernel = select_kernel("flex", torch.device("cuda"))
        rng = np.random.default_rng(0)
        numbers = []
        for tokens in [512, 512, *rng.integers(257, 900, 8).tolist()]:
            meta = metadata(random_batch(rng, tokens, branches=True, images=True, padding=True))
            tensors = [torch.randn(tokens, heads, 64, device="cuda") for heads in (4, 2, 2, 4)]
            by_tiles(kernel, tensors, [(np.arange(tokens), tile_table(meta, meta))], 0.125)
            numbers.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert numbers[1] == numbers[0] and len(set(numbers[3:])) == 1, numbers

    def test_a_layer_is_differentiated_through_the_kernel(self) -> None:
        """The backward runs in autograd's own thread for the GPU and there compiles and differentiates again."""
        meta = metadata(random_batch(np.random.default_rng(1), 300, branches=True, images=True, padding=True))
        plan = AttentionPlan(np.arange(300)[None], meta, 0, np.arange(300))
        tensors = [torch.randn(300, heads, 32) for heads in (4, 2, 2, 4)]
        q, k, v = (x.cuda().requires_grad_() for x in tensors[:3])
        transport = LocalAttention(single_axis("cp"), select_kernel("auto", torch.device("cuda")))
        out = core_attention(q, k, v, transport=transport, plan=plan, scale=0.2)
        out.backward(tensors[3].cuda())
        exact = by_autograd([x.double() for x in tensors], allowed(meta, meta), 0.2)
        for got, expected in zip((out.detach(), q.grad, k.grad, v.grad), exact, strict=True):
            assert (got.cpu().double() - expected).abs().max() <= 2e-5 * expected.abs().max()
