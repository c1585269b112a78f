"""One mask and its tiles, coloured by the rank that computes them, under two layouts side by
side.
"""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from bench.pictures import style
from bench.pictures.example import CP, NAMES, DealtRow, dealt
from megacp.attention.context_parallel.layout import document_bounds
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.mask import CAUSAL

Shape = tuple[np.ndarray, bool]
"""Corners [n, 2] of a tile in the row as (key, query), and whether its keys lie on another rank
than its queries.
"""
_STAY = 0.62
"""Share of white in a tile whose keys are on the rank itself."""


def _runs(tokens: np.ndarray) -> Iterator[tuple[int, int]]:
    """Stretches [start, stop) of consecutive numbers in `tokens`."""
    breaks = np.flatnonzero(np.diff(tokens) != 1) + 1
    for part in np.split(tokens, breaks):
        yield int(part[0]), int(part[-1]) + 1


def tile_shapes(plan: AttentionPlan) -> Iterator[Shape]:
    """The tiles of one rank, at the places of the row that its tokens and its keys have."""
    for source in range(plan.cp):
        keys = plan.indices[source]
        for row in plan.table(source).rows:
            queries = plan.local[row.q_start : row.q_stop]
            for tile in row.tiles:
                for top, bottom in _runs(queries):
                    for left, right in _runs(keys[tile.k_start : tile.k_stop]):
                        corners = [(left, top), (left, bottom), (right, bottom)]
                        corners += [] if tile.kind == CAUSAL else [(right, top)]
                        yield np.array(corners), source != plan.cp_rank


def draw_mask(axes: Axes, row: DealtRow, edge: float = 0.8) -> None:
    """The tiles of all ranks over the row, queries downwards and keys to the right."""
    for rank, plan in enumerate(row.plans):
        color = style.RANK_COLORS[rank]
        for corners, travels in tile_shapes(plan):
            face = style.lighter(color, 0.0 if travels else _STAY)
            axes.add_patch(Polygon(corners, facecolor=face, edgecolor=style.PAPER, linewidth=edge))
    size = len(row.metadata)
    axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xticks=[], yticks=[])
    for stop in document_bounds(row.metadata)[1][:-1]:
        axes.axhline(stop, color=style.PALE, linewidth=1, zorder=0)
        axes.axvline(stop, color=style.PALE, linewidth=1, zorder=0)


def _draw_holders(axes: Axes, row: DealtRow) -> None:
    """A strip at the left of the mask: which rank holds each token."""
    for rank, plan in enumerate(row.plans):
        for start, stop in _runs(np.sort(plan.local)):
            axes.add_patch(
                plt.Rectangle(
                    (-9, start),
                    6,
                    stop - start,
                    color=style.RANK_COLORS[rank],
                    clip_on=False,
                    linewidth=0,
                )
            )


def _draw_bars(axes: Axes, values: list[int], title: str) -> None:
    """One bar for each rank, with its value."""
    colors = style.RANK_COLORS[: len(values)]
    axes.barh(range(len(values)), values, color=colors, height=0.72)
    mean = sum(values) / len(values)
    for rank, value in enumerate(values):
        axes.text(value, rank, f" {value:,}", va="center", fontsize=11)
    style.quiet(("top", "right", "bottom"), axes)
    axes.set(xticks=[], ylim=(len(values) - 0.4, -0.6), xlim=(0, 1.0))
    axes.set_yticks(
        range(len(values)), [f"rank {rank}" for rank in range(len(values))], fontsize=11
    )
    axes.set_title(
        title.format(ratio=max(values) / max(mean, 1), total=sum(values)), fontsize=11.5, loc="left"
    )


def draw_masks() -> Figure:
    """The example row, contiguous beside balanced; below, each rank's work and the keys that it
    needs of others.
    """
    figure = plt.figure(figsize=(13.6, 9.5))
    rows = [dealt(layout) for layout in ("contiguous", "balanced")]
    most_area, most_keys = (
        max(max(values(row)) for row in rows) for values in (DealtRow.areas, DealtRow.travelling)
    )
    for side, (name, row) in enumerate(zip(("contiguous", "balanced"), rows, strict=True)):
        left = 0.075 + 0.49 * side
        mask = figure.add_axes((left, 0.278, 0.41, 0.41 * 13.6 / 9.5))
        draw_mask(mask, row)
        _draw_holders(mask, row)
        figure.text(
            left - 0.024,
            0.9,
            f"--cp-layout {name}",
            fontsize=14,
            weight="bold",
            family="DejaVu Sans Mono",
        )
        _label_documents(mask, row, first=side == 0)
        area = figure.add_axes((left + 0.02, 0.085, 0.155, 0.115))
        _draw_bars(area, row.areas(), "pairs computed\nlargest over mean {ratio:.2f}")
        area.set_xlim(0, 1.3 * most_area)
        keys = figure.add_axes((left + 0.245, 0.085, 0.155, 0.115))
        _draw_bars(keys, row.travelling(), "tokens whose keys arrive\n{total:,} in all")
        keys.set_xlim(0, 1.3 * most_keys)
    style.title(figure, f"One mask, {CP} ranks: every tile is computed exactly once", 0.968)
    figure.text(
        0.5,
        0.022,
        "Colour: the rank that holds the query. Pale: its keys are on the same rank. "
        "Strong: its keys travel. White: nobody computes it.",
        ha="center",
        color=style.GREY,
    )
    return figure


def _label_documents(axes: Axes, row: DealtRow, first: bool) -> None:
    """Names of the documents under the keys, and beside the queries of the first mask."""
    start, stop = document_bounds(row.metadata)
    for name, middle in zip(NAMES, (start + stop) / 2, strict=True):
        axes.text(middle, len(row.metadata) + 2, name, ha="center", va="top", fontsize=11)
        if first:
            axes.text(-12, middle, name, ha="right", va="center", fontsize=11, rotation=90)
    ways = "queries downwards, keys to the right"
    axes.text(
        len(row.metadata) / 2, -2, ways, ha="center", va="bottom", fontsize=11, color=style.GREY
    )
