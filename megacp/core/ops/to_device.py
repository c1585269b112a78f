"""Arrays of the host as tensors of the device, without waiting for it.

Key property: a copy from pinned memory is queued like a kernel. The plan and the tokens of a microbatch travel while
the GPU still computes the last microbatch. torch's pinned allocator keeps the block until the copy is over. Rejected:
`tensor.to(device, non_blocking=True)` from pageable memory, which the driver copies while the host waits.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(values: np.ndarray | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the values' dtype and shape; on a CPU it shares their memory."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if torch.device(device).type == "cpu":
        return tensor
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned_bytes(size: int) -> int:
    """What pinned memory of `size` bytes takes: torch's allocator rounds up to a power of two."""
    return 1 << max(0, size - 1).bit_length()


def pinned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host in memory that `device` copies from; in other threads than the first, of its context."""
    if torch.device(device).type != "cuda" or tensor.is_pinned():
        return tensor
    with torch.cuda.device(device):  # a new thread's device is the first of the machine, which would get a context
        return tensor.pin_memory()
