"""A configuration as YAML text and back: the keys are the flags.

Key property: `from_yaml(to_yaml(config)) == config` exactly, and a key or type that is wrong is refused with its file
and the nearest right name, never dropped. Rejected: nested sections, which would be a second spelling of every flag.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from megacp.config.run import RunConfig, Value, fields, flag, flatten, with_values

_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")
"""`3e-4` and `1.5e8`, which YAML 1.1 would read as strings."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `3e-4` as a number and refuses a key that stands twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        seen = [str(key).replace("-", "_") for key in keys]
        double = sorted({name for name in seen if seen.count(name) > 1})
        if double:
            raise ValueError(f"the key {', '.join(double)} stands more than once")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings which `_Loader` would read as numbers."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def to_yaml(config: RunConfig) -> str:
    """All values as YAML, one flag a line, grouped by room."""
    values = flatten(config)
    parts = []
    for room in dict.fromkeys(info.room for info in fields().values()):
        rows = {info.name: _plain(values[info.name]) for info in fields().values() if info.room == room}
        parts.append(f"# {room or 'run'}\n" + yaml.dump(rows, Dumper=_Dumper, sort_keys=False, width=4096))
    return "\n".join(parts)


def from_yaml(text: str, base: RunConfig | None = None, source: str = "YAML") -> RunConfig:
    """Apply the keys in `text` to `base` (default: the defaults).

    Keys are flag names with underscores or dashes. Raises ValueError with all wrong keys and values at once, each
    naming `source`.
    """
    try:
        content = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source}: not valid YAML: {error}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ValueError(f"{source}: expected lines of `flag: value`, got a {type(content).__name__}")
    reasons: list[str] = []
    values: dict[str, Value] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in fields():
            reasons.append(f"{source}: unknown key {key!r}{nearest(name, fields())}")
            continue
        fitting, problem = _convert(value, fields()[name].hint)
        if problem:
            reasons.append(f"{source}: {key}: {problem}")
        values[name] = fitting
    if reasons:
        raise ValueError("\n".join(reasons))
    return with_values(base if base is not None else RunConfig(), values)


def read_yaml(path: str, base: RunConfig | None = None) -> RunConfig:
    """`from_yaml` of a file; ValueError when it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: cannot be read: {error}") from error
    return from_yaml(text, base, f"--config {path}")


def nearest(name: str, names: Iterable[str], as_flag: bool = False) -> str:
    """`, did you mean ...?` for the closest of `names`, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {flag(close[0]) if as_flag else close[0]}?" if close else ""


def _plain(value: Value) -> Any:
    """YAML has lists, no tuples."""
    return list(value) if isinstance(value, tuple) else value


def _convert(value: Any, hint: Any) -> tuple[Value, str | None]:
    """The value as the field's type, or the reason why it is not of it."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None, None
        (hint,) = [part for part in typing.get_args(hint) if part is not type(None)]
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        fits = isinstance(value, (list, tuple)) and len(value) == len(choices) and all(type(x) is int for x in value)
        return (tuple(value), None) if fits else (None, f"expected {len(choices)} whole numbers, got {value!r}")
    if choices:
        known = isinstance(value, str) and value in choices
        return value, None if known else f"got {value!r}, allowed are {', '.join(choices)}"
    if hint is float and type(value) is int and abs(value) < 2**1023:
        return float(value), None
    if type(value) is hint:
        return value, None
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string (quote it)"}
    return None, f"expected {names[hint]}, got {value!r} ({type(value).__name__})"
