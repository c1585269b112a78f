"""Lists in messages: long ones are cut, and the message says how much is left out."""

from __future__ import annotations

from collections.abc import Sequence


def listed(texts: Sequence[object], most: int, between: str = ", ") -> str:
    """The first `most` texts in one, followed by `and N more` when there are others."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join([*map(str, texts[:most]), *more])
