"""What all pictures share: size, colours, text, and a PNG whose bytes depend on the figure alone.

The palette is that of Okabe and Ito, which stays distinct under every common colour blindness.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from PIL import Image, PngImagePlugin

INK, GREY, PALE, PAPER = "#1b1f24", "#6b7280", "#e8eaed", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION = "#56B4E9", "#D55E00"
RANK_COLORS = (BLUE, ORANGE, GREEN, PURPLE)
"""Of four ranks, in order."""
SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
}
_DPI, _MOST_COLORS = 150, 128


def lighter(color: str, share: float) -> tuple[float, float, float]:
    """`color` mixed with white; a share of 1 is white."""
    red, green, blue = (channel + (1 - channel) * share for channel in to_rgb(color))
    return red, green, blue


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of that many inches with one axes, whose data are tenths of an inch from the top
    left.
    """
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10 * width), ylim=(10 * height, 0))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    color: str,
    *,
    share: float = 0.8,
) -> None:
    """A rounded rectangle from `corner`, filled with `color` mixed with white."""
    shape = "round,pad=0,rounding_size=0.8"
    axes.add_patch(
        FancyBboxPatch(
            corner, *size, boxstyle=shape, facecolor=lighter(color, share), edgecolor=color
        )
    )


def texts(figure: Figure) -> list[str]:
    """All that a figure says, but for the numbers that an axis finds itself while it is drawn."""
    return [
        text.get_text() for text in figure.findobj(Text) if text.get_text() and text.get_visible()
    ]


def stored_texts(path: Path) -> list[str]:
    """What the figure said that `write_png` wrote."""
    with Image.open(path) as image:
        return json.loads(image.info["texts"])


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG with a palette, which needs a third of the bytes; the same figure
    gives the same file.

    Its texts stand in the file too, so that a test can read them.
    """
    information = PngImagePlugin.PngInfo()
    information.add_text("texts", json.dumps(texts(figure)))
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    plt.close(figure)
    drawn.seek(0)
    with Image.open(drawn) as image:
        small = image.convert("RGB").quantize(_MOST_COLORS, dither=Image.Dither.NONE)
    packed = io.BytesIO()
    small.save(packed, format="PNG", optimize=True, pnginfo=information)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed.getvalue())


def title(figure: Figure, text: str, height: float) -> None:
    """The heading of a picture, at a share of its height."""
    figure.text(0.5, height, text, fontsize=18, weight="bold", ha="center", va="center")


def quiet(sides: Iterable[str], axes: Axes) -> None:
    """Take away some sides of the frame."""
    for side in sides:
        axes.spines[side].set_visible(False)


def use_style() -> None:
    """Draw into memory, with the settings of all pictures."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update(cast(Any, SETTINGS))
