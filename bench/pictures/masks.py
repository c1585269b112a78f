"""Draws one mask under two layouts, with its tiles coloured by the rank that computes them."""

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

LOCAL_WHITE = 0.62
"""Share of white in a tile whose keys are on the same rank as its queries."""


def _runs(tokens: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield stretches [start, stop) of consecutive numbers in `tokens`."""
    breaks = np.flatnonzero(np.diff(tokens) != 1) + 1
    for part in np.split(tokens, breaks):
        yield int(part[0]), int(part[-1]) + 1


def tile_shapes(plan: AttentionPlan) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield one rank's tiles at their positions in the row.

    For each tile, yield its corners [n, 2] as (key, query), three for a causal tile and four for a
    full one, and whether its keys come from another rank.
    """
    for source in range(plan.cp):
        keys = plan.indices[source]
        for row in plan.table(source).rows:
            queries = plan.local[row.q_start : row.q_stop]
            for tile in row.tiles:
                for top, bottom in _runs(queries):
                    for left, right in _runs(keys[tile.k_start : tile.k_stop]):
                        corners = [(left, top), (left, bottom), (right, bottom)]
                        if tile.kind != CAUSAL:
                            corners.append((right, top))
                        yield np.array(corners), source != plan.cp_rank


def draw_mask(axes: Axes, row: DealtRow, edge: float = 0.8) -> None:
    """Draw the tiles of all ranks, with queries downwards and keys to the right."""
    for plan, color in zip(row.plans, style.RANK_COLORS, strict=True):
        for corners, travels in tile_shapes(plan):
            face = color if travels else style.lighter(color, LOCAL_WHITE)
            tile = Polygon(corners, facecolor=face, edgecolor=style.PAPER, linewidth=edge)
            axes.add_patch(tile)
    size = len(row.metadata)
    axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xticks=[], yticks=[])
    _, stops = document_bounds(row.metadata)
    for stop in stops[:-1]:
        axes.axhline(stop, color=style.PALE, linewidth=1, zorder=0)
        axes.axvline(stop, color=style.PALE, linewidth=1, zorder=0)


def _label_mask(axes: Axes, row: DealtRow) -> None:
    """Label the documents along the keys, and show the rank of each query on the left."""
    starts, stops = document_bounds(row.metadata)
    axes.set_xticks((starts + stops) / 2, NAMES)
    axes.tick_params(length=0)
    axes.set_ylabel("queries", labelpad=20, color=style.GREY)
    axes.set_xlabel("keys", color=style.GREY)
    holders = np.empty((len(row.metadata), 1, 3))
    for plan, color in zip(row.plans, style.RANK_COLORS, strict=True):
        holders[plan.local] = style.lighter(color, 0)
    strip = axes.inset_axes((-0.045, 0, 0.03, 1))
    strip.imshow(holders, aspect="auto", interpolation="nearest")
    strip.axis("off")


def _draw_bars(axes: Axes, values: list[int], title: str, longest: int) -> None:
    """Draw one bar per rank, labelled with its value."""
    names = [f"rank {rank}" for rank in range(len(values))]
    bars = axes.barh(names, values, color=style.RANK_COLORS)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.invert_yaxis()
    axes.set(xticks=[], xlim=(0, 1.3 * longest))
    axes.set_title(title, fontsize=11.5)
    style.hide_frame(axes, "left")


def draw_masks() -> Figure:
    """Draw the example row under both layouts, with the work and traffic of each rank."""
    figure = plt.figure(figsize=(12.4, 9), layout="constrained")
    places = figure.subplot_mosaic(
        [["mask 0", "mask 0", "mask 1", "mask 1"], ["pairs 0", "keys 0", "pairs 1", "keys 1"]],
        height_ratios=(5, 1),
    )
    style.heading(figure, f"One mask, {CP} ranks: every tile is computed exactly once")
    layouts = ("contiguous", "balanced")
    rows = [dealt(layout) for layout in layouts]
    most_pairs = max(max(row.areas()) for row in rows)
    most_keys = max(max(row.received()) for row in rows)
    for number, (layout, row) in enumerate(zip(layouts, rows, strict=True)):
        mask = places[f"mask {number}"]
        draw_mask(mask, row)
        _label_mask(mask, row)
        mask.set_title(f"--cp-layout {layout}", family="DejaVu Sans Mono", weight="bold")

        pairs = row.areas()
        imbalance = max(pairs) * len(pairs) / sum(pairs)
        work = f"pairs computed:\nlargest over mean {imbalance:.2f}"
        _draw_bars(places[f"pairs {number}"], pairs, work, most_pairs)

        keys = row.received()
        traffic = f"keys received:\n{sum(keys):,} in total"
        _draw_bars(places[f"keys {number}"], keys, traffic, most_keys)
    figure.supxlabel(
        "Colour: the rank of the query. Pale: the key is on the same rank. "
        "Strong: the key travels. White: masked, so never computed.",
        fontsize=11,
        color=style.GREY,
    )
    return figure
