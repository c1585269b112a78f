"""The command line: order of flags and files, spelling, refusals, help."""

from __future__ import annotations

import pytest

from megacp.core.config.cli import given_names, parse
from megacp.core.config.run import RunConfig, fields, flag, flatten, with_values
from megacp.core.config.yaml_file import from_yaml, to_yaml


def test_no_arguments_give_the_defaults() -> None:
    assert parse([]) == RunConfig()


def test_flags_are_megatrons_and_flat() -> None:
    config = parse(
        "--tensor-model-parallel-size 2 --no-sequence-parallel --num-query-groups=4 --lr 3e-4 --cp-layout contiguous "
        "--qk-layernorm head --lr-decay-style WSD --kv_channels 64".split()
    )
    assert (config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel) == (2, False)
    assert (config.model.num_query_groups, config.model.kv_channels, config.model.qk_layernorm) == (4, 64, "head")
    assert (config.training.lr, config.training.lr_decay_style) == (3e-4, "WSD")


def test_of_flags_and_files_the_last_one_wins(tmp_path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("lr: 1.0\nseed: 1\nnum_layers: 8\nsave: out\n")
    second.write_text("lr: 2.0\nsave: null\n")
    a, b = ["--config", str(first)], [f"--config={second}"]
    assert parse([*a, *b]).training.lr == 2.0
    assert parse([*b, *a]).training.lr == 1.0
    assert parse([*a, *b, "--lr", "3"]).training.lr == 3.0
    between = parse(["--lr", "3", "--seed", "5", *a, "--num-layers", "4", *b])
    assert (between.training.lr, between.training.seed, between.model.num_layers) == (2.0, 1, 4)
    assert between.checkpoint.save is None


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


def test_unknown_flags_are_all_told_with_the_nearest_name() -> None:
    with pytest.raises(ValueError) as error:
        parse("--sequence-lenth 8 --lr 1 --tensor-model-parallel 2 --no-lr --xyzzy".split())
    text = str(error.value)
    assert "unknown flag --sequence-lenth, did you mean --seq-length?" in text
    assert "unknown flag --tensor-model-parallel, did you mean --tensor-model-parallel-size?" in text
    assert "unknown flag --no-lr" in text and text.splitlines()[-1] == "unknown flag --xyzzy"


def test_a_blend_is_weights_and_folders_on_the_command_line_and_in_yaml(tmp_path) -> None:
    blend = ("0.6", "captions", "0.4", "text")
    config = parse(["--data-path", *blend, "--valid-data-path", "held_out", "--lr", "1e-3"])
    assert (config.data.data_path, config.data.valid_data_path) == (blend, "held_out")
    assert from_yaml(to_yaml(config)) == config
    (tmp_path / "a.yaml").write_text("data_path: [0.6, captions, 0.4, text]\nvalid_data_path: held_out\n")
    assert parse(["--config", str(tmp_path / "a.yaml"), "--lr", "1e-3"]) == config
    (tmp_path / "a.yaml").write_text("data_path: [[0.6, captions]]\n")
    with pytest.raises(ValueError, match="data_path: expected weights and folders, got"):
        parse(["--config", str(tmp_path / "a.yaml")])


@pytest.mark.parametrize("argv", [["--config"], ["--seed", "1", "--config", "--lr", "2"]])
def test_config_without_a_path_is_refused(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="--config needs the path"):
        parse(argv)


@pytest.mark.parametrize("argv", [["--num-layers", "two"], ["--cp-layout", "spiral"], ["--add-qkv-bias", "true"]])
def test_a_value_of_the_wrong_type_ends_with_status_2(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err


def test_help_shows_every_flag_and_the_values_of_the_yaml_before_it(tmp_path, capsys) -> None:
    (tmp_path / "a.yaml").write_text("seed: 987\n")
    with pytest.raises(SystemExit) as stop:
        parse(["--help", "--config", str(tmp_path / "a.yaml")])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert [name for name in fields() if flag(name) not in text] == []
    assert "(default: 987)" in text and "may stand anywhere" in text


def test_every_field_says_what_it_is() -> None:
    import ast
    import inspect
    import sys

    undocumented = []
    for info in fields().values():
        owner = type(getattr(RunConfig(), info.room)) if info.room else RunConfig
        (body,) = (
            node.body
            for node in ast.parse(inspect.getsource(sys.modules[owner.__module__])).body
            if isinstance(node, ast.ClassDef) and node.name == owner.__name__
        )
        for field, after in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and field.target.id == info.name:
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                undocumented += [] if documented else [info.name]
    assert undocumented == []


def test_what_is_given_is_known_whatever_its_value(tmp_path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("num-layers: 4\nseed: 1\n")
    argv = ["--hidden-size=256", "--no-add-qkv-bias", "--config", str(path), "--vision-feature-layers", "-1", "-7"]
    assert given_names(argv) == {"hidden_size", "add_qkv_bias", "num_layers", "seed", "vision_feature_layers"}
    assert given_names([]) == frozenset()
