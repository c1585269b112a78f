"""The comparisons of tools/check_gpu.py as tests: run `pytest -m gpu` on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacp.verify import gpu_report
from megacp.verify.gpu_report import MIDDLE, Finding, Sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"
    ),
    # warnings of compilers and optional dependencies are not errors
    pytest.mark.filterwarnings("default"),
]

CHECKS = ("native_against_cpu", "engine_against_native", "ranks_on_one_device")


@pytest.mark.parametrize("check", [getattr(gpu_report, name) for name in CHECKS], ids=CHECKS)
def test_the_gpu_computes_like_the_cpu(check: Callable[[str, Sizes], list[Finding]]) -> None:
    findings = check("cuda", {**MIDDLE, "num_layers": 2, "hidden_size": 256, "seq_length": 1024})
    if all(finding.verdict == "skipped" for finding in findings):
        pytest.skip(findings[0].reason)
    assert [f"{f.name}: {f.difference}" for f in findings if f.verdict == "FAILED"] == []
