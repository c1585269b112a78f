"""Conversion of a configuration to YAML text and back. The keys are flag names, without sections.

`from_yaml(to_yaml(config))` returns exactly `config`. Errors report the file, and for an unknown
key the nearest valid one. YAML values bypass tyro, which would read the text `None` as a missing
value and accept 7 as a directory name.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

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
    source = f"--config {path}"
    try:
        return _values(load_yaml(read_regular(at_home(path), LARGEST_CONFIG), source), source)
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
    for key, value in content.items():
        name = str(key).replace("-", "_")
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
        if name not in fields():
            near = nearest(name[:100], fields())
            reasons.append(f"{source}: unknown key {_brief.repr(key)}{near}")
            continue
        try:
            values[name] = _convert(value, fields()[name])
        except ValueError as error:
            reasons.append(f"{source}: {key}: {error}")
    if reasons:
        raise ValueError(listed(reasons, _MOST_REASONS, "\n"))
    return values


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

# Checked before the search for similar names
ELSEWHERE = {
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_decay_style",
    "max_grad_norm": "clip_grad",
    "max_steps": "train_iters",
    "gradient_accumulation_steps": "global_batch_size",
    "cutoff_len": "seq_length",
    **dict.fromkeys(("bf16", "fp16"), "dtype bfloat16"),
    "gradient_checkpointing": "recompute_granularity",
    **dict.fromkeys(("deepspeed", "fsdp"), "data_parallel_sharding_strategy"),
    "model_name_or_path": "load_hf",
    "adapter_name_or_path": "load_adapter",
    "resume_from_checkpoint": "load",
    "output_dir": "save",
}
"""Flags of TRL, transformers and LLaMA-Factory, and their names here, which difflib cannot find."""


def nearest(name: str, names: Iterable[str], as_flag: bool = False) -> str:
    """Return `, did you mean ...?` with the nearest of `names`; "" if no name is similar."""
    if name in ELSEWHERE:
        close = [ELSEWHERE[name]]
    else:
        close = difflib.get_close_matches(name, list(names), 1, 0.5)
    if not close:
        return ""
    shown = flag(close[0]) if as_flag else close[0]
    return f", did you mean {shown}?"


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
