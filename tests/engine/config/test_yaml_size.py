"""A file of flags that is large, or expands by aliases, is refused quickly with a short message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megacp.engine.config.cli import parse
from megacp.engine.config.yaml_file import LARGEST_CONFIG, from_yaml, values_of_file

LONG = "x" * 900_000
DOUBLED = "1"
for level in range(60):
    DOUBLED = f"[&level_{level} {DOUBLED}, *level_{level}]"  # the list twice, by reference
FILES: dict[str, tuple[str, str]] = {
    "unknown keys": (
        "".join(f"key_{i}: 1\n" for i in range(10_000)),
        "unknown key 'key_0'.*and 9980 more",
    ),
    "near keys": (
        "".join(f"seq_lenght_{i}: 1\n" for i in range(10_000)),
        "did you mean seq_length?.*and 9980 more",
    ),
    "values": (
        f"lr: &a {LONG}\n" + "".join(f"k{i}: *a\n" for i in range(5000)),
        "lr: expected .* got 'xxx.*and 4981 more",
    ),
    "a list": (
        f"lr: &a {LONG}\ndata_path: [{','.join(['*a'] * 5000)}]\n",
        "lr: expected a number, got 'xxx",
    ),
    "keys": (f"lr: &a '{LONG}'\n" + "*a : 1\n" * 5000, "the key xxx.* appears more than once"),
    "a long value": (f"lr: '{LONG}'\n", "lr: expected a number, got 'xxx.*xxx"),
    "a long anchor": (
        f"lr: &{LONG} [1]\nmin_lr: *{LONG}\n",
        r"min_lr: expected a number, got \[1\]",
    ),
    "a key that is a list": ("? [1, 2]\n: 3\n", "found unhashable key"),
    "lists that double 60 times": (f"lr: {DOUBLED}\n", r"lr: expected a number, got \[\["),
    "one key": ("lr: 1\n" * 10_000, "the key lr appears more than once"),
    "small keys": ("".join(f"{i}: 1\n" for i in range(10_000)), "unknown key 0"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_large_file_is_refused_within_a_second_of_a_processor(name: str) -> None:
    text, message = FILES[name]
    begin = time.process_time()
    with pytest.raises(ValueError, match=f"(?s){message}") as refused:
        from_yaml(text)
    assert time.process_time() - begin < 1
    assert len(str(refused.value)) < 10_000


def test_unknown_flags_are_few_words_too() -> None:
    begin = time.process_time()
    with pytest.raises(ValueError, match="(?s)unknown flag --flag-0.*and 4980 more"):
        parse([f"--flag-{i}" for i in range(5000)])
    assert time.process_time() - begin < 1


def test_a_short_text_may_be_repeated() -> None:
    config = from_yaml("data_path: &a data/chat\nvalid_data_path: *a\n")
    assert config.data.data_path == config.data.valid_data_path == "data/chat"


def test_a_file_of_flags_has_a_bound(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("#" * (LARGEST_CONFIG + 1))
    with pytest.raises(ValueError, match="a.yaml has more than 1,048,576 bytes"):
        values_of_file(str(tmp_path / "a.yaml"))
