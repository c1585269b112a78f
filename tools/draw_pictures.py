"""Draw the pictures of README.md and docs/ into a folder.

python tools/draw_pictures.py --output docs/pictures [--only mask pipeline] [--demo demo_out]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megacp.training.monitor.console import warn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/ is not installed


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the pictures; return 0, or 2 after an error message."""
    parser = argparse.ArgumentParser(description="Draw the pictures of README.md and docs/.")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("docs/pictures"),
        metavar="DIR",
        help="folder for the pictures (default: docs/pictures)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="names of the pictures to draw (default: all)"
    )
    parser.add_argument(
        "--demo",
        type=Path,
        metavar="DIR",
        help="folder of a finished `make demo`, which the picture `demo` requires",
    )
    args = parser.parse_args(argv)
    try:
        from bench.pictures import draw_all
    except ImportError as error:
        warn(f"error: the pictures require {error.name}: pip install -e '.[demo]'")
        return 2
    try:
        for path in draw_all(args.output, args.only, args.demo):
            print(f"{path}: {path.stat().st_size:,} bytes")
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
