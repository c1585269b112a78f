"""Draws pipeline schedules as time charts, from the action lists that the runtime executes."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.pictures import style
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Kind
from megacp.engine.pipeline_parallel.timeline import Span, bubble, timeline

STAGES = 4
MICROBATCHES = 8
CHARTS = (  # title, schedule, chunks per stage
    ("1F1B, one chunk per stage: {idle:.1%} idle", "1f1b", 1),
    ("interleaved 1F1B, two chunks per stage: {idle:.1%} idle", "1f1b", 2),
    ("zero bubble, weight gradients are deferred: {idle:.1%} idle", "zero_bubble", 1),
)
STAGE_TIMES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 1.0, Kind.WEIGHTS: 1.0}
"""Time that a whole stage needs for one microbatch."""
COLORS: dict[tuple[Kind, int], Any] = {
    (Kind.FORWARD, 0): style.SKY,
    (Kind.FORWARD, 1): style.BLUE,
    (Kind.BACKWARD, 0): style.lighter(style.ORANGE, 0.35),
    (Kind.BACKWARD, 1): style.VERMILION,
    (Kind.WEIGHTS, 0): style.lighter(style.GREEN, 0.35),
}
LABELS = ("forward", "forward, chunk 1", "backward", "backward, chunk 1", "weight gradients")


def _spans(schedule: str, chunks: int) -> list[list[Span]]:
    """Return the time of each stage's actions, for stages with equal times."""
    actions = [SCHEDULES[schedule](stage, STAGES, MICROBATCHES, chunks) for stage in range(STAGES)]
    return timeline(actions, chunks, [STAGE_TIMES] * STAGES)


def _draw_chart(axes: Axes, spans: list[list[Span]], title: str) -> None:
    """Draw a row per stage: a grey bar up to the end of the step, covered by the actions."""
    end = max(stage[-1].stop for stage in spans)
    for stage, row in enumerate(spans):
        axes.barh(stage, end, color=style.PALE)
        for span in row:
            color = COLORS[span.action.kind, span.action.chunk]
            width = span.stop - span.start
            axes.barh(stage, width, left=span.start, color=color, edgecolor=style.PAPER)
            ink = style.PAPER if span.action.chunk else style.INK
            middle = span.start + width / 2
            number = str(span.action.microbatch)
            axes.text(middle, stage, number, fontsize=10.5, ha="center", va="center", color=ink)
    axes.set_title(title.format(idle=bubble(spans)))
    axes.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
    axes.invert_yaxis()
    axes.set_xticks([])
    style.hide_frame(axes)


def draw_pipeline() -> Figure:
    """Draw 1F1B, interleaved 1F1B and zero bubble, with the same work per stage."""
    figure, charts = plt.subplots(3, 1, figsize=(12.4, 9), sharex=True, layout="constrained")
    for axes, (title, schedule, chunks) in zip(charts, CHARTS, strict=True):
        _draw_chart(axes, _spans(schedule, chunks), title)
    style.heading(figure, f"{MICROBATCHES} microbatches through {STAGES} stages")
    handles = [
        Patch(color=color, label=label)
        for color, label in zip(COLORS.values(), LABELS, strict=True)
    ]
    handles.append(Patch(color=style.PALE, label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    return figure
