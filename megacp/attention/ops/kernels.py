"""The table of attention kernels, and the kernel that `auto` means on each device."""

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
"""Takes a line for the log, of which the same one may come again."""


@dataclass(frozen=True)
class KernelChoice:
    """A row of the table of kernels: how to build it, and the only device it runs on."""

    build: Callable[[float, Tell], Kernel]
    """Builder, given a cap of scores, or 0."""
    device: str = ""
    """The only device type, or any."""
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    """Dtypes for which it is exact: it accumulates in the same dtype or a wider one."""
    problem: Callable[[], str | None] = lambda: None
    """Why it cannot be had in this environment."""


KERNELS = {
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
"""Kernels by name; the names `auto` and `dense` have no row."""

FASTEST = {"cpu": ("flash",), "cuda": ("cudnn", "flex"), STAND_IN: ("flex",)}
"""What auto means on a type of device: the first that can be had and adds up in the model's dtype;
else math.
"""


def kernel_problem(name: str, device_type: str, dtype: str = "") -> str | None:
    """Return why a kernel cannot run on a device type (`cpu`, `cuda`) in a dtype (any, if empty),
    or None.

    Names without a row in `KERNELS` return None.
    """
    choice = KERNELS.get(name)
    if choice is None:
        return None
    if choice.device not in ("", device_type) and device_type != STAND_IN:
        only = {"cpu": "the CPU", "cuda": "CUDA"}[choice.device]
        return f"attention kernel {name} runs on {only}, not on {device_type}; choose auto or math"
    if dtype and dtype not in choice.dtypes:
        supported = " or ".join(choice.dtypes)
        return f"attention kernel {name} is for {supported}, not for {dtype}; choose auto or math"
    problem = None if device_type == STAND_IN else choice.problem()
    return problem and f"attention kernel {name}: {problem}"


def kernel_name(name: str, device_type: str, dtype: str = "") -> str:
    """Return the kernel that a name means.

    `auto` is flash on CPU, cudnn or flex on CUDA, and math for float64 on CUDA and on any other
    device. Every other name means itself; ValueError with the reason of `kernel_problem` if it
    cannot run.
    """
    if name == "auto":
        # a name asked for is an error where it cannot run; auto never is
        fastest = (
            each
            for each in FASTEST.get(device_type, ())
            if not kernel_problem(each, device_type, dtype)
        )
        return next(fastest, "math")
    problem = kernel_problem(name, device_type, dtype)
    if problem:
        raise ValueError(problem)
    return name


def auto_kernel(device_type: str, dtype: torch.dtype) -> str:
    """Return the kernel that `auto` means for tensors of any dtype; it accumulates at least as
    wide.
    """
    wide = dtype if dtype == torch.bfloat16 else accumulation_dtype(dtype)
    return kernel_name("auto", device_type, str(wide).removeprefix("torch."))


def select_kernel(
    name: str, device: torch.device, cap: float = 0.0, tell: Tell = lambda line: None
) -> Kernel:
    """Build the kernel of a name; ValueError if it is unknown or cannot run.

    torch's flash attention for the CPU does not support a `cap` on scores: plain torch takes its
    place. The dtype is not known here: for a float64 model, resolve `auto` first by `kernel_name`
    or `auto_kernel`.
    """
    chosen = kernel_name(name, device.type, "float32" if name == "auto" else "")
    if chosen not in KERNELS:
        raise ValueError(f"attention kernel {name} is unknown; choose auto, {', '.join(KERNELS)}")
    if device.type == STAND_IN and KERNELS[chosen].device:
        return FlexStandIn(cap)
    return KERNELS[chosen].build(cap, tell)
