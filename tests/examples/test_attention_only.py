"""The example of attention in your own model prints its difference from dense attention."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_sharded_attention_of_a_plain_module_equals_dense_attention() -> None:
    """Sums of 32 products of float64 numbers near 1, and gradients up to 100, have rounding errors
    of about 1e-14.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    run = subprocess.run(
        [*command, "examples/attention_only.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    found = re.fullmatch(r"2 ranks, largest difference from dense attention: (\S+)\n", run.stdout)
    assert found is not None, run.stdout
    assert float(found[1]) <= 1e-12
