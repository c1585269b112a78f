"""The floor plan: which room may import which, read from the contract that lint-imports checks."""

from __future__ import annotations

import ast
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megacp.measure.pictures import style

_ROOT = Path(__file__).resolve().parents[3]
_HEIGHT, _WIDTH, _LEFT = 8.2, 122.0, 9.0
_SCIENCE = {"tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel", "distributed", "ops", "sdpa"}


def _contracts() -> list[dict[str, Any]]:
    """What lint-imports checks. ValueError where this is no checkout of the project."""
    try:
        settings = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the floor plan needs pyproject.toml of a checkout, not in {_ROOT}") from error
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return contracts


def floors() -> list[list[str]]:
    """Rooms from the top floor down."""
    return [[room.strip(" ()") for room in layer.split("|")] for layer in _contracts()[0]["layers"]]


def pure_rooms() -> set[str]:
    """Rooms that may not import torch."""
    return {module.removeprefix("megacp.") for module in _contracts()[1]["source_modules"]}


def purpose(room: str) -> str:
    """The first sentence of a room's docstring, without the room's name that it may begin with."""
    folder = _ROOT / "megacp" / room
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    sentence = text.split("\n\n")[0].split(". ")[0].replace("\n", " ").replace("`", "").rstrip(".")
    head, colon, rest = sentence.partition(": ")
    names_room = bool(colon) and head[:5].lower() == room[:5]
    return rest if names_room else sentence


def _draw_floor(axes: Axes, rooms: list[str], colors: dict[str, str], corner: tuple[int, float]) -> None:
    number, top = corner
    axes.text(4.5, top + _HEIGHT / 2, str(number), fontsize=15, weight="bold", ha="center", va="center")
    width = _WIDTH / len(rooms)
    for index, room in enumerate(rooms):
        left = _LEFT + width * index
        style.box(axes, (left + 0.5, top + 0.4), (width - 1.0, _HEIGHT - 0.8), colors.get(room, style.BLUE))
        name = room if (_ROOT / "megacp" / room).is_dir() else f"{room}.py"
        axes.text(left + 1.6, top + 1.1, name, fontsize=11.5, weight="bold", va="top")
        lines = textwrap.wrap(purpose(room), int(width * 1.45))
        axes.text(left + 1.6, top + 3.3, "\n".join(lines[:3]), fontsize=8.4, va="top", linespacing=1.15)


def draw_floors() -> Figure:
    """All floors, the top one above."""
    plan = floors()
    colors = dict.fromkeys(_SCIENCE, style.ORANGE) | dict.fromkeys(pure_rooms(), style.GREEN)
    figure, axes = style.canvas(13.4, 1.9 + _HEIGHT * len(plan) / 10)
    style.title(figure, "A room imports only from floors below its own", 0.966)
    for number, rooms in enumerate(plan):
        _draw_floor(axes, rooms, colors, (len(plan) - 1 - number, 7.5 + _HEIGHT * number))
    bottom = 7.5 + _HEIGHT * len(plan) + 3.4
    for index, (color, text) in enumerate(
        ((style.BLUE, "a run and its tools"), (style.ORANGE, "the mathematics of ranks"), (style.GREEN, "no torch"))
    ):
        style.box(axes, (30 + 28 * index, bottom), (3, 2), color)
        axes.text(34 + 28 * index, bottom + 1.1, text, va="center", fontsize=10.5)
    return figure
