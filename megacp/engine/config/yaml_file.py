"""Conversion of a configuration to YAML text and back. The keys are flag names, without sections.

`from_yaml(to_yaml(config))` returns exactly `config`. Errors report the file, and for an unknown
key the nearest valid one. YAML values bypass tyro, which would read the text `None` as a missing
value and accept 7 as a directory name.
"""

from __future__ import annotations

import re
import reprlib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megacp.engine.config.other_programs import (
    ACCEPTED,
    Translated,
    advice,
    nearest,
    our_value,
)
from megacp.engine.config.run import (
    FieldInfo,
    RunConfig,
    Value,
    fields,
    flag,
    flatten,
    union_types,
    with_values,
)
from megacp.storage.files import read_regular
from megacp.storage.place import at_home
from megacp.storage.wording import listed

# PyYAML implements YAML 1.1, where a number with an exponent needs a dot and a sign (`3.0e-4`)
_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"),
    list("-+.0123456789"),
)
"""Resolver for numbers such as `3e-4` and `1.5e8`, which YAML 1.1 would read as strings."""


LARGEST_CONFIG = 1 << 20
"""Size limit of a --config file in bytes."""
_MOST_REASONS = 20
"""Maximum number of problems in an error message."""
_SHOWN = 200
"""Maximum length of a key or a value in an error message."""
# Messages show only the beginning of a value: YAML aliases can make it far larger than its file.
_brief = reprlib.Repr()
_brief.maxstring = _SHOWN
_brief.maxother = _SHOWN
_brief.maxlist = 8
_brief.maxdict = 8
_brief.maxlevel = 2


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `3e-4` as a number and refuses repeated keys.

    PyYAML itself would silently keep the last value of a repeated key.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for key, _ in node.value:
            # other keys are lists or mappings, which PyYAML refuses below
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in names:
                raise yaml.constructor.ConstructorError(
                    None, None, _repeated(key.value), key.start_mark
                )
            names.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings such as "3e-4", which `load_yaml` would read as numbers."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(*_FLOAT)


def _repeated(name: str) -> str:
    return f"the key {name[:_SHOWN]} appears more than once"


def load_yaml(text: str | bytes, source: str) -> Any:
    """Parse YAML text and return its value; None for an empty text.

    Raise ValueError, with `source` and the line if known, if the text is not valid YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}" if mark is not None else ""
        problem = error.problem or error.context
        raise ValueError(f"{source}: not valid YAML{line}: {problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # for example for a date such as 2026-13-45, or for lists nested a thousand times
        problem = " ".join(str(error).split())[:200]
        raise ValueError(f"{source}: not valid YAML: {problem}") from error


def to_yaml(config: RunConfig) -> str:
    """Return all values as YAML, one flag per line, grouped by section."""
    values = flatten(config)
    rooms: dict[str, dict[str, Any]] = {}
    for name, info in fields().items():
        value = values[name]
        # the safe dumper cannot write tuples
        plain = list(value) if isinstance(value, tuple) else value
        rooms.setdefault(info.room or "run", {})[name] = plain
    sections = []
    for room, rows in rooms.items():
        # a large width keeps long values on one line
        text = yaml.dump(rows, Dumper=_Dumper, sort_keys=False, width=4096)
        sections.append(f"# {room}\n{text}")
    return "\n".join(sections)


def from_yaml(text: str, source: str = "YAML") -> RunConfig:
    """Return the configuration in a YAML text that a run wrote; missing flags get their defaults.

    Keys may contain underscores or dashes. Flags of older releases (`RETIRED`) are skipped, because
    the text also contains every value derived from them. Raise ValueError that lists all invalid
    keys and values, each with `source`.
    """
    content = load_yaml(text, source)
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in RETIRED}
    return with_values(RunConfig(), _values(content, source))


def values_of_file(path: str) -> dict[str, Value]:
    """Return the values of a `--config` file by field name.

    Raise ValueError if the file cannot be read or contains invalid keys or values.
    """
    return _values(*_content(path))


def accepted_of_file(path: str) -> Translated:
    """Return the keys of a `--config` file that other programs use and a run does not need.

    Raise ValueError if the file cannot be read.
    """
    found = Translated()
    content, _ = _content(path)
    if not isinstance(content, dict):  # an empty file, or an error that `values_of_file` reports
        return found
    given = {_name(key) for key in content}
    for key, value in content.items():
        if _name(key) in ACCEPTED and not isinstance(value, dict):
            found.take(_name(key), flag(_name(key)), value, given)
    return found


def _content(path: str) -> tuple[Any, str]:
    """Return the content of a `--config` file, and its name in messages."""
    source = f"--config {path}"
    if Path(at_home(path)).is_dir():
        raise ValueError(f"{source}: is a folder, but must be a YAML file")
    try:
        return load_yaml(read_regular(at_home(path), LARGEST_CONFIG), source), source
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error


def _values(content: Any, source: str) -> dict[str, Value]:
    """Convert loaded YAML to values by field name. Raise ValueError that lists all problems."""
    if content is None:  # an empty file
        content = {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{source}: expected lines of `flag: value`, got a {type(content).__name__}"
        )
    reasons: list[str] = []
    values: dict[str, Value] = {}
    # values that follow from accepted keys of other programs
    implied: dict[str, Value] = {}
    given = {_name(key) for key in content}
    for key, value in content.items():
        name = _name(key)
        # With this many problems, the file is probably not a config. Only count the remaining
        # ones, because searching for the nearest key takes time.
        if len(reasons) >= _MOST_REASONS:
            reasons.append("")
            continue
        if name in RETIRED:
            retired = RETIRED[name]
            if value != retired.default:
                shown = _brief.repr(value)
                reasons.append(f"{source}: {key} {shown} no longer exists: {retired.instead}")
            continue
        if name in values:  # spelled once with dashes and once with underscores
            reasons.append(f"{source}: {_repeated(name)}")
            continue
        # a section with such a name, such as `optimizer`, gets advice for its keys below
        if name in ACCEPTED and not isinstance(value, dict):
            accepted = Translated()
            implied.update(accepted.take(name, name, value, given))
            reasons += [f"{source}: {problem}" for problem in accepted.problems]
            continue
        if name not in fields():
            hint = _inside(name, value) or advice(name[:_SHOWN]) or nearest(name, fields())
            reasons.append(f"{source}: unknown key {_brief.repr(key)}{hint}")
            continue
        try:
            values[name] = _convert(our_value(name, value), fields()[name])
        except ValueError as error:
            reasons.append(f"{source}: {key}: {error}")
    if reasons:
        raise ValueError(listed(reasons, _MOST_REASONS, "\n"))
    return {**implied, **values}


def _name(key: Any) -> str:
    """Return the spelling of a field for a key of a file, which may have dashes."""
    return str(key).replace("-", "_")


def _inside(section: str, value: Any) -> str:
    """Return advice for an unknown key whose value is a section of keys; "" for other values."""
    if not isinstance(value, dict):
        return ""
    parts = [": keys have no sections here"]
    for key in list(value)[:_MOST_REASONS]:
        hint = advice(f"{section}.{key}"[:_SHOWN])
        if hint:
            parts.append(f"{_brief.repr(key)}{hint}")
    return "; ".join(parts)


@dataclass(frozen=True)
class Retired:
    """A flag that no longer exists."""

    default: Value
    """Former default. A file may still set this value, without effect."""
    instead: str
    """Advice in the error message for any other value."""


RETIRED = {
    "parallel": Retired(
        "given",
        "plan a parallel layout with `megacp-plan --output best.yaml` and start the run with "
        "`--config best.yaml`; the scripts in examples/ do both if LAYOUT=auto is set",
    ),
}
"""Flags of older releases, by name, so that checkpoints and files with them can still be read."""


def _convert(value: Any, info: FieldInfo) -> Value:
    """Convert a YAML value to the type of a field. Raise ValueError if the type does not match."""
    # `NotNegative[int | Literal["auto"]]` has the parts int and Literal, and the word "auto"
    parts = union_types(info.hint)
    words = info.words
    if isinstance(value, bool):
        # YAML 1.1 reads the words on and off as true and false
        word = "on" if value else "off"
        if word in words:
            return word
    if value is None and type(None) in parts:
        return None
    if isinstance(value, str) and value in words:
        return value
    # WEIGHT FOLDER pairs: YAML reads the weights as numbers
    if isinstance(value, list) and tuple[str, ...] in parts:
        if all(type(x) in (str, int, float) for x in value):
            return tuple(map(str, value))
    # the first part of `int | None` is int; the sizes of `tuple[int, int] | None` are (int, int)
    kind = parts[0]
    sizes = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        if len(value) == len(sizes) and all(type(x) is int for x in value):
            return tuple(value)
    # a larger whole number would overflow a float
    if kind is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    # Compare types exactly: isinstance would accept `seq_length: true`, because a bool is an int.
    if type(value) is kind:
        return value
    shown = _brief.repr(value)
    if typing.get_origin(kind) is typing.Literal:
        raise ValueError(f"got {shown}; use one of {', '.join(words)}")
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string (quote it)",
    }
    expected = names.get(kind, f"{len(sizes)} whole numbers")
    raise ValueError(f"expected {expected}, got {shown} ({type(value).__name__})")
