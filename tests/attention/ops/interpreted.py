"""FlexAttention's Triton kernels for Hopper in Triton's interpreter: `python -m
tests.attention.ops.interpreted CASE`.

torch lowers the compiled `flex_attention` for an absent CUDA device of capability 9.0 and writes
Triton source. With TRITON_INTERPRET, that source is interpreted on CPU tensors: kernels, launch
grids and the code between them are torch's own. One line is printed per mask: its name, and the
errors of out, dq, dk, dv.

The following parts are replaced. While a graph is lowered, `torch.cuda` and its device interface
answer like an H100, the graph's fake tensors report CUDA as their device, and copies between fake
tensors are skipped. The lse is stored for a backward, which torch does not do if a graph was traced
with CPU tensors. At run time, GPU memory is CPU memory, and no device or stream is selected.

In float32 torch uses slow blocks of 16 x 16 for backward. They are replaced by the block sizes for
bfloat16 with heads 128 wide, and in one case by TMA descriptors, which the project uses only for
bfloat16. Of torch's candidate sizes for small kernels, the last one is used instead of the first.
Products of bfloat16 tiles are computed in float32, like tensor cores do; the interpreter would
multiply the bits.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

FOLDER = Path(sys.prefix) / "triton"
sys.path.append(
    str(FOLDER)
)  # not in site-packages, because torch changes its behaviour if Triton is importable

import torch._dynamo.device_interface  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch._inductor.runtime.triton_helpers  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from megacp.attention.ops import device, flex  # noqa: E402
from megacp.attention.ops.mask import UNLIMITED, Metadata, Reach, TileTable, allowed, tile_table  # noqa: E402
from megacp.attention.ops.tile_kernels import MathKernel  # noqa: E402
from megacp.distributed.grid import single_axis  # noqa: E402
from megacp.engine.tensor_parallel import vocabulary  # noqa: E402
from tests.attention.ops.test_flex import split  # noqa: E402
from tests.attention.ops.test_kernels import Tensors, by_autograd, by_tiles  # noqa: E402
from tests.reference.packs import metadata, random_batch  # noqa: E402

CUDA = torch.device("cuda", 0)
H100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, gcnArchName="")
BLOCKS = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 128,
    "bwd_BLOCK_M2": 128,
    "bwd_BLOCK_N2": 64,
}
ANSWERS = {
    "is_available": True,
    "current_device": 0,
    "get_device_properties": H100,
    "get_device_capability": (9, 0),
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "set_device": None,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
}


def always(answer: Any) -> Callable:
    return lambda *_, **__: answer


def on_cuda(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CUDA)


def compiler(backward: bool) -> Callable:
    """Lower a graph that was traced on the CPU as if it had been traced on CUDA."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with (
            mock.patch.object(torch.Tensor, "copy_", lambda x, *_: x),
            torch._guards.detect_fake_mode(inputs),
        ):
            for module in graph.modules():
                for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                    node.meta = tree_map(on_cuda, node.meta) if "val" in node.meta else node.meta
                    node.args = tuple(
                        {**x, "OUTPUT_LOGSUMEXP": True} if isinstance(x, dict) else x
                        for x in node.args
                    )
                    if "device" in node.kwargs:
                        node.kwargs = {**node.kwargs, "device": CUDA}
            cuda_inputs = [on_cuda(x) for x in inputs]
            return torch._inductor.compile_fx.compile_fx_inner(
                graph, cuda_inputs, is_backward=backward
            )

    return compile_graph


def dot(
    builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    def wide(x: Any) -> np.ndarray:
        return (
            (x.data.astype(np.uint32) << 16).view(np.float32)
            if x.dtype.scalar == tl.bfloat16
            else x.data
        )

    return interpreter.TensorHandle(
        np.matmul(wide(a), wide(b), dtype=d.data.dtype) + d.data, d.dtype.scalar
    )


def launched(tuner: CachingAutotuner, *args: Any, **options: Any) -> Any:
    LAUNCHES[tuner.fn.__name__] += 1
    tuner.configs = tuner.configs[-1:]
    return launch(tuner, *args, **options)


launch = CachingAutotuner.run
LAUNCHES: Counter[str] = Counter()
DESCRIPTORS = mock.create_autospec(
    interpreter.InterpreterBuilder.create_make_tensor_descriptor,
    side_effect=interpreter.InterpreterBuilder.create_make_tensor_descriptor,
)


def stand_in() -> None:
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=always(target)))
    interface = torch._dynamo.device_interface.CudaInterface
    for owner, (name, answer) in itertools.product(
        (torch.cuda, interface, interface.Worker), ANSWERS.items()
    ):
        if hasattr(owner, name):
            setattr(owner, name, always(answer))
    torch._C._cuda_getCurrentRawStream = always(0)
    torch._C._dynamo.guards._empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cpu
    torch._inductor.runtime.triton_helpers.set_driver_to_gpu = always(None)
    CachingAutotuner.run = launched
    libdevice = triton.language.extra.libdevice  # NVIDIA's library has no source
    libdevice.tanh, libdevice.exp = lambda x: 2 * tl.sigmoid(2 * x) - 1, lambda x: tl.exp(x)
    torch.nn.attention.flex_attention._validate_device = always(
        None
    )  # refuses gradients of tensors of the CPU
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_make_tensor_descriptor = DESCRIPTORS


stand_in()


def one(document: Any, branch: Any = 0, span: Any = 0) -> Metadata:
    """Return a pack of documents `[n]`; branches and spans are `(value, start, stop)`."""
    columns = [np.asarray(document), *(np.zeros(len(document), int) for _ in range(2))]
    for column, stretches in zip(columns[1:], (branch, span), strict=False):
        for value, start, stop in stretches or ():
            column[start:stop] = value
    return Metadata.of_documents(*columns)


def lengths(*parts: int) -> np.ndarray:
    return np.repeat(np.arange(len(parts)), parts)


def everything(seed: int, tokens: int, depth: int = 1) -> Metadata:
    kinds = {"branches": True, "images": True, "padding": True, "depth": depth}
    return metadata(random_batch(np.random.default_rng(seed), tokens, **kinds))


def masks() -> Iterator[tuple[str, Metadata, Metadata, list[tuple]]]:
    """Yield names, queries, keys, and the sources of keys in the form that kernels take."""
    square = {
        "documents across blocks": one(lengths(100, 90, 60)),
        "one document that ends in a block": one(lengths(250)),
        "documents of whole blocks": one(lengths(128, 128)),
        "short documents": one(lengths(*[7] * 34)),
        "documents of one token": one(lengths(*[1] * 200)),
        "two branches": one(lengths(250), branch=[(1, 60, 170), (2, 170, 250)]),
        "a branch longer than a block": one(
            lengths(256), branch=[(1, 9, 20), (2, 20, 230), (3, 230, 256)]
        ),
        "branches of the second document": one(
            lengths(90, 160), branch=[(1, 150, 200), (2, 200, 250)]
        ),
        "a span across blocks": one(lengths(240), span=[(1, 100, 200)]),
        "a span of all": one(lengths(250), span=[(1, 0, 250)]),
        "two spans": one(lengths(230), span=[(1, 10, 110), (2, 120, 230)]),
        "a span in a branch": one(
            lengths(250), branch=[(1, 50, 180), (2, 180, 250)], span=[(1, 60, 150)]
        ),
        "padding at the end": one(np.repeat([0, 1, -1], [60, 50, 90])),
        "padding between tokens": one(np.where(np.arange(256) % 3, 0, -1)),
        "everything": everything(0, 250),
        "everything in random order": everything(2, 200).take(
            np.random.default_rng(0).permutation(200)
        ),
        "one document of three blocks": one(lengths(384)),
        "a block of padding between documents": one(np.repeat([0, -1, 1], [128, 140, 110])),
        "trees": everything(5, 250, depth=5),
        "trees in windows": everything(6, 250, depth=4),
        "trees in chunks": everything(7, 250, depth=4),
        "two tokens": one(lengths(2)),
        "one token": one(lengths(1)),
    }
    for name, meta in square.items():
        reach = {"trees in windows": Reach(window=40), "trees in chunks": Reach(chunk=60)}.get(
            name, UNLIMITED
        )
        yield name, meta, meta, split(meta, reach=reach)
    row = everything(3, 380)
    yield "everything in three parts", row, row, split(row, 200, 201)
    for name, q, k in (
        ("queries of the middle", np.arange(150, 290), np.arange(380)),
        ("every third key", np.arange(380), np.arange(0, 380, 3)),
        ("one key", np.arange(380), np.flatnonzero(row.document >= 0)[:1]),
    ):
        queries, keys = row.take(q), row.take(k)
        yield name, queries, keys, [(np.arange(len(k)), tile_table(queries, keys))]


def errors(found: Tensors, exact: Tensors) -> list[float]:
    """Return each largest error relative to the largest exact value, or to 1 if all exact values
    are smaller.
    """
    pairs = zip(found, exact, strict=True)
    return [((x.double() - y).abs().max() / y.abs().max().clamp(min=1.0)).item() for x, y in pairs]


def differentiated(
    kernel: flex.FlexKernel, tensors: list[torch.Tensor], table: TileTable, scale: float
) -> Tensors:
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out = kernel.whole(q, k, v, table, scale)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])


def head_loss() -> None:
    """Print errors of losses and gradient; the gradient overwrites bfloat16 logits, padded per row."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, 300, generator=generator) * 9).bfloat16()
    labels, scale = torch.arange(7) * 49, torch.rand(7, generator=generator)
    wide = logits[:, :297].double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    (gradient,) = torch.autograd.grad(losses, wide, scale.double())
    device.is_compiled = vocabulary.is_compiled = always(True)
    with torch.no_grad():
        found = vocabulary.cross_entropy(logits[:, :297], labels, 0, single_axis("tp"), scale)
    wrong = errors((found, logits[:, :297]), (losses.detach(), gradient))
    print(json.dumps({"errors": {"head": wrong}, "launches": LAUNCHES}))


CASES = {
    "pointers": (torch.float32, 2, 1, 16, BLOCKS),
    "descriptors": (torch.float32, 4, 4, 16, BLOCKS | {"fwd_USE_TMA": True, "bwd_USE_TMA": True}),
    "capped": (torch.float32, 2, 1, 16, BLOCKS),
    "bfloat16": (torch.bfloat16, 4, 2, 128, {}),
}
"""Dtype, heads, K/V heads, head width, and changed options. The last case has training options and
a single mask, and so does the case with a cap on scores.
"""


def main(case: str) -> None:
    backend = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    if case == "head":
        device.BACKEND = backend
        return head_loss()
    dtype, heads, groups, width, changed = CASES[case]
    choose = flex.kernel_options
    flex.kernel_options = lambda *form: choose(*form) | changed
    cap = 0.7 if case == "capped" else 0.0
    kernel = flex.FlexKernel(flex.compiled(backend, backend), cap=cap)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, q, k, sources in masks():
        if case in ("bfloat16", "capped") and name != "everything":
            continue
        shapes = [(len(q), heads), (len(k), groups), (len(k), groups), (len(q), heads)]
        tensors = [torch.randn(*shape, width, generator=generator).to(dtype) for shape in shapes]
        wide = [x.double() for x in tensors]
        mask = allowed(q, k, sources[0][1].reach)
        exact = (
            by_tiles(MathKernel(cap), wide, sources, 0.25) if cap else by_autograd(wide, mask, 0.25)
        )
        found[name] = errors(by_tiles(kernel, tensors, sources, 0.25), exact)
        if name == "everything":
            found[f"{name}, differentiated whole"] = errors(
                differentiated(kernel, tensors, tile_table(q, k), 0.25), exact
            )
    print(
        json.dumps({"errors": found, "launches": LAUNCHES, "descriptors": DESCRIPTORS.call_count})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
