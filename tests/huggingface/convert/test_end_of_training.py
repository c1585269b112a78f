"""The end token of training: in prompts, as the end of an answer, and in an exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp import train
from megacp.huggingface import convert_command as convert
from megacp.huggingface import generate_command as generate
from megacp.huggingface.generation.prompt import PromptMaker
from megacp.huggingface.generation.sampler import Generator
from megacp.prepare import command as preprocess
from megacp.prepare.tokenize.tokenizer import Tokenizer, load_tokenizer
from tests.prepare.packs.builds import documents
from tests.prepare.templates.public import write_tokenizer
from tests.prepare.templates.test_conversation import PROMPT, TALK
from tests.prepare.templates.test_public import ASK, TELL

SIZES = [
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--ffn-hidden-size",
    "16",
]
MESSAGES = [ASK, TELL, ASK, TELL]


def trained(folder: Path, *flags: str, **beside: Any) -> Tokenizer:
    """Train one step on messages in `folder`/out, built with `flags`; return the tokenizer, whose
    files name `</s>`.
    """
    path = write_tokenizer(folder / "t", **beside)
    (folder / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    build = [
        "--input",
        str(folder / "a.jsonl"),
        "--tokenizer",
        str(path),
        "--seq-length",
        "512",
        "--workers",
        "1",
    ]
    assert preprocess.main(["build", *build, "--output", str(folder / "d"), *flags]) == 0
    run = [
        *SIZES,
        "--data-path",
        str(folder / "d"),
        "--seq-length",
        "512",
        "--global-batch-size",
        "1",
    ]
    assert train.main([*run, "--train-iters", "1", "--save", str(folder / "out")]) == 0
    return load_tokenizer(str(path), engine="reference")


def export(folder: Path, name: str, *flags: str) -> int:
    command = [
        "--from",
        "megacp",
        "--to",
        "hf",
        "--input",
        str(folder / "out"),
        "--output",
        str(folder / name),
    ]
    return convert.main([*command, "--tokenizer", str(folder / "t/tokenizer.json"), *flags])


def stops(folder: Path, monkeypatch: pytest.MonkeyPatch, *asked: str) -> tuple[int, ...]:
    found: list[tuple[int, ...]] = []
    answer = Generator.answer

    def noted(self: Generator, prompts: Any, sampling: Any, names: Any) -> Any:
        found.append(sampling.ends)
        return answer(self, prompts, sampling, names)

    monkeypatch.setattr(Generator, "answer", noted)
    command = ["--checkpoint", str(folder / "out"), "--tokenizer", str(folder / "t/tokenizer.json")]
    assert generate.main([*command, "--max-new-tokens", "1", *asked]) == 0
    return found[-1]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


ENDS = {
    "another": (["--eod-token", "<|im_end|>"], "<|im_end|>"),
    "none": (["--no-append-eod"], None),
    "that of the files": ([], "</s>"),
}


@pytest.mark.parametrize("end", ENDS)
def test_prompts_stops_and_exports_have_the_end_token_of_training(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    flags, text = ENDS[end]
    own = trained(tmp_path, *flags)
    expected = None if text is None else own.token_id(text)
    (tmp_path / "t/special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    asked = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "answers.jsonl")]
    found: list[list[int]] = []
    of_record = PromptMaker.of_record

    def noted(self: PromptMaker, record: Any) -> Any:
        prompts = of_record(self, record)
        found.extend(prompt.tokens.tolist() for prompt in prompts)
        return prompts

    monkeypatch.setattr(PromptMaker, "of_record", noted)
    assert stops(tmp_path, monkeypatch, *asked) == (() if expected is None else (expected,))
    (document,) = documents(tmp_path / "d")
    assert found == [document[: len(found[0])]] and own.decode(
        document[len(found[0]) :]
    ).startswith(TELL["content"])
    assert export(tmp_path, "hf") == 0
    for name in ("generation_config.json", "config.json"):
        assert read(tmp_path / "hf" / name)["eos_token_id"] == expected
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.eos_token == text


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        ([], ["<|im_end|>", "</s>"]),
        (["--eod-token", "<|end|>"], ["<|im_end|>", "<|end|>"]),
        (["--no-append-eod"], ["<|im_end|>"]),
    ],
)
def test_what_ends_the_answers_of_a_chat_template_stops_the_model(
    flags: list[str],
    ends: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    own = trained(tmp_path, "--chat-template", "chatml", *flags)
    ids = [own.token_id(text) for text in ends]
    assert own.token_id("</s>") not in np.concatenate(documents(tmp_path / "d"))
    assert stops(tmp_path, monkeypatch, "--prompt", "a") == tuple(ids)
    capsys.readouterr()
    assert export(tmp_path, "hf") == 0
    assert f"end of answers: '<|im_end|>' (id {ids[0]})\n" in capsys.readouterr().out
    for name in ("generation_config.json", "config.json"):
        assert read(tmp_path / "hf" / name)["eos_token_id"] == (ids if len(ids) > 1 else ids[0])
    # A template may write `eos_token`, which remains the token of the files.
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "</s>"


def test_answers_that_end_with_no_special_token_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(
        tmp_path,
        "--chat-template",
        "auto",
        "--no-append-eod",
        chat_template=f"{TALK}{{{{ m.content }}}} so\n{PROMPT}",
    )
    capsys.readouterr()
    assert stops(tmp_path, monkeypatch, "--prompt", "a") == ()
    told = capsys.readouterr().err
    assert "no special token is known to end the answers" in told
    assert "--max-new-tokens 1\n" in told
    assert export(tmp_path, "hf") == 0
    assert "end of answers: unknown: " in (said := capsys.readouterr().out)
    assert "set eos_token_id in generation_config.json" in said
