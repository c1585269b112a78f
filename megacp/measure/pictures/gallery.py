"""All pictures by name, and the call that writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from megacp.measure.pictures import style
from megacp.measure.pictures.demo import draw_demo
from megacp.measure.pictures.floors import draw_floors
from megacp.measure.pictures.flow import draw_flow
from megacp.measure.pictures.grid import draw_grid
from megacp.measure.pictures.masks import draw_masks
from megacp.measure.pictures.pipeline import draw_pipeline

PICTURES: dict[str, Callable[[], Figure]] = {
    "flow": draw_flow,
    "mask": draw_masks,
    "grid": draw_grid,
    "pipeline": draw_pipeline,
    "floors": draw_floors,
}
"""Pictures that need nothing besides the code."""
DEMO = "demo"
"""The picture that needs a finished demo."""


def draw_all(output: Path, only: Sequence[str] | None = None, demo: Path | None = None) -> Iterator[Path]:
    """Write `output/NAME.png` for each picture and yield its path. ValueError: an unknown name, no finished demo."""
    known = [*PICTURES, DEMO]
    names = only or [*PICTURES, *([DEMO] if demo else [])]
    if strange := [name for name in names if name not in known]:
        raise ValueError(f"--only {' '.join(strange)}: the pictures are {', '.join(known)}")
    if DEMO in names and demo is None:
        raise ValueError("the picture demo needs --demo DIR, the folder that `make demo` made")
    style.use_style()
    for name in names:
        figure = draw_demo(demo) if name == DEMO and demo else PICTURES[name]()
        path = output / f"{name}.png"
        style.write_png(figure, path)
        yield path
