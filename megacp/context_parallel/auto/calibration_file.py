"""The JSON file that keeps what `calibrate` measured, for as many machines and shapes as were ever used.

Key property: it is a cache and nothing more. A file that is damaged, or somebody else's, is told, measured anew and
replaced; a folder that cannot be written costs a message. Rejected: refusing to start for a file that a run makes.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megacp.context_parallel.auto.predict import KernelCost, Line, Machine

FORMAT = "megacp context parallel calibration, version 1"


def default_path() -> Path:
    """In the user's cache folder; in the working directory where the user has none."""
    try:
        return Path("~/.cache/megacp/context_parallel.json").expanduser()
    except RuntimeError:
        return Path("context_parallel.json")


def read(path: Path, key: str, links: Sequence[str]) -> tuple[Machine | None, str]:
    """What the file holds under `key` if that has all `links`, and what is wrong with the file ("" when nothing is)."""
    machines, wrong = _machines(path)
    if wrong or key not in machines:
        return None, wrong
    try:
        return _machine(machines[key], links), ""
    except (KeyError, TypeError, ValueError) as error:
        return None, f"{path} holds no usable figures for this machine ({error!r}): measured anew"


def write(path: Path, key: str, machine: Machine) -> str:
    """Put `machine` under `key`, keeping what else a sound file holds; "" or why nothing was written.

    The file is replaced as a whole, so that a run that reads it meanwhile sees the old or the new one.
    """
    machines, _ = _machines(path)
    text = json.dumps({"format": FORMAT, "machines": machines | {key: asdict(machine)}}, indent=1) + "\n"
    new = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)
    except OSError as error:
        if new is not None:
            Path(new).unlink(missing_ok=True)
        return f"{path} cannot be written ({error.strerror}): the next run measures again"
    return ""


def _machines(path: Path) -> tuple[dict[str, Any], str]:
    """All that the file holds, by key; empty with a reason for a file that is not one of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path} cannot be read ({error.strerror}): measured anew"
    except (ValueError, RecursionError):  # no JSON, or no text at all
        return {}, f"{path} is damaged: measured anew and overwritten"
    ours = isinstance(content, dict) and content.get("format") == FORMAT
    if not ours or not isinstance(content.get("machines"), dict):
        return {}, f"{path} is no file of this kind ({FORMAT}): measured anew and overwritten"
    return content["machines"], ""


def _machine(row: dict[str, Any], links: Sequence[str]) -> Machine:
    """The inverse of `asdict`. Raises KeyError, TypeError or ValueError for figures that nobody can have measured."""
    kernels = [KernelCost(*(_figure(row[name], part) for part in ("pair", "row", "call"))) for name in _PASSES]
    lines = {name: Line(*(_figure(row["links"][name], part) for part in ("latency", "per_byte"))) for name in links}
    machine = Machine(*kernels, _figure(row, "copy"), _figure(row, "overlap"), lines)
    if machine.overlap > 1 or min(kernel.pair for kernel in kernels) <= 0:
        raise ValueError("out of range")
    return machine


_PASSES = ("forward", "backward")


def _figure(row: dict[str, Any], name: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value!r}")
    return float(value)
