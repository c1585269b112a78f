"""Parse every form of record, and refuse invalid records by the name of the key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.records.record import (
    END,
    FOR_PROMPTS,
    Media,
    RecordError,
    RecordRules,
    SamplePart,
    decode_json,
)
from megacp.prepare.records.sample import parse_record

ASK, TELL = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
TURNS = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
IMAGE, VIDEO = ({"type": kind, "path": f"{kind}.bin"} for kind in ("image", "video"))
X = {"type": "text", "text": "x"}
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nGreet.\n\n### Response:\n"
)
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nGreet.\n\n### Input:\nAda\n\n"
    "### Response:\n"
)

IMAGES = RecordRules(media=True)


def said(*pieces: tuple[str | None, float]) -> tuple[SamplePart, ...]:
    return tuple(SamplePart(text, weight) for text, weight in pieces)


def test_texts_and_messages_are_learned_by_who_says_them() -> None:
    sample = parse_record({"text": "a b", "id": 7, "weight": 2, "url": "u"})
    assert (sample.prefix, sample.branches) == (said(("a b", 2), (None, 2)), ())
    for key in ("body", "content"):
        assert (
            parse_record({key: "x", "text": "", "ext": "py"}, RecordRules(key)).prefix[0].text
            == "x"
        )
    assert parse_record({"content": [X, X]}).prefix == (SamplePart("xx", 1.0), END)
    assert parse_record({"messages": [ASK, TELL]}).prefix == said(
        ("<|user|>\n", 0), ("Q", 0), ("\n<|assistant|>\n", 0), ("A", 1), (None, 1)
    )
    ended = parse_record({"messages": [TELL, {"role": "user", "content": [X]}]}).prefix
    assert ended[-2:] == said(("x", 0), (None, 0)) and sum(piece.weight for piece in ended) == 2.0
    roles = [
        {"role": role, "content": "a"}
        for role in ("system", "developer", "user", "assistant", "tool")
    ]
    assert sum(piece.weight for piece in parse_record({"messages": roles}).prefix) == 2.0
    weighted = [{**TELL, "weight": weight} for weight in (0, 0.5, None)] + [
        {**TELL, "content": [X], "weight": 2}
    ]
    pieces = parse_record({"messages": [{**ASK, "weight": 0}, *weighted]}).prefix
    assert [piece.weight for piece in pieces[2:]] == [0, 0, 0, 0, 0.5, 0.5, 0, 1, 1, 0, 2, 2]


def test_images_stand_where_they_are_named_and_are_not_learned() -> None:
    media = Media("image", "path", "image.bin", "content[2].path")
    pieces = parse_record({"content": [X, X, IMAGE]}, IMAGES).prefix
    assert pieces == (SamplePart("xx", 1.0), SamplePart(None, 0.0, media), SamplePart(None, 0.0))
    pieces = parse_record(
        {"messages": [{"role": "assistant", "content": [IMAGE, X]}]}, IMAGES
    ).prefix
    assert [piece.weight for piece in pieces] == [0.0, 0.0, 1.0, 1.0] and pieces[-1] == END
    part = {"type": "image", "image": {"bytes": b"x", "path": "a.png"}}
    assert parse_record({"content": [part]}, IMAGES).prefix[0].media == Media(
        "image", "bytes", b"x", "content[0].image"
    )


def test_branches_continue_the_record_which_itself_does_not_end() -> None:
    sample = parse_record(
        {"text": "Q", "weight": 2, "branches": ["a", {"messages": [TELL], "weight": 0.25}]}
    )
    assert sample.prefix == said(("Q", 2))
    assert sample.branches == (
        said(("a", 2), (None, 2)),
        said(("<|assistant|>\n", 0), ("A", 0.5), (None, 0.5)),
    )
    flat = parse_record({"messages": [ASK, ASK, TELL]}).prefix
    sample = parse_record({"messages": [ASK], "branches": [{"messages": [ASK, TELL]}] * 2})
    assert sample.prefix + sample.branches[0] == sample.prefix + sample.branches[1] == flat
    asked, line = {"messages": [ASK]}, SamplePart("\n", 0.0)
    sample = parse_record(
        {"content": [X, IMAGE], "branches": ["a cat", {"content": [X]}, asked]}, IMAGES
    )
    assert [branch[0] for branch in sample.branches] == [line, line, SamplePart("<|user|>\n", 0.0)]
    sample = parse_record({"content": [IMAGE, X], "branches": ["a"]}, IMAGES)
    assert sample.branches == ((SamplePart("a", 1.0), END),)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"conversations": TURNS}, [ASK, TELL]),
        ({"conversations": [ASK, TELL]}, [ASK, TELL]),
        ({"messages": [{**ASK, "id": "1"}, {**TELL, "id": 2}]}, [ASK, TELL]),
        ({"conversations": TURNS, "system": "S"}, [{"role": "system", "content": "S"}, ASK, TELL]),
        ({"conversations": TURNS, "system": ""}, [ASK, TELL]),
        (
            {
                "conversations": [
                    {"from": "system", "value": "S"},
                    {"from": "observation", "value": "O"},
                    *TURNS,
                ]
            },
            [{"role": "system", "content": "S"}, {"role": "tool", "content": "O"}, ASK, TELL],
        ),
        (
            {"messages": [ASK, {"role": "tool", "content": "O", "name": "look"}, TELL]},
            [ASK, {"role": "tool", "content": "O"}, TELL],
        ),
        (
            {"conversations": [TURNS[0], {**TURNS[1], "weight": 0.5}]},
            [ASK, {**TELL, "weight": 0.5}],
        ),
        ({"prompt": [ASK], "completion": [TELL]}, [ASK, TELL]),
        (
            {
                "instruction": "Q",
                "input": "x",
                "output": "A",
                "history": [["Q", "A"]],
                "system": "S",
            },
            [{"role": "system", "content": "S"}, ASK, TELL, {**ASK, "content": "Q\nx"}, TELL],
        ),
        (
            {"prompt": [ASK, TELL, ASK], "completion": [TELL]},
            [ASK, {**TELL, "weight": 0}, ASK, TELL],
        ),
        (
            {"prompt": [ASK, {**TELL, "weight": None}], "completion": [TELL]},
            [ASK, {**TELL, "weight": 0}, TELL],
        ),
    ],
)
def test_messages_of_other_tools_are_messages(
    record: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    assert parse_record({**record, "id": 1, "url": "u"}) == parse_record(
        {"messages": messages, "id": 1}
    )
    branched = parse_record({**record, "branches": [{"messages": [ASK, TELL]}, "words"]})
    assert branched == parse_record(
        {"messages": messages, "branches": [{"conversations": TURNS}, "words"]}
    )


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 =", " 4"),
        ({"instruction": "Greet.", "output": "Hi"}, PROMPT, "Hi"),
        ({"instruction": "Greet.", "input": "", "output": "Hi"}, PROMPT, "Hi"),
        ({"instruction": "Greet.", "input": None, "output": "Hi", "weight": 2}, PROMPT, "Hi"),
        ({"instruction": "Greet.", "output": "Hi", "history": [], "system": ""}, PROMPT, "Hi"),
        ({"instruction": "Greet.", "input": "Ada", "output": "Hi Ada"}, WITH_INPUT, "Hi Ada"),
    ],
)
def test_the_answer_to_a_written_prompt_is_learned_with_its_end(
    record: Any, prompt: str, answer: str
) -> None:
    weight = record.get("weight", 1)
    assert parse_record(record).prefix == said((prompt, 0), (answer, weight), (None, weight))
    assert parse_record({"prompt": "", "completion": answer}).prefix == said((answer, 1), (None, 1))


@pytest.mark.parametrize(
    ("named", "text", "content"),
    [
        ({"image": "image.bin"}, "<image>\nQ", [IMAGE, {"type": "text", "text": "\nQ"}]),
        ({"images": ["image.bin"]}, "Q <image>", [{"type": "text", "text": "Q "}, IMAGE]),
        ({"image": ["image.bin", "image.bin"]}, "<image><image>", [IMAGE, IMAGE]),
        (
            {"image": {"bytes": b"x", "path": "a.png"}},
            "<image>",
            [{"type": "image", "bytes": b"x"}],
        ),
        ({"image": {"bytes": None, "path": "image.bin"}}, "<image>", [IMAGE]),
        ({"images": [b"x"]}, "<image>", [{"type": "image", "bytes": b"x"}]),
        ({"images": [{"base64": "eA=="}]}, "<image>", [{"type": "image", "base64": "eA=="}]),
        (
            {"video": "video.bin"},
            "<video>Q <image>",
            [VIDEO, {"type": "text", "text": "Q <image>"}],
        ),
        ({"images": ["image.bin"]}, [{"type": "image"}, X], [IMAGE, X]),
        (
            {},
            [{"type": "image_url", "image_url": {"url": "a/b.png", "detail": "low"}}],
            [{"type": "image", "path": "a/b.png"}],
        ),
        (
            {},
            [{"type": "image_url", "image_url": "data:image/png;base64,eA=="}],
            [{"type": "image", "base64": "data:image/png;base64,eA=="}],
        ),
        (
            {},
            [{"type": "image", "url": "https://a.org/b.png"}],
            [{"type": "image", "path": "https://a.org/b.png"}],
        ),
    ],
)
def test_images_stand_where_a_text_leaves_a_place_for_them(
    named: dict[str, Any], text: Any, content: Any
) -> None:
    found = parse_record(
        {"messages": [{"role": "user", "content": text}, TELL], **named}, IMAGES
    ).prefix
    expected = parse_record(
        {"messages": [{"role": "user", "content": content}, TELL]}, IMAGES
    ).prefix

    def shown(pieces: tuple[SamplePart, ...]) -> list[Any]:
        return [
            (p.text, p.weight, p.media and (p.media.kind, p.media.source, p.media.value))
            for p in pieces
        ]

    assert shown(found) == shown(expected)


@pytest.mark.parametrize(
    ("record", "placed"),
    [
        ({"image": "a", "text": "x"}, {"text": "<image>x"}),
        ({"images": ["a", b"y"], "text": "x", "weight": 2}, {"text": "<image><image>x"}),
        ({"image": {"bytes": b"y", "path": "a"}, "caption": "x"}, {"caption": "<image>x"}),
        ({"image": "a", "content": [X]}, {"content": [{"type": "text", "text": "<image>x"}]}),
        ({"video": "v", "caption": "x"}, {"caption": "<video>x"}),
        ({"image": "a", "prompt": "Q", "completion": "A"}, {"prompt": "<image>Q"}),
        (
            {"image": "a", "conversations": TURNS},
            {"conversations": [{**TURNS[0], "value": "<image>\nQ"}, TURNS[1]]},
        ),
        (
            {"images": ["a", "b"], "messages": [TELL, ASK]},
            {"messages": [TELL, {**ASK, "content": "<image><image>Q"}]},
        ),
    ],
)
def test_images_without_a_place_stand_at_the_beginning_of_what_is_asked(
    record: Any, placed: Any
) -> None:
    """LLaVA's own code puts a newline after each image."""
    pieces = parse_record(record, IMAGES).prefix
    assert pieces == parse_record({**record, **placed}, IMAGES).prefix and any(
        piece.media for piece in pieces
    )
    with pytest.raises(RecordError, match="refers to an image or a video .*--image-root"):
        parse_record(record)


def test_a_caption_is_learned_around_its_images() -> None:
    found = parse_record({"image": "a", "text": "x<image>x"}, IMAGES).prefix
    assert [(piece.text, piece.weight) for piece in found] == [
        ("x", 1),
        (None, 0),
        ("x", 1),
        (None, 1),
    ]
    written = parse_record({"image": "a", "prompt": "Q", "completion": "A"}, IMAGES).prefix
    assert [(piece.text, piece.weight) for piece in written] == [
        (None, 0),
        ("Q", 0),
        ("A", 1),
        (None, 1),
    ]


@pytest.mark.parametrize(
    "text", ["<image>\nWhat is shown?", "What is shown?\n<image>", "<image> What?"]
)
@pytest.mark.parametrize("images", [{}, {"images": []}, {"image": None}])
def test_a_place_for_an_image_that_nothing_names_is_refused_where_images_may_be(
    text: str, images: Any
) -> None:
    record = {**images, "conversations": [{"from": "human", "value": text}, TURNS[1]]}
    with pytest.raises(
        RecordError, match=re.escape("`conversations[0]` has a placeholder <image>")
    ):
        parse_record(record, IMAGES)
    kept = parse_record(record, RecordRules(media=True, ignore_keys=("<image>",)))
    assert text in str(kept.prefix[1].text) and parse_record(record) == kept
    words = [
        {**ASK, "content": "what does <image> mean in SVG?"},
        {**TELL, "content": "<image>\n</image>"},
    ]
    assert parse_record({"messages": words}, IMAGES) == parse_record({"messages": words})


def test_every_example_of_the_page_is_a_record_that_teaches() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    examples = re.findall(r"^\|[^|]*\| `([{\[].*[}\]])` \|[^|]*\|$", page, re.MULTILINE)
    assert len(examples) == 12
    for example in examples:
        pieces = parse_record(json.loads(example), IMAGES).prefix
        assert any(piece.text and piece.weight for piece in pieces)


# ---- unknown keys and roles

METADATA: list[dict[str, Any]] = [
    {
        "dump": "CC",
        "url": "u",
        "date": "d",
        "file_path": "p",
        "language": "en",
        "language_score": 0.9,
    },
    {"token_count": 3, "num_images": 2, "n_tokens": 5, "image_width": 640, "is_ok": True},
    {"source": "s", "added": "x", "created": "y", "metadata": {"a": 1}, "attributes": {"b": [1]}},
    {
        "hexsha": "1",
        "ext": "py",
        "max_stars_repo_path": "p",
        "max_stars_repo_licenses": ["MIT"],
        "lang": "Py",
    },
    {"title": "t", "timestamp": "2019", "__key__": "1", "__url__": "u", "__index_level_0__": 3},
    {"image_id": 17, "imageId": "a7", "content_hash": "ab"},
    {
        "key": "0001",
        "status": "success",
        "error_message": None,
        "original_width": 3,
        "exif": "{}",
        "sha256": "ab",
    },
    {"similarity": 0.3, "punsafe": 0.1, "pwatermark": 0.2, "NSFW": "UNLIKELY", "LICENSE": "?"},
    {"images": [], "tools": None, "system": "", "reasoning_content": {}, "anything": None},
]
LOST = {
    **{
        "images": ["a.jpg"],
        "image": "a.jpg",
        "image_path": "a.jpg",
        "videos": ["a.mp4"],
        "audio": {"path": "a"},
    },
    **{
        "tools": [{"name": "f"}],
        "tool_calls": [1],
        "reasoning_content": "hm",
        "prompt": "a",
        "completion": "b",
    },
    **{"loss_weight": 0, "input_ids": [1, 2], "wieght": 0, "Weight": 0, "branch": ["a"]},
    **{"summary": "s", "source_text": "s", "target": "t", "labels": [1], "chosen": "c"},
}


def test_ordinary_metadata_may_stand_beside_the_text() -> None:
    for keys in METADATA:
        assert parse_record({"text": "a", **keys}).prefix == (SamplePart("a", 1.0), END), keys


@pytest.mark.parametrize("key", LOST)
def test_a_key_that_would_be_lost_is_refused_unless_it_is_named(key: str) -> None:
    for record in ({"text": "see <image>"}, {"messages": [TELL]}):
        advice = "--image-root" if re.match("image|video", key) else f"--ignore-keys {key} "
        with pytest.raises(RecordError, match=f"`{key}` .*{advice}") as refused:
            parse_record({**record, key: LOST[key]})
        # ignoring the key would drop the image
        assert ("--ignore-keys" in str(refused.value)) == (advice != "--image-root")
        assert parse_record(
            {**record, key: LOST[key]}, RecordRules(ignore_keys=(key,))
        ) == parse_record(record)


def test_all_keys_that_would_be_lost_are_told_and_a_pattern_covers_all_but_images() -> None:
    with pytest.raises(RecordError, match="--ignore-keys summary,zzz "):
        parse_record({"text": "a", "summary": "s", "images": ["a"], "zzz": 1})
    pattern = RecordRules(ignore_keys=("my_*",))
    assert parse_record({"text": "a", "my_note": "s"}, pattern).prefix == (
        SamplePart("a", 1.0),
        END,
    )
    with pytest.raises(RecordError, match="`my_image` refers to an image"):
        parse_record({"text": "a", "my_image": "s"}, pattern)
    for key in ("name", "tool_calls", "reasoning_content", "url"):
        with pytest.raises(RecordError, match=rf"`messages\[0\]`: `{key}` is unknown"):
            parse_record({"messages": [{**TELL, key: "x"}]}, RecordRules(ignore_keys=("*",)))
        assert parse_record({"messages": [{**TELL, key: None}]}) == parse_record(
            {"messages": [TELL]}
        )


def test_a_form_is_chosen_by_ignoring_the_keys_of_the_other() -> None:
    record = {"messages": [ASK, TELL], "conversations": TURNS[:1]}
    assert parse_record(record, RecordRules(ignore_keys=("conversations",))) == parse_record(
        {"messages": [ASK, TELL]}
    )
    both = {"text": "x", "instruction": "a", "output": "b"}
    assert parse_record(both, RecordRules(ignore_keys=("instruction", "output"))) == parse_record(
        {"text": "x"}
    )
    named = parse_record(
        {"output": "b", "instruction": "a"}, RecordRules("output", ignore_keys=("instruction",))
    )
    assert named == parse_record({"text": "b"})


@pytest.mark.parametrize("role", ["gpt", "model", "bot", "human", "Assistant"])
def test_a_role_that_is_named_as_context_is_never_learned(role: str) -> None:
    record = {"messages": [{"role": role, "content": "a"}, TELL]}
    pieces = parse_record(record, RecordRules(context_roles=(role,))).prefix
    assert [piece.weight for piece in pieces] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_record_that_is_asked_may_have_any_metadata_but_nothing_that_would_be_missing() -> None:
    sample = parse_record(
        {"messages": [{**ASK, "role": "human"}, {**TELL, "weight": 0}], "zzz": 1}, FOR_PROMPTS
    )
    assert [piece.weight for piece in sample.prefix] == [0.0, 0.0, 0.0, 1.0, 1.0]
    sample = parse_record({"text": "a", "branches": [{"text": "b", "weight": 0}]}, FOR_PROMPTS)
    assert sample.branches == ((SamplePart("b", 1.0), END),)
    with pytest.raises(RecordError):
        parse_record({"text": "a", "photos": ["b.png"]}, FOR_PROMPTS)


PLACE = [{**ASK, "content": "<image>"}, TELL]
REFUSED: list[tuple[Any, str]] = [
    (["text"], "a list"),
    ({}, "no key"),
    ({"txt": "x", "id": 1}, "`txt`, `id`"),
    ({"text": "x", "messages": []}, "more than one"),
    ({"text": 3}, "`text`"),
    ({"text": None}, "`text` is null"),
    ({"messages": [{"content": "x"}]}, "`messages[0]` has no `role`"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "use --chat-template"),
    ({"text": ""}, "`text`"),
    ({"messages": []}, "`messages`"),
    ({"messages": [{"role": "user"}]}, "`messages[0]`"),
    ({"messages": [{"role": "user", "content": 5}]}, "`messages[0].content`"),
    ({"messages": [{**ASK, "weight": 1}]}, "`messages[0].weight`"),
    ({"messages": [{**TELL, "weight": -1}]}, "`messages[0].weight`"),
    ({"content": [{"type": "audio"}]}, "`content[0]`"),
    ({"content": [{"type": "text", "text": ""}]}, "`content`"),
    ({"content": [{**X, "weight": 0}]}, "`content[0]`: `weight`"),
    ({"content": [{**IMAGE, "caption": "a"}]}, "`content[0]`: `caption`"),
    ({"content": [{**VIDEO, "start": 3.5}]}, "`content[0]`: `start`"),
    *(({"text": "x", "weight": weight}, "`weight`") for weight in ("1", -1, 1e13, float("nan"))),
    ({"text": "x", "branches": []}, "`branches`"),
    ({"text": "x", "branches": [3]}, "`branches[0]`"),
    ({"text": "x", "branches": ["a", ""]}, "`branches[1]`"),
    ({"text": "x", "branches": [{"text": "a", "weight": -1}]}, "`branches[0].weight`"),
    ({"text": "x", "branches": [{"no": 1}]}, "branches[0] needs"),
    ({"text": "x", "branches": ["b", {"text": "c", "photos": ["x"]}]}, "`branches[1]`: `photos`"),
    ({"text": "x", "conversations": TURNS}, "`text` and `conversations`"),
    (
        {"instruction": "a", "output": "b", "prompt": "a", "completion": "b"},
        "`prompt` with `completion` and",
    ),
    ({"prompt": "a"}, "`prompt`"),
    ({"instruction": "a", "input": "b"}, "`instruction`, `input`"),
    ({"prompt": "a", "completion": [TELL]}, "`completion`"),
    ({"prompt": "a", "completion": ""}, "`completion`"),
    ({"instruction": "", "output": "b"}, "`instruction`"),
    ({"instruction": "a", "input": 3, "output": "b"}, "`input`"),
    ({"instruction": "a", "output": "b", "history": [["x"]]}, "`history`"),
    ({"conversations": "x"}, "`conversations`"),
    ({"conversations": [{"from": "gpt"}]}, "`conversations[0]`"),
    (
        {"conversations": [{"from": "function_call", "value": "x"}]},
        "`conversations[0].value` is a string",
    ),
    ({"conversations": [{"from": "function_call", "value": "[3]"}]}, "must be a call with `name`"),
    ({"conversations": [{**TURNS[0], "loss": False}, TURNS[1]]}, "`conversations[0]`: `loss`"),
    (
        {"conversations": [{"from": "system", "value": "S"}], "system": "T"},
        "`system` and `conversations[0]`",
    ),
    ({"images": ["a"], "messages": [TELL]}, "`images`"),
    ({"images": ["a", "b"], "messages": PLACE}, "`images` has 2 entries"),
    ({"image": "a", "images": ["b"], "messages": PLACE}, "`image` and `images`"),
    ({"image": {"bytes": None, "path": None}, "messages": PLACE}, "`messages[0].content[0].image`"),
]


@pytest.mark.parametrize(("record", "named"), REFUSED)
def test_a_wrong_record_is_refused_by_name(record: Any, named: str) -> None:
    with pytest.raises(RecordError, match=re.escape(named)):
        parse_record(record, IMAGES)


def test_a_text_build_names_the_image_that_it_cannot_hold() -> None:
    record = {"image": "a.png", "conversations": [{"from": "human", "value": "<image>Q"}, TURNS[1]]}
    with pytest.raises(
        RecordError, match=re.escape("`conversations[0].content[0]` has type image")
    ):
        parse_record(record)
    told = parse_record({"conversations": [{"from": "human", "value": "<image>Q"}, TURNS[1]]})
    assert told.prefix[1].text == "<image>Q"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b'{"text": "\xff"}', "byte 0xff at column 11"),
        (b'{"text": "a"', "at column 13$"),
        (
            b"{'text': 'a'}",
            "at column 2; .*Python object.*json.dumps",
        ),
        (b'{"text": "a"} {}', "at column 15"),
        (b'{"text": "\\ud83d"}', "surrogate"),
        (b'{"text": "a\tb"}', "Invalid control character at column 12"),
        (
            b'{"text": "a", "n": ' + b"1" * 5000 + b"}",
            "^an integer has more than 4,300 digits$",
        ),
    ],
)
def test_a_line_that_is_not_json_text_is_refused(line: bytes, named: str) -> None:
    with pytest.raises(RecordError, match=named):
        decode_json(line)
    assert decode_json(json.dumps({"text": "\U0001f642 \\ud"}).encode()) == {
        "text": "\U0001f642 \\ud"
    }
