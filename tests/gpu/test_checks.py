"""The comparisons of tools/check_gpu.py as tests: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacp.verify import gpu_checks
from megacp.verify.gpu_checks import CheckSizes, Finding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
    pytest.mark.filterwarnings("default"),  # compilers and guest packages warn as they like
]

CHECKS = ("native_against_cpu", "fused_tiles", "engine_against_native", "ranks_on_one_device")


@pytest.mark.parametrize("check", [getattr(gpu_checks, name) for name in CHECKS], ids=CHECKS)
def test_the_gpu_computes_like_the_cpu(check: Callable[[str, CheckSizes], list[Finding]]) -> None:
    findings = check("cuda", CheckSizes(layers=2, hidden=256, tokens=1024, ranks=(2,)))
    if all(finding.verdict == "skipped" for finding in findings):
        pytest.skip(findings[0].reason)
    assert [f"{f.name}: {f.difference}" for f in findings if f.verdict == "FAILED"] == []
