"""A configuration as YAML text and back: the keys are the flags, without sections.

`from_yaml(to_yaml(config)) == config` exactly. A wrong key or type is refused with its file and the
nearest right name. Values do not pass through tyro, which reads the text `None` as no value and 7
as the name of a directory.
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

_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"),
    list("-+.0123456789"),
)
"""`3e-4` and `1.5e8`, which YAML 1.1 would read as strings."""


LARGEST_CONFIG = 1 << 20
"""Bytes of the largest file of --config."""
_MOST_REASONS = 20
_SHOWN = 200
"""Characters of a key or a value in a message."""
_brief = reprlib.Repr()
"""Shows the beginning of a value: aliases can make a value far larger than its file."""
_brief.maxstring = _brief.maxother = _SHOWN
_brief.maxlist = _brief.maxdict = 8
_brief.maxlevel = 2


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `3e-4` as a number and refuses repeated keys, of which PyYAML would
    keep the last.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for key, _ in node.value:
            # any other key is a list or a mapping, which PyYAML refuses below
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, _repeated(key.value), key.start_mark
                    )
                names.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings which `load_yaml` would read as numbers."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(*_FLOAT)


def _repeated(name: str) -> str:
    return f"the key {name[:_SHOWN]} stands more than once"


def load_yaml(text: str | bytes, source: str) -> Any:
    """The value of a YAML text, None for an empty one. Raises ValueError that names `source` and
    the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}" if mark is not None else ""
        raise ValueError(
            f"{source}: not valid YAML{line}: {error.problem or error.context}"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{source}: not valid YAML: {' '.join(str(error).split())[:200]}"
        ) from error


def to_yaml(config: RunConfig) -> str:
    """All values as YAML, one flag a line, grouped by room."""
    values = flatten(config)
    rooms: dict[str, dict[str, Any]] = {}
    for name, info in fields().items():
        value = values[name]
        rooms.setdefault(info.room or "run", {})[name] = (
            list(value) if isinstance(value, tuple) else value
        )
    shown = {
        room: yaml.dump(rows, Dumper=_Dumper, sort_keys=False, width=4096)
        for room, rows in rooms.items()
    }
    return "\n".join(f"# {room}\n{rows}" for room, rows in shown.items())


def from_yaml(text: str, source: str = "YAML") -> RunConfig:
    """Return the defaults with the values of `text`, whose keys are flag names with underscores or
    dashes.

    The text is a config that a run wrote. One of an older release may hold flags of `RETIRED`,
    which are skipped: it also holds every value that they led to. Raises ValueError with all wrong
    keys and values, each naming `source`.
    """
    content = load_yaml(text, source)
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in RETIRED}
    return with_values(RunConfig(), _values(content, source))


def values_of_file(path: str) -> dict[str, Value]:
    """What the file of a `--config` says, by field name; ValueError."""
    source = f"--config {path}"
    try:
        return _values(load_yaml(read_regular(at_home(path), LARGEST_CONFIG), source), source)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error


def _values(content: Any, source: str) -> dict[str, Value]:
    """The values by field name; ValueError with all that is wrong."""
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(
            f"{source}: expected lines of `flag: value`, got a {type(content).__name__}"
        )
    reasons: list[str] = []
    values: dict[str, Value] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if (
            len(reasons) >= _MOST_REASONS
        ):  # a file of something else: the search for near names takes time
            reasons.append("")
            continue
        if name in RETIRED:
            if value != RETIRED[name].default:
                reasons.append(
                    f"{source}: {key} {_brief.repr(value)} no longer exists: "
                    f"{RETIRED[name].instead}"
                )
            continue
        if name in values:
            reasons.append(f"{source}: {_repeated(name)}")
            continue
        if name not in fields():
            reasons.append(
                f"{source}: unknown key {_brief.repr(key)}{nearest(name[:100], fields())}"
            )
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
    """Its former default. A file that holds this value asks for nothing special."""
    instead: str
    """Advice: what to use now."""


RETIRED = {
    "parallel": Retired(
        "given",
        "plan a layout with `megacp-plan --output best.yaml` and give `--config best.yaml` to the run; the scripts of "
        "examples/ do both if LAYOUT=auto is set",
    ),
}
"""Flags of older releases by name. Their checkpoints and files can still be read."""

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
"""Flags of TRL, transformers and LLaMA-Factory that are spelled quite otherwise here, and what they
are.
"""


def nearest(name: str, names: Iterable[str], as_flag: bool = False) -> str:
    """`, did you mean ...?` for the closest of `names`, or nothing when none is close."""
    close = (
        [ELSEWHERE[name]]
        if name in ELSEWHERE
        else difflib.get_close_matches(name, list(names), 1, 0.5)
    )
    return f", did you mean {flag(close[0]) if as_flag else close[0]}?" if close else ""


def _convert(value: Any, info: FieldInfo) -> Value:
    """The value as the field's type; ValueError says why it is not of it."""
    parts, words = union_types(info.hint), info.words
    if (
        isinstance(value, bool) and (word := "on" if value else "off") in words
    ):  # YAML 1.1 reads off as false
        return word
    if (value is None and type(None) in parts) or (isinstance(value, str) and value in words):
        return value
    if (
        isinstance(value, list)
        and tuple[str, ...] in parts
        and all(type(x) in (str, int, float) for x in value)
    ):
        return tuple(map(str, value))
    kind, sizes = parts[0], typing.get_args(parts[0])
    if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        if len(value) == len(sizes) and all(type(x) is int for x in value):
            return tuple(value)
    if kind is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if type(value) is kind:
        return value
    shown = _brief.repr(value)
    if typing.get_origin(kind) is typing.Literal:
        raise ValueError(f"got {shown}, allowed are {', '.join(words)}")
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string (quote it)",
    }
    expected = names.get(kind, f"{len(sizes)} whole numbers")
    raise ValueError(f"expected {expected}, got {shown} ({type(value).__name__})")
