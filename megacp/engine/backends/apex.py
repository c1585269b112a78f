"""Detection of NVIDIA's apex.

There is no wheel for NVIDIA's apex, and the package `apex` on the public index is an unrelated web
toolkit. The detection imports nothing, because `import apex` would run the web toolkit's code and
fail only later.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"
"""apex's extension module that fuses the product and the float32 sum of weight gradients."""

BUILD = (
    "build it from the source repository NVIDIA/apex, in an environment that has CUDA torch: "
    "pip install -v --no-build-isolation --config-settings '--build-option=--cpp_ext' "
    "--config-settings '--build-option=--cuda_ext' ."
)


def apex_status() -> str:
    """Return `nvidia`, `nvidia without extensions`, `impostor` or `absent`."""
    spec = find_spec("apex")
    if spec is None:
        return "absent"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    # NVIDIA's package has this folder, with or without extensions
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return "impostor"
    return "nvidia" if find_spec("amp_C") else "nvidia without extensions"


def describe_apex() -> str:
    """Return one line about the installed apex and, if it is the wrong one, how to fix it."""
    descriptions = {
        "nvidia": "apex: NVIDIA's package, with its CUDA extensions",
        "nvidia without extensions": (
            f"apex: NVIDIA's package, but without its CUDA extensions (no amp_C); {BUILD}"
        ),
        "impostor": (
            "apex: the installed package is an unrelated web toolkit and not NVIDIA's; run "
            f"pip uninstall apex, then {BUILD}"
        ),
        "absent": "apex: not installed, and not needed",
    }
    return descriptions[apex_status()]


def weight_gradient_kernel() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
    """Return a function that adds `dy^T x` to a total with apex; None if its kernel is missing.

    The arguments are `(total[f, h], dy[t, f], x[t, h])`; the total is float32.
    """
    if apex_status() not in ("nvidia", "nvidia without extensions"):
        return None
    if find_spec(GRADIENT_KERNEL) is None:
        return None
    # import only now that the package is known to be NVIDIA's
    kernel = import_module(GRADIENT_KERNEL)

    def add(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        # apex's argument order is input, output gradient, total
        kernel.wgrad_gemm_accum_fp32(x.contiguous(), grad.contiguous(), total)

    return add
