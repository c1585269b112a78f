"""Peak memory of the process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from megacp.core.monitor.memory import peak_bytes


def test_the_peak_sees_an_allocation_that_is_gone() -> None:
    """Would catch a current value in place of the peak, KiB taken for bytes, and the peak of the parent process."""
    code = (
        "from megacp.core.monitor.memory import peak_bytes; before = peak_bytes(); x = bytearray(b'x') * (64 << 20); "
        "del x; grown = peak_bytes() - before; assert 60 << 20 < grown < 80 << 20, grown"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_peak_never_falls() -> None:
    """Would catch a reading that forgets."""
    first = peak_bytes()
    np.ones(1 << 20).sum()
    assert peak_bytes("cpu") >= first > 1 << 20


@pytest.mark.gpu
def test_the_peak_on_cuda_is_the_allocators() -> None:
    """Would catch host memory reported for a GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = peak_bytes("cuda")
    torch.empty(1 << 24, device="cuda", dtype=torch.uint8)
    assert peak_bytes("cuda") >= before and peak_bytes("cuda") >= 1 << 24
