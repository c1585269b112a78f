"""Draw the loss curve of a run from its JSONL log.

python tools/plot_log.py --log out/checkpoints/log.jsonl --output out/loss.png
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from megacp.engine.config.cli import OneLineParser
from megacp.storage.files import read_regular, require_free, write_result
from megacp.training.monitor.console import say, warn

_LARGEST_LOG = 4 << 30
"""Bytes of a log."""
MEAN_OF = 20
"""Steps of the running mean: the loss of one step says as much of its packs as of the model."""


def running_mean(losses: Sequence[float]) -> list[float]:
    """The mean of each step's loss and of those before it, together at most MEAN_OF."""
    return [fmean(losses[max(0, end - MEAN_OF) : end]) for end in range(1, len(losses) + 1)]


def read_curves(path: Path) -> dict[str, dict[int, float]]:
    """Losses of a log by kind (`train`, `valid`) and step. ValueError names the file and line that
    hold none.
    """
    curves: dict[str, dict[int, float]] = {"train": {}, "valid": {}}
    for number, line in enumerate(
        read_regular(path, _LARGEST_LOG).splitlines(), 1
    ):  # of bytes: a text has further ends of lines
        try:
            row = json.loads(line)
            if (
                row["kind"] == "run"
            ):  # it went on from here: what came after that step counts no more
                curves = {
                    kind: {s: y for s, y in one.items() if s <= row["step"]}
                    for kind, one in curves.items()
                }
            elif row["kind"] in curves:
                curves[row["kind"]][int(row["step"])] = float(row["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--log {path}:{number} is no line of a training log: {error!r}"
            ) from error
    if not curves["train"]:
        raise ValueError(f"--log {path} holds no training step")
    return curves


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, read, draw; exit status 2 with one message on bad input."""
    parser = OneLineParser(description="Draw the loss curve of a run from its JSONL log.")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument(
        "--mark",
        type=int,
        action="append",
        default=[],
        metavar="STEP",
        help="where a run was resumed",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file where it exists")
    arguments = parser.parse_args(argv)
    try:
        require_free("--output", arguments.output, arguments.overwrite)
        curves = read_curves(arguments.log)
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except (ValueError, OSError, ImportError) as error:
        extra = " (pip install 'megacp[log]')" if isinstance(error, ImportError) else ""
        warn(f"error: {error}{extra}")
        return 2
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    losses = list(curves["train"].values())
    (line,) = axes.plot(list(curves["train"]), losses, linewidth=1, alpha=0.35, label="train")
    mean_name = f"train, mean of {MEAN_OF} steps"
    axes.plot(list(curves["train"]), running_mean(losses), color=line.get_color(), label=mean_name)
    axes.plot(
        list(curves["valid"]), list(curves["valid"].values()), "o-", linewidth=1, label="valid"
    )
    for step in arguments.mark:
        axes.axvline(step, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=arguments.output.suffix[1:] or None, bbox_inches="tight")
        write_result("--output", arguments.output, drawn.getvalue(), arguments.overwrite)
    except (ValueError, OSError) as error:  # a suffix that is no picture's, a disk that is full
        warn(f"error: {error}")
        return 2
    say(f"{arguments.output}: {len(losses)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0
