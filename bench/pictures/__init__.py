"""The pictures of README.md and docs/ by name, and the function that draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.pictures import style
from bench.pictures.demo import draw_demo
from bench.pictures.flow import draw_flow
from bench.pictures.masks import draw_masks
from bench.pictures.pipeline import draw_pipeline

PICTURES: dict[str, Callable[[], Figure]] = {
    "flow": draw_flow,
    "mask": draw_masks,
    "pipeline": draw_pipeline,
}
"""Pictures that need only the code; `demo` also needs the results of `make demo`."""


def draw_all(
    output: Path, only: Sequence[str] | None = None, demo: Path | None = None
) -> Iterator[Path]:
    """Write `output/NAME.png` for each picture and yield its path.

    Raise ValueError if a name is unknown, or if `demo` is to be drawn without its folder.
    """
    drawn = dict(PICTURES)
    if demo is not None:
        drawn["demo"] = lambda: draw_demo(demo)
    style.use_style()
    for name in only or drawn:
        if name == "demo" and demo is None:
            raise ValueError(
                "the picture demo requires --demo DIR, the output folder of `make demo`"
            )
        if name not in drawn:
            raise ValueError(
                f"--only {name} is unknown; the pictures are {', '.join(PICTURES)}, demo"
            )
        path = output / f"{name}.png"
        style.save(drawn[name](), path)
        yield path
