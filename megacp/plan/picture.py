"""Draw a plan as an HTML page: bars for the best layouts, and the first one's memory in a step.

Each chart has an axis with units. Charts of memory have the scale of the GPU's memory, and a longer
one with a line at it if a layout does not fit. A memory term has one colour on the whole page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megacp.dry_run.in_flight import Held, held_over
from megacp.dry_run.memory import PHASES, STATE, RankMemory, stage_memory
from megacp.engine.config.run import RunConfig
from megacp.engine.models.costs import stage_layers
from megacp.engine.pipeline_parallel.schedules import Kind
from megacp.plan.answer import Answer, flags, large
from megacp.plan.search import fullest_stage
from megacp.storage.page import page_head

# Okabe and Ito's palette: its colours remain distinct with common colour blindness. Two other
# colours replace its black, which a dark page would hide.
_COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999933",
    "#9a6b4f",
)
# Name and colour of the sum of all small parts.
_REST = "other"
_REST_COLOR = "#7d8590"
_STYLE = """
body { max-width: 80em; }
pre { background: var(--panel); padding: .5em; overflow-x: auto; }
table { border-collapse: collapse; font-size: .9em; }
th, td { padding: .2em .6em; vertical-align: top; white-space: nowrap; text-align: right; }
th { font-weight: 600; border-bottom: 1px solid var(--line); }
/* the layout and its comparison are texts, the remaining columns are numbers */
:is(th, td):is(:nth-child(2), :last-child) { text-align: left; white-space: normal; }
td:nth-child(2) { min-width: 15em; } td:last-child { min-width: 22em; }
.key { display: flex; flex-wrap: wrap; gap: .2em 1.2em; }
.key i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; }
.layout { display: flex; justify-content: space-between; gap: 1em; }
.layout b { white-space: nowrap; font-weight: 600; }
.bar { display: flex; position: relative; height: 1.2em; background: var(--panel);
  margin-bottom: .4em; }
.limit { position: absolute; top: -3px; bottom: -3px; width: 2px; background: var(--text);
  outline: 1px solid var(--page); }
.axis, .levels { position: relative; font-size: .85em; color: var(--soft); }
.axis { height: 1.6em; border-top: 1px solid var(--line); }
.axis span, .levels span, .peak { position: absolute; white-space: nowrap; }
.axis span { transform: translateX(-50%); } .axis span:first-child { transform: none; }
.axis span:last-child { transform: translateX(-100%); }
.plot { display: grid; grid-template-columns: 5em 1fr; margin-top: 1.5em; }
.levels span { right: .5em; transform: translateY(50%); }
.area { position: relative; height: 18em; background: var(--panel); }
.area svg { display: block; width: 100%; height: 100%; }
.area line { stroke: var(--soft); stroke-opacity: .4; vector-effect: non-scaling-stroke; }
.area .over { stroke: var(--text); stroke-opacity: 1; stroke-width: 2; }
.unit { grid-column: 2; text-align: center; font-size: .85em; color: var(--soft); }
.peak { transform: translateX(-50%); line-height: 1; }
"""
# Ticks that are closer to the end of an axis than this share of it would overlap its last label.
_ROOM_FOR_LABEL = 0.12


# Phases of each kind of action.
_PHASES_OF = {
    Kind.FORWARD: ("forward", "loss"),
    Kind.BACKWARD: ("table", "backward", "vision"),
    # like the forward pass, weight gradients need no temporaries of a block's backward pass
    Kind.WEIGHTS: ("forward",),
}


@dataclass(frozen=True)
class Moment:
    """Memory during an action of a stage, the optimizer update or a checkpoint.

    An action may have several phases; the one that needs the most memory counts.
    """

    name: str
    phase: str
    memory: RankMemory

    @property
    def total(self) -> int:
        """Bytes on the fullest rank."""
        return self.memory.peaks[self.phase]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes kept for the whole step, saved for the backward pass, and needed by this action."""
        state = sum(getattr(self.memory, term) for term in STATE)
        waiting = 0
        if "activations" in PHASES[self.phase]:
            waiting = self.memory.activations
        return {"state": state, "activations": waiting, "temporary": self.total - state - waiting}


def moments(config: RunConfig, stage: int, world_size: int) -> list[Moment]:
    """Return the moments of a step on a rank of `stage`, in the order of the schedule."""
    layers = stage_layers(config, world_size)[stage]
    known: dict[Held | None, RankMemory] = {}
    steps: list[tuple[str, tuple[str, ...], Held | None]] = []
    for action, in_flight in held_over(config, stage, world_size):
        steps.append((str(action), _PHASES_OF[action.kind], in_flight))
    for name in ("optimizer", "checkpoint"):
        steps.append((name, (name,), None))
    found = []
    for name, phases, held in steps:
        # Most actions have the same microbatches in flight as an earlier action.
        if held not in known:
            known[held] = stage_memory(config, stage, layers, world_size, held)
        peaks = known[held].peaks
        found.append(Moment(name, max(phases, key=lambda phase: peaks[phase]), known[held]))
    return found


@dataclass(frozen=True)
class _Panel:
    """A chart with one bar per layout."""

    title: str
    scale: str
    """A sentence about the value of a full bar."""
    unit: str
    bars: list[dict[str, float]]
    totals: list[str]
    """The value of each bar, in the digits of the table."""
    end: float
    """Value of a full bar."""
    limit: float | None = None
    """Value that is marked by a line, if a bar is longer."""


def _panels(answer: Answer) -> list[_Panel]:
    """Return two panels, of seconds and of GiB."""
    slowest = max(one.layout.time.total for one in answer.best)
    times = [_with_rest(vars(one.layout.time)) for one in answer.best]
    # Most layouts fit, so the charts of memory end at the memory of a GPU.
    available = answer.hardware.memory
    needed = max(one.layout.gib for one in answer.best)
    memory = [_with_rest(one.gib) for one in answer.best]
    totals = [f"{one.layout.gib:.1f} GiB" for one in answer.best]
    scale = f"A full bar is the memory of a GPU, {available:.4g} GiB."
    limit = None
    if needed > available:
        scale = f"The line is the memory of a GPU, {available:.4g} GiB."
        limit = available
    end = max(available, needed)
    title = "Memory of the fullest rank"
    memory_panel = _Panel(title, scale, "GiB", memory, totals, end, limit)
    totals = [f"{one.layout.time.total:.3g} s" for one in answer.best]
    scale = "A full bar is the slowest layout."
    return [_Panel("Time of a step", scale, "s", times, totals, slowest), memory_panel]


def _with_rest(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the large parts, and the sum of all small ones, so that a bar has its full length."""
    found = large(parts)
    rest = sum(value for name, value in parts.items() if name not in found)
    if rest > 0:
        found[_REST] = rest
    return found


def _colors(bars: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Choose a colour for each part of the bars; the sum of small parts is the last one."""
    # a dict is a set that keeps the order
    names = dict.fromkeys(itertools.chain(*bars))
    has_rest = _REST in names
    names.pop(_REST, None)
    found = dict(zip(names, itertools.cycle(_COLORS), strict=False))
    if has_rest:
        found[_REST] = _REST_COLOR
    return found


def _ticks(end: float) -> list[float]:
    """Return round values from 0 for an axis, at most six, and `end` itself as the last one."""
    # A power of ten between a tenth of the ideal step and the ideal step itself.
    power = 10.0 ** math.floor(math.log10(end / 5))
    # The smallest step of 1, 2 or 5 times a power of ten that needs at most five steps.
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= end)
    found = [0.0]
    # Multiples instead of sums, which would collect rounding errors.
    while found[-1] + step <= end * (1 - _ROOM_FOR_LABEL):
        found.append(len(found) * step)
    return [*found, end]


def _label(value: float, end: float, unit: str) -> str:
    """Return the label of a tick; only the last one of an axis has the unit."""
    if value < end:
        return f"{value:.4g}"
    return f"{value:.4g} {unit}"


def _axis(end: float, unit: str) -> str:
    """Return a horizontal axis from 0 to `end`."""
    labels = []
    for value in _ticks(end):
        text = _label(value, end, unit)
        labels.append(f'<span style="left:{value / end:.2%}">{text}</span>')
    return f'<div class="axis">{"".join(labels)}</div>'


def page(answer: Answer) -> Iterator[str]:
    """Yield the plan as an HTML page, part by part."""
    yield page_head(f"Plan for {answer.world_size:,} GPUs", _STYLE)
    yield from (f"<p>{escape(line)}</p>" for line in answer.heading())
    yield from _table(answer)
    times, memory = _panels(answer)
    # Terms of time are not terms of memory, so this chart has its own colours.
    yield from _bars(answer, times, _colors(times.bars))
    config = answer.found[0].config
    stage, _ = fullest_stage(config, answer.world_size)
    steps = moments(config, stage, answer.world_size)
    # Both charts of memory use the same colours; the first and plainest ones are for large areas.
    colors = _colors([steps[0].parts, *memory.bars])
    yield from _bars(answer, memory, colors)
    yield f"<h2>Memory of layout 1 during a step (stage {stage})</h2>"
    yield from _timeline(steps, answer.hardware.memory, colors)
    chosen = escape(flags(answer.found[0]))
    yield f"<h2>Flags of layout 1, for --config</h2><p>{answer.longest()}.</p>"
    yield f"<pre>{chosen}</pre></body></html>\n"


def _table(answer: Answer) -> Iterator[str]:
    """Yield the table of the best layouts, which scrolls if it is wider than the page."""
    header, *rows = answer.rows()
    # An element that scrolls needs the focus, so that the arrow keys reach it.
    yield f'<div class="wide" tabindex="0"><table>{_row("th", header)}'
    for row in rows:
        yield _row("td", row)
    yield "</table></div>"


def _row(tag: str, texts: Sequence[str]) -> str:
    """Return a row of a table; `tag` is the element of its cells."""
    cells = [f"<{tag}>{escape(text)}</{tag}>" for text in texts]
    return f"<tr>{''.join(cells)}</tr>"


def _bars(answer: Answer, panel: _Panel, colors: Mapping[str, str]) -> Iterator[str]:
    """Yield a chart with one bar per layout: its name and value, then its parts."""
    # `colors` may have names of another chart; the legend has the order of the bars.
    names = list(_colors(panel.bars))
    yield f"<h2>{panel.title}</h2><p>{panel.scale}</p>{_key(names, colors)}"
    for place, one in enumerate(answer.best, 1):
        parts = panel.bars[place - 1]
        total = panel.totals[place - 1]
        name = f'{place} <span class="note">{escape(one.name)}</span>'
        yield f'<div class="layout"><span>{name}</span><b>{total}</b></div><div class="bar">'
        for part, value in parts.items():
            style = f"width:{value / panel.end:.2%};background:{colors[part]}"
            # The pointer shows the value of each part.
            yield f'<div title="{part} {value:.3g} {panel.unit}" style="{style}"></div>'
        if panel.limit is not None:
            yield f'<div class="limit" style="left:{panel.limit / panel.end:.2%}"></div>'
        yield "</div>"
    yield _axis(panel.end, panel.unit)


def _key(names: Iterable[str], colors: Mapping[str, str]) -> str:
    """Return the legend: each colour with its name."""
    entries = []
    for name in names:
        square = f'<i style="background:{colors[name]}"></i>'
        entries.append(f"<span>{square}{name.replace('_', ' ')}</span>")
    return f'<p class="key">{"".join(entries)}</p>'


def _timeline(
    steps: Sequence[Moment], available: float, colors: Mapping[str, str]
) -> Iterator[str]:
    """Yield a chart of a rank's memory, moment by moment. `available` is a GPU's memory in GiB."""
    peak = max(steps, key=lambda moment: moment.total)
    end = max(available, peak.total / 2**30)
    count = len(steps)
    yield (
        "<p>State is weights, gradients and the optimizer. Activations wait for the backward pass. "
        f"Temporary memory is only needed during one action.</p>{_key(steps[0].parts, colors)}"
    )
    yield '<div class="plot"><div class="levels">'
    for value in _ticks(end):
        label = _label(value, end, "GiB")
        yield f'<span style="bottom:{value / end:.2%}">{label}</span>'
    yield '</div><div class="area">'
    # Without an aspect ratio, an action is 1 wide and a full scale 1 high, whatever the screen.
    yield f'<svg viewBox="0 0 {count} 1" preserveAspectRatio="none" role="img" '
    yield f'aria-label="GiB in each of {count} actions">'
    yield from _areas(steps, end, colors)
    for value in _ticks(end)[1:-1]:
        yield _level(value / end, count)
    if end > available:
        yield _level(available / end, count, "over")
    # A triangle marks the fullest moment.
    at = steps.index(peak)
    share = peak.total / 2**30 / end
    place = f"left:{(at + 0.5) / count:.2%};bottom:{share:.2%}"
    yield f'</svg><span class="peak" style="{place}">\u25bc</span></div>'
    # The axis of actions is in the second column, below the area.
    yield f"<div></div>{_axis(count, '')}"
    yield '<div class="unit">actions in the order of the schedule</div></div>'
    yield (
        f"<p>\u25bc is the peak, {peak.total / 2**30:.1f} GiB: {peak.name} (action {at + 1} of "
        f"{count}). All actions have the same width, whatever their duration."
    )
    if end > available:
        yield f" The line is the memory of a GPU, {available:.4g} GiB."
    yield "</p>"


def _areas(steps: Sequence[Moment], end: float, colors: Mapping[str, str]) -> Iterator[str]:
    """Yield a polygon per part of the memory; a height of 1 is `end` GiB."""
    names = list(steps[0].parts)
    # Each polygon includes all parts below it, and lower ones are drawn later.
    for number, part in reversed(list(enumerate(names))):
        stacked = names[: number + 1]
        points = []
        for at, moment in enumerate(steps):
            gib = sum(moment.parts[name] for name in stacked) / 2**30
            height = 1 - gib / end
            points.append(f"{at},{height:.4f} {at + 1},{height:.4f}")
        line = " ".join(points)
        yield f'<polygon fill="{colors[part]}" points="0,1 {line} {len(steps)},1"/>'


def _level(share: float, count: int, name: str = "") -> str:
    """Return a horizontal line over `count` actions at a share of the height, of class `name`."""
    height = f"{1 - share:.4f}"
    return f'<line class="{name}" x1="0" x2="{count}" y1="{height}" y2="{height}"/>'
