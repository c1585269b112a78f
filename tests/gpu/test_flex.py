"""The real FlexAttention and cuDNN kernels, compared with float64 on the CPU: run `pytest -m gpu`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import LocalAttention, WholeAttention
from megacp.attention.ops.kernel import Heads, Kernel, empty_partial
from megacp.attention.ops.kernels import kernel_problem, select_kernel
from megacp.attention.ops.mask import Metadata, allowed, tile_table
from tests.attention.ops.test_flex import mask_of, split
from tests.attention.ops.test_kernels import by_autograd, by_tiles
from tests.engine.backends.test_transformer_engine_attention import Case, by_parts, whole_row
from tests.reference.packs import metadata, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"
    ),
    pytest.mark.filterwarnings("default"),  # warnings of compilers are not errors
]


def errors(
    kernel: Kernel, tensors: list[torch.Tensor], meta: Metadata, cuts: list[int]
) -> list[float]:
    """Return errors of out, dq, dk, dv relative to the largest exact value of each.

    Keys are processed at once, then in parts in random order. `tensors` are on the CPU in any
    dtype, the kernel runs on the GPU, and the exact values are float64 on the CPU.
    """
    scale = tensors[0].shape[-1] ** -0.5
    exact = by_autograd([x.double() for x in tensors], allowed(meta, meta), scale)
    on_gpu, found = [x.cuda() for x in tensors], []
    for sources in ([(np.arange(len(meta)), tile_table(meta, meta))], split(meta, *cuts)):
        for got, expected in zip(by_tiles(kernel, on_gpu, sources, scale), exact, strict=True):
            assert got.dtype == torch.float32, "partial results are held in fp32"
            error = (got.cpu().double() - expected).abs().max() / expected.abs().max().clamp(
                min=1e-30
            )
            found.append(error.item())
    return found


@pytest.fixture(autouse=True)
def forget_compiled_forms() -> None:
    """Clear compiled forms before each test: their limit is for one model, not for all models of
    this file.
    """
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
    dtype: torch.dtype, heads: int, groups: int, width: int
) -> None:
    """Packs have documents, branches, spans and padding, and are one or several blocks long, with
    and without a partial block.
    """
    # fp32: 2^-24 times sums of 700 terms, and an approximate exp2; bf16: inputs, weights and parts
    # are rounded to 2^-9
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    kernel = select_kernel("auto", torch.device("cuda"))
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for tokens, documents in ((768, 2), (700, 5), (100, 3), (2, 1)):
        batch = random_batch(
            rng, tokens, documents=documents, branches=True, images=True, padding=documents > 2
        )
        meta = metadata(batch)
        full = mask_of(tile_table(meta, meta)).full_kv_num_blocks.sum()
        assert full > 0 or tokens < 768, "full blocks belong to the test"
        shapes = [(tokens, heads), (tokens, groups), (tokens, groups), (tokens, heads)]
        tensors = [torch.randn(*shape, width, generator=generator).to(dtype) for shape in shapes]
        cuts = [1, *sorted(rng.integers(1, tokens + 1, 2).tolist())]  # the first part has one key
        found = errors(kernel, tensors, meta, cuts)
        assert all(error < tolerance for error in found), (tokens, found)  # `max` ignores NaN


def test_rows_that_see_nothing_give_zero_and_lse_minus_infinity() -> None:
    """This holds in a block without any key, and next to rows with visible keys."""
    document = np.repeat([0, -1, 1, -1], [100, 200, 20, 60])
    meta = Metadata.of_documents(document)
    tensors = tuple(torch.randn(380, 2, 32, device="cuda") for _ in range(3))
    partial = empty_partial(tensors[0])
    select_kernel("flex", torch.device("cuda")).attend(
        partial, tensors, tile_table(meta, meta), 0.2
    )
    nothing = torch.from_numpy(document < 0)
    assert torch.equal((partial.lse == -torch.inf).cpu(), nothing[:, None].expand(-1, 2))
    assert (partial.out.cpu()[nothing] == 0).all() and partial.out.isfinite().all()


def test_packs_of_any_length_share_a_few_compiled_forms() -> None:
    """Same as on the CPU, with the guards of the real compiler and with a backward."""
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


@pytest.mark.parametrize("transport", [LocalAttention, WholeAttention])
@pytest.mark.parametrize("name", ["flex", "flex_flash"])
def test_a_layer_is_differentiated_through_the_kernel(
    transport: type[LocalAttention], name: str
) -> None:
    """Backward runs in autograd's separate thread for the GPU, which compiles the backward of
    parts.
    """
    dtype, tolerance = (torch.float32, 2e-5) if name == "flex" else (torch.bfloat16, 4e-2)
    problem = kernel_problem(name, "cuda", str(dtype)[6:])
    if problem:
        pytest.skip(problem)
    meta = metadata(
        random_batch(np.random.default_rng(1), 300, branches=True, images=True, padding=True)
    )
    plan = AttentionPlan(np.arange(300)[None], meta, 0, np.arange(300))
    tensors = [torch.randn(300, heads, 64).to(dtype) for heads in (4, 2, 2, 4)]
    q, k, v = (x.cuda().requires_grad_() for x in tensors[:3])
    chosen = transport(select_kernel(name, torch.device("cuda")))
    out = chosen.attend(q, k, v, plan, 0.2)
    out.backward(tensors[3].cuda())
    exact = by_autograd([x.double() for x in tensors], allowed(meta, meta), 0.2)
    for got, expected in zip((out.detach(), q.grad, k.grad, v.grad), exact, strict=True):
        assert (got.cpu().double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("heads", [Heads(8, 2, 128), Heads(4, 4, 64)])
def test_cudnns_kernel_is_near_float64_in_one_call_and_in_parts(heads: Heads) -> None:
    problem = kernel_problem("cudnn", "cuda", "bfloat16")
    if problem:
        pytest.skip(problem)
    told: list[str] = []
    kernel = select_kernel("cudnn", torch.device("cuda"), tell=told.append)
    case = Case((700, 60, 1, 300), 9, layout="zigzag", heads=heads, dtype=torch.bfloat16)
    wholes = [whole_row(kernel, "cuda", heads, torch.bfloat16, window) for window in (0, 17)]
    for found, exact in itertools.chain(by_parts(kernel, "cuda", case, 3), *wholes):
        assert (found - exact).abs().max() < 4e-2 * exact.abs().max()
    assert set(told) == {"attention: using cuDNN for documents with a causal mask"}, told
