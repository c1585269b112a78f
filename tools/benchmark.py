"""Measure speed, memory and traffic of training steps on this machine's CPU (`make bench`).

    python tools/benchmark.py [--quick] [--json FILE]
    python tools/benchmark.py --peers --peers-python ENVIRONMENT/bin/python

The layouts of a group take turns, one step each, and the table shows medians. Ratios compare with
one process on one thread and on two threads. Each rank has one thread.

`--peers` compares our trainer with others on the same model and tokens, in turns (tools/peers).
Their packages are not dependencies: `--peers-python` names an interpreter that has them installed.
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
    """Convert a checkpoint of ours to a Hugging Face folder. The converter's messages go to
    standard error.
    """
    with contextlib.redirect_stdout(sys.stderr):
        convert(Request("megacp", "hf", checkpoint, folder), single_axis("world"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status."""
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
        help="measured steps per layout (default 3, peers 5, quick 1)",
    )
    parser.add_argument(
        "--peers",
        action="store_const",
        const=["peers"],
        dest="only",
        help="the same as --only peers",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of steps"
    )
    parser.add_argument(
        "--peers-python",
        metavar="PATH",
        default=sys.executable,
        help="interpreter with the peers installed (default: this one)",
    )
    parser.add_argument(
        "--grids",
        nargs="+",
        choices=GRIDS,
        default=list(GRIDS),
        help="grids of --peers (default: all)",
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
