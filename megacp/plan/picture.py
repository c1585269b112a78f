"""Draw a plan as an HTML page: bars for the best layouts, and the first one's memory in a step."""

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

# Okabe and Ito's palette: its colours remain distinct with common colour blindness.
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
        return {"state": state, "activations": waiting, "at work": self.total - state - waiting}


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


def _panels(answer: Answer) -> list[tuple[str, list[Mapping[str, float]], float]]:
    """Return a panel of step times and a panel of memory.

    Each panel is a title, one bar per layout, and the value of a full bar.
    """
    # The slowest layout has a full bar of time. A full bar of memory is the GPU's memory, or the
    # memory of the largest layout if that is more.
    slowest = max(one.layout.time.total for one in answer.best)
    times: list[Mapping[str, float]] = [large(vars(one.layout.time)) for one in answer.best]
    most = max(answer.hardware.memory, *(one.layout.gib for one in answer.best))
    memory: list[Mapping[str, float]] = [large(one.gib) for one in answer.best]
    title = f"Memory of the fullest rank (a GPU has {answer.hardware.memory:g} GiB)"
    return [("Seconds per step", times, slowest), (title, memory, most)]


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
    yield f"<h2>Flags of layout 1</h2><p>{answer.longest()}</p><pre>{chosen}</pre></body></html>\n"


def _key(colors: Mapping[str, str]) -> str:
    """Return a legend that names each colour."""
    names = (
        f'<i style="background:{color}"></i>{name.replace("_", " ")}'
        for name, color in colors.items()
    )
    return f"<p>{''.join(names)}</p>"


def _timeline(answer: Answer) -> Iterator[str]:
    """Yield a chart of the fullest rank's memory with the first layout, action by action."""
    config = answer.found[0].config
    stage, _ = fullest_stage(config, answer.world_size)
    steps = moments(config, stage, answer.world_size)
    peak = max(steps, key=lambda moment: moment.total)
    end = max(answer.hardware.memory * 2**30, peak.total)
    colors = _colors(moment.parts for moment in steps)
    title = f"Layout 1: memory of stage {stage} during a step, of {end / 2**30:g} GiB"
    yield f"<h2>{title}</h2>{_key(colors)}"
    yield f'<svg viewBox="0 0 {len(steps)} 1" preserveAspectRatio="none">'
    # Parts are stacked. Each polygon also covers all parts below it, so draw the top one first.
    names = list(colors)
    for number, part in reversed(list(enumerate(names))):
        stacked = names[: number + 1]
        points = []
        for at, moment in enumerate(steps):
            height = 1 - sum(moment.parts[name] for name in stacked) / end
            points.append(f"{at},{height:.4f} {at + 1},{height:.4f}")
        line = " ".join(points)
        yield f'<polygon fill="{colors[part]}" points="0,1 {line} {len(steps)},1"/>'
    # Mark the moment of peak memory with a red column above it.
    at = steps.index(peak)
    above = 1 - peak.total / end
    yield f'<rect x="{at}" width="1" y="0" height="{above:.4f}" fill="#D55E00"/></svg>'
    yield (
        f"<p>Memory peaks during {peak.name} ({at + 1} of {len(steps)}): "
        f"{peak.total / 2**30:.1f} GiB.</p>"
    )
