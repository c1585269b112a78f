"""Is NVIDIA's apex here? It has no wheel, and the package `apex` on the public index is an
unrelated web toolkit.

The search imports nothing: `import apex` would succeed for the impostor, run its code and fail
later.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"
"""The extension module of apex that adds a weight gradient to a float32 sum inside the product."""

BUILD = (
    "build it from the source repository NVIDIA/apex, in an environment that has CUDA torch: "
    "pip install -v --no-build-isolation --config-settings '--build-option=--cpp_ext' "
    "--config-settings '--build-option=--cuda_ext' ."
)


def apex_status() -> str:
    """`nvidia`, `nvidia without extensions`, `impostor` or `absent`."""
    spec = find_spec("apex")
    if spec is None:
        return "absent"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return "impostor"
    return "nvidia" if find_spec("amp_C") else "nvidia without extensions"


def describe_apex() -> str:
    """One line for a person: what is installed and, where it is wrong, how to put it right."""
    return {
        "nvidia": "apex: NVIDIA's, with its CUDA extensions",
        "nvidia without extensions": f"apex: NVIDIA's, but without its CUDA extensions (no amp_C); {BUILD}",
        "impostor": f"apex: the installed package is not NVIDIA's but a web toolkit: pip uninstall apex, then {BUILD}",
        "absent": "apex: not installed, and not needed",
    }[apex_status()]


def weight_gradient_kernel() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
    """apex's product `(total[f, h] float32, dy[t, f], x[t, h])` that adds `dy^T x` to the total;
    None without it.
    """
    if (
        apex_status() not in ("nvidia", "nvidia without extensions")
        or find_spec(GRADIENT_KERNEL) is None
    ):
        return None
    kernel = import_module(GRADIENT_KERNEL)

    def add(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        kernel.wgrad_gemm_accum_fp32(x.contiguous(), grad.contiguous(), total)

    return add
