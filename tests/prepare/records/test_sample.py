"""Records to samples: every form, and a message for every way to be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megacp.prepare.records.parts import END, Media, SamplePart
from megacp.prepare.records.record import RecordError
from megacp.prepare.records.sample import decode_json, parse_record


def test_a_text_record_is_its_text_and_the_end_of_document() -> None:
    sample = parse_record({"text": "a b", "id": 7, "weight": 2, "url": "ignored"})
    assert sample.prefix == (SamplePart("a b", 1.0), END)
    assert (sample.identity, sample.weight, sample.branches) == ("7", 2.0, ())


def test_only_what_an_assistant_says_and_its_end_is_learned() -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert parse_record({"messages": messages}).prefix == (
        SamplePart("<|user|>\n", 0.0),
        SamplePart("2+2?", 0.0),
        SamplePart("\n<|assistant|>\n", 0.0),
        SamplePart("4", 1.0),
        END,
    )


def test_a_conversation_that_ends_with_a_user_ends_without_loss() -> None:
    messages = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": [{"type": "text", "text": "bye"}]}]
    pieces = parse_record({"messages": messages}).prefix
    assert pieces[-2:] == (SamplePart("bye", 0.0), SamplePart(None, 0.0))
    assert sum(piece.weight for piece in pieces) == 2.0


def test_the_texts_of_content_are_joined() -> None:
    record = {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert parse_record(record).prefix == (SamplePart("ab", 1.0), END)


def test_images_stand_where_they_are_named_and_are_not_learned() -> None:
    picture, words = {"type": "image", "path": "a.png"}, {"type": "text", "text": "x"}
    media = Media("image", "path", "a.png", "content[2].path")
    pieces = parse_record({"content": [words, words, picture]}, media=True).prefix
    assert pieces == (SamplePart("xx", 1.0), SamplePart(None, 0.0, media), SamplePart(None, 0.0))
    messages = [{"role": "assistant", "content": [picture, words]}]
    pieces = parse_record({"messages": messages}, media=True).prefix
    assert [piece.weight for piece in pieces] == [0.0, 0.0, 1.0, 1.0] and pieces[-1] == END


def test_branches_continue_the_record_which_itself_does_not_end() -> None:
    record = {"text": "Q", "branches": ["A1", {"messages": [{"role": "assistant", "content": "A2"}]}]}
    sample = parse_record(record)
    assert sample.prefix == (SamplePart("Q", 1.0),)
    assert sample.branches == (
        (SamplePart("A1", 1.0), END),
        (SamplePart("<|assistant|>\n", 0.0), SamplePart("A2", 1.0), END),
    )


def test_a_branch_of_messages_goes_on_as_in_one_conversation() -> None:
    """Would catch a model that is asked in other tokens than those it was trained on."""
    user, assistant = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    flat = parse_record({"messages": [user, user, assistant]}).prefix
    sample = parse_record({"messages": [user], "branches": [{"messages": [user, assistant]}] * 2})
    assert sample.prefix + sample.branches[0] == sample.prefix + sample.branches[1] == flat


def test_learned_text_after_an_image_begins_with_a_newline_that_is_not_learned() -> None:
    """Would catch captions whose first word nothing predicts."""
    picture, words = {"type": "image", "path": "a.png"}, {"type": "text", "text": "x"}
    line = SamplePart("\n", 0.0)
    asked = {"messages": [{"role": "user", "content": "?"}]}
    sample = parse_record({"content": [words, picture], "branches": ["a cat", {"content": [words]}, asked]}, media=True)
    assert [branch[0] for branch in sample.branches] == [line, line, SamplePart("<|user|>\n", 0.0)]
    assert parse_record({"content": [picture, words], "branches": ["a"]}, media=True).branches == (
        (SamplePart("a", 1.0), END),
    )


def test_a_branch_may_have_a_weight_of_its_own() -> None:
    sample = parse_record({"text": "Q", "weight": 2, "branches": ["a", {"text": "b", "weight": 0.25}]})
    assert [[piece.weight for piece in branch] for branch in sample.branches] == [[1.0, 1.0], [0.25, 0.25]]
    assert sample.weight == 2.0


def test_the_text_key_can_be_named() -> None:
    assert parse_record({"body": "x", "text": ""}, "body").prefix[0].text == "x"
    with pytest.raises(RecordError, match="`text` looks like content"):
        parse_record({"body": "x", "text": "y"}, "body")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (["text"], "must be a JSON object, found a list"),
        ({}, "missing key: a record needs exactly one of `text` or `messages` or `content` or .*, found no key"),
        ({"txt": "x", "id": 1}, "missing key.*found `txt`, `id`"),
        ({"text": "x", "messages": []}, "more than one content key"),
        ({"text": 3}, r"`text` is a number \(3\), it must be a string"),
        ({"text": None}, "missing key"),
        ({"text": ""}, "`text` is empty"),
        ({"messages": []}, "`messages` must be a list of at least one message, found an empty list"),
        ({"messages": [{"role": "user"}]}, r"`messages\[0\]` must be an object with `role` and `content`"),
        ({"messages": [{"role": "user", "content": 5}]}, r"`messages\[0\].content` is a number"),
        ({"content": [{"type": "image", "path": "a.jpg"}]}, r"`content\[0\]` is of type image.*vision build"),
        ({"content": [{"type": "video"}]}, "of type video"),
        ({"content": [{"type": "audio"}]}, r"`content\[0\]` must be an object with `type` text"),
        ({"content": [{"type": "text", "text": ""}]}, "`content` holds no text"),
        ({"text": "x", "id": 1.5}, r"`id` is a number \(1.5\), it must be a string or an integer"),
        ({"text": "x", "id": True}, "`id` is a boolean"),
        ({"text": "x", "weight": "1"}, "`weight` is a string, it must be a number"),
        ({"text": "x", "weight": -1}, "`weight` is -1, it must be a number from 0 to 1e\\+12"),
        ({"text": "x", "weight": 1e13}, "`weight` is 10000000000000.0, it must be a number from 0"),
        ({"text": "x", "weight": float("nan")}, "`weight` is nan"),
        ({"text": "x", "branches": []}, "`branches` must be a list of at least one continuation"),
        ({"text": "x", "branches": [3]}, r"`branches\[0\]` is a number"),
        ({"text": "x", "branches": ["a", ""]}, r"`branches\[1\]` is empty"),
        ({"text": "x", "branches": [{"text": "a", "branches": ["b"]}]}, r"`branches\[0\].branches`: a branch has none"),
        ({"text": "x", "branches": ["a", {"text": "a", "id": 1}]}, r"`branches\[1\].id`: a branch has none"),
        (
            {"text": "x", "branches": [{"text": "a", "weight": -1}]},
            r"`branches\[0\].weight` is -1, it must be a number",
        ),
        ({"text": "x", "branches": [{"no": 1}]}, r"missing key: branches\[0\] needs exactly one of"),
    ],
)
def test_a_wrong_record_is_refused_by_name(record: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse_record(record)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
        (b'{"text": "a"', "invalid JSON: Expecting ',' delimiter at column 13"),
        (b'{"text": "a"} {}', "invalid JSON: Extra data"),
        (b'{"text": "\\ud83d"}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": "lost", "text": "a"}', "the key `text` stands more than once"),
        (
            b'{"messages": [{"role": "user", "content": "q", "content": "r"}]}',
            "the key `content` stands more than once",
        ),
    ],
)
def test_a_line_that_is_not_json_text_is_refused(line: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode_json(line)


def test_escaped_characters_outside_the_basic_plane_are_text() -> None:
    assert decode_json(json.dumps({"text": "\U0001f642 \\ud"}).encode()) == {"text": "\U0001f642 \\ud"}
