"""The data tools can read the output of tools/train_tokenizer.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megacp.prepare.tokenize.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
CHECK = """
import train_tokenizer
code = train_tokenizer.main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


def train(*args: object) -> subprocess.CompletedProcess[str]:
    program = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tools')]!r}\n" + CHECK,
    ]
    return subprocess.run(
        [*program, *map(str, args)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    text = Path(json.__file__).read_text(encoding="utf-8")
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in text.splitlines() if line)
    )
    return [tmp_path / "a.txt", tmp_path / "b.jsonl"]


@pytest.mark.slow
def test_a_trained_tokenizer_is_loaded_ends_documents_and_is_repeatable(
    corpus: list[Path], tmp_path: Path
) -> None:
    name = "tokenizer.json"
    for folder in ("one", "two"):
        done = train("--input", *corpus, "--output", tmp_path / folder / name, "--vocab-size", 400)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    tokenizer = load_tokenizer(str(tmp_path / "one" / name))
    assert tokenizer.vocab_size == 400 and tokenizer.eos_id is not None
    text = corpus[0].read_text()
    ids = tokenizer.encode([text])[0]
    assert tokenizer.decode(ids) == text and len(ids) < 0.8 * len(text)


def test_symbols_are_one_token_each_and_records_with_images_give_their_text(tmp_path: Path) -> None:
    name = "tokenizer.json"
    content = [
        {"type": "image", "path": "no/such/file.png"},
        {"type": "text", "text": "which digits are these then?"},
    ]
    record = {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "seven and two"},
        ]
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    symbols = ["<|user|>", "<|assistant|>"]
    more = ["--vocab-size", 290, "--symbols", *symbols]
    done = train("--input", tmp_path / "a.jsonl", "--output", tmp_path / name, *more)
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(str(tmp_path / name))
    text = "<|user|>\nwhich digits are these then?\n<|assistant|>\n"
    ids = tokenizer.encode([text])[0].tolist()
    assert tokenizer.decode(ids) == text and len(ids) < 40
    assert [[tokenizer.decode([i]) for i in ids].count(symbol) for symbol in symbols] == [1, 1]


@pytest.mark.slow
def test_errors_are_one_line_and_nothing_is_overwritten(corpus: list[Path], tmp_path: Path) -> None:
    record = json.dumps({"text": "seven and two " * 20, "strange": "lost"}) + "\n"
    for name, text in (
        ("kept.json", "mine"),
        ("bad.jsonl", "{\n"),
        ("empty.txt", ""),
        ("odd.JSON", record),
    ):
        (tmp_path / name).write_text(text)
    for named, source, output, size in (
        ("kept.json", "a.txt", "kept.json", 300),
        ("must end in .json", "a.txt", "x.model", 300),
        ("none.txt", "none.txt", "x.json", 300),
        ("257", "a.txt", "x.json", 200),
        ("bad.jsonl:1", "bad.jsonl", "x.json", 300),
        ("--input", "empty.txt", "x.json", 300),
    ):
        failed = train(
            "--input", tmp_path / source, "--output", tmp_path / output, "--vocab-size", size
        )
        assert (
            failed.returncode == 2 and named in failed.stderr and failed.stderr.count("\n") == 1
        ), failed.stderr
        assert not (tmp_path / "x.json").exists()
    assert (tmp_path / "kept.json").read_text() == "mine"
    arguments = [
        "--input",
        tmp_path / "odd.JSON",
        "--output",
        tmp_path / "t.json",
        "--vocab-size",
        280,
    ]
    assert train(*arguments).returncode == 0
    assert load_tokenizer(str(tmp_path / "t.json")).token_id('":') is None, (
        "JSON's own marks are tokens"
    )
