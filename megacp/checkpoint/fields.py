"""Values of a JSON object that somebody else may have written, each taken with its type and its range.

Key property: what leaves here is of the type that it is used as, and an error names the field and shows what stands
there, shortened. Rejected: reading values as they are, after which `"6" + 1`, a step of -5 or a number of thirty digits
fails far from the file that holds it.
"""

from __future__ import annotations

import dataclasses
import reprlib
import typing
from collections.abc import Mapping
from typing import Any

MOST = 1 << 53
"""The largest count: every whole number up to it is exact in a float64, and no run gets there."""
_MOST_TEXT = 4096


class Fields:
    """The fields of `content`, which is at `where`. Every method raises ValueError that names place and field."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, Mapping):
            raise ValueError(f"{where} fields are {reprlib.repr(content)}, expected an object")
        self._content, self._where = content, where

    @property
    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._content)

    def whole(self, name: str, low: int = 0, high: int = MOST) -> int:
        """A whole number with low <= value <= high; true is none."""
        value = self._value(name)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def text(self, name: str) -> str:
        """A short text that can be printed."""
        value = self._value(name)
        if type(value) is not str or len(value) > _MOST_TEXT or not value.isprintable():
            raise self._wrong(name, value, "a line of text")
        return value

    def present(self, cls: type, limits: Mapping[str, int]) -> dict[str, Any]:
        """The fields of a dataclass that are there, by the types it declares: int, str, dict or None.

        Numbers end at `MOST`, or at what `limits` says of their field.
        """
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls) if field.name in self._content]
        return {name: self._typed(name, hints[name], limits.get(name, MOST)) for name in names}

    def _typed(self, name: str, hint: Any, most: int) -> Any:
        if hint is int:
            return self.whole(name, high=most)
        if hint is str:
            return self.text(name)
        return None if self._content[name] is None else self.object(name)

    def object(self, name: str) -> dict[str, Any]:
        """An object."""
        value = self._value(name)
        if type(value) is not dict:
            raise self._wrong(name, value, "an object")
        return value

    def _value(self, name: str) -> Any:
        if name not in self._content:
            raise ValueError(f"{self._where} {_shown(name)} is missing")
        return self._content[name]

    def _wrong(self, name: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self._where} {_shown(name)} is {reprlib.repr(value)}, expected {expected}")


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) < 100 else ascii(name[:100])
