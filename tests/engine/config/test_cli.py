"""Command line and YAML: order of flags and files, exact round trips, and errors that name the flag,
file and key.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import types
import typing
from fractions import Fraction
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacp.engine.checks import check, require
from megacp.engine.config.blend import WeightedFolder, path_problems, weighted_folders
from megacp.engine.config.cli import given_names, parse
from megacp.engine.config.run import RunConfig, fields, flag, flatten, with_values
from megacp.engine.config.yaml_file import from_yaml, to_yaml, values_of_file
from megacp.huggingface import convert_command
from megacp.prepare import command as prepare_command
from megacp.training.start.script import flags_of


def test_flags_are_megatrons_and_flat() -> None:
    assert parse([]) == RunConfig()
    config = parse(
        "--tensor-model-parallel-size 2 --no-sequence-parallel --num-query-groups=4 --lr 3e-4 --cp-layout contiguous "
        "--qk-layernorm head --lr-decay-style WSD --kv_channels 64".split()
    )
    assert (config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel) == (
        2,
        False,
    )
    assert (config.model.num_query_groups, config.model.kv_channels, config.model.qk_layernorm) == (
        4,
        64,
        "head",
    )
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
    assert given_names(argv) == {
        "hidden_size",
        "add_qkv_bias",
        "lr",
        "save",
        "vision_feature_layers",
    }


def test_every_field_can_be_given_as_a_flag() -> None:
    changed = {}
    for name, value in flatten(RunConfig()).items():
        changed[name] = (
            value + 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        )
    assert parse(flags_of(changed)) == with_values(RunConfig(), changed)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--sequence-lenth", "8", "--lr", "1"],
            "unknown flag --sequence-lenth, did you mean --seq-length?",
        ),
        (
            ["--lr", "1", "--tensor-model-parallel", "2"],
            "did you mean --tensor-model-parallel-size?",
        ),
        (["--no-lr", "--xyzzy"], "unknown flag --xyzzy"),
        (
            ["--learning-rate=1e-5", "--output_dir", "a"],
            "unknown flag --learning-rate: use --lr\nunknown flag --output_dir: use --save",
        ),
        (
            ["--fp16", "--fsdp"],
            "--fp16 is not offered: use --dtype bfloat16\n"
            "unknown flag --fsdp: use --data-parallel-sharding-strategy",
        ),
        (
            ["--parallel", "auto"],
            "--parallel no longer exists: plan a parallel layout with `megacp-plan --output best.yaml`",
        ),
        (["--config"], "--config needs the path"),
        (["--seed", "1", "--config", "--lr", "2"], "--config needs the path"),
        (["--config", "none.yaml"], "--config none.yaml: cannot be read"),
        (["--config", "/"], "--config /: is a folder, but must be a YAML file"),
    ],
)
def test_an_unknown_flag_and_a_missing_file_are_refused(argv: list[str], told: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(argv)
    assert told in str(error.value)


def test_a_flag_that_is_named_anywhere_exists_and_its_help_says_its_default() -> None:
    others = "build-option config-settings cpp_ext cuda_ext no-build-isolation gpus-per-task local-dir max-restarts nproc-per-node"
    # flags that are not added by a string literal
    undeclared = "config export-dtype help-all no-verify fake image video no-thinking vision"
    actions = [
        *prepare_command.preprocess_parser()._actions,
        *convert_command.convert_parser()._actions,
    ]
    # the list grows during the loop by the flags of subcommands
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            actions += [own for command in action.choices.values() for own in command._actions]
    real = {
        *others.split(),
        *undeclared.split(),
        *(name[2:] for action in actions for name in action.option_strings),
    }
    real |= {flag(f"{no}{name}")[2:] for name in fields() for no in ("", "no_")}
    root = Path(__file__).resolve().parents[3]
    text = "".join(
        path.read_text()
        for room in ("megacp", "tools", "bench")
        for path in (root / room).rglob("*.py")
        # the variables of style sheets have two dashes, too
        if path.name not in ("page.py", "picture.py", "inspect_page.py")
    )
    real |= {*re.findall(r'\badd(?:_argument)?\(\s*"--([a-z-]+)"', text)}
    assert {*re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text)} - real == set()
    having = [
        action for action in actions if action.default not in (None, False, (), argparse.SUPPRESS)
    ]
    assert [action for action in having if not re.search(r"default|\(", str(action.help))] == []


@pytest.mark.parametrize(
    "argv", [["--num-layers", "two"], ["--cp-layout", "spiral"], ["--add-qkv-bias", "true"]]
)
def test_a_value_of_the_wrong_type_ends_with_status_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "(default: 987)" in text and "more than once" in text


def test_every_field_says_what_it_is() -> None:
    rooms = [
        RunConfig,
        *(
            type(getattr(RunConfig(), room))
            for room in {i.room for i in fields().values() if i.room}
        ),
    ]
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
        [
            "null",
            "1e5",
            "3.",
            "yes",
            "~",
            "0x1F",
            "- a",
            "#",
            "=",
            "2001-01-01",
            "1_000",
            "-.5e-3",
            "none",
        ]
    ),
}


def values_of(hint: typing.Any) -> st.SearchStrategy:
    """Return a strategy for all values of a field's type."""
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


CONFIGS = st.fixed_dictionaries(
    {}, optional={name: values_of(info.hint) for name, info in fields().items()}
).map(lambda values: with_values(RunConfig(), values))


@pytest.mark.slow
@given(CONFIGS)
def test_a_config_survives_the_round_trip_exactly(config: RunConfig) -> None:
    again = from_yaml(to_yaml(config))
    assert again == config
    assert [type(v) for v in flatten(again).values()] == [type(v) for v in flatten(config).values()]


def test_yaml_reads_flags_exponents_truths_and_nothing() -> None:
    config = from_yaml(
        "seq-length: 2048\nlr: 3e-4\nweight_decay: 0\nload: ckpt\nnum_query_groups: null\nfp8: off"
    )
    assert (config.data.seq_length, config.training.lr, config.checkpoint.load) == (
        2048,
        3e-4,
        "ckpt",
    )
    assert type(config.training.weight_decay) is float and config.training.fp8 == "off"
    assert from_yaml("") == from_yaml("# only a comment") == RunConfig()
    assert from_yaml("hidden_size: &width 64\nffn_hidden_size: *width").model.ffn_hidden_size == 64


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
            "data_path: [[0.6, captions]]",
            "data_path: expected a string (quote it), got [[0.6, 'captions']] (list)",
        ),
        ("vision_feature_layers: [1]", "vision_feature_layers: expected 2 whole numbers, got [1]"),
        ("cp_layout: spiral", "cp_layout: got 'spiral'; use one of zigzag, zigzag_document"),
        ("cp_layout: [zigzag]", "cp_layout: got ['zigzag']; use one of"),
        ("fp8: on", "fp8: got True; use one of off, delayed"),
        (
            "training:\n  lr: 1",
            "unknown key 'training': keys have no sections here; 'lr': use --lr",
        ),
        ("- lr", "expected lines of `flag: value`, got a list"),
        ("lr: 1\nlr: 2", "the key lr appears more than once"),
        ("seq-length: 1\nseq_length: 2", "the key seq_length appears more than once"),
        ("lr: [", "not valid YAML"),
        ("seed: &a [1, 1]\nlr: [*a, *a]", "lr: expected a number, got [[1, 1], [1, 1]] (list)"),
    ],
)
def test_wrong_yaml_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        from_yaml(text, source="a.yaml")
    assert words in str(error.value)
    assert str(error.value).startswith("a.yaml: ")


def test_a_flag_of_an_older_release_is_skipped_where_it_asks_for_nothing(tmp_path: Path) -> None:
    """A checkpoint contains the layout that followed from the flag. In a file of flags, however,
    ignoring `auto` would start a different run.
    """
    assert (
        from_yaml("parallel: auto\nlr: 1")
        == from_yaml("parallel: given\nlr: 1")
        == from_yaml("lr: 1")
    )
    (tmp_path / "old.yaml").write_text("parallel: given\nlr: 1")
    assert values_of_file(str(tmp_path / "old.yaml")) == {"lr": 1.0}
    (tmp_path / "old.yaml").write_text("parallel: auto\nlr: 1")
    with pytest.raises(
        ValueError, match=r"old.yaml: parallel 'auto' no longer exists: .*megacp-plan.*LAYOUT=auto"
    ):
        values_of_file(str(tmp_path / "old.yaml"))


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
    (tmp_path / "a.yaml").write_text(
        "data_path: [0.6, captions, 0.4, text]\nvalid_data_path: held_out\n"
    )
    assert parse(["--config", str(tmp_path / "a.yaml"), "--lr", "1e-3"]) == config


def test_weights_are_exact_and_a_weight_of_zero_leaves_its_dataset_out() -> None:
    found = weighted_folders("--data-path", ("0.1", "a", "0", "missing", "3e-1", "b"))
    assert found == (WeightedFolder("a", Fraction(1, 10)), WeightedFolder("b", Fraction(3, 10)))
    for path in ("a b", "0.5", ("0.5",), ("7", "0.5")):
        assert [one.folder for one in weighted_folders("--data-path", path)] == [
            "0.5" if "0.5" in path else "a b"
        ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("a", "b"), "--data-path a b: expected one folder, or pairs of WEIGHT FOLDER"),
        (("0.5", "a", "b"), "--data-path 0.5 a b: expected one folder"),
        (("0.5", "a", "0.5"), "--data-path 0.5 a 0.5: expected one folder"),
        (
            ("1", "a", "-2", "b", "nan", "c"),
            "--data-path: b has the weight -2, but",
        ),
        (("1", "a", "nan", "c"), "--data-path: c has the weight nan, but"),
        (("inf", "a", "1", "c"), "--data-path: a has the weight inf, but"),
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
    assert first.startswith("--data-path: a has the weight -1, but")
    assert {reason.split()[2] for reason in others} == {
        "a",
        "./a",
        str(tmp_path),
        str(tmp_path / "link"),
    }
    assert all(
        reason.endswith("more than once: list it once, with the sum of its weights")
        for reason in others
    )


GOOD = with_values(RunConfig(), {"vocab_size": 64})
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
ZB, V, STRATEGY = (
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "data_parallel_sharding_strategy",
)
DYNAMIC = {"dynamic_context_parallel": True, "cp_comm_type": "kv_exchange", "cp_layout": "balanced"}
SIZES = "hierarchical_context_parallel_sizes"
SEES = {
    "vision_num_layers": 3,
    "vision_hidden_size": 24,
    "vision_ffn_hidden_size": 36,
    "vision_num_attention_heads": 6,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -2),
    "additional_vocab_size": 8,
    "untie_embeddings_and_output_weights": True,
}
"""A valid tiny tower with crops of 16 x 16 pixels."""
HYBRID = {"linear_attention_rule": "mamba2", "linear_attention_freq": "2"}
GRIDS = {"vision_family": "qwen3_5", "image_attention": "causal", "vision_feature_layers": (0, 0)}

EP, EXPERTS = "expert_model_parallel_size", {"num_experts": 8}
SIGMOID = {"moe_router_score_function": "sigmoid"}
TOPK = "moe_router_topk"
Q_DOWN = {"lora_rank": 4, "lora_targets": "q,down"}

CONTRADICTIONS: list[tuple[dict, int, str]] = [
    ({EP: 2}, 2, "--num-experts"),
    (
        {**EXPERTS, EP: 3, "global_batch_size": 12},
        3,
        "--expert-model-parallel-size 3 must divide both --num-experts 8",
    ),
    (
        {**EXPERTS, EP: 4, PP: 4},
        8,
        "2 ranks of a stage (tp 1 x cp 1 x dp 2): use a divisor of 2",
    ),
    ({"num_experts": 16, EP: 5, "global_batch_size": 12}, 12, "use a divisor of 4"),
    ({"num_experts": 3, "moe_router_topk": 4}, 1, "--moe-router-topk 4"),
    ({**EXPERTS, "moe_layer_freq": "[0,2]"}, 1, "--moe-layer-freq [0,2]"),
    (
        {**EXPERTS, "moe_layer_freq": "[0,0,0,0]"},
        1,
        "--moe-layer-freq [0,0,0,0] gives none of the 4 layers experts",
    ),
    (
        {**EXPERTS, "moe_layer_freq": "[0,1]"},
        1,
        "--moe-layer-freq [0,1] has 2 entries, but --num-layers is 4",
    ),
    ({**EXPERTS, "moe_layer_freq": "[0,1,1,1,0]"}, 1, "has 5 entries"),
    (
        {"moe_shared_expert_intermediate_size": 64},
        1,
        "--moe-shared-expert-intermediate-size 64 needs --num-experts",
    ),
    ({**EXPERTS, "moe_shared_expert_gate": True}, 1, "--moe-shared-expert-gate needs"),
    ({**EXPERTS, TP: 2, "moe_shared_expert_intermediate_size": 65}, 2, "64 or 66"),
    ({"moe_z_loss_coeff": 0.1}, 1, "--moe-z-loss-coeff 0.1"),
    ({**EXPERTS, "moe_aux_loss_coeff": 0.1, "lora_rank": 4}, 1, "--moe-aux-loss-coeff 0.1"),
    (
        {"moe_router_score_function": "sigmoid"},
        1,
        "--moe-router-score-function sigmoid needs --num-experts",
    ),
    (
        {**EXPERTS, **SIGMOID, "moe_router_bias_update_rate": 0.1, "lora_rank": 4},
        1,
        "--moe-router-bias-update-rate 0.1 has no effect",
    ),
    ({**EXPERTS, "moe_router_bias_update_rate": 0.1}, 1, "--moe-router-score-function sigmoid"),
    ({**EXPERTS, "moe_router_num_groups": 4}, 1, "--moe-router-score-function sigmoid"),
    ({**EXPERTS, **SIGMOID, "moe_router_num_groups": 3}, 1, "--moe-router-num-groups 3"),
    (
        {**EXPERTS, **SIGMOID, "moe_router_topk": 3, "moe_router_num_groups": 4},
        1,
        "--moe-router-group-topk 1",
    ),
    (
        {**EXPERTS, **SIGMOID, "moe_router_group_topk": 2},
        1,
        "--moe-router-group-topk 2 is above --moe-router-num-groups 1",
    ),
    (
        {**EXPERTS, TOPK: 1},
        1,
        "--moe-router-topk 1: the softmax over the chosen expert is always 1",
    ),
    (
        {**EXPERTS, **SIGMOID, TOPK: 1},
        1,
        "--moe-router-topk 1: the normalised sigmoid of the chosen expert is always 1",
    ),
    (
        {**EXPERTS, TOPK: 1, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
        1,
        "use --moe-router-pre-softmax",
    ),
    ({**EXPERTS, **SEES, TOPK: 1, "freeze": "vision"}, 1, "use --moe-router-pre-softmax"),
    (
        {"num_experts": 1, TOPK: 1, "moe_router_pre_softmax": True},
        1,
        "--num-experts 1: the softmax over one expert",
    ),
    ({**EXPERTS, "fp8": "delayed"}, 1, "--fp8 delayed"),
    ({**EXPERTS, TP: 2, "sequence_parallel": False}, 2, "--sequence-parallel"),
    (
        {**EXPERTS, EP: 4, "num_distributed_optimizer_instances": 2},
        4,
        "--num-distributed-optimizer-instances 2",
    ),
    (
        {**EXPERTS, "lora_rank": 4, "lora_targets": "q,up", "lora_dropout": 0.1},
        1,
        "--lora-dropout 0.1 on experts.up",
    ),
    (
        {"linear_attention_rule": "mamba2", "linear_attention_freq": "[1]", **Q_DOWN},
        1,
        "--lora-targets q: this model has no such",
    ),
    (
        {"num_distributed_optimizer_instances": 4, "global_batch_size": 12},
        6,
        "--num-distributed-optimizer-instances 4",
    ),
    (
        {STRATEGY: "optim_grads", "gradient_accumulation_fusion": True},
        1,
        "--gradient-accumulation-fusion",
    ),
    ({"lora_rank": 4, "gradient_accumulation_fusion": True}, 1, "--gradient-accumulation-fusion"),
    ({PP: 2, ZB: "zero_bubble", STRATEGY: "optim_grads"}, 2, "--pipeline-schedule zero_bubble"),
    ({PP: 2, ZB: "zero_bubble", "lora_rank": 4}, 2, "--lora-rank 4"),
    ({PP: 2, ZB: "zero_bubble", "mlp_chunk_tokens": 64}, 2, "--mlp-chunk-tokens 64"),
    ({TP: 2, PP: 2, CP: 2}, 12, "8 or 16"),
    ({TP: 4}, 2, "a world of 2 ranks"),
    ({"world_size": 8}, 1, "--world-size 8"),
    ({TP: 3, "ffn_hidden_size": 768, "seq_length": 513}, 3, "--num-attention-heads 8"),
    ({TP: 4, "num_query_groups": 2}, 4, "--num-query-groups 2"),
    ({"num_query_groups": 3}, 1, "--num-query-groups 3"),
    ({"hidden_size": 250}, 1, "--hidden-size 250"),
    ({"kv_channels": 33}, 1, "--kv-channels"),
    ({TP: 2, "ffn_hidden_size": 767}, 2, "766 or 768"),
    ({PP: 4, V: 2}, 4, "--num-layers 4"),
    ({V: 2}, 1, flag(V)),
    ({"micro_batch_size": 3}, 1, "6 or 9"),
    ({"micro_batch_size": 2}, 6, "--global-batch-size 8"),
    ({CP: 2, TP: 2, "seq_length": 500}, 4, "496 or 504"),
    ({CP: 2, "seq_length": 501, "cp_layout": "contiguous"}, 2, "--seq-length 501"),
    ({"vocab_size": 0}, 1, "--vocab-size 0"),
    ({"additional_vocab_size": 128}, 1, "--untie-embeddings-and-output-weights"),
    ({"no_rope_freq": "0"}, 1, "--no-rope-freq 0"),
    ({"no_rope_freq": "[0,2]"}, 1, "--no-rope-freq [0,2]"),
    ({"window_size": 4, "window_attn_skip_freq": "0"}, 1, "--window-attn-skip-freq 0"),
    ({"window_attn_skip_freq": "2"}, 1, "needs --window-size"),
    ({"lr": 0.1, "min_lr": 0.2}, 1, "--min-lr 0.2"),
    ({"lr_warmup_iters": 51, "lr_decay_iters": 50}, 1, "--lr-decay-iters 50"),
    ({"lr_wsd_decay_iters": 5}, 1, "--lr-wsd-decay-iters 5"),
    ({"lr_warmup_iters": 101}, 1, "--lr-warmup-iters 101 is above --train-iters 100"),
    (
        {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.5},
        1,
        "--lr-warmup-iters 2 and --lr-warmup-fraction 0.5",
    ),
    ({"lr_decay_style": "WSD"}, 1, "--lr-wsd-decay-iters"),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 10},
        1,
        "--lr-wsd-decay-iters 95",
    ),
    ({"profile": "12:10"}, 1, "--profile 12:10"),
    ({"profile": "101:102"}, 1, "--profile 101:102"),
    ({"eval_interval": 2}, 1, "--valid-data-path"),
    ({"valid_data_path": "x", "dry_run": True}, 1, "--data-path"),
    ({"save_interval": 5}, 1, "--save-interval"),
    ({"auto_resume": True}, 1, "--auto-resume"),
    ({"finetune": True}, 1, "--finetune"),
    ({"load": "a", "load_hf": "b", "dry_run": True}, 1, "--load-hf b"),
    ({"vision_from_hf": "none"}, 1, "--load-hf"),
    ({"lora_alpha": 16.0}, 1, "--lora-rank"),
    (
        {"lora_rank": 4, "lora_targets": "v,up", "lora_dropout": 0.1, "mlp_chunk_tokens": 64},
        1,
        "--lora-dropout 0.1",
    ),
    ({"lora_rank": 4, "lora_targets": "q,query,all"}, 1, "--lora-targets q,query,all"),
    ({"lora_rank": 4, "lora_targets": "q,attention.z"}, 1, "(invalid: attention.z)"),
    (
        {"lora_rank": 4, "lora_targets": "q:0:4,k:2:inf,v:2,up:2:nan,gate:2:-1"},
        1,
        "q:0:4, k:2:inf, v:2, up:2:nan, gat",
    ),
    (
        {"lora_rank": 4, "lora_targets": "q,shared.up"},
        1,
        "--lora-targets shared.up: this model has no such",
    ),
    (
        {"lora_rank": 4, "lora_targets": "v,attention.q:257:8"},
        1,
        "attention.q (rank 257, width 256)",
    ),
    (
        {**EXPERTS, "num_layers": 4096, "num_experts": 32},
        1,
        "--num-experts 32 x --num-layers 4096 = 131,072",
    ),
    ({**EXPERTS, "num_experts": 8193}, 1, "--num-experts: got 8193"),
    ({"lora_rank": 65, "num_query_groups": 2, "lora_targets": "all"}, 1, "--lora-rank 65"),
    (HYBRID | {"lora_rank": 4, "linear_attention_freq": "[1]"}, 1, "--lora-targets q v"),
    (HYBRID | {"lora_rank": 65, "num_query_groups": 2}, 1, "--lora-rank 65"),
    (
        {"lora_rank": 4, "vision_from_hf": "none", "load_hf": "a", "dry_run": True},
        1,
        "--vision-from-hf none",
    ),
    ({CP: 2, "attention_kernel": "dense"}, 2, "--attention-kernel dense"),
    ({"seq_length": 16384, "attention_kernel": "dense"}, 1, "--attention-kernel dense"),
    ({**DYNAMIC, "attention_kernel": "dense"}, 2, "--attention-kernel dense"),
    ({"attention_kernel": "dense", "cp_comm_type": "auto"}, 1, "--cp-comm-type auto"),
    ({"dynamic_context_parallel": True}, 2, "--dynamic-context-parallel"),
    ({CP: 16, "cp_comm_type": "a2a"}, 16, "--num-attention-heads"),
    ({CP: 8, TP: 2, "cp_comm_type": "a2a"}, 16, "tp 2"),
    ({CP: 4, "cp_comm_type": "a2a+p2p"}, 4, flag(SIZES)),
    ({CP: 4, "cp_comm_type": "a2a+p2p", SIZES: (2, 4)}, 4, flag(SIZES)),
    ({CP: 16, "cp_comm_type": "a2a+p2p", SIZES: (16, 1)}, 16, "--num-attention-heads"),
    ({CP: 4, SIZES: (2, 2)}, 4, flag(SIZES)),
    (SEES | {TP: 2, "vision_ffn_hidden_size": 33}, 2, "--vision-ffn-hidden-size 33"),
    (SEES | {TP: 4}, 4, "--vision-num-attention-heads 6"),
    (SEES | {"vision_num_attention_heads": 5}, 1, "--vision-hidden-size 24"),
    (SEES | {TP: 2, "connector_ffn_hidden_size": 33}, 2, "--connector-ffn-hidden-size 33"),
    (SEES | {"vision_image_size": 18}, 1, "--vision-image-size 18"),
    (SEES | {"vision_feature_layers": (-1, -4)}, 1, "--vision-feature-layers -1 -4"),
    (SEES | {"vision_feature_layers": (1, 0)}, 1, "--vision-feature-layers 1 0"),
    (SEES | {"additional_vocab_size": 0}, 1, "--additional-vocab-size"),
    (SEES | GRIDS | {"image_attention": "image"}, 1, "--image-attention image"),
    (SEES | GRIDS | {"vision_num_attention_heads": 12}, 1, "is 2, but"),
    (SEES | {"freeze": "vision,connector,text"}, 1, "--freeze vision,connector,text"),
    (SEES | {"freeze": "tower"}, 1, "--freeze tower"),
    # a single invalid field
    ({"exit_duration": 0.0}, 1, "--exit-duration"),
    ({"cp_layout": "spiral"}, 1, "--cp-layout"),
    ({SIZES: (0, 2)}, 1, flag(SIZES)),
    ({"hidden_dropout": 1.0}, 1, "--hidden-dropout"),
    ({"lr": float("nan")}, 1, "--lr"),
    ({"save": "", "save_interval": 5}, 1, "--save"),
    ({"data_path": "", "vocab_size": 0}, 1, "--data-path"),
    ({"seed": -1}, 1, "--seed"),
]


@pytest.mark.parametrize(("values", "world", "named"), CONTRADICTIONS)
def test_a_contradiction_is_told_once_by_its_flag(values: dict, world: int, named: str) -> None:
    (reason,) = check(with_values(GOOD, values), world)
    assert named in reason


def test_a_router_without_a_gradient_may_be_frozen_or_converted() -> None:
    """A published model with one expert per token can still be trained by LoRA and be exported."""
    top_1 = {**EXPERTS, TOPK: 1}
    assert check(with_values(GOOD, top_1), 1, trains=False) == []
    for values in ({"lora_rank": 4}, {**SEES, "freeze": "text"}, {"moe_router_pre_softmax": True}):
        assert check(with_values(GOOD, {**top_1, **values}), 1) == []


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ValueError) as error:
        require(
            with_values(GOOD, {TP: 3, "num_query_groups": 5, "min_lr": 5.0, "save_interval": 1}), 4
        )
    named = (
        "a world of 4",
        "--num-attention-heads 8",
        "--num-query-groups 5",
        "--min-lr 5",
        "--save-interval",
    )
    assert [name for name in named if name not in str(error.value)] == []
    assert check(GOOD, 0) == ["the world size is 0, but it must be at least 1"]


def test_every_number_has_a_range_and_is_named_beyond_it() -> None:
    kinds = (
        int,
        float,
        int | Literal["auto"],
        int | None,
        float | None,
        tuple[int, int],
        tuple[int, int] | None,
    )
    assert [
        name for name, info in fields().items() if (info.hint in kinds) != (info.range is not None)
    ] == []
    for name in (name for name, info in fields().items() if info.range):
        reasons = check(with_values(GOOD, {name: -1}), 1)
        assert [
            reason
            for reason in reasons
            if reason.startswith(f"{flag(name)}: got -1, but it must be")
        ] == reasons


@given(st.data())
def test_layouts_built_to_fit_are_accepted(data: st.DataObject) -> None:
    draw = data.draw
    tp, pp, cp, dp = (draw(st.sampled_from([1, 2, 4, 8])) for _ in range(4))
    virtual = draw(st.integers(1, 3)) if pp > 1 else 1
    micro, groups = draw(st.integers(1, 3)), tp * draw(st.sampled_from([1, 2, 3]))
    values = {
        TP: tp,
        PP: pp,
        CP: cp,
        V: virtual,
        "num_layers": pp * virtual + draw(st.integers(0, 5)),
        "num_query_groups": groups,
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "kv_channels": 2 * draw(st.integers(1, 40)),
        "hidden_size": draw(st.integers(1, 1000)),
        "ffn_hidden_size": tp * draw(st.integers(1, 300)),
        "seq_length": 2 * cp * tp * draw(st.integers(1, 100)),
        "micro_batch_size": micro,
        "global_batch_size": micro * dp * draw(st.integers(1, 9)),
        "sequence_parallel": draw(st.booleans()),
        "cp_layout": draw(st.sampled_from(["zigzag", "contiguous"])),
    }
    assert check(with_values(GOOD, values), tp * pp * cp * dp) == []


def test_a_directory_with_the_checkpoints_of_another_run_is_only_gone_on_with(
    tmp_path: Path,
) -> None:
    step, save = tmp_path / "step_0000002", {"save": str(tmp_path)}
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    (reason,) = check(with_values(GOOD, save), 1)
    assert (
        reason.startswith(f"--save {tmp_path} already contains checkpoints") and "--load" in reason
    )
    for more in (
        {"load": str(tmp_path)},
        {"load": str(step)},
        {"dry_run": True},
        {"auto_resume": True},
    ):
        assert check(with_values(GOOD, {**save, **more}), 1) == []
    assert len(check(with_values(GOOD, {**save, "load": str(tmp_path), "finetune": True}), 1)) == 1


def test_paths_are_looked_at_except_in_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    (tmp_path / "file").write_text("")
    data, file, missing = (str(tmp_path / name) for name in ("data", "file", "missing"))
    good = {"data_path": data, "vocab_size": 0, "save": str(tmp_path / "new"), "load": data}
    assert check(with_values(GOOD, good), 1) == []
    (reason,) = check(with_values(GOOD, {**good, "eval_interval": 10}), 1)
    assert reason == "--eval-interval 10 needs --valid-data-path"
    values = {
        "data_path": missing,
        "valid_data_path": str(tmp_path),
        "load": missing,
        "save": file,
        "tensorboard_dir": file,
        "log_file": str(tmp_path),
    }
    reasons = check(with_values(GOOD, values), 1)
    assert [reason.split()[0] for reason in reasons] == [flag(name) for name in values]
    assert check(with_values(GOOD, {**values, "dry_run": True}), 1) == []
    blends = {
        "data_path": ("1", "no_a", "0", "no_b", "2", "no_c"),
        "valid_data_path": ("1", "v", "x", "w"),
    }
    reasons = check(with_values(GOOD, blends), 1)
    assert [reason.split(" does not exist: ")[0] for reason in reasons if "no_" in reason] == [
        f"--data-path no_{name}" for name in "ac"
    ]
    assert any(
        reason.startswith("--valid-data-path 1 v x w: expected one folder") for reason in reasons
    )
    monkeypatch.setattr("megacp.engine.checks.os.access", lambda path, mode: False)
    (reason,) = check(with_values(GOOD, {"save": str(tmp_path / "a" / "b")}), 1)
    assert reason.startswith("--save ")
