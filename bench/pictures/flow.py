"""From a record to the loss in five panels, each drawn from the same row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from bench.pictures import style
from bench.pictures.example import NAMES, DealtRow, dealt
from bench.pictures.masks import draw_mask
from megacp.attention.context_parallel import kv_exchange, plan
from megacp.attention.ops import mask
from megacp.engine.rows import shard
from megacp.prepare import packs, records
from megacp.training.loop import denominator

_DOCUMENTS = (style.GREY, style.SKY, style.VERMILION, style.INK)
"""Colours of the row's documents."""
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
_INTEGERS = list(inspect.signature(mask.Metadata.of_row).parameters)
"""What the mask reads of each token."""
_STEPS = (
    ("1  record", "a line of JSON;\nbranches share the image", [records]),
    ("2  pack", "documents, end to end,\nup to --seq-length", [packs]),
    (
        "3  plan",
        f"{len(_INTEGERS)} integers a token\n({', '.join(_INTEGERS)}) give exact tiles",
        [mask, plan],
    ),
    (
        "4  ranks",
        "each holds a share of the row\nand is sent the keys it needs",
        [shard, kv_exchange],
    ),
    ("5  loss", "summed over all ranks,\nthen divided once", [denominator]),
)
_LEFTS, _TOP, _SIDE = (3.0, 33.0, 63.0, 93.0, 123.0), 23.0, 26.0


def _places(modules: Sequence[ModuleType]) -> str:
    """Where modules and rooms lie: the first two folders, then a line each."""
    root = Path(__file__).parents[2]
    paths = [Path(str(module.__file__)).relative_to(root) for module in modules]
    names = [f"{path.parent}/" if path.name == "__init__.py" else str(path) for path in paths]
    room = "/".join(paths[0].parts[:2]) + "/"
    return "\n".join([room, *(name.removeprefix(room) for name in names)])


def _strip(
    axes: Axes, row: DealtRow, tokens: np.ndarray, corner: tuple[float, float], width: float
) -> None:
    """Tokens as a bar, coloured by their document, image tokens paler."""
    unit = width / len(tokens)
    for number, token in enumerate(tokens):
        color = _DOCUMENTS[row.metadata.document[token]]
        face = style.lighter(color, 0.55 if row.metadata.span[token] else 0.0)
        axes.add_patch(
            Rectangle(
                (corner[0] + unit * number, corner[1]),
                unit * 1.02,
                3.4,
                facecolor=face,
                linewidth=0,
            )
        )


def _draw_record(axes: Axes) -> None:
    style.box(axes, (_LEFTS[0], _TOP), (_SIDE, _SIDE), style.SKY, share=0.9)
    left, top = _LEFTS[0] + 1.2, _TOP + 1.4
    axes.text(left, top, RECORD, linespacing=1.45, family="DejaVu Sans Mono", fontsize=11, va="top")


def _draw_pack(axes: Axes, row: DealtRow) -> None:
    """The row's tokens broken into lines, as text is."""
    lines = np.arange(len(row.metadata)).reshape(6, -1)
    for number, tokens in enumerate(lines):
        _strip(axes, row, tokens, (_LEFTS[1], _TOP + 4.5 * number), _SIDE)


def _draw_ranks(axes: Axes, row: DealtRow) -> None:
    for rank, (own, arriving) in enumerate(zip(row.plans, row.travelling(), strict=True)):
        top = _TOP + 6.8 * rank
        axes.add_patch(Rectangle((_LEFTS[3], top), 1.6, 5.2, color=style.RANK_COLORS[rank]))
        axes.text(
            _LEFTS[3] + 2.6,
            top + 0.7,
            f"rank {rank}: {len(own.local)} tokens",
            fontsize=11,
            va="center",
        )
        axes.text(
            _LEFTS[3] + _SIDE, top + 0.7, f"+ {arriving} keys", fontsize=11, va="center", ha="right"
        )
        _strip(axes, row, own.local, (_LEFTS[3] + 2.6, top + 1.8), _SIDE - 2.6)


def _draw_loss(axes: Axes) -> None:
    left = _LEFTS[4]
    style.box(axes, (left, _TOP), (_SIDE, _SIDE), style.GREY, share=0.93)
    sums = r"\sum_{\mathrm{ranks}} \ \sum_{t} \; w_t"
    formula = rf"$\frac{{{sums} \cdot \mathrm{{loss}}_t}}{{{sums}}}$"
    axes.text(left + _SIDE / 2, _TOP + 8.4, formula, fontsize=19, ha="center", va="center")
    text = "The denominator of the\nwhole step is known\nbefore the forward.\nSo two grids differ\nby rounding only."
    axes.text(
        left + _SIDE / 2,
        _TOP + 19.4,
        text,
        fontsize=11.5,
        ha="center",
        va="center",
        linespacing=1.4,
    )


def draw_flow() -> Figure:
    """Record, pack, plan, ranks, loss."""
    row = dealt("balanced")
    figure, axes = style.canvas(15.2, 6.6)
    style.title(figure, "The mask is data: from a record to the loss", 0.91)
    for number, (left, (name, text, modules)) in enumerate(zip(_LEFTS, _STEPS, strict=True)):
        axes.text(left, 12.6, name, fontsize=16, weight="bold", va="center")
        axes.text(left, 17.8, text, fontsize=11.5, va="center", color=style.GREY, linespacing=1.3)
        places, below = _places(modules), _TOP + _SIDE + 1.4
        axes.text(
            left, below, places, fontsize=11, family="DejaVu Sans Mono", va="top", linespacing=1.3
        )
        if number:
            ends = (left - 3.6, _TOP + _SIDE / 2), (left - 0.5, _TOP + _SIDE / 2)
            axes.add_patch(
                FancyArrowPatch(
                    *ends, arrowstyle="-|>", mutation_scale=16, color=style.GREY, linewidth=1.6
                )
            )
    _draw_record(axes)
    _draw_pack(axes, row)
    tiles = figure.add_axes((_LEFTS[2] / 152, 1 - (_TOP + _SIDE) / 66, _SIDE / 152, _SIDE / 66))
    draw_mask(tiles, row, edge=0.4)
    _draw_ranks(axes, row)
    _draw_loss(axes)
    _draw_legend(axes)
    return figure


def _draw_legend(axes: Axes) -> None:
    """Which colour is which document, under the pack."""
    left = 33.0
    for name, color in zip(NAMES, _DOCUMENTS, strict=True):
        axes.add_patch(Rectangle((left, 60.6), 2, 2, facecolor=color, linewidth=0))
        axes.text(left + 2.8, 61.6, name, fontsize=11.5, va="center")
        left += 5.5 + 1.35 * len(name)
    axes.text(
        left,
        61.6,
        "pale: image tokens, which see each other",
        fontsize=11.5,
        va="center",
        color=style.GREY,
    )
