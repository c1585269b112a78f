"""The style of all pictures, and PNG files whose bytes depend only on the figure.

The palette by Okabe and Ito stays distinct under every common form of colour blindness.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

INK = "#1b1f24"
GREY = "#6b7280"
PALE = "#e8eaed"
PAPER = "#ffffff"
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
VERMILION = "#D55E00"

RANK_COLORS = (BLUE, ORANGE, GREEN, PURPLE)
"""Colours of four ranks, in order."""

SETTINGS = {
    "font.family": "DejaVu Sans",  # shipped with matplotlib, so every machine has it
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.constrained_layout.w_pad": 0.14,  # inches
    "figure.constrained_layout.h_pad": 0.1,
    "savefig.dpi": 105,
}


def use_style() -> None:
    """Apply the settings of all pictures, and draw into memory."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update(cast(Any, SETTINGS))


def lighter(color: str, white: float) -> tuple[float, float, float]:
    """Mix `color` with a share of white, between 0 (none) and 1 (only white)."""
    red, green, blue = (channel + (1 - channel) * white for channel in to_rgb(color))
    return red, green, blue


def heading(figure: Figure, text: str) -> None:
    """Write the heading of a picture."""
    figure.suptitle(text, fontsize=17, weight="bold")


def hide_frame(axes: Axes, *kept: str) -> None:
    """Hide the sides of the frame, except those in `kept`."""
    hidden = [side for side in axes.spines if side not in kept]
    axes.spines[hidden].set_visible(False)
    axes.tick_params(length=0)


def texts(figure: Figure) -> list[str]:
    """Return the visible texts of a figure, without matplotlib's own tick labels."""
    found = figure.findobj(Text)
    return [text.get_text() for text in found if text.get_text() and text.get_visible()]


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, with its texts in the file's metadata for tests to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = json.dumps(texts(figure))
    figure.savefig(path, metadata={"Software": "", "texts": said})
    plt.close(figure)
