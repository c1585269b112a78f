"""Forms of records that other tools write: each says what messages or texts of our own say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.records.parts import END, Media, SamplePart
from megacp.prepare.records.record import RecordError
from megacp.prepare.records.record_keys import Accepted
from megacp.prepare.records.sample import parse_record

ASK, TELL = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
TURNS = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nGreet.\n\n### Response:\n"
)
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nGreet.\n\n### Input:\nAda\n\n"
    "### Response:\n"
)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"conversations": TURNS}, [ASK, TELL]),
        ({"conversations": [ASK, TELL]}, [ASK, TELL]),
        ({"conversations": TURNS, "system": "S"}, [{"role": "system", "content": "S"}, ASK, TELL]),
        ({"conversations": TURNS, "system": ""}, [ASK, TELL]),
        (
            {"conversations": [{"from": "system", "value": "S"}, {"from": "observation", "value": "O"}, *TURNS]},
            [{"role": "system", "content": "S"}, {"role": "tool", "content": "O"}, ASK, TELL],
        ),
        ({"conversations": [TURNS[0], {**TURNS[1], "weight": 0.5}]}, [ASK, {**TELL, "weight": 0.5}]),
        ({"prompt": [ASK], "completion": [TELL]}, [ASK, TELL]),
        ({"prompt": [ASK, TELL, ASK], "completion": [TELL]}, [ASK, {**TELL, "weight": 0}, ASK, TELL]),
        ({"prompt": [ASK, {**TELL, "weight": None}], "completion": [TELL]}, [ASK, {**TELL, "weight": 0}, TELL]),
    ],
)
def test_messages_of_other_tools_are_messages(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert parse_record({**record, "id": 1, "url": "u"}) == parse_record({"messages": messages, "id": 1})
    branched = parse_record({**record, "branches": [{"messages": [ASK, TELL]}, "words"]})
    assert branched == parse_record({"messages": messages, "branches": [{"conversations": TURNS}, "words"]})


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 =", " 4"),
        ({"instruction": "Greet.", "output": "Hi"}, PROMPT, "Hi"),
        ({"instruction": "Greet.", "input": "", "output": "Hi"}, PROMPT, "Hi"),
        ({"instruction": "Greet.", "input": None, "output": "Hi", "weight": 2}, PROMPT, "Hi"),
        ({"instruction": "Greet.", "input": "Ada", "output": "Hi Ada"}, WITH_INPUT, "Hi Ada"),
    ],
)
def test_the_answer_to_a_written_prompt_is_learned_with_its_end(
    record: dict[str, Any], prompt: str, answer: str
) -> None:
    assert parse_record(record).prefix == (SamplePart(prompt, 0.0), SamplePart(answer, 1.0), END)
    alone = parse_record({"prompt": "", "completion": answer}).prefix
    assert alone == (SamplePart(answer, 1.0), END)


IMAGE, VIDEO = ({"type": kind, "path": f"{kind}.bin"} for kind in ("image", "video"))


@pytest.mark.parametrize(
    ("record", "content"),
    [
        ({"image": "image.bin", "conversations": "<image>\nQ"}, [IMAGE, {"type": "text", "text": "\nQ"}]),
        ({"images": ["image.bin"], "messages": "Q <image>"}, [{"type": "text", "text": "Q "}, IMAGE]),
        ({"image": ["image.bin"], "messages": "<image><image>", "also": "image.bin"}, [IMAGE, IMAGE]),
        ({"image": {"bytes": b"x", "path": "a.png"}, "messages": "<image>"}, [{"type": "image", "bytes": b"x"}]),
        ({"image": {"bytes": None, "path": "image.bin"}, "messages": "<image>"}, [IMAGE]),
        ({"images": [b"x"], "messages": "<image>"}, [{"type": "image", "bytes": b"x"}]),
        ({"images": [{"base64": "eA=="}], "messages": "<image>"}, [{"type": "image", "base64": "eA=="}]),
        ({"video": "video.bin", "messages": "<video>Q <image>"}, [VIDEO, {"type": "text", "text": "Q <image>"}]),
        (
            {"images": ["image.bin"], "messages": [{"type": "image"}, {"type": "text", "text": "Q"}]},
            [IMAGE, {"type": "text", "text": "Q"}],
        ),
    ],
)
def test_images_stand_where_a_text_leaves_a_place_for_them(record: dict[str, Any], content: list[Any]) -> None:
    record = dict(record)
    if "also" in record:
        record["image"] = [*record["image"], record.pop("also")]
    key = "conversations" if "conversations" in record else "messages"
    record[key] = [{"role": "user", "content": record[key]}, TELL]
    found = parse_record(record, media=True).prefix
    expected = parse_record({"messages": [{"role": "user", "content": content}, TELL]}, media=True).prefix

    def shown(pieces: tuple[SamplePart, ...]) -> list[Any]:
        return [(p.text, p.weight, p.media and (p.media.kind, p.media.source, p.media.value)) for p in pieces]

    assert shown(found) == shown(expected)


def test_the_image_feature_of_datasets_is_a_source_of_a_part() -> None:
    part = {"type": "image", "image": {"bytes": b"x", "path": "a.png"}}
    (piece, _) = parse_record({"content": [part]}, media=True).prefix
    assert piece.media == Media("image", "bytes", b"x", "content[0].image")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x", "conversations": TURNS}, "it has `text` and `conversations`; --ignore-keys leaves one out"),
        (
            {"instruction": "a", "output": "b", "prompt": "a", "completion": "b"},
            "it has `prompt` with `completion` and `instruction` with `output`",
        ),
        ({"messages": [ASK, TELL], "conversations": TURNS}, "it has `messages` and `conversations`"),
        ({"prompt": "a"}, "missing key: a record needs exactly one of .*found `prompt`"),
        ({"instruction": "a", "input": "b"}, "missing key.*found `instruction`, `input`"),
        ({"prompt": "a", "completion": [TELL]}, "`prompt` is a string and `completion` a list: both must be strings"),
        ({"prompt": "a", "completion": ""}, "`completion` is empty"),
        ({"prompt": "a", "completion": "b", "chosen": "c"}, "`chosen` looks like content"),
        ({"instruction": "", "output": "b"}, "`instruction` is empty"),
        ({"instruction": "a", "input": 3, "output": "b"}, "`input` is a number"),
        ({"instruction": "a", "output": "b", "history": [["x", "y"]]}, "`history` is unknown and would be lost"),
        ({"conversations": "x"}, "`conversations` must be a list of at least one message"),
        ({"conversations": [{"from": "gpt"}]}, r"`conversations\[0\]` must be an object with `from` and `value`"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "'function_call' is none of the roles"),
        ({"conversations": [{**TURNS[0], "loss": False}, TURNS[1]]}, r"`conversations\[0\]`: `loss` is unknown here"),
        (
            {"conversations": [{"from": "system", "value": "S"}, *TURNS], "system": "T"},
            r"`system` and `conversations\[0\]` are both what the system says",
        ),
        ({"conversations": TURNS, "tools": "[]{"}, "`tools` looks like content.*nothing of tools is read"),
        ({"images": ["a"], "messages": [ASK, TELL]}, "`images` looks like content"),
        (
            {"images": ["a", "b"], "messages": [{**ASK, "content": "<image>"}, TELL]},
            "`images` names 2 and the messages have 1 places for them",
        ),
        (
            {"image": "a", "images": ["b"], "messages": [{**ASK, "content": "<image>"}, TELL]},
            "`image` and `images` both name what stands at <image>",
        ),
        ({"image": {"bytes": None, "path": None}, "messages": [{**ASK, "content": "<image>"}]}, "neither `bytes` nor"),
    ],
)
def test_what_a_form_cannot_be_is_refused_by_name(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse_record(record, media=True)


def test_every_example_of_the_page_is_a_record_that_teaches() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    examples = re.findall(r"^\|[^|]*\| `(\{.*\})` \|[^|]*\|$", page, re.MULTILINE)
    assert len(examples) == 8
    for example in examples:
        pieces = parse_record(json.loads(example), media=True).prefix
        assert any(piece.text and piece.weight for piece in pieces)


def test_a_text_build_names_the_image_that_it_cannot_hold() -> None:
    record = {"image": "a.png", "conversations": [{"from": "human", "value": "<image>Q"}, TURNS[1]]}
    with pytest.raises(RecordError, match=re.escape("`conversations[0].content[0]` is of type image: this build")):
        parse_record(record)
    told = parse_record({"conversations": [{"from": "human", "value": "<image>Q"}, TURNS[1]]})
    assert told.prefix[1].text == "<image>Q"


def test_a_form_is_chosen_by_ignoring_the_keys_of_the_other() -> None:
    record = {"messages": [ASK, TELL], "conversations": TURNS[:1]}
    accepted = Accepted(("conversations",))
    assert parse_record(record, accepted=accepted) == parse_record({"messages": [ASK, TELL]})
    both = {"text": "x", "instruction": "a", "output": "b"}
    only = Accepted(("instruction", "output"))
    assert parse_record(both, accepted=only) == parse_record({"text": "x"})
    assert parse_record({"output": "b", "instruction": "a"}, "output", accepted=Accepted(("instruction",))) == (
        parse_record({"text": "b"})
    )


@pytest.mark.parametrize("text", ["<image>\nWhat is shown?", "What is shown?\n<image>", "<image> What?"])
@pytest.mark.parametrize("images", [{}, {"images": []}, {"image": None}])
def test_a_place_for_an_image_that_nothing_names_is_refused_where_images_may_be(
    text: str, images: dict[str, Any]
) -> None:
    """Would catch an answer about a picture that is learned without the picture."""
    record = {**images, "conversations": [{"from": "human", "value": text}, TURNS[1]]}
    with pytest.raises(RecordError, match=re.escape("`conversations[0]` has a place <image> and the record names no")):
        parse_record(record, media=True)
    kept = parse_record(record, media=True, accepted=Accepted(("<image>",)))
    assert text in str(kept.prefix[1].text) and parse_record(record) == kept


def test_a_word_about_images_is_no_place_for_one() -> None:
    said = [{**ASK, "content": "what does <image> mean in SVG?"}, {**TELL, "content": "<image>\n</image>"}]
    assert parse_record({"messages": said}, media=True) == parse_record({"messages": said})
