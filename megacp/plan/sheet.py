"""The fields of a sheet of hardware, and everything that can be wrong with one that somebody wrote.

A sheet is read before anything is planned: an unknown or missing field, another type and a number
that no machine has are reported together, each with its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from megacp.engine.config.ranges import Range
from megacp.engine.config.yaml_file import load_yaml, nearest
from megacp.storage.files import read_regular
from megacp.storage.wording import listed

Sheet = dict[str, Any]
"""The content of hardware.yaml; a measured sheet has one GPU, and the `terms` of its host."""

_LARGEST_SHEET = 1 << 20
"""Bytes of a sheet."""
_MOST_REASONS = 20
_RATE = Range(1, 1e24)
"""FLOP/s or bytes/s."""
_GIB = Range(1e-6, 1e9)
_SHARE = Range(1e-9, 1e9)
"""A factor of a rate; a CPU's may be above 1, as its peak is that of its products."""
_SECONDS = Range(0, 1e6)

_GPU: dict[str, Range | type] = {
    "flops": _RATE,
    "memory": _GIB,
    "bandwidth": _RATE,
    "link": _RATE,
    "source": str,
}
_REACHED: dict[str, Range] = {
    **dict.fromkeys(("products", "experts", "bandwidth", "link", "network", "host"), _SHARE),
    "latency": _SECONDS,
}
_PAIRS = ("fused", "flex")
"""Shares in `reached` that have a number for forward and one for backward."""
_TERMS: dict[str, Range] = {
    "calls": _SECONDS,
    "overlap": Range(0, 1),
    "cores": Range(1),
    "beside": _SHARE,
}
_DTYPES = ("float32", "bfloat16", "float64")
_ENDLESS = "cores"
"""The number that may be infinite: ranks of GPUs do not take turns."""
_PARTS = ("gpus", "networks", "host", "host_memory", "reached", "terms")


def read_sheet(path: str, network: str) -> Sheet:
    """Read the sheet of one GPU. Raises ValueError with all that is wrong, and OSError when there
    is no such file.
    """
    source = f"--gpu {path}"
    try:
        text = read_regular(path, _LARGEST_SHEET)
    except ValueError as error:
        raise ValueError(f"--gpu: {error}") from error
    sheet = load_yaml(text, source)
    reasons = list(itertools.islice(_problems(sheet, network), 10 * _MOST_REASONS))
    if reasons:
        between = "\n  - "
        told = listed(reasons, _MOST_REASONS, between)
        raise ValueError(f"{source} is not a sheet of `calibrate`:{between}{told}")
    return sheet


def _problems(sheet: Any, network: str) -> Iterator[str]:
    if not isinstance(sheet, dict):
        yield f"expected the fields {', '.join(_PARTS)}, got {_shown(sheet)}"
        return
    optional = ("terms",)
    yield from _names(sheet, _PARTS, "", optional)
    gpus = sheet.get("gpus")
    if isinstance(gpus, dict) and len(gpus) == 1:
        (own,) = gpus.values()
        yield from _fields(own, _GPU, "gpus", ())
    elif "gpus" in sheet:
        yield f"gpus: expected the fields of one GPU below its name, got {_shown(gpus)}"
    if "networks" in sheet:
        networks = sheet["networks"]
        known = dict.fromkeys(("infiniband", "ethernet"), _RATE)
        yield from _fields(networks, known, "networks", tuple(known))
        if isinstance(networks, dict) and network not in networks:
            yield f"networks: {network} is missing, which --network asks for"
    yield from _number(sheet, "host", _RATE, "")
    yield from _number(sheet, "host_memory", _GIB, "")
    if "reached" in sheet:
        yield from _reached(sheet["reached"])
    if "terms" in sheet:
        yield from _terms(sheet["terms"])


def _reached(reached: Any) -> Iterator[str]:
    yield from _fields(reached, _REACHED, "reached", (), _PAIRS)
    if not isinstance(reached, dict):
        return
    for name in _PAIRS:
        pair = reached.get(name)
        if isinstance(pair, list) and len(pair) == 2:
            for i, value in enumerate(pair):
                yield from _number({f"{name}[{i}]": value}, f"{name}[{i}]", _SHARE, "reached.")
        elif name in reached:
            yield (
                f"reached.{name}: expected two numbers, of forward and backward, got {_shown(pair)}"
            )


def _terms(terms: Any) -> Iterator[str]:
    yield from _fields(terms, _TERMS, "terms", tuple(_TERMS), ("dtype",), ("dtype",))
    if isinstance(terms, dict) and "dtype" in terms and terms["dtype"] not in _DTYPES:
        yield f"terms.dtype: expected {', '.join(_DTYPES)}, got {_shown(terms['dtype'])}"


def _fields(
    values: Any,
    known: Mapping[str, Range | type],
    part: str,
    optional: tuple[str, ...],
    also: tuple[str, ...] = (),
    also_optional: tuple[str, ...] = (),
) -> Iterator[str]:
    """What is wrong with a part's names, numbers and texts; `also`: names that somebody else looks
    at.
    """
    if not isinstance(values, dict):
        yield f"{part}: expected the fields {', '.join([*known, *also])}, got {_shown(values)}"
        return
    yield from _names(values, (*known, *also), f"{part}.", (*optional, *also_optional))
    for name, kind in known.items():
        if isinstance(kind, Range):
            yield from _number(values, name, kind, f"{part}.")
        elif name in values and not isinstance(values[name], kind):
            yield f"{part}.{name}: expected a text, got {_shown(values[name])}"


def _names(
    values: Mapping[Any, Any], known: tuple[str, ...], before: str, optional: tuple[str, ...]
) -> Iterator[str]:
    for name in values:
        if name not in known:
            yield f"unknown field {before}{str(name)[:60]}{nearest(str(name)[:60], known)}"
    for name in known:
        if name not in values and name not in optional:
            yield f"{before}{name} is missing"


def _number(values: Mapping[str, Any], name: str, allowed: Range, before: str) -> Iterator[str]:
    if name not in values:
        return
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        yield f"{before}{name}: expected a number, got {_shown(value)}"
    elif value == float("inf") and name == _ENDLESS:
        return
    elif not allowed.holds(value):
        yield f"{before}{name}: got {_shown(value)}, it must be {allowed}"


def _shown(value: Any) -> str:
    """A value as a message has it: short, whatever it is."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a whole number of more than 64 bits"  # Python refuses to write very long ones
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    return f"{value!r:.60}"
