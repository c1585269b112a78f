"""The breaks still fit the code."""

from __future__ import annotations

from tests.mutants import all_breaks, problems


def test_the_text_of_every_break_is_in_its_file_once() -> None:
    breaks = all_breaks()
    assert problems(breaks) == []
    assert len(breaks) > 700  # a missing file of breaks must not pass
