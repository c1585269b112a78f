"""Lines for a person about the layers of a run: which ones run, and why not others."""

from __future__ import annotations


class Notes:
    """Lines that are each given out once; a backend and its copies for towers share them."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._new: list[str] = []

    def tell(self, line: str) -> None:
        """Add a line, unless it was added before."""
        if line not in self._known:
            self._known.add(line)
            self._new.append(line)

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        lines = list(self._new)
        self._new.clear()
        return lines
