"""Figures of context parallelism: balance, traffic, tiles, memory and time, each beside its goal (`make bench`).

    python tools/bench_cp.py [--quick] [--json FILE] [--plot DIR] [--only layouts memory time]

The costs of layouts are counted from plans for 2 to 16 ranks; memory and time are measured on 1, 2 and 4 processes with
one thread each. Times are processor seconds summed over ranks, medians of runs that take turns: other programs on the
machine move them little. Wall seconds are in the JSON.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

from bench.context_parallel import layout_part, memory_part, time_part
from bench.report import benchmark_parser, run_parts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = benchmark_parser("Figures of context parallelism beside their goals.", ["layouts", "memory", "time"])
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture of each pack's tiles by rank there")
    arguments = parser.parse_args(argv)
    parts = {
        "layouts": functools.partial(layout_part, arguments.quick, arguments.plot),
        "memory": functools.partial(memory_part, arguments.quick),
        "time": functools.partial(time_part, arguments.quick),
    }
    return run_parts(parts, arguments)


if __name__ == "__main__":
    sys.exit(main())
