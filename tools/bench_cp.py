"""Measure the balance, traffic and time of context parallelism, and compare each figure with its
goal (`make bench`).

    python tools/bench_cp.py [--quick] [--json FILE] [--only layouts time states experts]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

from bench.attention import layout_part, states_part, time_part
from bench.experts import experts_part
from bench.report import benchmark_parser, run_parts

PARTS = {"layouts": layout_part, "time": time_part, "states": states_part, "experts": experts_part}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return the exit status."""
    arguments = benchmark_parser(
        "Measure context parallelism, and compare each figure with its goal.", [*PARTS]
    ).parse_args(argv)
    return run_parts(
        {name: functools.partial(part, arguments.quick) for name, part in PARTS.items()}, arguments
    )


if __name__ == "__main__":
    sys.exit(main())
