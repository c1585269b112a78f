"""A record of the input with its place in a file, or the reason why there is none.

Key property: all readers give the same two types, so nothing behind them knows the format of a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_RECORD_BYTES = 64 << 20


class RecordError(ValueError):
    """Why one record cannot be used; the reader adds where it stands. `url`: of an image that did not come."""

    def __init__(self, reason: str, url: str = "") -> None:
        super().__init__(reason)
        self.url = url


@dataclass(frozen=True)
class Refusal:
    """A record that cannot be used: one line of rejects.jsonl."""

    file: str
    line: int
    """1-based; in Parquet the row, in a tar the number of the record."""
    offset: int
    """Byte offset of the record in its (uncompressed) file; in Parquet the row, 0-based."""
    reason: str
    url: str = ""
    """Of an image that did not come."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason} (byte offset {self.offset})"

    def to_json(self) -> dict[str, Any]:
        """Its fields; the URL where there is one."""
        return {name: value for name, value in vars(self).items() if name != "url" or value}


@dataclass(frozen=True)
class Record:
    """A decoded record and where it stands; `line` and `offset` as in Refusal."""

    line: int
    offset: int
    size: int
    """Bytes it takes in the file."""
    value: Any
    members: dict[str, bytes] | None = None
    """Of a tar: the group's files that are neither record nor text, by their whole names (only when asked for)."""


def text_at(value: Any, key: str) -> str:
    """A value that stands at `key` of a record and must be a string; RecordError when it is none."""
    if not isinstance(value, str):
        raise RecordError(f"`{key}` is {described(value)}, it must be a string")
    return value


def described(value: Any) -> str:
    """What a value of a record is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"a number ({value})" if math.isfinite(value) else "a number"
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), f"a {type(value).__name__}")
