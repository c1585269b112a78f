"""The comparisons of tools/check_gpu.py as tests: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacp.verify import gpu_checks
from megacp.verify.gpu_checks import CheckSizes, Finding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
    pytest.mark.filterwarnings("default"),  # compilers and guest packages warn as they like
]

SIZES = CheckSizes(layers=2, hidden=256, tokens=1024, ranks=(2,))


def assert_sound(findings: list[Finding]) -> None:
    assert [f"{f.name}: {f.difference}" for f in findings if f.verdict == "FAILED"] == []


def test_native_layers_train_like_the_cpu_in_float64() -> None:
    assert_sound(gpu_checks.native_against_cpu("cuda", SIZES))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_flex_attention_over_tiles_is_the_dense_softmax(seed: int) -> None:
    assert_sound(gpu_checks.fused_tiles("cuda", SIZES, seed))


@pytest.mark.parametrize("check", [gpu_checks.engine_against_native, gpu_checks.fused_weight_gradient])
def test_guest_packages_compute_like_native(check: Callable[[str, CheckSizes], list[Finding]]) -> None:
    findings = check("cuda", SIZES)
    if all(finding.skipped for finding in findings):
        pytest.skip(findings[0].skipped)
    assert_sound(findings)


@pytest.mark.timeout(600)
def test_ranks_that_share_the_gpu_train_like_one() -> None:
    assert_sound(gpu_checks.ranks_on_one_device("cuda", SIZES))
