"""How --chat-template chooses a template, and how a dataset records it."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.prepare.command import main
from megacp.prepare.packs.run import build
from megacp.prepare.records.chat_template import OURS, load_chat_template
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.prepare.verify import verify
from megacp.training.data.blend import PackBlend
from megacp.training.data.manifest import DatasetManifest
from megacp.training.data.reader import PackedDataset
from megacp.training.data.vision.molmo2 import image_layout
from megacp.training.loop.sources import Sources
from tests.prepare.media.pictures import TINY, encoded, noise
from tests.prepare.packs.builds import documents, files, run, settings
from tests.prepare.templates.public import TEMPLATES, tokenizer_at, write_tokenizer
from tests.prepare.templates.test_public import ASK, TELL, expected, library

TWO = [
    {"name": "default", "template": "A"},
    {"name": "tool_use", "template": "B"},
    {"name": "rag", "template": "C"},
]


def text(folder: Path, choice: str = "auto", today: str | None = None) -> str:
    return load_chat_template(choice, tokenizer_at(folder / "tokenizer.json"), today).text


def test_a_template_is_found_where_the_library_finds_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(
        ValueError,
        match=f"auto: {tmp_path} has no chat template; give auto, .* chatml, qwen3, qwen3_5, or "
        "FILE.jinja",
    ):
        text(tmp_path)
    assert text(tmp_path, "chatml") == OURS["chatml"]
    (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
    assert text(tmp_path) == "old"
    write_tokenizer(tmp_path, chat_template="stated")
    assert text(tmp_path) == "stated"
    write_tokenizer(tmp_path, chat_template=TWO)
    assert text(tmp_path) == "A" and text(tmp_path, "rag") == "C"
    with pytest.raises(
        ValueError, match="x: .* has the templates default, rag, tool_use; give auto"
    ):
        text(tmp_path, "x")
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "more.jinja").write_text("more")
    assert text(tmp_path) == "file" and text(tmp_path, "more") == "more"
    assert library(tmp_path, "").from_pretrained(tmp_path).chat_template == {
        "default": "file",
        "more": "more",
    }
    (tmp_path / "own.jinja").write_text("own")
    assert text(tmp_path, str(tmp_path / "own.jinja")) == "own"
    with pytest.raises(ValueError, match="no.jinja: no such file"):
        text(tmp_path, str(tmp_path / "no.jinja"))
    (tmp_path / "chat_template.jinja").write_text("")
    assert text(tmp_path) == ""


@pytest.mark.parametrize(
    ("config", "choice", "today", "named"),
    [
        ({"chat_template": "{% if %}"}, "auto", None, "not a Jinja template"),
        ({"chat_template": TEMPLATES["smollm_3"]}, "auto", None, "--chat-template-date YYYY-MM-DD"),
        (
            {"chat_template": TEMPLATES["smollm_3"]},
            "auto",
            "tomorrow",
            "--chat-template-date tomorrow",
        ),
        ({"eos_token": "<nowhere>"}, "chatml", None, "<nowhere>"),
        ({"im_end": "<|im_stop|>"}, "chatml", None, r"<\|im_start\|>"),
    ],
)
def test_a_template_that_cannot_be_applied_is_refused_before_a_record_is_read(
    tmp_path: Path, config: dict[str, Any], choice: str, today: str | None, named: str
) -> None:
    stop = config.pop("im_end", "<|im_end|>")
    path = write_tokenizer(tmp_path, **config)
    path.write_text(path.read_text().replace("<|im_end|>", stop))
    with pytest.raises(ValueError, match=named):
        text(tmp_path, choice, today)


def test_a_template_needs_a_tokenizer_with_special_tokens_and_jinja(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="--chat-template auto needs a tokenizer.json"):
        load_chat_template("auto", load_tokenizer("byte"), None)
    write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[data\]'"):
        text(tmp_path, "chatml")


@pytest.mark.parametrize("older", [False, True])
def test_tokens_that_only_the_settings_add_are_special_as_in_the_library(
    tmp_path: Path, older: bool
) -> None:
    path = write_tokenizer(tmp_path)
    content = json.loads(path.read_text())
    content["added_tokens"] = [
        t for t in content["added_tokens"] if t["content"] not in ("</s>", "<|im_end|>")
    ]
    content["model"]["vocab"] |= {"</s>": 900, "<|im_end|>": 901}
    path.write_text(json.dumps(content))
    named = {"eos_token": "</s>", "additional_special_tokens": ["<|im_end|>"]}
    if older:
        write = json.loads((tmp_path / "tokenizer_config.json").read_text())
        del write["eos_token"]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(write))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **named}))
    template = load_chat_template("chatml", tokenizer_at(path), None)
    text = template.render([ASK, TELL]).text + "</s>"
    theirs = library(tmp_path, OURS["chatml"])
    assert template.encode(text)[0].tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert {900, 901} <= set(template.encode(text)[0].tolist()) and template.special[
        "eos_token"
    ] == "</s>"


def records(path: Path, count: int = 40) -> list[dict[str, Any]]:
    made = [
        {"id": i, "messages": [ASK, {**TELL, "content": f"{'It is ' * (i % 7)}{i}."}] * (1 + i % 3)}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in made))
    return made


def test_messages_are_written_by_the_template_of_the_tokenizer_unasked(tmp_path: Path) -> None:
    """The template is read only if there are messages; a build that used one cannot continue with
    another.
    """

    def built(name: str, *inputs: str, part: tuple[int, int] | None = None, **more: Any) -> Any:
        given: dict[str, Any] = {
            "tokenizer": str(tmp_path / "t"),
            "seq_length": 512,
            "unit_bytes": 10,
            **more,
        }
        stream, paths = io.StringIO(), [tmp_path / f"{each}.jsonl" for each in inputs]
        build(settings(paths, tmp_path / name, **given), stream, part=part)
        made = None if part else DatasetManifest.read(tmp_path / name).chat_template
        return stream.getvalue(), made, documents(tmp_path / name) if part is None else None

    write(tmp_path / "text.jsonl", {"text": "only words"})
    made = records(tmp_path / "talks.jsonl", 4)
    write_tokenizer(tmp_path / "t", chat_template=TEMPLATES["qwen_25"])
    told, kept, found = built("own", "talks")
    assert f"{tmp_path / 't/tokenizer_config.json'} writes the messages" in told
    assert (kept, found) == built("asked", "talks", chat_template="auto")[1:]
    assert kept["default"] == TEMPLATES["qwen_25"]
    assert found == [
        expected(library(tmp_path / "t", TEMPLATES["qwen_25"]), record["messages"])[0]
        for record in made
    ]
    ignored = built("ignored", "talks", chat_template="ignore")
    assert ignored[:2] == ("", {"default": ""}) and ignored[2] != found
    built("both", "text", "talks", part=(0, 9))
    built("half", "text", "talks", part=(1, 2))
    # the first writes the current date; the second is not a template
    for broken in (TEMPLATES["smollm_3"], "{% if %}"):
        write_tokenizer(tmp_path / "t", chat_template=broken)
        assert built("words", "text")[:2] == ("", None)
        with pytest.raises(
            ValueError,
            match=r"chat template in .*tokenizer_config.json cannot be used: .*--chat-template ignore",
        ):
            built(f"broken{len(broken)}", "talks", on_error="skip")
    for other, by in {"own": kept, "ignored": None}.items():  # texts fit any template
        mixed = PackBlend(
            [PackedDataset(tmp_path / name) for name in ("words", other)], [Fraction(1)] * 2
        )
        assert Sources(mixed, None, "").chat_template == by
    write_tokenizer(tmp_path / "t", chat_template=TEMPLATES["granite"])
    for name, inputs in {"own": ["talks"], "half": ["text", "talks"]}.items():
        with pytest.raises(ValueError, match=f"{name} was begun with another chat template"):
            built(name, *inputs)
    with pytest.raises(ValueError, match="begun with other settings.*chat_template: "):
        built("asked", "talks", chat_template="auto")
    # the part that is already built had no messages
    assert built("both", "text", "talks")[1]["default"] == TEMPLATES["granite"]
    # the converter's template, which only repeats the format of a build without a template
    (tmp_path / "t" / "chat_template.jinja").write_text("{#- megacp's messages. -#}")
    assert built("ours", "talks") == ignored


def test_the_command_takes_a_template_and_its_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tokenizer(tmp_path / "t", chat_template=TEMPLATES["smollm_3"])
    records(tmp_path / "a.jsonl", 3)
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
    flags += ["--chat-template", "auto"]
    assert main(["build", *flags, "--output", str(tmp_path / "d")]) == 2
    assert "--chat-template-date YYYY-MM-DD" in capsys.readouterr().err
    for date in ("2026-01-02", "2026-01-03"):
        assert (
            main(["build", *flags, "--output", str(tmp_path / date), "--chat-template-date", date])
            == 0
        )
    assert documents(tmp_path / "2026-01-02") != documents(tmp_path / "2026-01-03")


SIZES = {"a.png": (20, 30), "b.png": (40, 16)}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ PLACE }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = {"type": "text", "text": "What is this? "}
TALK = [
    {
        "role": "user",
        "content": [TEXT, {"type": "image", "path": "a.png"}, {"type": "image", "path": "b.png"}],
    }
]


def values(folder: Path, place: str) -> dict[str, Any]:
    path = write_tokenizer(folder / "t", chat_template=CHATML.replace("PLACE", place))
    (folder / "root").mkdir(exist_ok=True)
    for name, size in SIZES.items():
        (folder / "root" / name).write_bytes(encoded(noise(*size)))
    rules = dataclasses.replace(TINY, token_ids={}).with_token_ids(tokenizer_at(path))
    return {
        "tokenizer": str(path),
        "chat_template": "auto",
        "seq_length": 2048,
        "image_rules": rules,
        "image_root": str(folder / "root"),
    }


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def with_images(ids: list[int], weights: list[float], place: int, layouts: list[np.ndarray]) -> Any:
    """Return ids and weights with the tokens of an image at each `place`."""
    found: list[int] = []
    learned: list[float] = []
    left = list(layouts)
    for i, weight in zip(ids, weights, strict=True):
        new = left.pop(0).tolist() if i == place else [i]
        found, learned = found + new, learned + ([0.0] * len(new) if i == place else [weight])
    assert not left
    return found, learned


@pytest.mark.parametrize("form", ["messages", "llava"])
def test_images_stand_in_the_places_of_the_template(tmp_path: Path, form: str) -> None:
    given = values(tmp_path, "'<image>'")
    messages = [
        *TALK,
        TELL,
        {"role": "user", "content": [{"type": "image", "path": "a.png"}]},
        TELL,
    ]
    record: dict[str, Any] = {"messages": messages}
    if form == "llava":
        turns = ["What is this? <image><image>", TELL["content"], "<image>", TELL["content"]]
        said = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)]
        record = {"conversations": said, "images": ["a.png", "b.png", "a.png"]}
    run([write(tmp_path / "a.jsonl", record)], tmp_path / "d", **given)
    theirs = library(tmp_path / "t", CHATML.replace("PLACE", "'<image>'"))
    layouts = [
        image_layout(*SIZES[name], given["image_rules"]).tokens
        for name in ("a.png", "b.png", "a.png")
    ]
    place = theirs.convert_tokens_to_ids("<image>")
    ids, weights = with_images(*expected(theirs, messages), place, layouts)
    assert documents(tmp_path / "d") == [ids]
    found = PackedDataset(tmp_path / "d").pack(0).weights
    assert found is not None and found.tolist() == weights
    assert verify(tmp_path / "d") == []
    run([tmp_path / "a.jsonl"], tmp_path / "again", workers=2, **given)
    assert files(tmp_path / "again") == files(tmp_path / "d")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("''", "`messages[0].content[1].path`: the chat template writes '' for it"),
        (
            "'[IMG]'",
            "the chat template writes '[IMG]' for it, but image placeholders must consist of special tokens",
        ),
        ("'Picture: <image>'", "writes 'Picture: <image>' for it"),
        ("loop.index ~ '<image>'", "writes '2<image>' for it"),
        (
            "'<image>'",
            "`messages[0].content[1].path`: the chat template writes '' for it, but video placeholders",
        ),
    ],
)
def test_an_image_without_a_place_of_its_own_is_refused(
    tmp_path: Path, place: str, message: str
) -> None:
    said = json.dumps({"messages": [*TALK, TELL]}).replace(
        '"image"', '"video"' if place == "'<image>'" else '"image"'
    )
    source = write(tmp_path / "a.jsonl", json.loads(said))
    with pytest.raises(ValueError) as error:
        run([source], tmp_path / "d", **values(tmp_path, place))
    assert f"{source}:1: " in str(error.value) and message in str(error.value)


def test_a_record_without_images_beside_them_is_a_conversation_too(tmp_path: Path) -> None:
    given = values(tmp_path, "'<image>'")
    run([write(tmp_path / "a.jsonl", {"messages": [ASK, TELL]})], tmp_path / "d", **given)
    theirs = library(tmp_path / "t", CHATML.replace("PLACE", "'<image>'"))
    assert documents(tmp_path / "d") == [expected(theirs, [ASK, TELL])[0]]
