"""The table of attention kernels, and which of them a `--attention-kernel` value means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacp.attention.ops.cudnn import CudnnKernel, engine_problem
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.flex import FlexKernel, flash_problem
from megacp.attention.ops.kernel import Kernel
from megacp.attention.ops.tile_kernels import FlashKernel, MathKernel

Tell = Callable[[str], None]
"""Takes a line for the log, of which the same one may come again."""


@dataclass(frozen=True)
class KernelChoice:
    """A row of the table of kernels: how to build it, and the only device it runs on."""

    build: Callable[[float, Tell], Kernel]
    """Builder, given a cap of scores, or 0."""
    device: str = ""
    """The only device type, or any."""
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    """Values of `--dtype` that it is exact for: it adds up in them or wider."""
    problem: Callable[[], str | None] = lambda: None
    """Why it cannot be had in this environment."""


KERNELS = {
    "flash": KernelChoice(lambda cap, tell: MathKernel(cap) if cap else FlashKernel(), "cpu"),
    "math": KernelChoice(lambda cap, tell: MathKernel(cap)),
    "flex": KernelChoice(lambda cap, tell: FlexKernel(cap=cap), "cuda", ("float32", "bfloat16")),
    "flex_flash": KernelChoice(
        lambda cap, tell: FlexKernel(whole_backend="FLASH", cap=cap), "cuda", ("bfloat16",), flash_problem
    ),
    "cudnn": KernelChoice(
        lambda cap, tell: FlexKernel(cap=cap) if cap else CudnnKernel(FlexKernel(), tell),
        "cuda",
        ("bfloat16",),
        engine_problem,
    ),
}
"""The values of `--attention-kernel` besides auto, and dense."""

FASTEST = {"cpu": ("flash",), "cuda": ("cudnn", "flex")}
"""What auto means on a type of device: the first that can be had and adds up in the model's dtype; else math."""


def kernel_problem(name: str, device_type: str, dtype: str = "") -> str | None:
    """Why a kernel cannot run on a type of device (`cpu`, `cuda`) in a `--dtype`, or in some; None for names without a
    row.
    """
    choice = KERNELS.get(name)
    if choice is None:
        return None
    if choice.device not in ("", device_type):
        only = {"cpu": "the CPU", "cuda": "CUDA"}[choice.device]
        return f"--attention-kernel {name} runs on {only}, this run is on {device_type}; choose auto or math"
    if dtype and dtype not in choice.dtypes:
        takes = " or ".join(choice.dtypes)
        return f"--attention-kernel {name} is for --dtype {takes}, this run has --dtype {dtype}; choose auto or math"
    problem = choice.problem()
    return problem and f"--attention-kernel {name}: {problem}"


def kernel_name(name: str, device_type: str, dtype: str = "") -> str:
    """What a `--attention-kernel` value means: `auto` is flash on CPU, cudnn or flex on CUDA, and math for float64
    there and on any other device; other values mean themselves. Raises ValueError with the reason of `kernel_problem`.
    """
    if name == "auto":
        # a name asked for is an error where it cannot run; auto never is
        fastest = (each for each in FASTEST.get(device_type, ()) if not kernel_problem(each, device_type, dtype))
        return next(fastest, "math")
    problem = kernel_problem(name, device_type, dtype)
    if problem:
        raise ValueError(problem)
    return name


def auto_kernel(device_type: str, dtype: torch.dtype) -> str:
    """What auto means for tensors of a dtype, also of one that is no `--dtype`: the kernel must add up as wide."""
    wide = dtype if dtype == torch.bfloat16 else accumulation_dtype(dtype)
    return kernel_name("auto", device_type, str(wide).removeprefix("torch."))


def select_kernel(name: str, device: torch.device, cap: float = 0.0, tell: Tell = lambda line: None) -> Kernel:
    """The kernel of a `--attention-kernel` value; raises ValueError where it is unknown or cannot run.

    torch's flash attention for the CPU has no `cap` of scores: plain torch takes its place.
    It knows no dtype: for a float64 model `kernel_name` or `auto_kernel` must have resolved `auto` before.
    """
    chosen = kernel_name(name, device.type, "float32" if name == "auto" else "")
    if chosen not in KERNELS:
        raise ValueError(f"--attention-kernel {name} is unknown; choose auto, {', '.join(KERNELS)}")
    return KERNELS[chosen].build(cap, tell)
