"""The FlexAttention kernel: its block mask, its backward from merged results, and the real function
where it runs.

On the CPU everything except the fused GPU kernel is tested. A dense float64 attention with autograd
reads the block mask in the same way as the GPU kernel. torch's own `flex_attention` runs
uncompiled, forward and backward. The kernel itself is tested in tests/gpu.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)

from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import LocalAttention, WholeAttention
from megacp.attention.ops import flex
from megacp.attention.ops.kernel import Saved, empty_partial
from megacp.attention.ops.kernels import auto_kernel, kernel_name, select_kernel
from megacp.attention.ops.mask import UNLIMITED, Metadata, Reach, TileTable, allowed, tile_table
from megacp.distributed.grid import single_axis
from megacp.engine.config.training import RECOMPUTE_MODES
from megacp.engine.models.recompute import run_block
from megacp.engine.save import Save
from megacp.train import main
from megacp.training.start import launch
from megacp.training.start.status import REFUSED
from tests.attention.ops.test_kernels import (
    CAPS_AND_SINKS,
    HEADS,
    by_autograd,
    by_tiles,
    draw,
    pack,
)
from tests.reference.packs import metadata, random_batch

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-12, "atol": 1e-13}  # float64, sums of some 40 terms of order 1

TRITON, ROOT = Path(sys.prefix) / "triton", Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    not TRITON.is_dir(), reason=f"needs Triton in {TRITON}: make setup"
)

uncompiled = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning"
)
"""The real function runs uncompiled on the CPU here."""


def mask_of(table: TileTable, size: int = flex.BLOCK) -> BlockMask:
    return flex.block_mask(flex.host_mask(table, size), CPU)


def read(mask: BlockMask, by_keys: bool = False) -> np.ndarray:
    """Return bool `[queries, keys]` as the GPU kernel reads a block mask: only listed blocks, with
    the rule only in partial blocks.

    Forward and dq iterate over the key blocks of each query block; dk and dv iterate over the query
    blocks of each key block.
    """
    queries, keys = mask.seq_lengths
    block_q, block_k = mask.BLOCK_SIZE
    side = "q" if by_keys else "kv"
    found = np.zeros((queries, keys), bool)
    for prefix in ("", "full_"):
        counts, indices = (
            getattr(mask, f"{prefix}{side}_{name}") for name in ("num_blocks", "indices")
        )
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
                    found[rows.numpy(), columns.numpy()] = mask.mask_mod(
                        zero, zero, rows, columns
                    ).numpy()
    return found


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    kernel_options: FlexKernelOptions,
    return_aux: AuxRequest | None,
    score_mod: Callable[..., torch.Tensor] = lambda score: score,
) -> Any:
    """`flex_attention` in plain torch with autograd; it knows of the mask only the parts that the
    GPU kernel reads.
    """
    visible = torch.from_numpy(read(block_mask))
    assert enable_gqa and visible.shape == (q.shape[2], k.shape[2])
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    nothing = ~visible.any(1)
    scores = score_mod(q @ keys.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    scores = scores.masked_fill(nothing[:, None], 0.0)
    out = torch.softmax(scores, -1).masked_fill(nothing[:, None], 0.0) @ values
    if return_aux is None:
        return out
    return out, AuxOutput(lse=torch.logsumexp(scores, -1).masked_fill(nothing, -torch.inf))


DENSE = dense, flex.flex_backward


def split(
    meta: Metadata, *cuts: int, seed: int = 0, reach: Reach = UNLIMITED
) -> list[tuple[np.ndarray, TileTable]]:
    """Return sources of keys `(indices, table)`: the tokens of a pack in random order, in parts."""
    parts = np.split(np.random.default_rng(seed).permutation(len(meta)), cuts)
    return [(index, tile_table(meta, meta.take(index), reach)) for index in parts]


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8, 16]), st.booleans())
def test_a_block_mask_read_from_either_side_is_exactly_the_mask(
    seed: int, size: int, permuted: bool
) -> None:
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(2, 60))
    flags = dict(zip(("branches", "images", "padding"), rng.random(3) < 0.7, strict=True))
    trees = {
        "documents": int(rng.integers(1, min(tokens, 5) + 1)),
        "depth": int(rng.integers(1, 4)),
    }
    reach = (
        Reach(),
        Reach(int(rng.integers(1, 30))),
        Reach(0, int(rng.integers(1, 30))),
        Reach(5, 11),
    )[seed % 4]
    meta = metadata(random_batch(rng, tokens, **trees, **flags))
    order = rng.permutation(tokens) if permuted else np.arange(tokens)
    q, k = (
        meta.take(order[: rng.integers(1, tokens + 1)]),
        meta.take(order[rng.integers(0, tokens) :]),
    )
    mask = mask_of(tile_table(q, k, reach), size)
    assert mask.seq_lengths == (-(-len(q) // size) * size, -(-len(k) // size) * size)
    assert mask.BLOCK_SIZE == (size, size)
    filled = np.zeros(
        mask.seq_lengths, bool
    )  # padding of the last blocks sees nothing and is not seen
    filled[: len(q), : len(k)] = allowed(q, k, reach)
    for by_keys in (False, True):
        assert np.array_equal(read(mask, by_keys), filled)


def test_the_lists_are_as_narrow_as_the_longest_of_them() -> None:
    tokens, blocks = 131072, 1024
    document = np.arange(tokens) // 4096
    row = Metadata.of_documents(document)
    mask = mask_of(tile_table(row, row))
    kinds = [
        (f"{full}{side}_num_blocks", f"{full}{side}_indices")
        for full in ("", "full_")
        for side in ("kv", "q")
    ]
    shapes = [tuple(getattr(mask, indices).shape) for _, indices in kinds]
    assert shapes == [(1, 1, blocks, 31)] * 4, "31 full blocks and 1 on the diagonal, at most"
    assert (
        sum(getattr(mask, indices).nbytes for _, indices in kinds)
        == 507904
        < 4 * blocks**2 * 4 / 33
    )
    one = mask_of(tile_table(row.take(np.arange(100)), row.take(np.arange(100))))
    assert {getattr(one, indices).shape[-1] for _, indices in kinds} == {1}, (
        "no wider than there are blocks"
    )


def test_padding_and_text_are_no_document_and_no_span_of_their_own() -> None:
    padding = Metadata.of_documents(np.array([-1, 0, -1, 0]))
    mask = mask_of(tile_table(padding, padding))
    assert read(mask).nonzero()[0].tolist() == [1, 3, 3] and read(mask).nonzero()[1].tolist() == [
        1,
        1,
        3,
    ]


@pytest.mark.parametrize("reach", [Reach(3), Reach(0, 4), Reach(3, 4)], ids=str)
def test_the_rule_on_a_device_knows_windows_and_chunks(reach: Reach) -> None:
    row = Metadata.of_documents(np.repeat([0, 1], 11), np.repeat([0, 1, 2, 0], [4, 3, 4, 11]))
    queries, filled = row.take(np.arange(3, 22)), np.zeros((20, 24), bool)
    filled[:19, :22] = allowed(queries, row, reach)
    assert np.array_equal(read(mask_of(tile_table(queries, row, reach), 4)), filled)


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("size", [4, 16, 128])
def test_forward_and_backward_equal_the_dense_mask(heads: int, groups: int, size: int) -> None:
    kernel = flex.FlexKernel(DENSE, size)
    for seed in range(4):
        meta = pack(seed)
        tensors = draw(40, 40, heads, groups, seed)
        found = by_tiles(kernel, tensors, [(np.arange(40), tile_table(meta, meta))], 8**-0.5)
        for got, expected in zip(
            found, by_autograd(tensors, allowed(meta, meta), 8**-0.5), strict=True
        ):
            torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_backward_from_the_merged_result_is_exact_for_keys_in_several_parts(seed: int) -> None:
    meta, tensors = pack(seed + 5), draw(40, 40, 4, 2, seed)
    expected = by_autograd(tensors, allowed(meta, meta), 0.4)
    for cuts in ((7, 8, 30), (20,), (1, 2, 3, 39)):
        found = by_tiles(flex.FlexKernel(DENSE, 8), tensors, split(meta, *cuts, seed=seed), 0.4)
        for got, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(got, exact, **EXACT)


def test_the_backward_of_a_part_computes_no_forward_and_is_exact() -> None:
    made: list[str] = []

    def called(function: Callable) -> Callable:
        return lambda *args, **options: made.append(function.__name__) or function(*args, **options)

    meta, tensors = pack(6, 37), draw(37, 37, 4, 2)
    expected, sources = by_autograd(tensors, allowed(meta, meta), 0.4), split(meta, 7, 30)
    found = by_tiles(
        flex.FlexKernel((called(dense), called(flex.flex_backward)), 8), tensors, sources, 0.4
    )
    assert made == ["dense"] * 3 + ["flex_backward"] * 3
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact, **EXACT)


@pytest.mark.slow
@uncompiled
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_the_real_functions_are_exact(heads: int, groups: int) -> None:
    meta, tensors = pack(5), draw(40, 40, heads, groups)
    expected = by_autograd(tensors, allowed(meta, meta), 0.4)
    kernel = flex.FlexKernel((flex_attention, flex.flex_backward), 8)
    for got, exact in zip(
        by_tiles(kernel, tensors, split(meta, 7, 30), 0.4), expected, strict=True
    ):
        torch.testing.assert_close(got, exact, **EXACT)


def test_rows_that_see_nothing_give_zero_output_lse_minus_infinity_and_zero_gradients() -> None:
    meta = Metadata.of_documents(np.array([0, -1, 0, -1, 1]))
    tensors = draw(5, 5, 4, 2)
    for sources in ([(np.arange(5), tile_table(meta, meta))], split(meta, 1, 3)):
        _, *grads = by_tiles(flex.FlexKernel(DENSE), tensors, sources, 1.0)
        for grad in grads:
            assert grad.isfinite().all() and (grad[[1, 3]] == 0).all()
        partial = empty_partial(tensors[0])
        for index, table in sources:
            flex.FlexKernel(DENSE).attend(
                partial, (tensors[0], tensors[1][index], tensors[2][index]), table, 1.0
            )
        assert (partial.out[[1, 3]] == 0).all() and (partial.lse[[1, 3]] == -torch.inf).all()


def test_a_source_that_nobody_sees_costs_no_call_and_changes_nothing() -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("called")

    meta, (q, k, v, dout) = pack(1), draw(40, 40, 4, 2)
    nobody = Metadata.of_documents(np.full(40, -1))
    kernel, partial = flex.FlexKernel((never, never)), empty_partial(q)
    for keys, table in (
        (40, tile_table(nobody, meta)),
        (0, tile_table(meta, meta.take(np.arange(0)))),
    ):
        kernel.attend(partial, (q, k[:keys], v[:keys]), table, 1.0)
        kernel.attend_backward(
            Saved(q, partial.out, partial.lse, dout), (k[:keys], v[:keys]), table, 1.0, (q, k, v)
        )
    assert partial.untouched and (partial.out == 0).all()


def test_strided_keys_are_read_and_gradients_are_added_to_views() -> None:
    meta = pack(2)
    table, (q, k, v, dout) = tile_table(meta, meta), draw(40, 40, 4, 2)
    expected = by_autograd([q, k, v, dout], allowed(meta, meta), 0.5)
    both = torch.cat([k, v], -1)
    keys, values = both.chunk(2, -1)
    assert not keys.is_contiguous()
    kernel, partial = flex.FlexKernel(DENSE, 16), empty_partial(q)
    kernel.attend(partial, (q, keys, values), table, 0.5)
    torch.testing.assert_close(partial.out, expected[0], **EXACT)
    dq, dkv = torch.ones_like(q), torch.ones_like(both)
    saved = Saved(q, partial.out, partial.lse, dout)
    kernel.attend_backward(saved, (keys, values), table, 0.5, (dq, *dkv.chunk(2, -1)))
    for got, exact in zip((dq, *dkv.chunk(2, -1)), expected[1:], strict=True):
        torch.testing.assert_close(got - 1, exact, rtol=1e-12, atol=1e-12)


class Calls:
    """Return `dense` with a list of its calls."""

    def __init__(self) -> None:
        self.made: list[tuple[str, bool]] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        assert q.shape[2] % 8 == k.shape[2] % 8 == 0 and options["kernel_options"]["IS_DIVISIBLE"]
        self.made.append((options["kernel_options"]["BACKEND"], options["return_aux"] is not None))
        return dense(q, k, v, **options)


@pytest.mark.parametrize("tokens", [40, 37, 3], ids="{} tokens".format)
@pytest.mark.parametrize("transport", [LocalAttention, WholeAttention])
@pytest.mark.parametrize(("cap", "sinks"), CAPS_AND_SINKS)
def test_a_layer_is_differentiated_through_the_kernel(
    transport: type[LocalAttention], tokens: int, cap: float, sinks: int
) -> None:
    meta = pack(4, tokens)
    tensors = draw(tokens, tokens, 4, 2)
    plan = AttentionPlan(np.arange(tokens)[None], meta, 0, np.arange(tokens))
    leaves = [
        x.clone().requires_grad_()
        for x in (*tensors[:3], *[torch.linspace(-2, 2, 4).double()] * sinks)
    ]
    chosen = transport(flex.FlexKernel(DENSE, 8, cap=cap))
    out = chosen.attend(*leaves[:3], plan, 0.3, *leaves[3:])
    found = (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))
    for got, exact in zip(
        found, by_autograd(tensors, allowed(meta, meta), 0.3, cap, *leaves[3:]), strict=True
    ):
        torch.testing.assert_close(got, exact, **EXACT)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_row_whose_keys_are_all_here_is_computed_once(recompute: str) -> None:
    meta, calls = pack(4), Calls()
    plan = AttentionPlan(np.arange(40)[None], meta, 0, np.arange(40))
    transport = WholeAttention(flex.FlexKernel((calls, flex.flex_backward), 8, "FLASH"))
    tensors = draw(40, 40, 4, 2)
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, save: Save) -> torch.Tensor:
        return transport.attend(q, k, v, plan, 0.3, call=save.results)

    out = run_block(layer, RECOMPUTE_MODES[recompute], q, k, v)
    found = torch.autograd.grad(out, (q, k, v), tensors[3])
    assert calls.made == [("FLASH", False)], "no lse, which FLASH could not differentiate"
    for got, exact in zip(found, by_autograd(tensors, allowed(meta, meta), 0.3)[1:], strict=True):
        torch.testing.assert_close(got, exact, **EXACT)
    by_tiles(transport.kernel, tensors, split(meta, 11), 0.3)
    assert calls.made[-3:] == [calls.made[0]] + [("TRITON", True)] * 2, (
        "parts are merged by their lse"
    )


@needs_triton
def test_memory_for_descriptors_is_there_in_whatever_thread_launches_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator belongs to Triton; torch 2.13 sets it only at the first launch of a kernel."""
    spec = importlib.util.spec_from_file_location(
        "allocation", TRITON / "triton" / "runtime" / "_allocation.py"
    )
    triton = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(triton)
    monkeypatch.setitem(sys.modules, "triton", triton)
    launched = []

    def launch(*qkv: torch.Tensor, **options: Any) -> Any:
        if not launched:
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size))
        launched.append(triton._allocator.get()(384, 128, None).nbytes)
        return dense(*qkv, **options)

    meta, tensors = pack(4), draw(40, 40, 4, 2)
    plan = AttentionPlan(np.arange(40)[None], meta, 0, np.arange(40))
    transport = WholeAttention(flex.FlexKernel((launch, flex.flex_backward), 8))

    def layer() -> None:
        transport.attend(*tensors[:3], plan, 0.3)

    layer()
    with concurrent.futures.ThreadPoolExecutor(1) as autograd:
        autograd.submit(layer).result()
    assert launched[1:] == [384]


def interpreted(case: str, folder: Path) -> dict[str, Any]:
    settings = {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": "."}
    command = [sys.executable, "-m", "tests.attention.ops.interpreted", case]
    ran = subprocess.run(
        command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, timeout=850
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
@needs_triton
def test_the_loss_reads_logits_in_one_kernel_and_writes_their_gradient_in_another(
    tmp_path: Path,
) -> None:
    """A third kernel reads only the labels' logits. Gradients are rounded to 8 bits, and losses are
    fp32 sums of 297 terms.
    """
    found = interpreted("head", tmp_path)
    loss, gradient = found["errors"]["head"]
    assert loss < 1e-6 and gradient < 2**-8
    assert len(found["launches"]) == sum(found["launches"].values()) == 3


def test_wide_heads_have_more_warps_backward() -> None:
    warps = [
        flex.kernel_options(torch.bfloat16, width).get("bwd_num_warps")
        for width in (64, 128, 192, 256)
    ]
    assert warps == [None, None, 8, 8]


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_triton
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ("capped", 1e-5),
        pytest.param("pointers", 1e-5, marks=pytest.mark.long),
        pytest.param("descriptors", 1e-5, marks=pytest.mark.long),
        pytest.param("bfloat16", 4e-2, marks=pytest.mark.long),
    ],
)
def test_the_kernels_that_torch_writes_for_hopper_are_exact(
    case: str, tolerance: float, tmp_path: Path
) -> None:
    """See `interpreted.py`. Tolerances: fp32 sums of 400 terms and an approximate exp2; bf16 rounds
    to 2^-9.
    """
    found = interpreted(case, tmp_path)
    assert len(found["errors"]) == (2 if case in ("bfloat16", "capped") else 28)
    wrong = {
        name: errors
        for name, errors in found["errors"].items()
        if not all(x < tolerance for x in errors)
    }
    assert not wrong, wrong
    assert (found["descriptors"] > 0) == (case in ("descriptors", "bfloat16"))
    kernels = " ".join(found["launches"])
    assert (
        "tem_fused_flex_attention_0" in kernels and "tem_fused_flex_attention_backward" in kernels
    )


def test_on_cuda_a_rank_with_all_keys_takes_the_whole_row_at_once() -> None:
    device = torch.device("cuda")
    assert isinstance(select_transport("p2p", "auto", single_axis("cp"), device), WholeAttention)
    assert not isinstance(
        select_transport("p2p", "math", single_axis("cp"), device), WholeAttention
    )
    two = dataclasses.replace(single_axis("cp"), size=2, global_ranks=(0, 1), group=object())
    assert isinstance(select_transport("a2a", "auto", two, device).inner, WholeAttention)
    assert not isinstance(select_transport("a2a", "math", two, device).inner, WholeAttention)


def test_flash_attention_4_is_refused_where_it_is_not_installed_or_too_narrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="attention kernel flex_flash: .*: pip install flash-attn-4"
    ):
        kernel_name("flex_flash", "cuda", "bfloat16")
    monkeypatch.setattr(flex, "find_spec", lambda name: object())
    assert kernel_name("flex_flash", "cuda", "bfloat16") == "flex_flash"
    assert isinstance(select_kernel("flex_flash", torch.device("cuda")), flex.FlexKernel)
    with pytest.raises(
        ValueError, match="attention kernel flex_flash supports bfloat16, not float32"
    ):
        kernel_name("flex_flash", "cuda", "float32")


class Compilations:
    """A compiler that runs the captured graph unchanged and counts its calls."""

    def __init__(self) -> None:
        self.number = 0
        self.heads: set[Any] = set()
        """Return (heads, width) of tensors `[1, heads, n, width]`; numbers are static in a compiled
        form.
        """

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.number += 1
        values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        tensors = [
            x
            for x in values
            if isinstance(x, torch.Tensor) and x.dim() == 4 and x.is_floating_point()
        ]
        self.heads |= {(type(x.shape[1]), type(x.shape[3])) for x in tensors}
        return graph.forward


@pytest.mark.slow
def test_packs_of_any_length_share_a_few_compiled_forms() -> None:
    forward, backward = Compilations(), Compilations()
    kernel = flex.FlexKernel(flex.compiled(forward, backward))
    rng = np.random.default_rng(0)
    numbers = []
    for tokens in [512, 512, *rng.integers(257, 900, 8).tolist()]:
        meta = metadata(random_batch(rng, tokens, branches=True, images=True, padding=True))
        tensors = [x.float() for x in draw(tokens, tokens, 2, 1, tokens)]
        by_tiles(kernel, tensors, [(np.arange(tokens), tile_table(meta, meta))], 0.3)
        numbers.append((forward.number, backward.number))
    assert numbers == [(1, 1)] * 2 + [(2, 2)] * 8, (
        "one form for the first length and one for all others"
    )


def test_a_tower_and_a_decoder_with_other_heads_have_forms_of_their_own() -> None:
    """torch cannot lower a backward for a dynamic number of heads, which a second model in a
    process used to request.
    """
    compilers = Compilations(), Compilations()
    kernel = flex.FlexKernel(flex.compiled(*compilers))
    for heads, groups, width in ((4, 2, 16), (2, 1, 32)):
        shapes = [(60, heads), (60, groups), (60, groups), (60, heads)]
        tensors = [torch.randn(*shape, width) for shape in shapes]
        meta = metadata(random_batch(np.random.default_rng(0), 60))
        by_tiles(kernel, tensors, [(np.arange(60), tile_table(meta, meta))], 0.3)
    assert [compiler.heads for compiler in compilers] == [{(int, int)}] * 2
    assert [compiler.number for compiler in compilers] == [2, 2]


def test_auto_means_the_fastest_kernel_that_is_exact_and_others_are_refused() -> None:
    found = {
        (d, t): kernel_name("auto", d, t)
        for d in ("cpu", "cuda", "xpu")
        for t in ("bfloat16", "float64")
    }
    assert found == {
        ("cpu", "bfloat16"): "flash",
        ("cpu", "float64"): "flash",
        ("cuda", "bfloat16"): "flex",
        ("cuda", "float64"): "math",
        ("xpu", "bfloat16"): "math",
        ("xpu", "float64"): "math",
    }
    assert (
        kernel_name("dense", "cpu") == "dense" and kernel_name("math", "cuda", "float64") == "math"
    )
    assert isinstance(select_kernel("auto", torch.device("cuda")), flex.FlexKernel)
    with pytest.raises(
        ValueError, match="attention kernel flex runs on CUDA, not on cpu; choose auto or"
    ):
        select_kernel("flex", CPU)
    with pytest.raises(ValueError, match="attention kernel flash runs on the CPU, not on cuda"):
        kernel_name("flash", "cuda")
    with pytest.raises(
        ValueError, match="attention kernel fast is unknown; choose auto, flash, math"
    ):
        select_kernel("fast", CPU)
    with pytest.raises(
        ValueError, match="attention kernel flex supports float32 or bfloat16, not float64"
    ):
        kernel_name("flex", "cuda", "float64")


def test_the_kernel_of_a_tensor_adds_up_as_wide_as_its_dtype_asks() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    assert [auto_kernel("cuda", dtype) for dtype in dtypes] == ["math", "flex", "flex", "flex"]
    assert [auto_kernel("cpu", dtype) for dtype in dtypes] == ["flash"] * 4


def test_a_kernel_for_another_device_is_refused_before_the_run_starts_with_all_other_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(launch, "device_type", lambda world: "cpu")
    assert (
        main(
            [
                "--attention-kernel",
                "flex",
                "--vocab-size",
                "101",
                "--lr",
                "1e-4",
                "--min-lr",
                "1e-3",
            ]
        )
        == REFUSED
    )
    told = capsys.readouterr().err
    assert (
        "--attention-kernel and --dtype: attention kernel flex runs on CUDA, not on cpu" in told
        and "--min-lr 0.001" in told
    )
