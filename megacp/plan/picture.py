"""Draw a plan as an HTML page: bars of the best layouts, and the first one's memory in a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
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

# Palette of Okabe and Ito, whose colours stay distinct under common colour blindness.
_COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#6b7280",
    "#1b1f24",
    "#b8c8e8",
)
_STYLE = """
body { max-width: 80em; } pre { background: #eee; }
table { border-collapse: collapse; font-size: .9em; }
td { text-align: right; padding: .1em .6em; } td:nth-child(2) { text-align: left; }
i { padding: 0 .5em; margin: 0 .3em 0 1em; } svg { width: 100%; height: 18em; background: #eee; }
.bar { display: flex; height: 1.2em; background: #eee; margin-bottom: .4em; }
"""


# Phases of each kind of action.
_PHASES_OF = {
    Kind.FORWARD: ("forward", "loss"),
    Kind.BACKWARD: ("table", "backward", "vision"),
    Kind.WEIGHTS: ("forward",),  # like forward, it needs no temporaries of a block's backward
}


@dataclass(frozen=True)
class Moment:
    """An action of a stage, the optimizer or a checkpoint, in its largest phase."""

    name: str
    phase: str
    memory: RankMemory

    @property
    def total(self) -> int:
        """Bytes of the fullest rank."""
        return self.memory.peaks[self.phase]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes that stay for the whole step, that wait for backward, and that only this needs."""
        state = sum(getattr(self.memory, term) for term in STATE)
        waiting = 0
        if "activations" in PHASES[self.phase]:
            waiting = self.memory.activations
        return {"state": state, "activations": waiting, "at work": self.total - state - waiting}


def moments(config: RunConfig, stage: int, world_size: int) -> list[Moment]:
    """Return the moments of a rank's step, in the order of its schedule."""
    layers = stage_layers(config, world_size)[stage]
    known: dict[Held | None, RankMemory] = {}
    steps: list[tuple[str, tuple[str, ...], Held | None]] = []
    for action, in_flight in held_over(config, stage, world_size):
        steps.append((str(action), _PHASES_OF[action.kind], in_flight))
    for name in ("optimizer", "checkpoint"):
        steps.append((name, (name,), None))
    found = []
    for name, phases, held in steps:
        # Most actions have the same microbatches in flight as an earlier one.
        if held not in known:
            known[held] = stage_memory(config, stage, layers, world_size, held)
        peaks = known[held].peaks
        found.append(Moment(name, max(phases, key=lambda phase: peaks[phase]), known[held]))
    return found


def _panels(answer: Answer) -> list[tuple[str, list[Mapping[str, float]], float]]:
    """Return two panels, of seconds and of GiB: title, a bar per layout, value of a full bar."""
    # The slowest layout fills the bar of times; the memory of a GPU fills the bar of memory, unless
    # a layout needs more.
    slowest = max(one.layout.time.total for one in answer.best)
    times: list[Mapping[str, float]] = [large(vars(one.layout.time)) for one in answer.best]
    most = max(answer.hardware.memory, *(one.layout.gib for one in answer.best))
    memory: list[Mapping[str, float]] = [large(one.gib) for one in answer.best]
    title = f"Memory, of {answer.hardware.memory:g} GiB"
    return [("A step, s", times, slowest), (title, memory, most)]


def _colors(bars: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Choose a colour for each part of the bars."""
    names = dict.fromkeys(itertools.chain(*bars))
    return dict(zip(names, itertools.cycle(_COLORS), strict=False))


def page(answer: Answer) -> Iterator[str]:
    """Yield the plan as an HTML page, part by part."""
    yield page_head(f"Plan for {answer.world_size:,} GPUs", _STYLE)
    yield from (f"<p>{escape(line)}</p>" for line in answer.heading())
    yield "<table>"
    for row in answer.rows():
        cells = "".join(f"<td>{escape(text)}</td>" for text in row)
        yield f"<tr>{cells}</tr>"
    yield "</table>"
    for title, bars, end in _panels(answer):
        colors = _colors(bars)
        yield f"<h2>{title}</h2>{_key(colors)}"
        for place, (one, bar) in enumerate(zip(answer.best, bars, strict=True), 1):
            yield f'<div>{place} <span class="note">{escape(one.name)}</span></div>'
            yield '<div class="bar">'
            for part, value in bar.items():
                style = f"width:{value / end:.2%};background:{colors[part]}"
                yield f'<div title="{part} {value:.3g}" style="{style}"></div>'
            yield "</div>"
    yield from _timeline(answer)
    chosen = escape(flags(answer.found[0]))
    yield f"<h2>Flags of 1</h2><p>{answer.longest()}</p><pre>{chosen}</pre></body></html>\n"


def _key(colors: Mapping[str, str]) -> str:
    """Return the legend: each colour with its name."""
    names = (
        f'<i style="background:{color}"></i>{name.replace("_", " ")}'
        for name, color in colors.items()
    )
    return f"<p>{''.join(names)}</p>"


def _timeline(answer: Answer) -> Iterator[str]:
    """Yield a chart of the fullest rank's memory under the first layout, action by action."""
    config = answer.found[0].config
    stage, _ = fullest_stage(config, answer.world_size)
    steps = moments(config, stage, answer.world_size)
    peak = max(steps, key=lambda moment: moment.total)
    end = max(answer.hardware.memory * 2**30, peak.total)
    colors = _colors(moment.parts for moment in steps)
    title = f"Memory of stage {stage} through a step of 1, of {end / 2**30:g} GiB"
    yield f"<h2>{title}</h2>{_key(colors)}"
    yield f'<svg viewBox="0 0 {len(steps)} 1" preserveAspectRatio="none">'
    # Parts are stacked: each polygon includes all parts below it, and lower ones are drawn later.
    names = list(colors)
    for number, part in reversed(list(enumerate(names))):
        stacked = names[: number + 1]
        points = []
        for at, moment in enumerate(steps):
            height = 1 - sum(moment.parts[name] for name in stacked) / end
            points.append(f"{at},{height:.4f} {at + 1},{height:.4f}")
        line = " ".join(points)
        yield f'<polygon fill="{colors[part]}" points="0,1 {line} {len(steps)},1"/>'
    # Mark the fullest moment by a red column above it.
    at = steps.index(peak)
    above = 1 - peak.total / end
    yield f'<rect x="{at}" width="1" y="0" height="{above:.4f}" fill="#D55E00"/></svg>'
    yield (
        f"<p>The peak is in {peak.name} ({at + 1} of {len(steps)}): "
        f"{peak.total / 2**30:.1f} GiB.</p>"
    )
