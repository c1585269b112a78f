"""Peak memory of this process: resident set on a CPU, the allocator's high mark on CUDA.

Key property: the system keeps the high mark, so reading it costs nothing and misses no spike. On Linux it is `VmHWM`.
`ru_maxrss` of getrusage would begin with the peak of the process that started this one (torchrun, a test runner).
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_bytes(device_type: str = "cpu") -> int:
    """Most bytes held at once: by the whole process ("cpu") or in tensors on its GPU ("cuda")."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # "VmHWM:   123456 kB"
    high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return high if sys.platform == "darwin" else high * 1024  # bytes on macOS, KiB elsewhere
