"""Draw the loss curve of a run from its JSONL log.

python tools/plot_log.py --log out/checkpoints/log.jsonl --output out/loss.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def read_curves(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and losses by kind (`train`, `valid`). Raises ValueError naming the file when it holds none."""
    curves: dict[str, dict[int, float]] = {"train": {}, "valid": {}}
    try:
        lines = path.read_bytes().splitlines()  # of bytes: a text has further ends of lines
    except OSError as error:
        raise ValueError(f"--log {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["kind"] == "run":  # it went on from here: what came after that step counts no more
                curves = {kind: {s: y for s, y in one.items() if s <= row["step"]} for kind, one in curves.items()}
            elif row["kind"] not in ("attention", "blend", "note", "timing"):
                curves[row["kind"]][int(row["step"])] = float(row["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--log {path}:{number} is no line of a training log: {error!r}") from error
    if not curves["train"]:
        raise ValueError(f"--log {path} holds no training step")
    return {kind: (list(one), list(one.values())) for kind, one in curves.items()}


def draw(curves: dict[str, tuple[list[int], list[float]]], marks: Sequence[int], output: Path) -> None:
    """Write the curve as PNG; `marks` are steps at which the run was resumed. ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("a plot needs the package matplotlib: pip install 'megacp[log]'") from error

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(*curves["train"], linewidth=1, label="training")
    if curves["valid"][0]:
        axes.plot(*curves["valid"], "o-", markersize=4, label="validation")
    for index, step in enumerate(marks):
        axes.axvline(step, color="grey", linestyle="--", linewidth=1, label="resumed" if index == 0 else None)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, read, draw; exit status 2 with one message on bad input."""
    parser = argparse.ArgumentParser(description="Draw the loss curve of a run from its JSONL log.")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument(
        "--mark", type=int, action="append", default=[], metavar="STEP", help="a step to mark as resumed"
    )
    arguments = parser.parse_args(argv)
    try:
        curves = read_curves(arguments.log)
        draw(curves, arguments.mark, arguments.output)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    steps, losses = curves["train"]
    print(f"{arguments.output}: {len(steps)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0
