"""The table of breaks follows the code."""

from __future__ import annotations

from tests.mutants import BREAKS, lost


def test_every_break_finds_its_place_once() -> None:
    assert lost() == []
    assert len(BREAKS) > 350  # as its first line says
