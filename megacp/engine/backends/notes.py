"""Log lines about the layers of a run: which layers it uses, and why."""

from __future__ import annotations


class Notes:
    """Log lines without duplicates. A backend shares this object with its copies for towers."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._new: list[str] = []

    def tell(self, line: str) -> None:
        """Add a line, unless it has been added before."""
        if line not in self._known:
            self._known.add(line)
            self._new.append(line)

    def take(self) -> list[str]:
        """Return the lines added since the last call."""
        lines = list(self._new)
        self._new.clear()
        return lines
