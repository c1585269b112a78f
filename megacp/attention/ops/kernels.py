"""The table of attention kernels, and the kernel that `auto` selects on each device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacp.attention.ops.cudnn import CudnnKernel, engine_problem
from megacp.attention.ops.device import STAND_IN
from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.flex import FlexKernel, FlexStandIn, flash_problem
from megacp.attention.ops.kernel import Kernel
from megacp.attention.ops.tile_kernels import FlashKernel, MathKernel

Tell = Callable[[str], None]
"""A function that logs a line; callers may pass the same line several times."""


@dataclass(frozen=True)
class KernelChoice:
    """A row of the kernel table: how to build a kernel, and where it can run."""

    build: Callable[[float, Tell], Kernel]
    """Build the kernel, given a cap on scores (0 for none) and a logger."""
    device: str = ""
    """The only supported device type; empty if the kernel runs on all devices."""
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    """Supported dtypes: the kernel accumulates in the same dtype or a wider one."""
    problem: Callable[[], str | None] = lambda: None
    """Return the reason why the kernel is not available in this environment, or None."""


KERNELS = {
    # torch's CPU kernel and cuDNN do not support a cap on scores
    "flash": KernelChoice(lambda cap, tell: MathKernel(cap) if cap else FlashKernel(), "cpu"),
    "math": KernelChoice(lambda cap, tell: MathKernel(cap)),
    "flex": KernelChoice(lambda cap, tell: FlexKernel(cap=cap), "cuda", ("float32", "bfloat16")),
    "flex_flash": KernelChoice(
        lambda cap, tell: FlexKernel(whole_backend="FLASH", cap=cap),
        "cuda",
        ("bfloat16",),
        flash_problem,
    ),
    "cudnn": KernelChoice(
        lambda cap, tell: FlexKernel(cap=cap) if cap else CudnnKernel(FlexKernel(), tell),
        "cuda",
        ("bfloat16",),
        engine_problem,
    ),
}
"""Kernels by name; `auto` and `dense` have no row."""

FASTEST = {"cpu": ("flash",), "cuda": ("cudnn", "flex"), STAND_IN: ("flex",)}
"""Candidates of `auto` for each device type. `auto` selects the first candidate that is available
and supports the dtype, or math if there is none.
"""


def kernel_problem(name: str, device_type: str, dtype: str = "") -> str | None:
    """Return the reason why a kernel cannot run on a device type in a dtype, or None.

    `device_type` is `cpu` or `cuda`; an empty `dtype` stands for any dtype. Return None for names
    without a row in `KERNELS`.
    """
    choice = KERNELS.get(name)
    if choice is None:
        return None
    if choice.device not in ("", device_type) and device_type != STAND_IN:
        only = {"cpu": "the CPU", "cuda": "CUDA"}[choice.device]
        return f"attention kernel {name} runs on {only}, not on {device_type}; choose auto or math"
    if dtype and dtype not in choice.dtypes:
        supported = " or ".join(choice.dtypes)
        return f"attention kernel {name} supports {supported}, not {dtype}; choose auto or math"
    if device_type == STAND_IN:
        return None
    problem = choice.problem()
    return problem and f"attention kernel {name}: {problem}"


def kernel_name(name: str, device_type: str, dtype: str = "") -> str:
    """Return the name of the kernel that `name` selects on a device.

    `auto` selects flash on CPU and cudnn or flex on CUDA. It selects math for float64 on CUDA, and
    on any other device. Other names are returned unchanged. Raise ValueError with the message of
    `kernel_problem` if the kernel cannot run.
    """
    if name == "auto":
        # an explicit name that cannot run is an error; `auto` always finds a kernel
        for candidate in FASTEST.get(device_type, ()):
            if not kernel_problem(candidate, device_type, dtype):
                return candidate
        return "math"
    problem = kernel_problem(name, device_type, dtype)
    if problem:
        raise ValueError(problem)
    return name


def auto_kernel(device_type: str, dtype: torch.dtype) -> str:
    """Return the kernel that `auto` selects for tensors of a dtype.

    The kernel accumulates in that dtype or a wider one.
    """
    wide = dtype if dtype == torch.bfloat16 else accumulation_dtype(dtype)
    return kernel_name("auto", device_type, str(wide).removeprefix("torch."))


def select_kernel(
    name: str, device: torch.device, cap: float = 0.0, tell: Tell = lambda line: None
) -> Kernel:
    """Build a kernel by name.

    torch's flash attention for the CPU does not support a `cap` on scores, so MathKernel replaces
    it if `cap` is not 0. The dtype is unknown here: for a float64 model, resolve `auto` with
    `kernel_name` or `auto_kernel` first.

    Raise ValueError if the kernel is unknown or cannot run.
    """
    chosen = kernel_name(name, device.type, "float32" if name == "auto" else "")
    if chosen not in KERNELS:
        raise ValueError(f"attention kernel {name} is unknown; choose auto, {', '.join(KERNELS)}")
    # a dry run computes with shapes only, so one stand-in represents all kernels of a GPU
    if device.type == STAND_IN and KERNELS[chosen].device:
        return FlexStandIn(cap)
    return KERNELS[chosen].build(cap, tell)
