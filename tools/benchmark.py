"""Measure the speed, memory and traffic of training steps on this machine's CPU (`make bench`).

    python tools/benchmark.py [--quick] [--json FILE]
    python tools/benchmark.py --peers --peers-python ENVIRONMENT/bin/python

The parallel layouts of a group take turns, one step each, and the table shows medians. Ratios are
relative to one process with one thread and with two threads. Each rank has one thread.

`--peers` compares megacp with other trainers on the same model and tokens, in turns (tools/peers).
Their packages are not dependencies: set `--peers-python` to an interpreter that has them installed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

from bench.peers.comparison import Opponents, peers_part
from bench.peers.grids import GRIDS, PEERS
from bench.plans import plan_part
from bench.preprocessing import text_part
from bench.report import benchmark_parser, run_parts
from bench.steps import GROUPS, QUICK_SIZES, SIZES, step_part
from megacp.distributed.grid import single_axis
from megacp.huggingface.convert.export import Request, convert


def to_hugging_face(checkpoint: Path, folder: Path) -> None:
    """Convert a megacp checkpoint to a Hugging Face folder, with messages on standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        convert(Request("megacp", "hf", checkpoint, folder), single_axis("world"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return the exit status."""
    about = "Measure training steps and preprocessing on this machine's CPU."
    parser = benchmark_parser(
        about,
        [*GROUPS, "peers", "plan", "preprocess"],
        left_out=["four", "sharding", "peers", "plan"],
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="number of measured steps per layout (default: 3; 5 with --peers; 1 with --quick)",
    )
    parser.add_argument(
        "--peers",
        action="store_const",
        const=["peers"],
        dest="only",
        help="compare with other trainers; the same as --only peers",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the model (default: float32)",
    )
    parser.add_argument(
        "--peers-python",
        metavar="PATH",
        default=sys.executable,
        help="Python interpreter that has the other trainers installed (default: this one)",
    )
    parser.add_argument(
        "--grids",
        nargs="+",
        choices=GRIDS,
        default=list(GRIDS),
        help="grids to compare with --peers (default: all)",
    )
    arguments = parser.parse_args(argv)
    sizes = {**(QUICK_SIZES if arguments.quick else SIZES), "dtype": arguments.dtype}
    quick, rounds = arguments.quick, arguments.rounds or (1 if arguments.quick else 3)
    parts = {name: functools.partial(step_part, name, sizes, rounds) for name in GROUPS}
    parts |= {
        "preprocess": functools.partial(text_part, quick),
        "plan": functools.partial(plan_part, sizes, rounds),
    }
    scripts = Path(__file__).resolve().parent / "peers"
    opponents = Opponents(arguments.peers_python, scripts, PEERS)
    turns = arguments.rounds or (1 if quick else 5)
    parts |= {
        "peers": functools.partial(
            peers_part, quick, turns, opponents, to_hugging_face, arguments.grids
        )
    }
    return run_parts(parts, arguments, sizes=sizes, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
