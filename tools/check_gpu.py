"""Check a machine's GPU in under ten minutes and write a report:
`python tools/check_gpu.py --output DIR`.

First, a run of 14 steps is saved and resumed. Then three comparisons follow: training on the GPU
with training on the CPU in float64, Transformer Engine with native layers, and several ranks that
share the GPU with a single rank. Finally, the speed and utilisation of a 1B model are measured.
`report.json` and `report.md` contain all figures and the software versions. `--dry-run` lists the
checks and needs no GPU. The exit status is 1 if a comparison fails.

`--fake --world-size N --config FILE ...` needs no GPU either. It accepts all flags of a run, trains
one step of `--rank` and its neighbours on a simulated device, and prints their memory
(`megacp/verify/fake_step.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megacp.training.monitor.console import warn
from megacp.verify import fake_cuda


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--fake" in arguments:
        arguments.remove("--fake")
        try:
            fake_cuda.load_fake_cuda()  # before torch
            from megacp.verify import fake_step

            return fake_step.main(arguments)
        except ValueError as error:
            warn(f"error: {error}")
            return 2
    import torch

    from megacp.attention.ops.flex import compiler_problem
    from megacp.engine.config.cli import OneLineParser
    from megacp.storage.files import require_free
    from megacp.verify.gpu_report import check_device, parts

    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("gpu_report"),
        help="folder for the report (default: gpu_report)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing report")
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.0,
        help="start no part after this number of minutes (default: 7)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the checks without running them; needs no GPU"
    )
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="device to check; cpu runs small sizes, to test this script (default: cuda)",
    )
    options = parser.parse_args(arguments)
    if options.dry_run:
        print("\n".join(parts(options.device)))
        return 0
    missing = (
        None
        if torch.cuda.is_available()
        else "torch finds no CUDA device; use --dry-run to list the checks"
    )
    if options.device == "cuda" and (problem := missing or compiler_problem()):
        warn(f"error: {problem}")
        return 2
    try:
        for name in ("report.json", "report.md"):
            require_free("--output", options.output / name, options.overwrite)
    except ValueError as error:
        warn(f"error: {error}")
        return 2
    return check_device(options.device, options.output, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
