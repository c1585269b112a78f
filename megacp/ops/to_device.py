"""Arrays of the host as tensors of the device, without waiting for it.

Key property: a copy from pinned memory is queued like a kernel. The plan and the tokens of a microbatch travel while
the GPU still computes the last microbatch. torch's pinned allocator keeps the block until the copy is over. Rejected:
`tensor.to(device, non_blocking=True)` from pageable memory, which the driver copies while the host waits.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A tensor of the array's dtype and shape; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
