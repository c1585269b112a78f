"""All pictures by name, and the call that writes them."""

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
"""Pictures that need nothing besides the code."""


def draw_all(
    output: Path, only: Sequence[str] | None = None, demo: Path | None = None
) -> Iterator[Path]:
    """Write `output/NAME.png` for each picture and yield its path. ValueError: an unknown name, no
    finished demo.
    """
    known = [*PICTURES, "demo"]
    names = only or [*PICTURES, *(["demo"] if demo else [])]
    if strange := [name for name in names if name not in known]:
        raise ValueError(f"--only {' '.join(strange)}: the pictures are {', '.join(known)}")
    if "demo" in names and demo is None:
        raise ValueError("the picture demo needs --demo DIR, the folder that `make demo` made")
    style.use_style()
    for name in names:
        figure = draw_demo(demo) if name == "demo" and demo else PICTURES[name]()
        path = output / f"{name}.png"
        style.write_png(figure, path)
        yield path
