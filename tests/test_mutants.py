"""The table of breaks follows the code."""

from __future__ import annotations

from tests.mutants import BREAKS, ROOT


def test_every_break_finds_its_place_once() -> None:
    """Would catch a break that no longer breaks anything."""
    found = {row: (ROOT / row.file).read_text(encoding="utf-8").count(row.old) for row in BREAKS}
    assert [(row.file, row.old, count) for row, count in found.items() if count != 1] == []
    assert len(BREAKS) >= 120
