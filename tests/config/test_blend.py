"""What --data-path may say: one folder, pairs of weights and folders, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from megacp.core.config.blend import WeightedFolder, path_problems, weighted_folders
from megacp.core.config.checks import check
from megacp.core.config.run import RunConfig, with_values


def told(*path: str) -> list[str]:
    return path_problems("--data-path", path)


def test_one_folder_is_taken_as_it_stands_with_or_without_a_weight() -> None:
    for path in ("a b", "0.5", ("0.5",), ("7", "0.5")):
        folder = "0.5" if "0.5" in path else "a b"
        (one,) = weighted_folders("--data-path", path)
        assert one.folder == folder


def test_weights_are_exact_and_a_weight_of_zero_leaves_its_dataset_out() -> None:
    found = weighted_folders("--data-path", ("0.1", "a", "0", "missing", "3e-1", "b"))
    assert found == (WeightedFolder("a", Fraction(1, 10)), WeightedFolder("b", Fraction(3, 10)))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("a", "b"), "--data-path a b: no number stands before 'a'; it takes one folder, or pairs of WEIGHT FOLDER"),
        (("0.5", "a", "b"), "--data-path 0.5 a b: no number stands before 'b'; it takes one folder"),
        (("0.5", "a", "0.5"), "--data-path 0.5 a 0.5: no folder follows '0.5'; it takes one folder"),
        (("1", "a", "-2", "b", "nan", "c"), "--data-path: b has the weight -2, it must be at least 0"),
        (("1", "a", "nan", "c"), "--data-path: c has the weight nan, it must be at least 0"),
        (("inf", "a", "1", "c"), "--data-path: a has the weight inf, it must be at least 0"),
        (("0", "a", "0.0", "b"), "--data-path: all 2 weights are 0"),
        ((), "--data-path names no folder"),
    ],
)
def test_what_is_no_blend_is_refused(path: tuple[str, ...], message: str) -> None:
    assert told(*path)[0].startswith(message)


def test_everything_wrong_is_told_and_a_folder_has_one_weight(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    reasons = told("-1", "a", "1", str(tmp_path), "1", str(tmp_path / "link"), "1", "./a")
    assert reasons[0] == "--data-path: a has the weight -1, it must be at least 0"
    assert {reason.split()[2] for reason in reasons[1:]} == {"a", "./a", str(tmp_path), str(tmp_path / "link")}
    assert all(reason.endswith("more than once: give it the sum of its weights") for reason in reasons[1:])


def test_the_checks_of_a_run_look_at_every_folder_of_every_split() -> None:
    values = {"data_path": ("1", "no_a", "0", "no_b", "2", "no_c"), "valid_data_path": ("1", "v", "x", "w")}
    reasons = check(with_values(RunConfig(), values), 1)
    assert [reason for reason in reasons if "no_" in reason] == [
        f"--data-path no_{name}: holds no manifest.json" for name in "ac"
    ]
    assert any(reason.startswith("--valid-data-path 1 v x w: no number stands before 'x'") for reason in reasons)
