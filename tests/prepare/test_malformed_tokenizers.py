"""Damaged tokenizer files end with one message and status 2, never a traceback or a panic."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.prepare.command import main
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.storage import cache

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")

CORPUS = [
    Path(json.__file__).read_text(encoding="utf-8"),
    Path(np.__file__).read_text(encoding="utf-8"),
]
END, USER = "<|endoftext|>", "<|user|>"
FLAGS = {
    "special": True,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": END,
    "bos_token": {"content": USER, **FLAGS},
    "pad_token": None,
    "add_bos_token": True,
    "additional_special_tokens": [USER],
    "model_max_length": 128,
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1 << 70,
    1.5,
    "",
    "x",
    "\ud800",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
]
VALUES += [{"type": "x"}, {"content": 5}, {"content": None}, float("nan"), "x" * 5000]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer.json with a post-processor and settings, GPT-2's files, and a SentencePiece
    model.
    """
    folder = tmp_path_factory.mktemp("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([tokenizers.AddedToken(USER, normalized=False, special=True)])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", pair="$A $B", special_tokens=[(END, made.token_to_id(END))]
    )
    made.save(str(folder / "tokenizer.json"))
    made.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines() if line),
        model_prefix=str(folder / "sp"),
        vocab_size=400,
        model_type="bpe",
        minloglevel=2,
    )
    return folder


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE", str(tmp_path / "cache"))


def copied(whole: Path, folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        shutil.copyfile(whole / name, folder / name)
    return folder


def told(specification: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the error message of a refused build; check that Rust and C++ print nothing else."""
    text = specification.parent / "text.jsonl"
    text.write_text('{"text": "Hello"}\n')
    output = specification.parent / "output"
    capfd.readouterr()
    flags = [
        "--input",
        str(text),
        "--output",
        str(output),
        "--tokenizer",
        str(specification),
        "--seq-length",
        "64",
    ]
    assert main(["build", *flags]) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1 and len(errors) < 2000
    return errors


def with_field(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a JSON value with a different value at `path`."""
    if not path:
        return new
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return copy


TEMPLATE = ("post_processor", "single", 0, "SpecialToken", "id")
FIELDS = {
    "no vocabulary": (
        "tokenizer.json",
        ("model", "vocab"),
        None,
        "not a Hugging Face tokenizer.json",
    ),
    "a negative id": (
        "tokenizer.json",
        ("model", "vocab"),
        {"a": -1},
        "not a Hugging Face tokenizer.json",
    ),
    "a merge of no token": (
        "tokenizer.json",
        ("model", "merges"),
        [["zz", "qq"]],
        "not a Hugging Face tokenizer.json",
    ),
    "an unknown model": (
        "tokenizer.json",
        ("model", "type"),
        "Best",
        "not a Hugging Face tokenizer.json",
    ),
    "a token without an id": ("tokenizer.json", TEMPLATE, "<x>", "its post_processor adds '<x>'"),
    "a list": ("tokenizer.json", (), [1], "not a Hugging Face tokenizer.json"),
    "a number as the end": (
        "tokenizer_config.json",
        ("eos_token",),
        1.5,
        "eos_token is 1.5, but it must be a text",
    ),
    "a list as the end": (
        "tokenizer_config.json",
        ("eos_token",),
        ["a"],
        "eos_token is ['a'], but it must be a text",
    ),
    "no content": (
        "tokenizer_config.json",
        ("bos_token", "content"),
        None,
        "bos_token is {'content': None",
    ),
    "a word as a switch": (
        "tokenizer_config.json",
        ("add_bos_token",),
        "no",
        "add_bos_token is 'no', but it must be true",
    ),
    "settings in a list": (
        "tokenizer_config.json",
        (),
        [SETTINGS],
        "expected a JSON object, found a list",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_malformed_field_is_one_message(
    name: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, path, value, expected = FIELDS[name]
    folder = copied(whole, tmp_path / "model", "tokenizer.json", "tokenizer_config.json")
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(with_field(content, path, value)))
    message = told(folder, capfd)
    assert expected in message and file in message


@pytest.mark.parametrize("kind", ["empty", "half", "no text", "a pointer"])
@pytest.mark.parametrize(
    ("file", "rest"),
    [
        ("tokenizer.json", ["tokenizer_config.json"]),
        ("tokenizer_config.json", ["tokenizer.json"]),
        ("vocab.json", ["merges.txt"]),
        ("merges.txt", ["vocab.json"]),
        ("sp.model", []),
    ],
)
def test_a_file_that_is_not_whole_is_one_message(
    kind: str,
    file: str,
    rest: list[str],
    whole: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = copied(whole, tmp_path / "model", file, *rest)
    content = (folder / file).read_bytes()
    half = content[: len(content) // 2]
    if file == "merges.txt":
        # half of the lines would be a valid file of merges
        half += b" a b c\n"
    damaged = {
        "empty": b"",
        "half": half,
        "no text": b"\xff\xfe\x00" * 20,
        "a pointer": POINTER.encode(),
    }
    (folder / file).write_bytes(damaged[kind])
    if file == "merges.txt" and kind == "empty":
        return  # a vocabulary without merges is valid
    message = told(folder / file if file == "sp.model" else folder, capfd)
    assert file in message
    assert ("is a Git LFS pointer, not the file itself" in message) is (kind == "a pointer")


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of a JSON value and of the first values inside it."""
    yield path
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)[:12]
    elif isinstance(value, list):
        keys = list(range(min(3, len(value))))
    for key in keys:
        yield from paths_of(value[key], (*path, key))


def require_message_or_tokenizer(
    specification: Path, capfd: pytest.CaptureFixture[str], note: object
) -> None:
    """The result is a working tokenizer or a ValueError, without output on standard error."""
    try:
        tokenizer = load_tokenizer(str(specification))
        tokenizer.decode(tokenizer.encode([f"Hello {USER}"])[0])
        tokenizer.info()
    except ValueError as error:
        assert str(error), note
    assert "panicked" not in capfd.readouterr().err, note


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_random_fields_are_never_a_traceback(
    file: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drawn = random.Random(0)
    content = json.loads((whole / file).read_text())
    paths = list(paths_of(content))
    for turn in range(150):
        folder = copied(whole, tmp_path / str(turn), "tokenizer.json", "tokenizer_config.json")
        path, value = drawn.choice(paths), drawn.choice(VALUES)
        (folder / file).write_text(json.dumps(with_field(content, path, value)))
        require_message_or_tokenizer(folder, capfd, (turn, path, value))


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json", "merges.txt", "sp.model"])
def test_random_bytes_are_never_a_traceback(
    file: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drawn = random.Random(1)
    content = (whole / file).read_bytes()
    beside = {
        "tokenizer.json": [],
        "vocab.json": ["merges.txt"],
        "merges.txt": ["vocab.json"],
        "sp.model": [],
    }
    for turn in range(60):
        folder = copied(whole, tmp_path / str(turn), *beside[file])
        damaged = bytearray(content)
        place = drawn.randrange(len(damaged))
        how = drawn.choice(("flip", "cut", "zeros", "more"))
        if how == "flip":
            damaged[place] ^= 1 << drawn.randrange(8)
        elif how == "cut":
            del damaged[place:]
        elif how == "zeros":
            damaged[place : place + 40] = bytes(40)
        else:
            damaged[place:place] = drawn.randbytes(5)
        (folder / file).write_bytes(damaged)
        require_message_or_tokenizer(
            folder / file if file == "sp.model" else folder, capfd, (turn, how, place)
        )
