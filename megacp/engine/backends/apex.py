"""Detection of NVIDIA's apex.

apex has no wheel, and the package `apex` on the public index is an unrelated web toolkit. The
detection imports nothing: `import apex` would run the code of the web toolkit and fail only later.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"
"""apex's extension module for a fused product and sum of weight gradients in float32."""

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
        "nvidia": "apex: NVIDIA's, with its CUDA extensions",
        "nvidia without extensions": (
            f"apex: NVIDIA's, but without its CUDA extensions (no amp_C); {BUILD}"
        ),
        "impostor": (
            "apex: the installed package is not NVIDIA's but a web toolkit: pip uninstall apex, "
            f"then {BUILD}"
        ),
        "absent": "apex: not installed, and not needed",
    }
    return descriptions[apex_status()]


def weight_gradient_kernel() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
    """Return apex's function that adds `dy^T x` to a total, or None without its kernel.

    The arguments are `(total[f, h], dy[t, f], x[t, h])`; the total is float32.
    """
    if apex_status() not in ("nvidia", "nvidia without extensions"):
        return None
    if find_spec(GRADIENT_KERNEL) is None:
        return None
    # import only now, when it is certain that the package is NVIDIA's
    kernel = import_module(GRADIENT_KERNEL)

    def add(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        # apex's argument order is input, output gradient, total
        kernel.wgrad_gemm_accum_fp32(x.contiguous(), grad.contiguous(), total)

    return add
