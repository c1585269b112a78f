"""Peaks, utilisation and peak memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megacp.core.monitor.flops import cuda_peak, gpu_peak, peak_bytes


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 2060", None),
        ("NVIDIA A10G", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, peak: float | None) -> None:
    """Would catch an L40S taken for an L4, or an unknown GPU given somebody else's peak."""
    assert gpu_peak(name, "bfloat16") == peak


@pytest.mark.parametrize(("precision", "peak"), [("highest", 67e12), ("high", 494e12)])
def test_float32_is_compared_with_what_torch_may_use(
    precision: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch float32 products held against tensor cores that torch leaves idle by default."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert cuda_peak(torch.device("cuda"), "float32") == peak
    assert cuda_peak(torch.device("cuda"), "bfloat16") == 989e12


def test_the_peak_sees_an_allocation_that_is_gone() -> None:
    """Would catch a current value in place of the peak, KiB taken for bytes, and the peak of the parent process."""
    code = (
        "from megacp.core.monitor.flops import peak_bytes; before = peak_bytes(); x = bytearray(b'x') * (64 << 20); "
        "del x; grown = peak_bytes() - before; assert 60 << 20 < grown < 80 << 20, grown"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.gpu
def test_the_peak_on_cuda_is_the_allocators() -> None:
    """Would catch host memory reported for a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = peak_bytes("cuda")
    torch.empty(1 << 24, device="cuda", dtype=torch.uint8)
    assert peak_bytes("cuda") >= before and peak_bytes("cuda") >= 1 << 24
