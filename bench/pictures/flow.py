"""Draws the path from a record to the loss in five panels, all for the same row."""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.pictures import style
from bench.pictures.example import NAMES, DealtRow, dealt
from bench.pictures.masks import draw_mask

RECORD = """{"messages": [
 {"role": "user",
  "content": [
   {"type": "image",
    "path": "cat.jpg"}]}],

 "branches": [
  "A cat, asleep.",
  "Two ears, one tail.",
  "It lies in the sun."
 ]}"""
PANELS = (
    ("1  record", "a line of JSON;\nbranches share the image"),
    ("2  pack", "documents, end to end,\nup to --seq-length"),
    ("3  plan", "two integers per token\ngive exact tiles"),
    ("4  ranks", "each receives the keys\nthat its tokens attend to"),
    ("5  loss", "summed over all ranks,\nthen divided once"),
)
LOSS = r"""$\frac{\sum_{\mathrm{ranks}} \ \sum_{t} \; w_t \cdot \mathrm{loss}_t}
{\sum_{\mathrm{ranks}} \ \sum_{t} \; w_t}$""".replace("\n", "")
REASON = """The denominator of the
whole step is known
before the forward pass.
Two grids therefore differ
by rounding only."""
DOCUMENT_COLORS = (style.GREY, style.SKY, style.VERMILION, style.INK)
PACK_LINES = 6


def token_colors(row: DealtRow) -> np.ndarray:
    """Return the colour of each token [T, 3]: its document's, paler for image tokens."""
    colors = []
    for document, span in zip(row.metadata.document, row.metadata.span, strict=True):
        white = 0.55 if span else 0.0
        colors.append(style.lighter(DOCUMENT_COLORS[document], white))
    return np.array(colors)


def draw_lines(axes: Axes, colors: np.ndarray) -> None:
    """Draw `colors` [lines, tokens, 3] as bars, one below the other."""
    axes.imshow(colors, aspect="auto", interpolation="nearest")
    for line in range(1, len(colors)):
        axes.axhline(line - 0.5, color=style.PAPER, linewidth=10)
    style.hide_frame(axes)
    axes.set(xticks=[], yticks=[])


def draw_ranks(axes: Axes, row: DealtRow) -> None:
    """Draw each rank's tokens, with the number of keys that the rank receives."""
    colors = token_colors(row)
    draw_lines(axes, np.stack([colors[plan.local] for plan in row.plans]))
    labels = [f"rank {rank}\n+{keys} keys" for rank, keys in enumerate(row.received())]
    axes.set_yticks(range(len(labels)), labels)
    axes.yaxis.tick_right()
    for label, color in zip(axes.get_yticklabels(), style.RANK_COLORS, strict=True):
        label.set_color(color)
        label.set_fontweight("bold")


def draw_flow() -> Figure:
    """Draw record, pack, plan, ranks and loss."""
    row = dealt("balanced")
    figure, panels = plt.subplots(
        1, 5, figsize=(14, 5), width_ratios=(5, 4, 4, 4, 4.4), layout="constrained"
    )
    style.heading(figure, "The mask is data: from a record to the loss")
    for axes, (name, explanation) in zip(panels, PANELS, strict=True):
        axes.set(xticks=[], yticks=[])
        axes.set_title(name, fontsize=15, weight="bold", pad=46)
        axes.text(0, 1.05, explanation, color=style.GREY, transform=axes.transAxes)
    record, pack, plan, ranks, loss = panels

    record.text(0.03, 0.95, RECORD, va="top", family="DejaVu Sans Mono", fontsize=10.5)
    colors = token_colors(row)
    draw_lines(pack, colors.reshape(PACK_LINES, -1, 3))
    draw_mask(plan, row, edge=0.4)
    plan.set_aspect("auto")
    draw_ranks(ranks, row)
    loss.text(0.5, 0.68, LOSS, fontsize=17, ha="center", va="center")
    loss.text(0.5, 0.28, REASON, fontsize=11, ha="center", va="center")

    documents = [
        Patch(color=color, label=name) for name, color in zip(NAMES, DOCUMENT_COLORS, strict=True)
    ]
    images = Patch(color=style.lighter(style.SKY, 0.55), label="pale: image tokens")
    figure.legend(handles=[*documents, images], loc="outside lower center", ncols=5, frameon=False)
    return figure
