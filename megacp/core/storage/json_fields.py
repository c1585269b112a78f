"""The fields of a JSON object from outside: each is read with its type and its range.

Key property: a field that is missing, unknown, of another type or out of range is a ValueError. The error names the
field by its full place (`shards[3].files[0].size`) and shows its value. true is no 1, and 1.0 is no 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

LARGEST_INT32 = 2**31 - 1
LARGEST_INT64 = 2**63 - 1
LARGEST_COUNT = 2**53
"""Every whole number up to it is exact in a float64, and no run counts further."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
"""A file or folder name that cannot lead anywhere else."""
SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN, _MOST_NAME, _MOST_LINE = 60, 100, 4096


def shown(value: Any) -> str:
    """A value in an error message, cut short; never fails, whatever is nested in it."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print some of them
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


class Fields:
    """One JSON object, `values` as it is. Ask for each field once, then call `done`."""

    def __init__(self, value: Any, place: str = "", before: str = "") -> None:
        """`place` is where the object stands, "" at the top of a file; every message begins with `before`.

        ValueError when `value` is no object.
        """
        if not isinstance(value, dict):
            at = f"`{place}`" if place else "the top"
            raise ValueError(f"{before}{at} is {shown(value)}, it must be an object")
        self.values, self._place, self._before, self._asked = value, place, before, set[str]()

    def integer(self, name: str, low: int = 0, high: int = LARGEST_INT64) -> int:
        """An integer of `low` to `high`."""
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, value, f"an integer of {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int = 0, high: int = LARGEST_INT64) -> int | None:
        """null, or an integer of `low` to `high`."""
        value = self._take(name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise self._wrong(name, value, f"null or an integer of {low} to {high}")
        return value

    def boolean(self, name: str) -> bool:
        """true or false."""
        value = self._take(name)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, pattern: re.Pattern[str] | None = None, what: str = "text") -> str:
        """A string, all of which matches `pattern`; `what` says in words what that is."""
        value = self._take(name)
        if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
            raise self._wrong(name, value, what)
        return value

    def line(self, name: str) -> str:
        """A short text that can be printed."""
        value = self._take(name)
        if not isinstance(value, str) or len(value) > _MOST_LINE or not value.isprintable():
            raise self._wrong(name, value, "a line of text")
        return value

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        items = enumerate(self._list(name))
        return [Fields(item, self._at(f"{name}[{i}]"), self._before) for i, item in items]

    def object(self, name: str) -> Fields:
        """An object."""
        return Fields(self._take(name), self._at(name), self._before)

    def optional_object(self, name: str) -> dict[str, Any] | None:
        """null, or an object as it is, with unchecked fields."""
        value = self._take(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, value, "null or an object")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self._list(name)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self._wrong(f"{name}[{i}]", value, "text")
        return tuple(values)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers of `low` to `high`."""
        values = self._list(name)
        for i, value in enumerate(values):
            if type(value) is not int or not low <= value <= high:
                raise self._wrong(f"{name}[{i}]", value, f"an integer of {low} to {high}")
        return tuple(values)

    def has(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self.values

    def is_number(self, name: str, expected: float) -> bool:
        """Whether a field is there and is this number."""
        value = self.values.get(name)
        return type(value) in (int, float) and value == expected

    def done(self, ignored: Sequence[str] = ()) -> None:
        """ValueError when the object has fields that nobody asked for, but for the `ignored`."""
        unknown = sorted(set(self.values) - self._asked - set(ignored))
        if unknown:
            where = f" of `{self._place}`" if self._place else ""
            raise ValueError(f"{self._before}unknown fields{where}: {', '.join(shown(name) for name in unknown[:5])}")

    def refused(self, name: str, reason: str) -> ValueError:
        """The error for a field that is wrong in a way of its own."""
        return self._error(name, f"is {shown(self.values.get(name))}, {reason}")

    def _list(self, name: str) -> list[Any]:
        value = self._take(name)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value

    def _take(self, name: str) -> Any:
        self._asked.add(name)
        if name not in self.values:
            raise self._error(name, "is missing")
        return self.values[name]

    def _at(self, name: str) -> str:
        name = name if name.isprintable() and len(name) <= _MOST_NAME else ascii(name[:_MOST_NAME])
        return f"{self._place}.{name}" if self._place else name

    def _wrong(self, name: str, value: Any, expected: str) -> ValueError:
        return self._error(name, f"is {shown(value)}, it must be {expected}")

    def _error(self, name: str, what: str) -> ValueError:
        return ValueError(f"{self._before}`{self._at(name)}` {what}")
