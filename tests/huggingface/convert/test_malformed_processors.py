"""Damaged processor files, generation settings and configs of model folders: one message, status 2,
no traceback.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.huggingface.convert.source import GENERATION, read_hf
from megacp.huggingface.convert_command import main as convert
from megacp.prepare.media.processor_files import IMAGES, PROCESSOR, VIDEOS
from megacp.train import main as train
from tests.huggingface.convert.models import qwen3_5, save
from tests.huggingface.convert.test_folder_rules import IMAGE, VIDEO, with_tokenizer
from tests.tools.in_process import preprocessed

pytest.importorskip("tokenizers")
pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

# Number of damaged files per folder; 15,000 were tried once.
ROUNDS = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a Qwen3.5 and a Molmo2 with processor files, and text models with each kind of rotary
    embedding.
    """
    place = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    qwen3_5(vocab_size=264).save_pretrained(place / "qwen")
    (place / "qwen" / IMAGES).write_text(json.dumps(IMAGE))
    (place / "qwen" / VIDEOS).write_text(json.dumps(VIDEO))
    with_tokenizer(place / "qwen")
    save("molmo2 native", place / "molmo")
    for name in ("gemma3_text", "olmo3", "glm4_moe"):
        save(name, place / name)
    return {path.name: path for path in place.iterdir()}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    (tmp_path / "r.jsonl").write_text(json.dumps({"text": "words"}) + "\n")
    return tmp_path / "r.jsonl"


def pipe(path: Path) -> None:
    os.mkfifo(path)


FILES: dict[str, Callable[[Path], Any]] = {
    "no JSON": lambda path: path.write_text("{"),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("NaN"),
    "nothing": lambda path: path.write_text(""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00{"),
    "too deep": lambda path: path.write_text("[" * 100_000),
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": pipe,
    "a number of 5000 digits": lambda path: path.write_text('{"patch_size": ' + "9" * 5000 + "}"),
}


def commands(folder: Path, records: Path) -> dict[str, Callable[[], int]]:
    """Run each command that opens a folder; return their exit statuses."""
    out = ["--output", str(records.parent / "out")]
    return {
        "build": lambda: build(folder, records),
        "train": lambda: train(
            ["--load-hf", str(folder), "--seq-length", "64", "--log-file", "/dev/null"]
        ),
        "to megacp": lambda: convert(
            ["--from", "hf", "--to", "megacp", "--input", str(folder), *out]
        ),
        "to hf": lambda: convert(["--from", "hf", "--to", "hf", "--input", str(folder), *out]),
    }


def build(folder: Path, records: Path) -> int:
    basic = [
        "build",
        "--input",
        records,
        "--output",
        records.parent / "d",
        "--tokenizer",
        folder,
        "--overwrite",
    ]
    done = preprocessed(*basic, "--seq-length", 64, "--image-root", records.parent, "--workers", 1)
    print(done.stderr)
    return done.returncode


def with_file(folder: Path, target: Path, name: str) -> Path:
    """Return a copy of a folder without a file."""
    shutil.copytree(folder, target)
    (target / name).unlink(missing_ok=True)
    return target / name


@pytest.mark.parametrize("damage", FILES)
@pytest.mark.parametrize("file", [IMAGES, VIDEOS, PROCESSOR])
def test_a_damaged_processor_file_is_one_message_by_its_name(
    damage: str,
    file: str,
    folders: dict[str, Path],
    records: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = records.parent / "copy"
    FILES[damage](with_file(folders["qwen"], copy, file))
    # All commands read a file alike, so one command per damage is enough.
    names = list(commands(copy, records))
    command = names[(list(FILES).index(damage) + len(file)) % len(names)]
    assert commands(copy, records)[command]() == 2
    told = "".join(capsys.readouterr())
    assert file in told and "Traceback" not in told and len(told) < 2000


@pytest.mark.parametrize(
    "content", [{"eos_token_id": "2"}, {"eos_token_id": [1, None]}, {"pad_token_id": {"a": 1}}, []]
)
def test_damaged_settings_of_generation_are_one_message(
    content: Any, folders: dict[str, Path], records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = records.parent / "copy"
    with_file(folders["glm4_moe"], copy, GENERATION).write_text(json.dumps(content))
    for name, command in commands(copy, records).items():
        if name != "build":  # which reads only a tokenizer
            assert command() == 2
            assert GENERATION in capsys.readouterr().err
    with_file(folders["glm4_moe"], records.parent / "other", GENERATION)
    config = json.loads((records.parent / "other" / "config.json").read_text())
    if isinstance(content, dict):
        (records.parent / "other" / "config.json").write_text(json.dumps(config | content))
        with pytest.raises(ValueError, match="expected a token id or a list of token ids"):
            read_hf(records.parent / "other")


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    10**30,
    10**400,
    0.5,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
]
VALUES += [
    "8",
    "a" * 10_000,
    [],
    [[]],
    [None],
    [1, 2],
    [0.5] * 3,
    ["a"],
    {},
    {"a": 1},
    {"height": 1},
    [{}],
    4096,
]
VALUES += [
    {"rope_type": "yarn"},
    {"rope_type": [1]},
    {"full_attention": 3, "sliding_attention": None},
]
FURTHER = "size fps num_frames image_processor video_processor rope_scaling layer_types text_config vision_config "
FURTHER += "eos_token_id quantization_config attention_dropout dtype num_nextn_predict_layers mtp_num_hidden_layers"


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the paths of all values inside a JSON value."""
    found = [before] if before else []
    if isinstance(value, dict | list):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(inside, (*before, key))
    return found


def damaged(content: dict[str, Any], drawn: random.Random) -> str:
    """Change one or two values of an object; return the changes."""
    told = []
    for _ in range(drawn.randint(1, 2)):
        path = (
            drawn.choice(places(content))
            if content and drawn.random() < 0.8
            else (drawn.choice(FURTHER.split()),)
        )
        inside: Any = content
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = drawn.choice(VALUES)
        told.append(f"{path}: {inside[path[-1]]!r:.40}")
    return "; ".join(told)


@pytest.mark.parametrize("name", ["qwen", "molmo", "gemma3_text", "olmo3", "glm4_moe"])
def test_random_fields_are_read_or_refused_by_one_message(
    name: str, folders: dict[str, Path]
) -> None:
    """Every error is a ValueError of bounded length."""
    folder, drawn, refused = folders[name], random.Random(0), 0
    files = [
        file
        for file in ("config.json", GENERATION, IMAGES, VIDEOS, PROCESSOR)
        if (folder / file).is_file()
    ]
    for _ in range(ROUNDS):
        path = folder / drawn.choice(files)
        before = path.read_bytes()
        content = json.loads(before)
        told = damaged(content, drawn)
        path.write_text(json.dumps(content))
        try:
            read_hf(folder).notes(False)
        except ValueError as error:
            assert len(str(error)) < 5000, told
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path.name}: {told}") from error
        finally:
            path.write_bytes(before)
    assert 10 < refused < ROUNDS
