"""Figures of images: balance over ranks, bytes of features, preprocessing, packs; each beside its goal (`make bench`).

    python tools/bench_vision.py [--quick] [--json FILE] [--only loads bytes preprocessing packs]

Loads and bytes are counted from the tables and routes of training for 2 to 16 ranks, bytes also on 2 and 4 real ranks.
Preprocessing is the real build on photos and videos made here, medians of runs with 1 and 2 workers that take turns.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

from bench.preprocessing import media_part
from bench.report import benchmark_parser, run_parts
from bench.vision import byte_part, load_part, pack_part

PARTS = {"loads": load_part, "bytes": byte_part, "preprocessing": media_part, "packs": pack_part}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = benchmark_parser("Figures of images beside their goals.", [*PARTS]).parse_args(argv)
    return run_parts({name: functools.partial(part, arguments.quick) for name, part in PARTS.items()}, arguments)


if __name__ == "__main__":
    sys.exit(main())
