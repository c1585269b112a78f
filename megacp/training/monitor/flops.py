"""Model FLOPs utilisation (PaLM, Chowdhery et al. 2022, appendix B) and peak memory.

The FLOPs are those of `engine/models/costs.py`, without recomputation, compared with the dense
peaks of known GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2250e12, "tf32": 1100e12, "float32": 75e12, "float64": 37e12},
    "GH200": {"bfloat16": 989e12, "tf32": 494e12, "float32": 67e12, "float64": 67e12},
    "H200": {"bfloat16": 989e12, "tf32": 494e12, "float32": 67e12, "float64": 67e12},
    "H100 PCIe": {"bfloat16": 756e12, "tf32": 378e12, "float32": 51e12, "float64": 51e12},
    "H100 NVL": {"bfloat16": 835e12, "tf32": 417e12, "float32": 60e12, "float64": 60e12},
    "H100": {"bfloat16": 989e12, "tf32": 494e12, "float32": 67e12, "float64": 67e12},
    "A100": {"bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 19.5e12},
    "L40S": {"bfloat16": 362e12, "tf32": 183e12, "float32": 91.6e12, "float64": 1.4e12},
    "A10": {"bfloat16": 125e12, "tf32": 62.5e12, "float32": 31.2e12, "float64": 0.97e12},
    "L4": {"bfloat16": 121e12, "tf32": 60e12, "float32": 30.3e12, "float64": 0.47e12},
}
"""Dense peaks in FLOP/s from the vendor's data sheets, by a part of the device's name; tf32 is
float32 on tensor cores with 10 bits of mantissa.
"""


def gpu_peak(device_name: str, dtype: str) -> float | None:
    """FLOP/s of a GPU by its name (`torch.cuda.get_device_name()`); None when it is in no table.

    The longest matching name counts, so an L40S is no L4.
    """
    words = device_name.replace("-", " ")
    matches = [
        name for name in PEAK_FLOPS if f" {name} " in f" {words} " or words.endswith(f" {name}")
    ]
    return PEAK_FLOPS[max(matches, key=len)][dtype] if matches else None


def cuda_peak(device: torch.device, dtype: str) -> float | None:
    """`gpu_peak` of a device; float32 means TF32 where torch may multiply in it, which is not its
    default.
    """
    import torch

    tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return gpu_peak(torch.cuda.get_device_name(device), "tf32" if tf32 else dtype)


def peak_bytes(device_type: str = "cpu") -> int:
    """Most bytes held at once: by the whole process ("cpu") or in tensors on its GPU ("cuda")."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    # getrusage's ru_maxrss would begin with the peak of the process that started this one
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024  # "VmHWM:   123456 kB"
