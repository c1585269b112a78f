"""Model FLOPs utilisation (PaLM, Chowdhery et al. 2022, appendix B) and peak memory.

FLOPs come from `engine/models/costs.py`, without recomputation, and are compared with the GPU's
dense peak.
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
"""Dense peak FLOP/s from vendors' data sheets, by words in the device's name. tf32 is float32 on
tensor cores, with a mantissa of 10 bits.
"""


def gpu_peak(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a GPU by its name (`torch.cuda.get_device_name()`).

    If several table entries match, the longest counts. Return None if none matches.
    """
    # whole words only, so that an L40S does not match L4
    words = f" {device_name.replace('-', ' ')} "
    matches = [name for name in PEAK_FLOPS if f" {name} " in words]
    return PEAK_FLOPS[max(matches, key=len)][dtype] if matches else None


def cuda_peak(device: torch.device, dtype: str) -> float | None:
    """Return `gpu_peak` for a device.

    float32 counts as TF32 if torch is allowed to use TF32, which is not the default.
    """
    import torch

    tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return gpu_peak(torch.cuda.get_device_name(device), "tf32" if tf32 else dtype)


def peak_bytes(device_type: str = "cpu") -> int:
    """Return the peak bytes of the whole process ("cpu"), or of its tensors on the GPU ("cuda")."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    # getrusage's ru_maxrss is unsuitable, because it starts with the parent process's peak
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024  # "VmHWM:   123456 kB"
