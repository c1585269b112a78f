"""Adapters damaged by other programs, editors and attackers: each is read, or refused with one
message.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megacp.huggingface.convert import adapter_config
from megacp.huggingface.convert.adapter import Adapter
from megacp.huggingface.convert.families import of_config
from megacp.train import main as train
from tests.huggingface.convert.models import MODELS

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
QUERY = f"{PREFIX}model.layers.1.self_attn.q_proj.lora_"
GOOD: dict[str, Any] = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "lora_dropout": 0.0},
    **{"target_modules": ["q_proj", "v_proj"], "exclude_modules": None, "target_parameters": None},
    **{
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
    },
    **{
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
    },
    **{
        "fan_in_fan_out": False,
        "layer_replication": None,
        "megatron_config": None,
        "loftq_config": {},
    },
    **{
        "trainable_token_indices": None,
        "alora_invocation_tokens": None,
        "inference_mode": True,
        "revision": None,
    },
}
Described = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module")
def described() -> Described:
    """Return the family of a tiny model and our flags for it."""
    content = MODELS["qwen3"]().config.to_dict()
    return of_config(content), of_config(content).values(content)


@pytest.fixture
def folder(tmp_path: Path, described: Described) -> Iterator[Path]:
    """Write a valid adapter with pairs on q and v of three layers."""
    family, values = described
    tensors = {}
    for link in family.links(values):
        module = link.theirs[0].name.removesuffix(".weight")
        if module.endswith(("q_proj", "v_proj")):
            rows, inputs = link.theirs[0].shape
            tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.ones(4, inputs)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.ones(rows, 4)
    save_file(tensors, tmp_path / WEIGHTS)
    write(tmp_path, {})
    Adapter(tmp_path, *described)
    yield tmp_path


def write(folder: Path, changes: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(GOOD | changes))


def refusal(folder: Path, described: Described) -> str:
    """Return the message that refuses an adapter. It must have a bounded length and no control
    characters; any other exception fails the test.
    """
    with pytest.raises(ValueError) as caught:
        Adapter(folder, *described)
    told = str(caught.value)
    assert told.isprintable() and 10 < len(told) < 2000
    return told


WHOLE, NUMBER = "expected a whole number of at least 1", "expected a number of at least 1e-09"
MALFORMED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"r": value}, f"r is {value!r}, {WHOLE}")
        for value in (4.9, 4.0, True, "8", 0, -4, 10**30, [4], math.nan)
    ),
    ({"r": None}, f"r is null, {WHOLE}"),
    ({"r": 8}, "model.layers.0.self_attn.q_proj has rank 4, but adapter_config.json has rank 8"),
    *(
        ({"lora_alpha": value}, NUMBER)
        for value in (math.inf, -math.inf, math.nan, 0, -6, -0.0, True, "6", None, {})
    ),
    *(
        ({"lora_dropout": value}, "lora_dropout is")
        for value in (math.nan, -0.1, 1.5, "0.1", None, True)
    ),
    *(
        ({"use_rslora": value}, f"use_rslora is {value!r}, expected true or false")
        for value in ("no", 1, 0, 0.5, [])
    ),
    *(({"inference_mode": value}, "expected true or false") for value in ("yes", 1)),
    *(
        ({"peft_type": value}, "only LORA is supported")
        for value in (None, "LOHA", 1, ["LORA"], {})
    ),
    *(
        ({"target_modules": value}, "target_modules is")
        for value in (1, True, [1], [None], {"q_proj": 1}, [["q"]])
    ),
    *(
        ({"target_modules": value}, "but model.layers.0.self_attn.q_proj has a pair")
        for value in (None, [], "q_proj")
    ),
    ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "k_proj has no pair"),
    ({"target_modules": "all-linear"}, "k_proj has no pair"),
    (
        {"target_modules": "("},
        "target_modules '(' is not a valid regular expression: 'missing ), unterminated subpattern",
    ),
    (
        {"target_modules": "*"},
        "target_modules '*' is not a valid regular expression: 'nothing to repeat",
    ),
    (
        {"target_modules": "a{99999999999}"},
        "is not a valid regular expression: 'the repetition number is too large'",
    ),
    ({"target_modules": "(" * 3000 + ")" * 3000}, "is not a valid regular expression"),
    *(({"exclude_modules": value}, "exclude_modules is") for value in (1, [1], {}, True)),
    ({"exclude_modules": "[a-"}, "exclude_modules '[a-' is not a valid regular expression"),
    (
        {"exclude_modules": "q_proj|(?P<a>.*)(?P<a>.*)"},
        "is not a valid regular expression: \"redefinition of group name 'a'",
    ),
    *(
        ({"target_parameters": value}, "target_parameters is")
        for value in ("q_proj.weight", 1, [1], {"a": "b"})
    ),
    ({"target_parameters": ["mlp.experts.down_proj"]}, "but the model has no such linear"),
    ({"target_parameters": ["q_proj.weight"]}, "in both target_modules and target_parameters"),
    *(({"rank_pattern": value}, "rank_pattern is") for value in ([], "q_proj", 4, [["q_proj", 4]])),
    *(
        ({"rank_pattern": {"q_proj": value}}, "rank_pattern['q_proj'] is")
        for value in ("4", 4.5, True, None, 0, -1)
    ),
    (
        {"rank_pattern": {"q_proj": 2}},
        "model.layers.0.self_attn.q_proj has rank 4, but adapter_config.json has rank 2",
    ),
    ({"rank_pattern": {"q_proj": 10**18}}, "rank_pattern['q_proj'] is 1000000000000000000"),
    ({"rank_pattern": {"[": 4}}, "rank_pattern '[' is not a valid regular expression"),
    *(({"alpha_pattern": value}, "alpha_pattern is") for value in ([], "q_proj", 4)),
    *(
        ({"alpha_pattern": {"k": value}}, "alpha_pattern['k'] is")
        for value in ("4", True, None, 0, -1, math.inf, [])
    ),
    ({"alpha_pattern": {"(?<": 4}}, "alpha_pattern '(?<' is not a valid regular expression"),
    *(
        ({"layers_to_transform": value}, "layers_to_transform is")
        for value in ("0", 1.0, True, [0, "1"], -1, {})
    ),
    (
        {"layers_to_transform": [0, 1]},
        "layers_to_transform [0, 1], but model.layers.2.self_attn.q_proj has a pair",
    ),
    ({"layers_to_transform": 0}, "model.layers.1.self_attn.q_proj has a pair"),
    (
        {"layers_to_transform": [0, 1, 2], "layers_pattern": "blocks"},
        "model.layers.0.self_attn.q_proj has a pair",
    ),
    (
        {"layers_to_transform": [0, 1, 2], "layers_pattern": ["("]},
        "layers_pattern '(' is not a valid regular expression",
    ),
    (
        {"layers_to_transform": [0], "target_modules": ".*(q|v)_proj"},
        "layers_to_transform requires a list",
    ),
    *(({"layers_pattern": value}, "layers_pattern is") for value in (1, [0], {})),
    *(({"init_lora_weights": value}, "init_lora_weights is") for value in (None, 1, [], {})),
    *(
        ({"init_lora_weights": value}, "modifies the weights of the base model")
        for value in ("pissa", "pissa_niter_4", "olora", "x")
    ),
    *(({"use_dora": value}, "has use_dora") for value in (True, "no", 1, [], {})),
    *(({"bias": value}, "has bias") for value in ("all", "lora_only", 1, True, [])),
    *(({"lora_bias": value}, "has lora_bias") for value in (True, 1, "none")),
    *(({"fan_in_fan_out": value}, "has fan_in_fan_out") for value in (True, 1)),
    *(({"modules_to_save": value}, "has modules_to_save") for value in (["lm_head"], "lm_head", 1)),
    ({"layer_replication": [[0, 2], [1, 3]]}, "has layer_replication"),
    ({"megatron_config": {"tp": 2}}, "has megatron_config"),
    ({"trainable_token_indices": [3]}, "has trainable_token_indices"),
    ({"alora_invocation_tokens": [5]}, "has alora_invocation_tokens"),
    *(({"loftq_config": value}, "loftq_config is") for value in ("4", [4], 1)),
    *(
        ({name: 1}, f"{name} is 1, expected a string")
        for name in ("task_type", "revision", "base_model_name_or_path")
    ),
    ({"from_tomorrow": 1}, "has from_tomorrow 1"),
    ({"\x1b[2J\x07": "\x1b[31m"}, r"has '\x1b[2J\x07' '\x1b[31m'"),
    ({"x" * 10_000: "y" * 10_000}, "xxx..."),
    ({"target_modules": ["\x1b[2J"]}, r"['\x1b[2J']"),
    ({"r": "\ud800"}, r"r is '\ud800'"),
]


@pytest.mark.parametrize(("changes", "told"), MALFORMED, ids=lambda value: repr(value)[:40])
def test_a_malformed_config_is_refused_by_its_field(
    changes: dict[str, Any], told: str, folder: Path, described: Described
) -> None:
    write(folder, changes)
    assert told in refusal(folder, described)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "3",
        '"LORA"',
        "{",
        "[" * 100_000,
        '{"r": 4}',
        '{"r": ' + "9" * 5000 + "}",
        "\x00",
        "{'r': 4}",
    ],
    ids=lambda text: repr(text)[:20],
)
def test_a_config_that_is_no_object_of_json_is_refused(
    text: str, folder: Path, described: Described
) -> None:
    (folder / CONFIG).write_text(text)
    refusal(folder, described)


# An expression whose matching time grows exponentially with the length of a name without a match.
SLOW = r"(([a-z.0-9_]+)+)+X"


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": SLOW},
        {"exclude_modules": SLOW},
        {"rank_pattern": {SLOW: 4}},
        {"alpha_pattern": {"v_proj": 4, SLOW: 4}},
        {"layers_to_transform": [0, 1, 2], "layers_pattern": [SLOW]},
    ],
    ids=lambda changes: next(reversed(changes)),
)
def test_an_expression_that_does_not_end_is_refused_in_time(
    changes: dict[str, Any], folder: Path, described: Described, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_config, "MATCHING_SECONDS", 0.2)
    write(folder, changes)
    began = time.process_time()
    assert "takes more than 0.2 s" in refusal(folder, described)
    assert time.process_time() - began < 2
    write(folder, {})
    Adapter(folder, *described)


ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        4,
        4.9,
        math.inf,
        -math.inf,
        math.nan,
        10**30,
        "8",
        "no",
        "",
        "(",
        "a{99999999999}",
    ),
    *(
        "all-linear",
        "none",
        "\ud800",
        "\x1b[31m",
        "x" * 10_000,
        [],
        [1],
        [None],
        ["q_proj"],
        [["q_proj"]],
        [0, 1, 2],
    ),
    *(
        {},
        {"a": 1},
        {"q_proj": "4"},
        {"q_proj": -1},
        {"[": 4},
        {"": 4},
        {"q_proj": {}},
        {"\x1b[2J": None},
    ),
)


@pytest.mark.parametrize("seed", range(4))
def test_a_config_with_random_fields_is_read_or_refused(
    seed: int, folder: Path, described: Described
) -> None:
    """Random fields have odd values, are missing or new. A refusal is one message that a terminal
    can show.
    """
    draw = random.Random(seed)
    names = [*GOOD, "from_tomorrow", "\x1b[2J", "eva_config", "auto_mapping", "use_qalora"]
    refused = 0
    for _ in range(60):
        content = dict(GOOD)
        for name in draw.sample(names, draw.choice((1, 1, 2, 4))):
            content.pop(name, None)
            if draw.random() < 0.9:
                content[name] = draw.choice(ODD)
        (folder / CONFIG).write_text(json.dumps(content))
        try:
            adapter = Adapter(folder, *described)
        except ValueError:
            refusal(folder, described)
            refused += 1
            continue
        assert isinstance(adapter.flags["lora_rank"], int) and adapter.flags["lora_rank"] == 4
        alpha = adapter.flags["lora_alpha"]
        assert isinstance(alpha, float) and 0 < alpha < math.inf
    assert 20 <= refused <= 58


TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no A": ({f"{QUERY}A.weight": None}, "model.layers.1.self_attn.q_proj has no lora_A.weight"),
    "no B": ({f"{QUERY}B.weight": None}, "model.layers.1.self_attn.q_proj has no lora_B.weight"),
    "no pair": (
        {f"{QUERY}A.weight": None, f"{QUERY}B.weight": None},
        "model.layers.1.self_attn.q_proj has no pair",
    ),
    "a row too few": (
        {f"{QUERY}A.weight": torch.ones(3, 48)},
        "rank 3, but adapter_config.json has rank 4",
    ),
    "a column too many": (
        {f"{QUERY}A.weight": torch.ones(4, 49)},
        "shapes (4, 49) of A and (64, 4) of B, but the model",
    ),
    "B of another width": (
        {f"{QUERY}B.weight": torch.ones(64, 3)},
        "shapes (4, 48) of A and (64, 3) of B, but the model",
    ),
    "B on its side": ({f"{QUERY}B.weight": torch.ones(4, 64)}, "and (4, 64) of B, but the model"),
    "a vector": ({f"{QUERY}A.weight": torch.ones(4)}, "shapes (4,) of A and (64, 4) of B, but"),
    "a number": ({f"{QUERY}A.weight": torch.ones(())}, "shapes () of A and (64, 4) of B, but"),
    "a stack": (
        {f"{QUERY}A.weight": torch.ones(4, 48, 1)},
        "shapes (4, 48, 1) of A and (64, 4) of B, but",
    ),
    "nothing": (
        {f"{QUERY}A.weight": torch.ones(0, 48)},
        "rank 0, but adapter_config.json has rank 4",
    ),
    "integers": (
        {f"{QUERY}A.weight": torch.ones(4, 48, dtype=torch.int64)},
        "has dtype torch.int64",
    ),
    "truths": ({f"{QUERY}B.weight": torch.ones(64, 4, dtype=torch.bool)}, "has dtype torch.bool"),
    "not a number": (
        {f"{QUERY}A.weight": torch.full((4, 48), math.nan)},
        "lora_A.weight contains inf or NaN values",
    ),
    "infinity": (
        {f"{QUERY}B.weight": torch.full((64, 4), math.inf)},
        "lora_B.weight contains inf or NaN values",
    ),
    "a head's pair": (
        {f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 48)},
        "'lm_head.lora_A.weight', but the model has no such linear",
    ),
    "a layer too many": (
        {QUERY.replace(".1.", ".3.") + "A.weight": torch.ones(4, 48)},
        "'model.layers.3.self_attn",
    ),
    "a magnitude": (
        {f"{QUERY}magnitude_vector": torch.ones(64)},
        "magnitude_vector', but the model has no such linear",
    ),
    "a weight": (
        {f"{PREFIX}model.norm.weight": torch.ones(48)},
        "'model.norm.weight', but the model has no such linear",
    ),
    "a name without prefix": (
        {"model.norm.weight": torch.ones(48)},
        "without peft's prefix base_model.model.",
    ),
    "a name of escapes": (
        {f"{PREFIX}\x1b[2J": torch.ones(1)},
        r"'\x1b[2J', but the model has no such linear",
    ),
    "a long name": (
        {f"{PREFIX}{'x' * 100_000}": torch.ones(1)},
        "xxx..., but the model has no such linear",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_a_malformed_tensor_is_refused_by_its_name(
    what: str, folder: Path, described: Described
) -> None:
    changes, told = TENSORS[what]
    tensors = {**load_file(folder / WEIGHTS), **changes}
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / WEIGHTS)
    assert told in refusal(folder, described)


def test_a_file_that_is_no_safetensors_is_refused(folder: Path, described: Described) -> None:
    path = folder / WEIGHTS
    whole = path.read_bytes()
    for content in (
        b"",
        b"x",
        whole[:100],
        whole[:-1],
        b"\xff" * 8 + whole[8:],
        (1 << 40).to_bytes(8, "little"),
    ):
        path.write_bytes(content)
        assert WEIGHTS in refusal(folder, described)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refusal(folder, described)
    path.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "adapter_model.bin is refused" in refusal(folder, described)


def test_a_run_ends_with_one_message_and_status_2(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path_factory.mktemp("base")
    MODELS["qwen3"]().save_pretrained(base)
    start = [
        "--load-hf",
        str(base),
        "--load-adapter",
        str(folder),
        "--seq-length",
        "32",
        "--log-file",
        "/dev/null",
    ]
    for changes, told in [
        ({"lora_alpha": math.inf}, "lora_alpha is inf"),
        ({"r": True}, "r is True"),
        ({"target_modules": "("}, "is not a valid regular expression"),
        ({"use_dora": True}, "has use_dora True"),
        ({"layers_to_transform": [0]}, "layers_to_transform [0]"),
    ]:
        write(folder, changes)
        assert train(start) == 2
        error = capsys.readouterr().err
        assert f"--load-adapter {folder}: " in error and told in error and "Traceback" not in error
    (folder / CONFIG).unlink()
    assert train(start) == 2
    assert f"--load-adapter {folder}: " in capsys.readouterr().err
