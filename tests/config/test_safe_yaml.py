"""YAML from anywhere: bombs, depth, double keys and broken text are one ValueError with file and line."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.config.cli import parse
from megacp.core.config.safe_yaml import load_yaml
from megacp.core.config.yaml_file import from_yaml

pytestmark = pytest.mark.timeout(60)

LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefghijklm"))
BAD = {
    "a thousand million laughs": (LAUGHS, r"not valid YAML in line 2: the alias \*a is of more than one value"),
    "a loop": ("lr: &a [*a]", r"in line 1: the alias \*a is of more than one value"),
    "merged laughs": ("a: &a {x: 1}\nb: {<<: *a}", r"in line 2: the alias \*a"),
    "depth": ("seed: 1\nlr: " + "[" * 100_000, "in line 2: nested more than 16 levels deep"),
    "depth in blocks": ("\n".join(" " * i + "a:" for i in range(300)), "in line 16: nested more than 16 levels deep"),
    "size": ("# " + "x" * (1 << 20), "more than 1,048,576 bytes"),
    "a double key": ("seed: 1\nlr: 1\nse-ed: 2\nse_ed: 3", "in line 4: the key se_ed stands more than once"),
    "a date that is none": ("seed: 1\nlr: 2024-13-45\n", "not valid YAML before line"),
    "a number of many digits": ("lr: " + "9" * 5000, "not valid YAML before line"),
    "an object": ("lr: !!python/object/apply:os.system ['true']", "in line 1: could not determine a constructor"),
    "a mapping of a list": ("lr: !!map [1, 2]", "not valid YAML"),
    "a mapping of a word": ("lr: !!map x", "not valid YAML"),
    "a list as key": ("? [1, 2]\n: 3", "in line 1: found unhashable key"),
    "a letter that is none": ("lr: \x07", "not valid YAML"),
    "half a list": ("seed: 1\nlr: [1, 2", "in line 2"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_yaml_is_refused_with_its_file_and_line(kind: str) -> None:
    """Would catch a value that takes for ever to show, a RecursionError, a TypeError of the parser."""
    text, reason = BAD[kind]
    with pytest.raises(ValueError, match=reason) as error:
        from_yaml(text, source="a.yaml")
    assert str(error.value).startswith("a.yaml: ") and len(str(error.value)) < 600


def test_an_alias_of_a_scalar_is_the_scalar() -> None:
    config = from_yaml("lr: &lr 3e-4\nmin_lr: *lr")
    assert config.training.lr == config.training.min_lr == 3e-4


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="a: not valid YAML: it is no text in UTF-8"):
        load_yaml(b"\xff\xfe", "a")


@pytest.mark.parametrize("kind", ["a named pipe", "a directory", "a device"])
def test_a_config_that_is_no_regular_file_is_refused_by_its_kind(tmp_path: Path, kind: str) -> None:
    """Would catch a start that waits for a pipe, or reads /dev/zero to the end of memory."""
    path = tmp_path / "c.yaml"
    {"a named pipe": os.mkfifo, "a directory": os.mkdir}.get(kind, lambda p: p.symlink_to("/dev/zero"))(path)
    with pytest.raises(ValueError, match=f"--config .*c.yaml: cannot be read: .* is {kind}, no regular file"):
        parse(["--config", str(path)])


@pytest.mark.slow
def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ValueError) as error:
        from_yaml("seed: [" + "1, " * 20_000 + "1]\n" + "x" * 100_000 + ": 1")
    assert len(str(error.value)) < 2000


_WORDS = st.sampled_from(
    "seed lr: - ? [ ] { } , & * a b !! map set omap binary str <<: = | > ' \" # % @ ` 1 1e3 ~".split()
)


@settings(max_examples=250)
@given(st.lists(st.one_of(_WORDS, st.sampled_from([" ", "\n", "\n  "]), st.text(max_size=3)), max_size=20))
@pytest.mark.slow
def test_any_text_is_a_value_or_a_value_error(parts: list[str]) -> None:
    try:
        load_yaml("".join(parts), "a.yaml")
    except ValueError as error:
        assert str(error).startswith("a.yaml: ")
