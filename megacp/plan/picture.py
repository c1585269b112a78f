"""Show a plan as a page of HTML: bars of the best layouts, and the memory of the first one through
a step.
"""

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
"""Palette of Okabe and Ito, which stays distinct under common colour blindness."""
_STYLE = """
body { max-width: 80em; } table { border-collapse: collapse; font-size: .9em; } pre { background: #eee; }
td { text-align: right; padding: .1em .6em; } td:nth-child(2) { text-align: left; }
i { padding: 0 .5em; margin: 0 .3em 0 1em; } svg { width: 100%; height: 18em; background: #eee; }
.bar { display: flex; height: 1.2em; background: #eee; margin-bottom: .4em; }
"""


_PHASES_OF = {
    Kind.FORWARD: ("forward", "loss"),
    Kind.BACKWARD: ("table", "backward", "vision"),
    Kind.WEIGHTS: ("forward",),  # which needs no work of a block either
}
"""Phases that a compute goes through."""


@dataclass(frozen=True)
class Moment:
    """A compute of a stage, or what follows them all, in its largest phase."""

    name: str
    phase: str
    memory: RankMemory

    @property
    def total(self) -> int:
        """Bytes."""
        return self.memory.peaks[self.phase]

    @property
    def parts(self) -> dict[str, int]:
        """What stays for the whole step, what waits for backward, and all that is needed now
        alone.
        """
        state = sum(getattr(self.memory, term) for term in STATE)
        waiting = self.memory.activations if "activations" in PHASES[self.phase] else 0
        return {"state": state, "activations": waiting, "at work": self.total - state - waiting}


def moments(config: RunConfig, stage: int, world_size: int) -> list[Moment]:
    """A step of a rank, in the order of its stage's list."""
    layers = stage_layers(config, world_size)[stage]
    known: dict[Held | None, RankMemory] = {}
    computes = [
        (str(action), _PHASES_OF[action.kind], held)
        for action, held in held_over(config, stage, world_size)
    ]
    found = []
    for name, phases, held in (
        *computes,
        ("optimizer", ("optimizer",), None),
        ("checkpoint", ("checkpoint",), None),
    ):
        if held not in known:
            known[held] = stage_memory(config, stage, layers, world_size, held)
        peaks = known[held].peaks
        found.append(Moment(name, max(phases, key=lambda phase: peaks[phase]), known[held]))
    return found


def _panels(answer: Answer) -> list[tuple[str, list[Mapping[str, float]], float]]:
    """Title, a bar for each layout, and the value at its right end: seconds of a step, and GiB."""
    slowest = max(one.layout.time.total for one in answer.best)
    most = max(answer.hardware.memory, *(one.layout.gib for one in answer.best))
    return [
        ("A step, s", [large(vars(one.layout.time)) for one in answer.best], slowest),
        (
            f"Memory, of {answer.hardware.memory:g} GiB",
            [large(one.gib) for one in answer.best],
            most,
        ),
    ]


def _colors(bars: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """A colour for each part that some bar has."""
    names = dict.fromkeys(name for bar in bars for name in bar)
    return dict(zip(names, itertools.cycle(_COLORS), strict=False))


def page(answer: Answer) -> Iterator[str]:
    """The plan as a page of HTML, part by part."""
    yield page_head(f"Plan for {answer.world_size:,} GPUs", _STYLE)
    yield from (f"<p>{escape(line)}</p>" for line in answer.heading())
    rows = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in answer.rows()]
    yield f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    for title, bars, end in _panels(answer):
        colors = _colors(bars)
        yield f"<h2>{title}</h2>{_key(colors)}"
        for place, (one, bar) in enumerate(zip(answer.best, bars, strict=True), 1):
            yield f'<div>{place} <span class="note">{escape(one.name)}</span></div><div class="bar">'
            for part, value in bar.items():
                style = f"width:{value / end:.2%};background:{colors[part]}"
                yield f'<div title="{part} {value:.3g}" style="{style}"></div>'
            yield "</div>"
    yield from _timeline(answer)
    yield (
        "<h2>Flags of "
        f"1</h2><p>{answer.longest()}</p><pre>{escape(flags(answer.found[0]))}</pre></body></html>\n"
    )


def _key(colors: Mapping[str, str]) -> str:
    """Names beside their colours."""
    names = (
        f'<i style="background:{color}"></i>{name.replace("_", " ")}'
        for name, color in colors.items()
    )
    return f"<p>{''.join(names)}</p>"


def _timeline(answer: Answer) -> Iterator[str]:
    """Memory of the fullest rank under the first layout, compute by compute."""
    config = answer.found[0].config
    stage, _ = fullest_stage(config, answer.world_size)
    steps = moments(config, stage, answer.world_size)
    peak = max(steps, key=lambda moment: moment.total)
    end = max(answer.hardware.memory * 2**30, peak.total)
    colors = _colors(moment.parts for moment in steps)
    yield (
        f"<h2>Memory of stage {stage} through a step of 1, of {end / 2**30:g} "
        f"GiB</h2>{_key(colors)}"
    )
    yield f'<svg viewBox="0 0 {len(steps)} 1" preserveAspectRatio="none">'
    for part in reversed(colors):  # each with all below it, and those in front
        below = [*colors][: [*colors].index(part) + 1]
        heights = [1 - sum(moment.parts[name] for name in below) / end for moment in steps]
        line = " ".join(
            f"{at},{height:.4f} {at + 1},{height:.4f}" for at, height in enumerate(heights)
        )
        yield f'<polygon fill="{colors[part]}" points="0,1 {line} {len(steps)},1"/>'
    at = steps.index(peak)
    yield f'<rect x="{at}" width="1" y="0" height="{1 - peak.total / end:.4f}" fill="#D55E00"/></svg>'
    yield (
        f"<p>Most is held in {peak.name} ({at + 1} of {len(steps)}): {peak.total / 2**30:.1f} "
        "GiB.</p>"
    )
