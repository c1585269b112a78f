"""A chat template from a dataset through a run to a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacp import train
from megacp.huggingface import convert_command as convert
from megacp.huggingface import generate_command as generate
from megacp.huggingface.generation.sampler import Generator
from megacp.prepare import command as preprocess
from megacp.training.data.manifest import ANSWER_FORMS
from tests.huggingface.convert.models import llama
from tests.prepare.packs.builds import documents
from tests.prepare.templates.public import TEMPLATES, write_tokenizer
from tests.prepare.templates.test_public import ASK, TELL, TOOLS

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


@pytest.mark.slow
def test_the_template_of_the_data_is_that_of_the_exported_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_tokenizer(tmp_path / "t", chat_template=TEMPLATES["qwen_3"])
    talk = {"messages": [ASK, TELL]}
    (tmp_path / "a.jsonl").write_text(
        json.dumps(talk) + "\n" + json.dumps({**talk, "tools": TOOLS}) + "\n"
    )
    flags = [
        "--input",
        str(tmp_path / "a.jsonl"),
        "--tokenizer",
        str(path),
        "--seq-length",
        "512",
        "--workers",
        "1",
    ]
    assert (
        preprocess.main(
            ["build", *flags, "--output", str(tmp_path / "d"), "--chat-template", "auto"]
        )
        == 0
    )
    write_tokenizer(tmp_path / "t", chat_template="{{ 'another' }}")
    run = [*SIZES, "--seq-length", "512", "--global-batch-size", "1", "--train-iters", "1"]
    run += ["--save", str(tmp_path / "out"), "--data-path"]
    assert train.main([*run, str(tmp_path / "d")]) == 0
    assert "learned answers:" not in capsys.readouterr().out  # no answer has a thought
    command = [
        "--from",
        "megacp",
        "--to",
        "hf",
        "--input",
        str(tmp_path / "out"),
        "--tokenizer",
        str(path),
    ]
    assert convert.main([*command, "--output", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert (
        "chat template: from the training data" in said
        and "without a thought: prompt with enable_thinking=False\n" in said
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.chat_template == TEMPLATES["qwen_3"]
    found = [
        theirs.apply_chat_template(talk["messages"], tools=t, return_dict=False)
        for t in (None, TOOLS)
    ]
    assert found == documents(tmp_path / "d")
    back = [
        "--from",
        "hf",
        "--to",
        "megacp",
        "--input",
        str(tmp_path / "hf"),
        "--output",
        str(tmp_path / "back"),
    ]
    assert convert.main(back) == 0
    assert (
        convert.main([*command, "--output", str(tmp_path / "no"), "--chat-template", "messages"])
        == 2
    )
    assert (
        "the messages of the training data were formatted with another template"
        in capsys.readouterr().err
    )
    (tmp_path / "asked.jsonl").write_text(json.dumps(talk))
    asked = ["--checkpoint", str(tmp_path / "out"), "--max-new-tokens", "1"]
    asked += ["--input", str(tmp_path / "asked.jsonl"), "--output", str(tmp_path / "answers.jsonl")]
    assert generate.main(asked) == 0
    (answer,) = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    off = {"add_generation_prompt": True, "enable_thinking": False}
    prompt = theirs.apply_chat_template([ASK], tokenize=False, **off)
    assert (answer["prompt"], answer["expected"]) == (prompt, TELL["content"])
    said = iter(["What is 6 x 7?", "a<|im_end|>b", "Sure?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    asked: list[list[int]] = []
    answers = Generator.answer

    def noted(self: Generator, prompts: Any, *given: Any) -> Any:
        asked.extend(prompt.tokens.tolist() for prompt in prompts)
        return answers(self, prompts, *given)

    monkeypatch.setattr(Generator, "answer", noted)
    capsys.readouterr()
    chat = ["--checkpoint", str(tmp_path / "out"), "--max-new-tokens", "1"]
    assert generate.main([*chat, "--chat"]) == 0
    first, refusal = capsys.readouterr().out.partition("\n")[2].split("\nerror: ")
    assert "the special token '<|im_end|>'" in refusal
    history = [ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
    for ids, messages in zip(asked, ([ASK], history), strict=True):
        assert ids == theirs.apply_chat_template(messages, return_dict=False, **off)
    assert (
        generate.main([*chat, "--prompt", ASK["content"], "--no-thinking"]) == 0
        and asked[-1] == asked[0]
    )
    assert generate.main([*chat, "--prompt", ASK["content"], "--raw", "--no-thinking"]) == 2
    assert generate.main([*chat, "--prompt", ASK["content"], "--raw"]) == 0
    assert asked[-1] == theirs.encode(ASK["content"], add_special_tokens=False)


def test_a_converted_folder_is_asked_by_its_own_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path / "hf", chat_template=TEMPLATES["qwen_25"])
    llama(vocab_size=1000).save_pretrained(tmp_path / "hf")
    into = [
        "--from",
        "hf",
        "--to",
        "megacp",
        "--input",
        str(tmp_path / "hf"),
        "--output",
        str(tmp_path / "start"),
    ]
    assert convert.main(into) == 0
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": [ASK, TELL]}))
    asked = ["--checkpoint", str(tmp_path / "start"), "--max-new-tokens", "1"]
    asked += ["--input", str(tmp_path / "asked.jsonl"), "--output", str(tmp_path / "answers.jsonl")]
    assert generate.main(asked) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = theirs.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
    assert json.loads((tmp_path / "answers.jsonl").read_text())["prompt"] == prompt


def test_validation_data_by_another_template_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tokenizer(tmp_path / "t")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [ASK, TELL]}) + "\n")
    flags = [
        "--input",
        str(tmp_path / "a.jsonl"),
        "--tokenizer",
        str(path),
        "--seq-length",
        "512",
        "--workers",
        "1",
    ]
    for name, more in (("a", ["--chat-template", "chatml"]), ("b", [])):
        assert preprocess.main(["build", *flags, "--output", str(tmp_path / name), *more]) == 0
    run = [*SIZES, "--seq-length", "512", "--global-batch-size", "1", "--train-iters", "1"]
    capsys.readouterr()
    assert (
        train.main(
            [*run, "--data-path", str(tmp_path / "a"), "--valid-data-path", str(tmp_path / "b")]
        )
        != 0
    )
    assert "--valid-data-path was built with another --chat-template" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["messages", "alpaca", "chat_template"])
def test_training_and_export_say_in_which_form_answers_were_learned(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate --prompt` uses this format: the tokens before the answer equal the dataset's."""
    template = {"chat_template": TEMPLATES["qwen_25"]} if form == "chat_template" else {}
    path = write_tokenizer(tmp_path / "t", **template)
    record = {"instruction": ASK["content"], "output": TELL["content"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    flags = [
        "--input",
        str(tmp_path / "a.jsonl"),
        "--tokenizer",
        str(path),
        "--seq-length",
        "512",
        "--workers",
        "1",
    ]
    flags += ["--chat-template", "ignore"] if form == "messages" else []
    assert preprocess.main(["build", *flags, "--output", str(tmp_path / "d")]) == 0
    run = [
        *SIZES,
        "--global-batch-size",
        "1",
        "--train-iters",
        "1",
        "--save",
        str(tmp_path / "out"),
    ]
    assert train.main([*run, "--data-path", str(tmp_path / "d")]) == 0
    words = f"{ANSWER_FORMS[form]} (1 record)"
    assert f"\nanswers are learned {words}\n" in capsys.readouterr().out

    asked: list[list[int]] = []
    answers = Generator.answer

    def noted(self: Generator, prompts: Any, *given: Any) -> Any:
        asked.extend(prompt.tokens.tolist() for prompt in prompts)
        return answers(self, prompts, *given)

    monkeypatch.setattr(Generator, "answer", noted)
    prompt = [
        "--checkpoint",
        str(tmp_path / "out"),
        "--max-new-tokens",
        "1",
        "--prompt",
        ASK["content"],
    ]
    assert generate.main(prompt) == 0
    (learned,) = documents(tmp_path / "d")
    (ids,) = asked
    assert learned[: len(ids)] == ids and 1 < len(learned) - len(ids) <= 40
    assert (f"answers were learned {words}" in capsys.readouterr().out) == (form != "chat_template")

    write_tokenizer(tmp_path / "t", chat_template="{{ 'another' }}")
    command = [
        "--from",
        "megacp",
        "--to",
        "hf",
        "--input",
        str(tmp_path / "out"),
        "--tokenizer",
        str(path),
    ]
    for choice in ("auto", "none"):
        output = ["--output", str(tmp_path / choice), "--chat-template", choice]
        assert convert.main([*command, *output]) == 0
        said = capsys.readouterr().out
        assert f"\nanswers were learned {words}\n" in said
        if form == "chat_template" and choice == "auto":
            assert "chat template: from the training data; the tokenizer's template differs" in said
        else:
            assert (
                "from the tokenizer, which differs from the format used in training: answers "
                f"were learned {words}" in said
            )
            assert ("--chat-template messages exports" in said) == (
                form == "messages" and choice == "auto"
            )
