"""Compile what CUDA runs for a Hopper GPU on a machine without one: `PYTHONPATH=. python tools/check_sm90.py`.

It needs torch's CUDA build, which brings Triton, ptxas and cuobjdump. Dynamo traces on the CPU, Inductor lowers each
graph for CUDA tensors that do not exist, and Triton and ptxas compile its kernels for sm_90. Nothing of them is run.
For each kernel the table has registers, bytes of stack (registers spilled to memory) and of shared memory. Internals of
torch are patched, so this is made for torch 2.11 and no part of the tests. Exit status 1 when a kernel needs more
shared memory than a block can have.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo.device_interface as device_interface
import torch._functorch.config as functorch_config
import torch._inductor.compile_fx as inductor
import torch._inductor.config as inductor_config
import torch._subclasses.fake_tensor as fake_tensor
import torch.nn.attention.flex_attention as torch_flex
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import async_compile
from torch._inductor.decomposition import select_decomp_table
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from megacp.core.ops import activation, compiled, flex, merge, norm, rotary
from megacp.core.ops.kernel import Saved, empty_partial
from megacp.core.ops.mask import Metadata, tile_table

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LENGTHS = {"fixed length": 512, "any length": 1100}
"""The first makes the form of a fixed length, the second that of any."""

GPU = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    max_blocks_per_multi_processor=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
    gcnArchName="",
    is_integrated=0,
)
"""What torch asks about a device (CUDA C++ Programming Guide, table of compute capability 9.0)."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as ptxas left it."""

    name: str
    registers: int
    stack: int
    """Bytes of a thread's local memory: what did not fit into registers."""
    shared: int
    """Bytes of a block's shared memory."""


class Compilers:
    """A backend of `torch.compile` that runs a graph as it is and compiles it for sm_90; `kernels` are what it made."""

    def __init__(self) -> None:
        self.kernels: list[CompiledKernel] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        aot_module_simplified(
            graph,
            inputs,
            fw_compiler=self._lower,
            bw_compiler=self._lower,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return graph.forward

    def _lower(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        """One direction of a graph, with fake CUDA tensors in the place of its CPU ones."""
        mode = torch._guards.detect_fake_mode(inputs)
        backward = any("tangents" in node.name for node in graph.graph.find_nodes(op="placeholder"))
        with pretended_gpu(), mock.patch.object(async_compile.AsyncCompile, "triton", self._triton):
            with mode:
                there = [_on_gpu(x) for x in inputs]
            for module in graph.modules():
                if isinstance(module, torch.fx.GraphModule):
                    for node in module.graph.nodes:
                        if "device" in node.kwargs:
                            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
                    module.recompile()
            with torch.no_grad():
                FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
            inductor.compile_fx_inner(graph, there, is_backward=backward)

    def _triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
        """Stands for `AsyncCompile.triton`, which would load the kernel."""
        kernel = async_compile._load_triton_kernel_from_source(name, source)
        kernel.precompile(warm_cache_only=True)
        self.kernels += [resources(name, result.kernel) for result in kernel.compile_results]
        return kernel


def _on_gpu(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda:0")


def resources(name: str, kernel: Any) -> CompiledKernel:
    """What a compiled kernel occupies, from its cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", told)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    return CompiledKernel(name, registers, stack, kernel.metadata.shared)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """torch and Triton believe in one idle H200."""
    import torch._inductor.runtime.triton_helpers as triton_helpers
    import triton.runtime.driver
    from triton.backends.compiler import GPUTarget

    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_target=_always(GPUTarget("cuda", 90, 32)),
            get_current_device=_always(0),
            get_current_stream=_always(0),
            get_active_torch_device=_always(torch.device("cuda", 0)),
            get_device_interface=_always(torch.cuda),
        )
    )
    common = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": GPU}
    common |= {"synchronize": None, "set_device": None}
    of_cuda = {"get_device_capability": (9, 0), "get_device_name": GPU.name, "_lazy_init": None, "is_initialized": True}
    of_cuda |= {"_exchange_device": 0, "_maybe_exchange_device": 0, "is_bf16_supported": True}
    of_cuda |= {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None}
    of_interface = {"get_compute_capability": 90, "get_raw_stream": 0, "exchange_device": 0, "maybe_exchange_device": 0}
    of_interface |= {"is_triton_capable": True, "raise_if_triton_unavailable": None}
    worker = {name: common[name] for name in ("current_device", "get_device_properties", "set_device")}
    interface = device_interface.CudaInterface
    with contextlib.ExitStack() as stack:

        def put(owner: Any, values: dict[str, Any], wrap: Callable[[Any], Any] = lambda x: x) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, wrap(_always(value)), create=True))

        put(torch.cuda, common | of_cuda)
        put(interface, common | of_interface, staticmethod)
        put(interface.Worker, worker, staticmethod)
        put(fake_tensor, {"init_gpu_context": None})
        put(triton_helpers, {"set_driver_to_gpu": None, "set_driver_to_cpu": None})
        put(torch._C, {"_cuda_getCurrentRawStream": 0})
        for name, module in list(sys.modules.items()):
            if name.startswith("torch") and "has_triton" in vars(module):
                put(module, {"has_triton": True})
        yield


def chains(dtype: torch.dtype) -> None:
    """The elementwise chains of a layer, forward and backward."""
    n, wide = 300, torch.float32
    x, weight, gate_up = torch.randn(n, 256).to(dtype), torch.ones(256).to(dtype), torch.randn(n, 512).to(dtype)
    heads, angles = torch.randn(n, 8, 64).to(dtype), torch.randn(n, 1, 32).to(dtype)
    out, lse = torch.zeros(n, 8, 64, dtype=wide), torch.zeros(n, 8, dtype=wide)
    with torch.enable_grad():
        norm.rms_norm(x.requires_grad_(), weight, 1e-5).sum().backward()
        activation.swiglu(gate_up.requires_grad_()).sum().backward()
        rotary.rotate(heads.requires_grad_(), angles, angles).sum().backward()
    merge.merge_into(out, lse, heads.detach(), lse.clone())
    flex.gradients_of_part(heads.detach(), lse, heads.detach(), lse, heads.detach())


def attention(kernel: flex.FlexKernel, dtype: torch.dtype, width: int, tokens: int) -> None:
    """A row whose keys are all here, and one part among several, forward and backward."""
    place = np.arange(tokens)  # documents of 200 tokens that begin with a span; kernels do not depend on it
    metadata = Metadata(place // 200, np.zeros(tokens, int), np.where(place % 200 < 50, 1 + place // 200, 0), place)
    table = tile_table(metadata, metadata)
    q, k, v, dout = (torch.randn(tokens, heads, width).to(dtype) for heads in (8, 2, 2, 8))
    kernel.whole(*(x.clone().requires_grad_() for x in (q, k, v)), table, 0.1)
    partial = empty_partial(q)
    kernel.attend(partial, (q, k, v), table, 0.1)
    sums = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    saved = Saved(q, partial.out.to(dtype), partial.lse, dout)
    kernel.attend_backward(saved, (k, v), table, 0.1, (sums[0], sums[1], sums[2]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="dtypes of the model")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128], help="widths of a head")
    options = parser.parse_args(argv)
    if torch.version.cuda is None:
        print("error: this torch has no CUDA: pip install torch==2.11.0 in an environment of its own", file=sys.stderr)
        return 2
    torch_flex._validate_device = _always(None)  # it refuses gradients on the CPU, where nothing is computed here
    functorch_config.force_non_lazy_backward_lowering = True
    inductor_config.compile_threads, inductor_config.fx_graph_cache = 1, False
    inductor_config.use_static_triton_launcher = False  # it keeps no cubin
    compilers = Compilers()
    compiled.is_compiled, compiled.BACKEND = _always(True), compilers
    print("| what | kernel | registers | bytes of stack | bytes of shared memory |\n| --- | --- | --- | --- | --- |")
    too_much = False

    def tell(what: str) -> None:
        nonlocal too_much
        for made in compilers.kernels:
            print(f"| {what} | {made.name} | {made.registers} | {made.stack} | {made.shared} |", flush=True)
            too_much |= made.shared > GPU.shared_memory_per_block_optin
        compilers.kernels.clear()

    for name in options.dtypes:
        chains(DTYPES[name])
        tell(f"chains, {name}")
        for width in options.widths:
            torch._dynamo.reset()
            kernel = flex.FlexKernel(flex.compiled(compilers))
            for form, tokens in LENGTHS.items():
                attention(kernel, DTYPES[name], width, tokens)
                tell(f"attention, {name}, width {width}, {form}")
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
