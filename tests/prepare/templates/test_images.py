"""Images in conversations by a template: each stands exactly where the template has a place for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.core.data.geometry import image_layout
from megacp.core.data.reader import PackedDataset
from megacp.prepare.verify import verify
from tests.prepare.build.builds import documents, files, run
from tests.prepare.media.pictures import TINY, encoded, noise
from tests.prepare.templates.public import tokenizer_at, write_tokenizer
from tests.prepare.templates.test_public import ASK, TELL, expected, library

SIZES = {"a.png": (20, 30), "b.png": (40, 16)}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ PLACE }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = {"type": "text", "text": "What is this? "}
TALK = [{"role": "user", "content": [TEXT, {"type": "image", "path": "a.png"}, {"type": "image", "path": "b.png"}]}]


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
    """Ids and weights with the tokens of an image in each `place`."""
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
    messages = [*TALK, TELL, {"role": "user", "content": [{"type": "image", "path": "a.png"}]}, TELL]
    record: dict[str, Any] = {"messages": messages}
    if form == "llava":
        turns = ["What is this? <image><image>", TELL["content"], "<image>", TELL["content"]]
        said = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)]
        record = {"conversations": said, "images": ["a.png", "b.png", "a.png"]}
    run([write(tmp_path / "a.jsonl", record)], tmp_path / "d", **given)
    theirs = library(tmp_path / "t", CHATML.replace("PLACE", "'<image>'"))
    layouts = [image_layout(*SIZES[name], given["image_rules"]).tokens for name in ("a.png", "b.png", "a.png")]
    place = theirs.convert_tokens_to_ids("<image>")
    ids, weights = with_images(*expected(theirs, messages), place, layouts)
    assert documents(tmp_path / "d") == [ids]
    found = PackedDataset(tmp_path / "d").pack(0).weights
    assert found is not None and found.tolist() == weights
    assert verify(tmp_path / "d") == []
    run([tmp_path / "a.jsonl"], tmp_path / "again", workers=2, **given)
    assert files(tmp_path / "again") == files(tmp_path / "d")


def test_branches_over_a_shared_image_hold_it_once(tmp_path: Path) -> None:
    given = values(tmp_path, "'<image>'")
    others = [{"messages": [ASK, TELL]}, {"messages": [TALK[0], TELL]}]
    record = {"messages": TALK, "branches": others}
    run([write(tmp_path / "a.jsonl", record)], tmp_path / "d", **given)
    theirs = library(tmp_path / "t", CHATML.replace("PLACE", "'<image>'"))
    place = theirs.convert_tokens_to_ids("<image>")
    layouts = [image_layout(*SIZES[name], given["image_rules"]).tokens for name in SIZES]
    pack = PackedDataset(tmp_path / "d").pack(0)
    assert pack.branches is not None and pack.images is not None
    starts = pack.branches["start"].tolist()
    tokens = documents(tmp_path / "d")[0]
    for branch, (start, end) in zip(others, zip(starts, [*starts[1:], len(tokens)], strict=True), strict=True):
        messages = TALK + branch["messages"]
        ids, _ = with_images(*expected(theirs, messages), place, layouts * (1 + (branch is others[1])))
        assert tokens[: starts[0]] + tokens[start:end] == ids
    assert len(pack.images.units) == 4


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("''", "`messages[0].content[1].path`: the chat template writes '' for it"),
        ("'[IMG]'", "the chat template writes '[IMG]' for it, and an image needs a place of special tokens alone"),
        ("'Picture: <image>'", "writes 'Picture: <image>' for it"),
        ("loop.index ~ '<image>'", "writes '2<image>' for it"),
    ],
)
def test_an_image_without_a_place_of_its_own_is_refused(tmp_path: Path, place: str, message: str) -> None:
    source = write(tmp_path / "a.jsonl", {"messages": [*TALK, TELL]})
    with pytest.raises(ValueError) as error:
        run([source], tmp_path / "d", **values(tmp_path, place))
    assert f"{source}:1: " in str(error.value) and message in str(error.value)


def test_a_video_is_refused_with_what_to_do(tmp_path: Path) -> None:
    part = {"type": "video", "frames": ["a.png", "b.png"]}
    source = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": [part]}, TELL]})
    with pytest.raises(ValueError, match=r"a.jsonl:1: `messages\[0\].content\[0\]`: a video has no one place"):
        run([source], tmp_path / "d", **values(tmp_path, "'<image>'"))


def test_a_record_without_images_beside_them_is_a_conversation_too(tmp_path: Path) -> None:
    given = values(tmp_path, "'<image>'")
    run([write(tmp_path / "a.jsonl", {"messages": [ASK, TELL]})], tmp_path / "d", **given)
    theirs = library(tmp_path / "t", CHATML.replace("PLACE", "'<image>'"))
    assert documents(tmp_path / "d") == [expected(theirs, [ASK, TELL])[0]]
