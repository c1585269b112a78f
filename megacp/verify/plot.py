"""Draw the loss curve of a run from its JSONL log.

python tools/plot_log.py --log out/checkpoints/log.jsonl --output out/loss.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megacp.core.config.cli import OneLineParser


def read_curves(path: Path) -> dict[str, dict[int, float]]:
    """Losses of a log by kind (`train`, `valid`) and step. ValueError names the file and line that hold none."""
    curves: dict[str, dict[int, float]] = {"train": {}, "valid": {}}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):  # of bytes: a text has further ends of lines
        try:
            row = json.loads(line)
            if row["kind"] == "run":  # it went on from here: what came after that step counts no more
                curves = {kind: {s: y for s, y in one.items() if s <= row["step"]} for kind, one in curves.items()}
            elif row["kind"] in curves:
                curves[row["kind"]][int(row["step"])] = float(row["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--log {path}:{number} is no line of a training log: {error!r}") from error
    if not curves["train"]:
        raise ValueError(f"--log {path} holds no training step")
    return curves


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, read, draw; exit status 2 with one message on bad input."""
    parser = OneLineParser(description="Draw the loss curve of a run from its JSONL log.")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--mark", type=int, action="append", default=[], metavar="STEP", help="where a run was resumed")
    arguments = parser.parse_args(argv)
    try:
        curves = read_curves(arguments.log)
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except (ValueError, OSError, ImportError) as error:
        extra = " (pip install 'megacp[log]')" if isinstance(error, ImportError) else ""
        print(f"error: {error}{extra}", file=sys.stderr)
        return 2
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for kind, style in (("train", "-"), ("valid", "o-")):
        axes.plot(list(curves[kind]), list(curves[kind].values()), style, linewidth=1, label=kind)
    for step in arguments.mark:
        axes.axvline(step, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, bbox_inches="tight")
    losses = list(curves["train"].values())
    print(f"{arguments.output}: {len(losses)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0
