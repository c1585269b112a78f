"""YAML: an exact round trip, and refusals that name file, key and nearest name."""

from __future__ import annotations

import types
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacp.core.config.run import RunConfig, fields, flatten, with_values
from megacp.core.config.yaml_file import from_yaml, to_yaml, values_of_file

BY_TYPE = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(
        ["null", "1e5", "3.", "yes", "~", "0x1F", "- a", "#", "=", "2001-01-01", "1_000", "-.5e-3", "none"]
    ),
}


def values_of(hint: typing.Any) -> st.SearchStrategy:
    """Any value of a field's type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of(map(values_of, typing.get_args(hint)))
    if hint is type(None):
        return st.none()
    if hint == tuple[str, ...]:
        return st.lists(BY_TYPE[str]).map(tuple)
    if typing.get_origin(hint) is tuple:
        return st.tuples(*map(values_of, typing.get_args(hint)))
    if typing.get_args(hint):
        return st.sampled_from(typing.get_args(hint))
    return BY_TYPE[hint]


CONFIGS = st.fixed_dictionaries({}, optional={name: values_of(info.hint) for name, info in fields().items()}).map(
    lambda values: with_values(RunConfig(), values)
)


@pytest.mark.slow
@given(CONFIGS)
def test_a_config_survives_the_round_trip_exactly(config: RunConfig) -> None:
    again = from_yaml(to_yaml(config))
    assert again == config
    assert [type(v) for v in flatten(again).values()] == [type(v) for v in flatten(config).values()]


def test_keys_may_be_spelled_like_flags_and_exponents_are_numbers() -> None:
    config = from_yaml("seq-length: 2048\nlr: 3e-4\nweight_decay: 0\nload: ckpt\nnum_query_groups: null")
    assert (config.data.seq_length, config.training.lr, config.checkpoint.load) == (2048, 3e-4, "ckpt")
    assert type(config.training.weight_decay) is float


def test_a_word_that_yaml_reads_as_a_truth_is_the_word() -> None:
    assert from_yaml("fp8: off").training.fp8 == "off"
    with pytest.raises(ValueError, match="fp8: got True, allowed are off, delayed"):
        from_yaml("fp8: on")


def test_an_empty_file_says_nothing() -> None:
    assert from_yaml("") == from_yaml("# only a comment") == RunConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seq_lenght: 3", "unknown key 'seq_lenght', did you mean seq_length?"),
        ("lr: fast", "lr: expected a number, got 'fast' (str)"),
        ("lr: true", "lr: expected a number, got True (bool)"),
        ("lr: 1" + "0" * 400, "lr: expected a number, got 1000"),
        ("num_layers: 2.0", "num_layers: expected a whole number, got 2.0 (float)"),
        ("num_layers: null", "num_layers: expected a whole number, got None (NoneType)"),
        ("sequence_parallel: 1", "sequence_parallel: expected true or false, got 1 (int)"),
        ("data_path: 7", "data_path: expected a string (quote it), got 7 (int)"),
        (
            "cp_layout: spiral",
            "cp_layout: got 'spiral', allowed are zigzag, zigzag_document, contiguous, balanced, auto",
        ),
        ("cp_layout: [zigzag]", "cp_layout: got ['zigzag'], allowed are"),
        ("training:\n  lr: 1", "unknown key 'training'"),
        ("- lr", "expected lines of `flag: value`, got a list"),
        ("lr: 1\nlr: 2", "the key lr stands more than once"),
        ("seq-length: 1\nseq_length: 2", "the key seq_length stands more than once"),
        ("lr: [", "not valid YAML"),
    ],
)
def test_wrong_yaml_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        from_yaml(text, source="a.yaml")
    assert words in str(error.value)
    assert str(error.value).startswith("a.yaml: ")


def test_all_wrong_keys_are_told_at_once() -> None:
    with pytest.raises(ValueError) as error:
        from_yaml("lerning_rate: 1\nlr: x\nnum_layer: 2\nseed: 3")
    assert len(str(error.value).splitlines()) == 3


def test_an_unreadable_file_names_flag_and_path(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"--config .*none.yaml: cannot be read"):
        values_of_file(str(tmp_path / "none.yaml"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not valid YAML"):
        values_of_file(str(tmp_path / "binary"))
