"""Draws the loss curve of a run from its JSONL log.

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
from megacp.storage.wording import counted
from megacp.training.monitor.console import say, warn

# The maximum size of a log in bytes.
_LARGEST_LOG = 4 << 30
# Number of steps in the running mean. A single step's loss depends on its packs as much as on the
# model.
MEAN_OF = 20


def running_mean(losses: Sequence[float]) -> list[float]:
    """Return for each step the mean loss of the last MEAN_OF steps (fewer at the start)."""
    return [fmean(losses[max(0, end - MEAN_OF) : end]) for end in range(1, len(losses) + 1)]


def read_curves(path: Path) -> dict[str, dict[int, float]]:
    """Return the losses of a log by kind (`train`, `valid`) and step.

    Raise ValueError, with file and line, if a line is invalid or the log has no training step.
    """
    curves: dict[str, dict[int, float]] = {"train": {}, "valid": {}}
    # Split bytes rather than text, because str.splitlines also splits at other characters.
    if path.is_dir():
        raise ValueError(f"--log {path} is a folder; a run writes log.jsonl in its --save folder")
    try:
        lines = read_regular(path, _LARGEST_LOG).splitlines()
    except FileNotFoundError as error:
        raise ValueError(
            f"--log {path}: no such file; a run with --save FOLDER writes FOLDER/log.jsonl"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["kind"] == "run":
                # The run was resumed at this step, so drop the losses of later steps.
                for kind, curve in curves.items():
                    curves[kind] = {
                        step: loss for step, loss in curve.items() if step <= row["step"]
                    }
            elif row["kind"] in curves:
                curves[row["kind"]][int(row["step"])] = float(row["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--log {path}:{number} is not a line of the log.jsonl of a run ({error!r})"
            ) from error
    if not curves["train"]:
        raise ValueError(f"--log {path} contains no training step")
    return curves


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status, which is 2 after an error message."""
    parser = OneLineParser(description="Draw the loss curve of a run from its JSONL log.")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument(
        "--mark",
        type=int,
        action="append",
        default=[],
        metavar="STEP",
        help="draw a vertical line at this step, for example where the run was resumed; repeatable",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    arguments = parser.parse_args(argv)
    try:
        require_free("--output", arguments.output, arguments.overwrite)
        curves = read_curves(arguments.log)
        # An optional dependency, imported only after the flags and the log are valid.
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except (ValueError, OSError, ImportError) as error:
        extra = " (pip install -e '.[log]')" if isinstance(error, ImportError) else ""
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
    # Mark the steps at which the run was resumed.
    for step in arguments.mark:
        axes.axvline(step, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=arguments.output.suffix[1:] or None, bbox_inches="tight")
        write_result("--output", arguments.output, drawn.getvalue(), arguments.overwrite)
    except (ValueError, OSError) as error:  # an unknown image suffix, or a full disk
        warn(f"error: {error}")
        return 2
    steps = counted(len(losses), "step")
    say(f"{arguments.output}: {steps}, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0
