"""Speed, memory and traffic of training steps on this machine's CPU, every layout in one run (`make bench`).

    python tools/benchmark.py [--quick] [--json FILE]

The layouts of a group take turns, one step each; the table shows medians. Ratios are over one process with one thread
and over one process with two; ranks have one thread. Bytes sent stand beside the formulas of megacp/measure/traffic.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from megacp.measure.preprocessing import text_part
from megacp.measure.report import benchmark_parser, run_parts
from megacp.measure.steps import GROUPS, QUICK_SIZES, SIZES, step_part


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    about = "Measure training steps and preprocessing on this machine's CPU."
    parser = benchmark_parser(about, [*GROUPS, "preprocess"], left_out=["four"])
    parser.add_argument("--rounds", type=int, metavar="N", help="steps measured of each layout (default 3, quick 1)")
    arguments = parser.parse_args(argv)
    quick, rounds = arguments.quick, arguments.rounds or (1 if arguments.quick else 3)
    parts = {name: functools.partial(step_part, name, quick, rounds) for name in GROUPS}
    parts |= {"preprocess": functools.partial(text_part, quick)}
    return run_parts(parts, arguments, sizes=QUICK_SIZES if quick else SIZES, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
