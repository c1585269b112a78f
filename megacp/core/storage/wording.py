"""Words of messages: long lists are cut, numbers have a unit."""

from __future__ import annotations

from collections.abc import Sequence


def listed(texts: Sequence[object], most: int, between: str = ", ") -> str:
    """The first `most` texts in one, followed by `and N more` when there are others."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join([*map(str, texts[:most]), *more])


def human_bytes(count: float) -> str:
    """Bytes with a binary unit and three digits: 1536 -> "1.50 KiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def human_count(count: float, unit: str = "") -> str:
    """A number with a decimal prefix and three digits: 7.24e9 -> "7.24 G"."""
    return _scaled(count, 1000, (unit, f"k{unit}", f"M{unit}", f"G{unit}", f"T{unit}", f"P{unit}", f"E{unit}"))


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    value, place = float(count), 0
    while abs(value) >= 999.5 and place < len(units) - 1:
        value, place = value / base, place + 1
    digits = 0 if place == 0 and value == int(value) else 2 - (abs(value) >= 9.995) - (abs(value) >= 99.95)
    return f"{value:.{digits}f} {units[place]}".rstrip()
