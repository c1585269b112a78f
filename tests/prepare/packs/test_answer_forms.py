"""Builds write one form of conversation per dataset, report it, and refuse mixtures."""

from __future__ import annotations

import io
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megacp.huggingface.generation.prompt import PromptMaker
from megacp.prepare.command import main
from megacp.prepare.packs.run import build
from megacp.prepare.records.forms import alpaca_prompt
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.training.data.blend import PackBlend
from megacp.training.data.manifest import DatasetManifest, answers_told
from megacp.training.data.reader import PackedDataset
from megacp.training.loop.sources import Sources
from tests.prepare.packs.builds import documents, run, settings
from tests.prepare.templates.public import TEMPLATES, write_tokenizer
from tests.prepare.templates.test_public import expected, library

ALPACA = {"instruction": "What is the answer?", "input": "The answer is 42.", "output": "42"}
TALK = [
    {"role": "user", "content": "What is the answer?\nThe answer is 42."},
    {"role": "assistant", "content": "42"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of a chat model's folder that a build reads."""
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder, chat_template=TEMPLATES["qwen_25"])
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base model's folder, which has no chat template."""
    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder)
    return folder


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def built(
    output: Path, model: Path, *records: Any, **more: Any
) -> tuple[list[list[int]], dict[str, int] | None, str]:
    """Return the documents, the forms in the manifest, and the line about answers."""
    source = write(output.with_suffix(".jsonl"), *records)
    summary = run([source], output, tokenizer=str(model), seq_length=512, **more)
    return documents(output), DatasetManifest.read(output).answer_forms, summary.answers


def test_all_of_alpacas_records_are_written_by_the_template(model: Path, tmp_path: Path) -> None:
    """A history or a system prompt makes no difference: the result equals the library's messages."""
    system = {"role": "system", "content": "You are a helpful assistant."}
    with_system = {**ALPACA, "system": system["content"], "history": []}
    found, forms, told = built(tmp_path / "d", model, ALPACA, with_system, {"messages": TALK})
    theirs = library(model, TEMPLATES["qwen_25"])
    talks = [TALK, [system, *TALK], TALK]
    assert found == [expected(theirs, talk)[0] for talk in talks]
    assert forms == {"chat_template": 3}
    assert told == "answers are learned as the chat template writes them (3 records)"


def test_the_old_form_exists_by_name_and_for_base_models(
    model: Path, base: Path, tmp_path: Path
) -> None:
    own = alpaca_prompt(ALPACA["instruction"], ALPACA["input"]) + ALPACA["output"]
    for name, folder, flags in (("base", base, {}), ("named", model, {"chat_template": "alpaca"})):
        found, forms, told = built(
            tmp_path / name, folder, ALPACA, {**ALPACA, "system": "", "history": []}, **flags
        )
        tokenizer = load_tokenizer(str(folder))
        assert [tokenizer.decode(tokens) for tokens in found] == [f"{own}</s>"] * 2 and forms == {
            "alpaca": 2
        }
        assert (
            told.startswith("answers are learned after Alpaca's prompt")
            and "--prompt uses this form" in told
        )
        assert ("the tokenizer's folder has no chat template" in told) == (name == "base")
    with pytest.raises(
        ValueError,
        match=":2: `messages` .*--chat-template alpaca .*`instruction` and `output`",
    ):
        built(tmp_path / "both", model, ALPACA, {"messages": TALK}, chat_template="alpaca")


def test_answers_in_two_forms_are_refused_with_the_flags_for_one(
    base: Path, tmp_path: Path
) -> None:
    records = [ALPACA, {**ALPACA, "system": "Be brief."}, {"messages": TALK}]
    with pytest.raises(
        ValueError,
        match="in two forms: 1 record .* and 2 conversations .*--chat-template ignore",
    ):
        built(tmp_path / "d", base, *records)
    assert not (tmp_path / "d" / "manifest.json").exists()
    with pytest.raises(ValueError, match="in two forms"):  # also if they are in different units
        built(tmp_path / "units", base, *records, unit_bytes=10, on_error="skip")
    found, forms, _ = built(tmp_path / "one", base, *records, chat_template="ignore")
    assert forms == {"messages": 3} and found[0] == found[2]
    assert built(tmp_path / "chatml", base, *records, chat_template="chatml")[1] == {
        "chat_template": 3
    }


def test_a_base_models_build_says_its_form_and_how_to_ask_and_export(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(
        tmp_path / "a.jsonl", {"messages": TALK}, {"prompt": "2 + 2 =", "completion": " 4"}
    )
    flags = [
        "--tokenizer",
        str(base),
        "--seq-length",
        "512",
        "--workers",
        "1",
        "--output",
        str(tmp_path / "d"),
    ]
    assert main(["build", "--input", str(source), *flags]) == 0
    (line,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("answers are learned")
    )
    assert (
        "megacp's own form" in line
        and "(1 record), and right after the text of their prompt (1 record)" in line
    )
    for way in (
        "no chat template",
        "tools/generate.py --prompt and --chat",
        "--chat-template messages adds a template",
    ):
        assert way in line
    assert (
        main(
            [
                "build",
                "--input",
                str(source),
                *flags[:-1],
                str(tmp_path / "e"),
                "--chat-template",
                "ignore",
            ]
        )
        == 0
    )
    assert "has no chat template" not in capsys.readouterr().out  # it was requested


def test_the_converters_own_template_makes_alpaca_a_conversation_of_its_form(
    base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(
        "{#- megacp's messages. -#}"
    )  # the part that a build reads
    found, forms, told = built(tmp_path / "d", folder, ALPACA, {"messages": TALK})
    assert forms == {"messages": 2} and found[0] == found[1] and "has no chat template" not in told


def test_only_stored_records_count_and_a_blend_adds_them_up(
    model: Path, base: Path, tmp_path: Path
) -> None:
    long = {"messages": [{"role": "user", "content": "long " * 600}, TALK[1]]}
    _, forms, _ = built(
        tmp_path / "a", model, {"messages": TALK}, long, {"text": "x"}, oversize="drop"
    )
    assert forms == {"chat_template": 1}
    assert built(tmp_path / "b", model, {"text": "x"})[1] is None
    assert "answer_forms" not in (tmp_path / "b" / "manifest.json").read_text()
    built(tmp_path / "c", model, {"prompt": "2 + 2 =", "completion": " 4"})
    blend = PackBlend([PackedDataset(tmp_path / name) for name in "abc"], [Fraction(1)] * 3)
    found = Sources(blend, None, "").answer_forms
    assert found == {"chat_template": 1, "completion": 1}
    told = "as the chat template writes them (1 record), and right after the text of their prompt (1 record)"
    assert answers_told(found) == f"answers are learned {told}"
    built(tmp_path / "d", model, ALPACA, chat_template="alpaca")
    with pytest.raises(
        ValueError,
        match="d has answers after Alpaca's prompt, .*a has conversations in a different form",
    ):
        PackBlend([PackedDataset(tmp_path / name) for name in "ad"], [Fraction(1)] * 2)
    assert Sources(PackedDataset(tmp_path / "d"), None, "").answer_forms == {"alpaca": 1}
    assert answers_told({"messages": 1200}).endswith("(1,200 records)") and not answers_told(None)


def test_an_interrupted_build_with_other_names_is_refused(base: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"q": "a", "a": "b"})
    named = {"tokenizer": str(base), "columns": (("prompt", "q"), ("completion", "a"))}
    run([source], tmp_path / "d", **named)
    with pytest.raises(ValueError, match="begun with other settings.*columns: "):
        run(
            [source], tmp_path / "d", **{**named, "columns": (("prompt", "a"), ("completion", "q"))}
        )


def test_flags_of_names_are_validated_before_a_record_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.jsonl", {"q": "a", "a": "b"})
    given = [
        "build",
        "--input",
        str(source),
        "--tokenizer",
        "byte",
        "--seq-length",
        "64",
        "--output",
    ]
    given += [str(tmp_path / "d"), "--workers", "1"]
    for flags, named in (
        (
            ["--columns", "question=prompt"],
            "reverse the names, as in --columns prompt=question",
        ),
        (["--columns", "ask=q"], "megacp reads; choose one of text, messages"),
        (["--columns", "prompt=q,completion=q"], "--columns names q twice"),
        (["--columns", "prompt=q,prompt=a"], "--columns names prompt twice"),
        (
            ["--columns", "prompt=q", "--ignore-keys", "q"],
            "--ignore-keys q: --columns reads these keys",
        ),
        (["--columns", "text=q", "--text-key", "a"], "--text-key a and --columns both name"),
        (["--roles", "bot=assistant"], "reverse the names, as in --roles assistant=bot"),
        (
            ["--roles", "user=a", "--context-roles", "a"],
            "--context-roles a: --roles gives these names another role",
        ),
    ):
        assert main([*given, *flags]) == 2
        assert named in capsys.readouterr().err
    for text in ("prompt", "prompt=", "=q"):
        with pytest.raises(SystemExit, match="2"):
            main([*given, "--columns", text])
        assert "OURS=THEIRS" in capsys.readouterr().err
    assert main([*given, "--columns", "prompt=q,completion=a", "--roles", "user=x,user=y"]) == 0


def test_a_prompt_is_asked_in_the_form_in_which_answers_were_learned(base: Path) -> None:
    tokenizer = load_tokenizer(str(base))
    plain, as_messages = PromptMaker(tokenizer), PromptMaker(tokenizer, as_messages=True)
    (asked,) = plain.of_record(ALPACA)
    assert (
        asked.question == alpaca_prompt(ALPACA["instruction"], ALPACA["input"])
        and asked.expected == "42"
    )
    (asked,) = as_messages.of_record(ALPACA)
    (same,) = plain.of_record({"messages": TALK})
    assert asked.tokens.tolist() == same.tokens.tolist()
    assert plain.of_question(TALK[0]["content"]).tokens.tolist() == same.tokens.tolist()


def test_variables_of_a_template_are_needed_only_where_they_say_something(
    model: Path, tmp_path: Path
) -> None:
    blank = {"enable_thinking": False, "custom_instructions": "", "xml_tools": [], "none": None}
    plain = built(tmp_path / "plain", model, {"messages": TALK})[0]
    assert (
        built(tmp_path / "blank", model, {"messages": TALK, "chat_template_kwargs": blank})[0]
        == plain
    )
    assert built(
        tmp_path / "ours",
        model,
        {"messages": TALK, "chat_template_kwargs": blank},
        chat_template="ignore",
    )
    given = {"messages": TALK, "chat_template_kwargs": {**blank, "custom_instructions": "Be kind."}}
    with pytest.raises(
        ValueError,
        match="custom_instructions`: .*--ignore-keys chat_template_kwargs",
    ):
        built(tmp_path / "said", model, given)
    assert built(tmp_path / "said", model, given, ignore_keys=("chat_template_kwargs",))[0] == plain


def test_the_note_of_a_build_names_the_template_that_wrote_alpacas_records(
    model: Path, tmp_path: Path
) -> None:
    stream = io.StringIO()
    source = write(tmp_path / "a.jsonl", ALPACA)
    build(settings([source], tmp_path / "d", tokenizer=str(model), seq_length=512), stream)
    assert re.search(
        r"tokenizer_config.json writes the messages \(--chat-template auto\)", stream.getvalue()
    )
