"""Pipeline schedules as charts of time, from the action lists that the runtime executes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.pictures import style
from megacp.engine.pipeline_parallel.schedules import SCHEDULES, Kind
from megacp.engine.pipeline_parallel.timeline import Span, bubble, timeline

STAGES, MICROBATCHES, CHUNKS = 4, 8, 2
_TIMES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 1.0, Kind.WEIGHTS: 1.0}
"""Times of a whole stage for one microbatch."""
_COLORS = {
    (Kind.FORWARD, 0): style.SKY,
    (Kind.FORWARD, 1): style.BLUE,
    (Kind.BACKWARD, 0): style.lighter(style.ORANGE, 0.35),
    (Kind.BACKWARD, 1): style.VERMILION,
    (Kind.WEIGHTS, 0): style.lighter(style.GREEN, 0.35),
}


def _draw_chart(axes: Axes, spans: Sequence[Sequence[Span]], longest: float, title: str) -> None:
    end = max(stage[-1].stop for stage in spans)
    for stage, row in enumerate(spans):
        axes.add_patch(
            Rectangle((0, stage + 0.06), end, 0.88, facecolor=style.PALE, edgecolor="none")
        )
        for span in row:
            color = _COLORS[span.action.kind, span.action.chunk]
            size = span.stop - span.start
            axes.add_patch(
                Rectangle(
                    (span.start, stage + 0.06),
                    size,
                    0.88,
                    facecolor=color,
                    edgecolor=style.PAPER,
                    linewidth=1,
                )
            )
            dark = color in (style.BLUE, style.VERMILION)
            ink = style.PAPER if dark else style.INK
            name, middle = str(span.action.microbatch), span.start + size / 2
            axes.text(middle, stage + 0.5, name, fontsize=10, ha="center", va="center", color=ink)
    axes.set(xlim=(0, longest), ylim=(len(spans), 0), xticks=[])
    axes.set_yticks(
        [stage + 0.5 for stage in range(len(spans))],
        [f"stage {stage}" for stage in range(len(spans))],
    )
    axes.tick_params(length=0)
    style.quiet(("top", "right", "bottom", "left"), axes)
    axes.set_title(title, loc="left", fontsize=12.5)


def draw_pipeline() -> Figure:
    """1F1B, interleaved 1F1B and zero bubble one below the other, with the same work a stage."""
    figure, places = plt.subplots(3, 1, figsize=(13.6, 9.4))
    schedules = {
        "1F1B, one chunk a stage: idle {idle:.1%} of the work": ("1f1b", 1),
        f"interleaved 1F1B, {CHUNKS} chunks a stage: idle {{idle:.1%}}": ("1f1b", CHUNKS),
        "--pipeline-schedule zero_bubble, weight gradients wait: idle {idle:.1%}": (
            "zero_bubble",
            1,
        ),
    }
    charts = {
        title: timeline(
            [SCHEDULES[name](s, STAGES, MICROBATCHES, chunks) for s in range(STAGES)],
            chunks,
            [_TIMES] * STAGES,
        )
        for title, (name, chunks) in schedules.items()
    }
    longest = max(stage[-1].stop for spans in charts.values() for stage in spans)
    for axes, (title, spans) in zip(places, charts.items(), strict=True):
        _draw_chart(axes, spans, longest, title.format(idle=bubble(spans)))
    style.title(figure, f"{MICROBATCHES} microbatches through {STAGES} stages", 0.97)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.9, bottom=0.08, hspace=0.3)
    names = [f"{kind.value}, chunk {chunk}" for kind, chunk in _COLORS if kind is not Kind.WEIGHTS]
    names += ["weight gradients", "idle"]
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in (*_COLORS.values(), style.PALE)]
    figure.legend(handles, names, loc="lower center", ncol=len(names), frameon=False, fontsize=11)
    return figure
