"""The grid of 16 ranks: which ranks share a layer, a row, a batch and a model, and what travels between them."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.pictures import style
from megacp.core.distributed.grid import GridShape

SHAPE = GridShape(tp=2, cp=2, dp=2, pp=2)
_CELL, _GAP = 10.5, 1.6
_MEANING = (
    ("tp", style.BLUE, "tensor parallel: halves of each linear layer", "activations, in every layer"),
    ("cp", style.ORANGE, "context parallel: halves of each row", "keys and values, image features"),
    ("dp", style.GREEN, "data parallel: different packs", "gradients, optimizer shards (with cp)"),
    ("pp", style.PURPLE, "pipeline parallel: halves of the model", "hidden states between stages"),
)
"""Axis, its colour, what its ranks share, what travels."""


def cell_of(rank: int) -> tuple[float, float]:
    """Top left corner of a rank's cell: stages side by side, replicas below each other, tp and cp inside."""
    place = SHAPE.coordinates(rank)
    step = _CELL + _GAP
    return 12 + 34 * place["pp"] + step * place["tp"], 19 + 32 * place["dp"] + step * place["cp"]


def _draw_replica(axes: Axes, first: int) -> None:
    """The frame around the ranks that hold one stage for one share of the batch."""
    left, top = cell_of(first)
    side = 2 * _CELL + _GAP + 4
    axes.add_patch(Rectangle((left - 2, top - 2), side, side, facecolor=style.PALE, edgecolor="none"))


def _draw_cell(axes: Axes, rank: int) -> None:
    left, top = cell_of(rank)
    place = SHAPE.coordinates(rank)
    style.box(axes, (left, top), (_CELL, _CELL), style.GREY, share=1.0)
    axes.text(left + _CELL / 2, top + 4.6, str(rank), ha="center", va="center", fontsize=17, weight="bold")
    for number, (name, color, _, _) in enumerate(_MEANING):
        x = left + 1.5 + 2.5 * number
        axes.text(x, top + 9.0, f"{place[name]}", ha="center", va="center", fontsize=9, color=color, weight="bold")


def _draw_links(axes: Axes) -> None:
    """A line from rank 0 to its neighbour on each axis: short ones straight, long ones around the cells."""
    centre = _CELL / 2
    for name, color, _, _ in _MEANING:
        (left, top), (right, bottom) = cell_of(0), cell_of(SHAPE.rank_of(**{name: 1}))
        start, stop, bend = {
            "tp": ((left + _CELL, top + centre), (right, bottom + centre), 0.0),
            "cp": ((left + centre, top + _CELL), (right + centre, bottom), 0.0),
            "dp": ((left, top + centre), (right, bottom + centre), 0.2),
            "pp": ((left + centre, top), (right + centre, bottom), -0.16),
        }[name]
        style.link(axes, start, stop, color, bend)


def draw_grid() -> Figure:
    """16 ranks as 2 stages of 2 replicas of 2 x 2 ranks."""
    figure, axes = style.canvas(13.2, 8.3)
    style.title(figure, "16 ranks: tp 2 x cp 2 x dp 2 x pp 2", 0.94)
    for first in range(0, SHAPE.world_size, SHAPE.tp * SHAPE.cp):
        _draw_replica(axes, first)
    _draw_links(axes)
    for rank in range(SHAPE.world_size):
        _draw_cell(axes, rank)
    for stage in range(SHAPE.pp):
        left = cell_of(SHAPE.rank_of(pp=stage))[0] + _CELL + _GAP / 2
        axes.text(left, 11.6, f"stage {stage}", ha="center", va="center", fontsize=13)
    for replica in range(SHAPE.dp):
        top = cell_of(SHAPE.rank_of(dp=replica))[1] + _CELL + _GAP / 2
        axes.text(4.6, top, f"batch\nshare {replica}", ha="center", va="center", fontsize=12, rotation=90)
    for number, (name, color, shared, travels) in enumerate(_MEANING):
        top = 20 + 12 * number
        axes.add_patch(Rectangle((80, top - 0.4), 1.6, 8.6, color=color))
        axes.text(83.5, top + 0.8, name, fontsize=15, weight="bold", color=color, va="center")
        axes.text(89.5, top + 0.8, shared, fontsize=11.5, va="center")
        axes.text(89.5, top + 4.6, f"between them: {travels}", fontsize=10.5, va="center", color=style.GREY)
    note = "Numbers under a rank: its place on tp, cp, dp and pp.\nNeighbouring ranks differ in tp, then cp, dp, pp:\n"
    axes.text(80, 72, note + "Megatron's default order. Lines: the groups of rank 0.", fontsize=10.5, va="center")
    return figure
