"""Fields of a hardware sheet, and checks for sheets that a user may have edited.

A sheet is checked before planning starts. Unknown and missing fields, wrong types and out-of-range
numbers are reported together, each with its location.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from megacp.engine.config.other_programs import nearest
from megacp.engine.config.ranges import Range
from megacp.engine.config.yaml_file import load_yaml
from megacp.storage.files import read_regular
from megacp.storage.wording import listed

# The contents of hardware.yaml. A measured sheet has only one GPU, and the `terms` of its host.
Sheet = dict[str, Any]

# Maximum size of a sheet in bytes.
_LARGEST_SHEET = 1 << 20
# Maximum number of problems in a message.
_MOST_REASONS = 20
# FLOP/s or bytes/s.
_RATE = Range(1, 1e24)
# Gibibytes of memory.
_GIB = Range(1e-6, 1e9)
# Fraction of a peak rate. It may exceed 1 on a CPU, whose peak is the measured rate of products.
_SHARE = Range(1e-9, 1e9)
_SECONDS = Range(0, 1e6)

# The fields of each part of a sheet, with their ranges.
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
# Fractions in `reached` that have two numbers, for the forward and the backward pass.
_PAIRS = ("fused", "flex")
_TERMS: dict[str, Range] = {
    "calls": _SECONDS,
    "overlap": Range(0, 1),
    "cores": Range(1),
    "beside": _SHARE,
}
_DTYPES = ("float32", "bfloat16", "float64")
# The only field that may be infinite: GPU ranks do not share cores.
_ENDLESS = "cores"
_PARTS = ("gpus", "networks", "host", "host_memory", "reached", "terms")


def read_sheet(path: str, network: str) -> Sheet:
    """Return the sheet in the file `path`, after checking it.

    Raise ValueError with all problems, or OSError if the file cannot be read.
    """
    source = f"--gpu {path}"
    try:
        text = read_regular(path, _LARGEST_SHEET)
    except ValueError as error:
        raise ValueError(f"--gpu: {error}") from error
    sheet = load_yaml(text, source)
    # A damaged file may have thousands of problems; do not collect all of them.
    reasons = list(itertools.islice(_problems(sheet, network), 10 * _MOST_REASONS))
    if reasons:
        between = "\n  - "
        told = listed(reasons, _MOST_REASONS, between)
        raise ValueError(f"{source} is not a sheet of `calibrate`:{between}{told}")
    return sheet


def _problems(sheet: Any, network: str) -> Iterator[str]:
    """Yield a sentence for each problem of a sheet."""
    if not isinstance(sheet, dict):
        # There are no fields to check.
        yield f"expected the fields {', '.join(_PARTS)}, got {_shown(sheet)}"
        return
    optional = ("terms",)
    yield from _names(sheet, _PARTS, "", optional)
    gpus = sheet.get("gpus")
    if isinstance(gpus, dict) and len(gpus) == 1:
        # A measured sheet describes a single GPU, whose name may be anything.
        (own,) = gpus.values()
        yield from _fields(own, _GPU, "gpus", ())
    elif "gpus" in sheet:
        yield f"gpus: expected one GPU name with its fields, got {_shown(gpus)}"
    if "networks" in sheet:
        networks = sheet["networks"]
        known = dict.fromkeys(("infiniband", "ethernet"), _RATE)
        yield from _fields(networks, known, "networks", tuple(known))
        if isinstance(networks, dict) and network not in networks:
            yield f"networks: {network} is missing, which --network selects"
    yield from _number(sheet, "host", _RATE, "")
    yield from _number(sheet, "host_memory", _GIB, "")
    if "reached" in sheet:
        yield from _reached(sheet["reached"])
    if "terms" in sheet:
        yield from _terms(sheet["terms"])


def _reached(reached: Any) -> Iterator[str]:
    """Yield the problems of the part `reached`."""
    # `_fields` only accepts the names of the pairs; their values are checked below.
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
                f"reached.{name}: expected two numbers, for the forward and the backward pass, "
                f"got {_shown(pair)}"
            )


def _terms(terms: Any) -> Iterator[str]:
    """Yield the problems of the part `terms`, whose fields are all optional."""
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
    """Yield the problems of a part's names, numbers and texts.

    `also` lists further allowed names, whose values the caller checks.
    """
    if not isinstance(values, dict):
        yield f"{part}: expected the fields {', '.join([*known, *also])}, got {_shown(values)}"
        return
    yield from _names(values, (*known, *also), f"{part}.", (*optional, *also_optional))
    for name, kind in known.items():
        if isinstance(kind, Range):
            yield from _number(values, name, kind, f"{part}.")
        elif name in values and not isinstance(values[name], kind):
            yield f"{part}.{name}: expected text, got {_shown(values[name])}"


def _names(
    values: Mapping[Any, Any], known: tuple[str, ...], before: str, optional: tuple[str, ...]
) -> Iterator[str]:
    """Yield unknown and missing names of a part; `before` is the path of the part."""
    for name in values:
        if name not in known:
            yield f"unknown field {before}{str(name)[:60]}{nearest(str(name)[:60], known)}"
    for name in known:
        if name not in values and name not in optional:
            yield f"{before}{name} is missing"


def _number(values: Mapping[str, Any], name: str, allowed: Range, before: str) -> Iterator[str]:
    """Yield the problem of a number, its type or its range, if the number is present."""
    if name not in values:
        return
    value = values[name]
    # `bool` is a subclass of `int` in Python, but YAML's true is not a number.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        yield f"{before}{name}: expected a number, got {_shown(value)}"
    elif value == float("inf") and name == _ENDLESS:
        return
    elif not allowed.holds(value):
        yield f"{before}{name}: got {_shown(value)}, expected {allowed}"


def _shown(value: Any) -> str:
    """Return a short description of any value, for use in a message."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an integer of more than 64 bits"  # Python refuses to print very long integers
    if isinstance(value, (dict, list)):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind} of {len(value)}"
    return f"{value!r:.60}"
