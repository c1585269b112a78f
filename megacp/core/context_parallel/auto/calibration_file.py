"""The JSON file that keeps what `calibrate` measured, for every machine and shape that was used.

Key property: the file is a cache. One that is damaged or of another kind is reported and replaced by a new measurement.
A folder that cannot be written costs a message. Rejected: refusing to start for a file that a run makes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from megacp.core.context_parallel.auto.predict import KernelCost, Line, Machine
from megacp.core.storage.files import read_json, write_atomically

FORMAT = "megacp context parallel calibration, version 1"


def default_path() -> Path:
    """In the user's cache folder; in the working directory where the user has none."""
    try:
        return Path("~/.cache/megacp/core/context_parallel.json").expanduser()
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
    """Put `machine` under `key` beside the others of a sound file; "" or why nothing was written."""
    machines, _ = _machines(path)
    text = json.dumps({"format": FORMAT, "machines": machines | {key: asdict(machine)}}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}): the next run measures again"
    return ""


def _machines(path: Path) -> tuple[dict[str, Any], str]:
    """All that the file holds, by key; empty with a reason for a file that cannot be used."""
    try:
        content = read_json(path)
        if content["format"] == FORMAT:
            return dict(content["machines"]), ""
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path} cannot be read ({error.strerror}): measured anew"
    except (KeyError, TypeError, ValueError) as error:
        return {}, f"{path} is damaged or no file of this kind ({error}): measured anew"
    return {}, f"{path} is no file of this kind ({FORMAT}): measured anew"


def _machine(row: dict[str, Any], links: Sequence[str]) -> Machine:
    """The inverse of `asdict`. Raises KeyError, TypeError or ValueError for figures that no measurement gives."""
    forward, backward = KernelCost(**row["forward"]), KernelCost(**row["backward"])
    lines = {name: Line(**row["links"][name]) for name in links}
    machine = Machine(forward, backward, row["copy"], row["overlap"], lines)
    figures = [machine.copy, machine.overlap, *astuple(forward), *astuple(backward)]
    figures += [figure for line in lines.values() for figure in astuple(line)]
    wrong = [x for x in figures if type(x) not in (int, float) or not 0 <= x < math.inf]  # a bool is no figure
    if wrong or machine.overlap > 1 or min(forward.pair, backward.pair) <= 0:
        raise ValueError(f"out of range: {wrong or 'overlap or pair'}")
    return machine
