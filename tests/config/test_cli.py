"""The command line and YAML: order of flags and files, an exact round trip, refusals that name flag, file and key."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacp.core.config.blend import WeightedFolder, path_problems, weighted_folders
from megacp.core.config.cli import given_names, parse
from megacp.core.config.run import RunConfig, fields, flag, flatten, with_values
from megacp.core.config.yaml_file import from_yaml, to_yaml, values_of_file


def test_flags_are_megatrons_and_flat() -> None:
    assert parse([]) == RunConfig()
    config = parse(
        "--tensor-model-parallel-size 2 --no-sequence-parallel --num-query-groups=4 --lr 3e-4 --cp-layout contiguous "
        "--qk-layernorm head --lr-decay-style WSD --kv_channels 64".split()
    )
    assert (config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel) == (2, False)
    assert (config.model.num_query_groups, config.model.kv_channels, config.model.qk_layernorm) == (4, 64, "head")
    assert (config.training.lr, config.training.lr_decay_style) == (3e-4, "WSD")


def test_of_flags_and_files_the_last_one_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("lr: 1.0\nseed: 1\nnum-layers: 8\nsave: out\n")
    second.write_text("lr: 2.0\nsave: null\n")
    a, b = ["--config", str(first)], [f"--config={second}"]
    assert parse([*a, *b]).training.lr == 2.0
    assert parse([*b, *a]).training.lr == 1.0
    assert parse([*a, *b, "--lr", "3"]).training.lr == 3.0
    between = parse(["--lr", "3", "--seed", "5", *a, "--num-layers", "4", *b])
    assert (between.training.lr, between.training.seed, between.model.num_layers) == (2.0, 1, 4)
    assert between.checkpoint.save is None
    argv = ["--hidden-size=256", "--no-add-qkv-bias", *b, "--vision-feature-layers", "-1", "-7"]
    assert given_names(argv) == {"hidden_size", "add_qkv_bias", "lr", "save", "vision_feature_layers"}


def test_every_field_can_be_given_as_a_flag() -> None:
    changed = {}
    for name, value in flatten(RunConfig()).items():
        changed[name] = value + 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    argv = []
    for name, value in changed.items():
        if isinstance(value, bool):
            argv.append(flag(name) if value else flag(f"no_{name}"))
        else:
            argv += [flag(name), *(str(x) for x in (value if isinstance(value, tuple) else [value]))]
    assert parse(argv) == with_values(RunConfig(), changed)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--sequence-lenth", "8", "--lr", "1"], "unknown flag --sequence-lenth, did you mean --seq-length?"),
        (["--lr", "1", "--tensor-model-parallel", "2"], "did you mean --tensor-model-parallel-size?"),
        (["--no-lr", "--xyzzy"], "unknown flag --xyzzy"),
        (["--config"], "--config needs the path"),
        (["--seed", "1", "--config", "--lr", "2"], "--config needs the path"),
        (["--config", "none.yaml"], "--config none.yaml: cannot be read"),
    ],
)
def test_an_unknown_flag_and_a_missing_file_are_refused(argv: list[str], told: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(argv)
    assert told in str(error.value)


@pytest.mark.parametrize("argv", [["--num-layers", "two"], ["--cp-layout", "spiral"], ["--add-qkv-bias", "true"]])
def test_a_value_of_the_wrong_type_ends_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err


def test_help_shows_every_flag_and_the_values_of_the_yaml_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("seed: 987\n")
    with pytest.raises(SystemExit) as stop:
        parse(["--help", "--config", str(tmp_path / "a.yaml")])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert [name for name in fields() if flag(name) not in text] == []
    assert "(default: 987)" in text and "may stand anywhere" in text


def test_every_field_says_what_it_is() -> None:
    rooms = [RunConfig, *(type(getattr(RunConfig(), room)) for room in {i.room for i in fields().values() if i.room})]
    documented = set()
    for owner in rooms:
        (body,) = (
            node.body
            for node in ast.parse(inspect.getsource(sys.modules[owner.__module__])).body
            if isinstance(node, ast.ClassDef) and node.name == owner.__name__
        )
        for field, after in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                documented.add(field.target.id)  # type: ignore[union-attr]
    assert set(fields()) <= documented


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


def test_yaml_reads_flags_exponents_truths_and_nothing() -> None:
    config = from_yaml("seq-length: 2048\nlr: 3e-4\nweight_decay: 0\nload: ckpt\nnum_query_groups: null\nfp8: off")
    assert (config.data.seq_length, config.training.lr, config.checkpoint.load) == (2048, 3e-4, "ckpt")
    assert type(config.training.weight_decay) is float and config.training.fp8 == "off"
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
        ("data_path: [[0.6, captions]]", "data_path: expected a string (quote it), got [[0.6, 'captions']] (list)"),
        ("vision_feature_layers: [1]", "vision_feature_layers: expected 2 whole numbers, got [1]"),
        ("cp_layout: spiral", "cp_layout: got 'spiral', allowed are zigzag, zigzag_document"),
        ("cp_layout: [zigzag]", "cp_layout: got ['zigzag'], allowed are"),
        ("fp8: on", "fp8: got True, allowed are off, delayed"),
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


def test_all_wrong_keys_are_told_at_once_and_a_binary_file_is_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        from_yaml("lerning_rate: 1\nlr: x\nnum_layer: 2\nseed: 3")
    assert len(str(error.value).splitlines()) == 3
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not valid YAML"):
        values_of_file(str(tmp_path / "binary"))


def test_a_blend_is_weights_and_folders_on_the_command_line_and_in_yaml(tmp_path: Path) -> None:
    blend = ("0.6", "captions", "0.4", "text")
    config = parse(["--data-path", *blend, "--valid-data-path", "held_out", "--lr", "1e-3"])
    assert (config.data.data_path, config.data.valid_data_path) == (blend, "held_out")
    assert from_yaml(to_yaml(config)) == config
    (tmp_path / "a.yaml").write_text("data_path: [0.6, captions, 0.4, text]\nvalid_data_path: held_out\n")
    assert parse(["--config", str(tmp_path / "a.yaml"), "--lr", "1e-3"]) == config


def test_weights_are_exact_and_a_weight_of_zero_leaves_its_dataset_out() -> None:
    found = weighted_folders("--data-path", ("0.1", "a", "0", "missing", "3e-1", "b"))
    assert found == (WeightedFolder("a", Fraction(1, 10)), WeightedFolder("b", Fraction(3, 10)))
    for path in ("a b", "0.5", ("0.5",), ("7", "0.5")):
        assert [one.folder for one in weighted_folders("--data-path", path)] == ["0.5" if "0.5" in path else "a b"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("a", "b"), "--data-path a b: it takes one folder, or pairs of WEIGHT FOLDER"),
        (("0.5", "a", "b"), "--data-path 0.5 a b: it takes one folder"),
        (("0.5", "a", "0.5"), "--data-path 0.5 a 0.5: it takes one folder"),
        (("1", "a", "-2", "b", "nan", "c"), "--data-path: b has the weight -2, it must be at least 0"),
        (("1", "a", "nan", "c"), "--data-path: c has the weight nan, it must be at least 0"),
        (("inf", "a", "1", "c"), "--data-path: a has the weight inf, it must be at least 0"),
        (("0", "a", "0.0", "b"), "--data-path: all 2 weights are 0"),
        ((), "--data-path"),
    ],
)
def test_what_is_no_blend_is_refused(path: tuple[str, ...], message: str) -> None:
    assert path_problems("--data-path", path)[0].startswith(message)


def test_everything_wrong_is_told_and_a_folder_has_one_weight(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    blend = ("-1", "a", "1", str(tmp_path), "1", str(tmp_path / "link"), "1", "./a")
    first, *others = path_problems("--data-path", blend)
    assert first == "--data-path: a has the weight -1, it must be at least 0"
    assert {reason.split()[2] for reason in others} == {"a", "./a", str(tmp_path), str(tmp_path / "link")}
    assert all(reason.endswith("more than once: give it the sum of its weights") for reason in others)
