"""Keys and roles beside those that are read: plain metadata may stand there, what would be lost in silence may not."""

from __future__ import annotations

from typing import Any

import pytest

from megacp.prepare.records.parts import END, SamplePart
from megacp.prepare.records.record import RecordError
from megacp.prepare.records.record_keys import FOR_PROMPTS, Accepted
from megacp.prepare.records.sample import parse_record

CORPORA: dict[str, dict[str, Any]] = {
    "web": {"dump": "CC", "url": "u", "date": "d", "file_path": "p", "language": "en", "language_score": 0.9},
    "counts": {"token_count": 3, "num_images": 2, "n_tokens": 5, "image_width": 640, "is_ok": True},
    "old web": {"timestamp": "2019", "url": "u"},
    "attributes": {"source": "s", "added": "x", "created": "y", "metadata": {"a": 1}, "attributes": {"b": [1]}},
    "code": {"hexsha": "1", "ext": "py", "max_stars_repo_path": "p", "max_stars_repo_licenses": ["MIT"], "lang": "Py"},
    "encyclopaedia": {"title": "t", "url": "u"},
    "tar and frame": {"__key__": "1", "__url__": "u", "__index_level_0__": 3},
    "picture database": {"image_id": 17, "imageId": "a7", "content_hash": "ab"},
    "nothing in them": {"images": [], "tools": None, "system": "", "reasoning_content": {}, "anything": None},
}


@pytest.mark.parametrize("name", CORPORA)
def test_ordinary_metadata_may_stand_beside_the_text(name: str) -> None:
    """Would catch a corpus that nobody can read without a list of flags."""
    assert parse_record({"text": "a", **CORPORA[name]}).prefix == (SamplePart("a", 1.0), END)


LOST = {
    "images": (["a.jpg"], "looks like content and would be lost .an image or a video is a part of `content`"),
    "image": ("a.jpg", "looks like content.*--ignore-keys image leaves it out"),
    "image_path": ("a.jpg", "looks like content"),
    "videos": (["a.mp4"], "looks like content"),
    "audio": ({"path": "a"}, "looks like content"),
    "tools": ([{"name": "f"}], "looks like content.*nothing of tools is read"),
    "tool_calls": ([1], "looks like content"),
    "reasoning_content": ("hm", "looks like content.*only `content` is read"),
    "prompt": ("a", "looks like content.*write it as `messages`"),
    "completion": ("b", "looks like content"),
    "system": ("be kind", "looks like content"),
    "loss_weight": (0, "looks like content.*a loss weight is `weight`"),
    "input_ids": ([1, 2], "looks like content"),
    "wieght": (0, "the nearest key is `weight`"),
    "Weight": (0, "the nearest key is `weight`"),
    "branch": (["a"], "the nearest key is `branches`"),
    "summary": ("s", "is unknown and would be lost.*--ignore-keys summary leaves it out"),
    "source_text": ("s", "looks like content"),
}


@pytest.mark.parametrize("key", LOST)
@pytest.mark.parametrize("record", [{"text": "see <image>"}, {"messages": [{"role": "assistant", "content": "a"}]}])
def test_a_key_that_would_be_lost_is_refused_unless_it_is_named(record: dict[str, Any], key: str) -> None:
    """Would catch words that are trained on without the image beside them."""
    value, message = LOST[key]
    with pytest.raises(RecordError, match=f"`{key}` .*{message}"):
        parse_record({**record, key: value})
    assert parse_record({**record, key: value}, accepted=Accepted((key,))) == parse_record(record)


def test_all_keys_of_a_record_that_would_be_lost_are_told_at_once() -> None:
    with pytest.raises(RecordError, match="--ignore-keys summary,images,zzz leaves it out"):
        parse_record({"text": "a", "summary": "s", "images": ["a"], "zzz": 1})


def test_a_pattern_covers_what_does_not_look_like_content() -> None:
    pattern = Accepted(("my_*",))
    assert parse_record({"text": "a", "my_note": "s"}, accepted=pattern).prefix == (SamplePart("a", 1.0), END)
    for key in ("my_image", "my_answer"):
        with pytest.raises(RecordError, match=f"`{key}` looks like content"):
            parse_record({"text": "a", key: "s"}, accepted=pattern)
    with pytest.raises(RecordError, match="the nearest key is `weight`"):
        parse_record({"text": "a", "wieght": 0}, accepted=Accepted(("*",)))


def test_keys_of_a_branch_are_told_with_their_branch() -> None:
    with pytest.raises(RecordError, match=r"`branches\[1\]`: `images` looks like content"):
        parse_record({"text": "a", "branches": ["b", {"text": "c", "images": ["x"]}]})


@pytest.mark.parametrize("key", ["name", "tool_calls", "reasoning_content", "url"])
def test_a_message_has_no_other_keys(key: str) -> None:
    message = {"role": "assistant", "content": "a"}
    with pytest.raises(RecordError, match=rf"`messages\[0\]`: `{key}` is unknown here and would be lost"):
        parse_record({"messages": [{**message, key: "x"}]}, accepted=Accepted(("*",)))
    plain = parse_record({"messages": [message]})
    assert parse_record({"messages": [{**message, key: None}]}) == plain
    assert parse_record({"messages": [{**message, key: "x"}]}, accepted=Accepted((key,))) == plain


@pytest.mark.parametrize(
    ("part", "lost"),
    [
        ({"type": "text", "text": "a", "path": "b.png"}, "path"),
        ({"type": "text", "text": "a", "weight": 0}, "weight"),
        ({"type": "image", "path": "b.png", "caption": "a"}, "caption"),
        ({"type": "video", "path": "b.mp4", "fps": 3}, "fps"),
        ({"type": "video", "path": "b.mp4", "start": 3.5}, "start"),
    ],
)
def test_a_part_has_no_other_keys(part: dict[str, Any], lost: str) -> None:
    """Would catch a cut of a video that is taken whole."""
    with pytest.raises(RecordError, match=rf"`content\[0\]`: `{lost}` is unknown here"):
        parse_record({"content": [part]}, media=True)


@pytest.mark.parametrize("role", ["gpt", "model", "bot", "human", "Assistant"])
def test_a_role_that_is_not_known_is_refused_unless_it_is_named_as_context(role: str) -> None:
    """Would catch conversations of which nothing is learned because the speaker is called otherwise."""
    record = {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(
        RecordError, match=rf"`messages\[0\].role`: '{role}' is none of the roles .*--context-roles {role}"
    ):
        parse_record(record)
    pieces = parse_record(record, accepted=Accepted((), (role,))).prefix
    assert [piece.weight for piece in pieces] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_the_roles_of_the_usual_formats_are_known() -> None:
    messages = [{"role": role, "content": "a"} for role in ("system", "developer", "user", "assistant", "tool")]
    assert sum(piece.weight for piece in parse_record({"messages": messages}).prefix) == 2.0


def test_a_message_has_a_weight_of_its_own() -> None:
    """Would catch a bad answer, marked with weight 0, that is learned."""
    said = [(0, "bad"), (0.5, "so so"), (None, "good")]
    messages = [{"role": "assistant", "content": text, "weight": weight} for weight, text in said]
    pieces = parse_record({"messages": [{"role": "user", "content": "?", "weight": 0}, *messages]}).prefix
    assert [piece.weight for piece in pieces] == [0.0, 0.0, *(0.0, 0.0, 0.0), *(0.0, 0.5, 0.5), *(0.0, 1.0, 1.0)]
    parts = [{"type": "text", "text": "x"}]
    pieces = parse_record({"messages": [{"role": "assistant", "content": parts, "weight": 2}]}).prefix
    assert [piece.weight for piece in pieces] == [0.0, 2.0, 2.0]


@pytest.mark.parametrize(("weight", "message"), [(1, "nothing that a user says is learned"), (-1, "a number from 0")])
def test_a_weight_that_cannot_be_is_refused(weight: float, message: str) -> None:
    with pytest.raises(RecordError, match=rf"`messages\[0\].weight` is {weight}.*{message}"):
        parse_record({"messages": [{"role": "user", "content": "?", "weight": weight}]})


def test_a_record_that_is_asked_may_have_any_metadata_but_nothing_that_would_be_missing() -> None:
    answer = {"role": "assistant", "content": "b", "weight": 0}
    sample = parse_record({"messages": [{"role": "human", "content": "a"}, answer], "zzz": 1}, accepted=FOR_PROMPTS)
    assert [piece.weight for piece in sample.prefix] == [0.0, 0.0, 0.0, 1.0, 1.0]
    sample = parse_record({"text": "a", "branches": [{"text": "b", "weight": 0}]}, accepted=FOR_PROMPTS)
    assert sample.branches == ((SamplePart("b", 1.0), END),)
    with pytest.raises(RecordError, match="`images` looks like content"):
        parse_record({"text": "a", "images": ["b.png"]}, accepted=FOR_PROMPTS)
    with pytest.raises(RecordError, match="'gpt' is none of the roles"):
        parse_record({"messages": [{"role": "gpt", "content": "a"}]}, accepted=FOR_PROMPTS)
