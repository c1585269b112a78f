"""Ids of several units: every repeated one is found, whatever the range of digests that is compared at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.prepare.build.identities import digest, identity_file, repeated, write_identities


def written(folder: Path, units: list[set[int]]) -> dict[int, Path]:
    """The tables of units that hold the ids of some numbers; the offset of a record is its number."""
    paths = {unit: identity_file(folder, unit) for unit, ids in enumerate(units) if ids}
    for unit, path in paths.items():
        write_identities(path, [(digest(str(i)), 0, i, 10 * unit) for i in sorted(units[unit])])
    return paths


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 40), max_size=12), max_size=5))
def test_every_later_unit_is_told_with_the_first_one(
    tmp_path_factory: pytest.TempPathFactory, units: list[set[int]]
) -> None:
    """Would catch an id at the edge of two ranges that is lost, and a pair of two later units."""
    paths = written(tmp_path_factory.mktemp("ids"), units)
    found = {(one.unit, int(one.row["offset"]), int(one.first["line"]) // 10) for one in repeated(paths)}
    expected = {
        (unit, i, next(first for first, earlier in enumerate(units) if i in earlier))
        for unit, ids in enumerate(units)
        for i in ids
        if any(i in earlier for earlier in units[:unit])
    }
    assert found == expected
    digests = [bytes(one.row["digest"]) for one in repeated(paths)]
    assert digests == sorted(digests)


def test_a_unit_without_ids_leaves_no_table(tmp_path: Path) -> None:
    path = identity_file(tmp_path, 3)
    write_identities(path, [(digest("a"), 0, 0, 0)])
    write_identities(path, [])
    assert not path.exists() and list(repeated({})) == []
