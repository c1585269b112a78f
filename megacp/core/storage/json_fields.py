"""The fields of a JSON object from outside: each is read with its type and its range; errors name field and value."""

from __future__ import annotations

import re
from typing import Any

LARGEST_INT64 = 2**63 - 1
LARGEST_COUNT = 2**53
"""Every whole number up to it is exact in a float64, and no run counts further."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
"""A file or folder name that cannot lead anywhere else."""
_MOST_LINE = 4096


class Fields:
    """One JSON object, `values` as it is."""

    def __init__(self, value: Any, place: str = "", before: str = "") -> None:
        """`place` is the name of the object in its file; every message begins with `before`."""
        if not isinstance(value, dict):
            raise ValueError(f"{before}`{place}` is no object")
        self.values, self._place, self._before = value, place, before

    def has(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self.values

    def integer(self, name: str, low: int = 0, high: int = LARGEST_INT64) -> int:
        """An integer of `low` to `high`."""
        value = self.values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"an integer of {low} to {high}")
        return value

    def line(self, name: str) -> str:
        """A short text that can be printed."""
        value = self.values.get(name)
        if not isinstance(value, str) or len(value) > _MOST_LINE or not value.isprintable():
            raise self._wrong(name, "a line of text")
        return value

    def optional_object(self, name: str) -> dict[str, Any] | None:
        """null, or an object as it is, with unchecked fields."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "null or an object")
        return value

    def _wrong(self, name: str, expected: str) -> ValueError:
        shown = f"{self.values.get(name)!r:.60}" if name in self.values else "missing"
        return ValueError(f"{self._before}`{self._place}.{name}` is {shown}, it must be {expected}")
