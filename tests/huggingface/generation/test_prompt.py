"""Prompts: texts, images and videos on the command line have the same tokens and pixels as in a
record.
"""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.huggingface.generate_command import asked_by
from megacp.huggingface.generation.prompt import PromptMaker, prompt_pixels
from megacp.prepare.records.chat_template import template_of
from megacp.prepare.records.record import Media
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.prepare.templates.public import TEMPLATES, tokenizer_at, write_tokenizer
from tests.prepare.templates.test_public import library

pytest.importorskip("av")
PICTURE, MOVING = encoded(noise(30, 20)), video(43)
GIVEN = {"image": PICTURE, "video": MOVING}
HEADER = b"\n<|assistant|>\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [("video",), ("image", "video"), ("video", "image"), ("video", "video")]
)
def test_given_media_have_the_tokens_and_pixels_of_a_record(kinds: tuple[str, ...]) -> None:
    maker = PromptMaker(load_tokenizer("byte"), TINY)
    given = maker.of_text(
        "what?", [Media(kind, "bytes", GIVEN[kind], f"--{kind}") for kind in kinds]
    )
    parts = [{"type": kind, "base64": base64.b64encode(GIVEN[kind]).decode()} for kind in kinds]
    content = [*parts, {"type": "text", "text": "what?"}]
    (record,) = maker.of_record({"messages": [{"role": "user", "content": content}]})
    assert [*b"<|user|>\n", *given.tokens.tolist(), *HEADER] == record.tokens.tolist()
    assert len(given.units) == sum(1 if kind == "image" else 12 for kind in kinds)
    for found, expected in zip(
        prompt_pixels([given], TINY), prompt_pixels([record], TINY), strict=True
    ):
        assert np.array_equal(found, expected)


ASK, TELL = {"role": "user", "content": "which?"}, {"role": "assistant", "content": "this"}
TOOL = {"role": "tool", "content": ""}


@pytest.mark.parametrize(
    "before", [[], [{"role": "system", "content": "say"}], [ASK, TELL], [ASK, TELL, TOOL]]
)
def test_messages_without_an_answer_are_asked_as_those_with_one(
    before: list[dict[str, str]],
) -> None:
    """The header of an answer has no weight in training: the model does not generate it."""
    maker = PromptMaker(load_tokenizer("byte"))
    messages = before if before[-1:] == [TOOL] else [*before, ASK]
    given = messages, [*messages, TELL], [*messages, {**TELL, "content": ""}]
    (asked,), (answered,), (begun,) = (maker.of_record({"messages": found}) for found in given)
    assert asked.tokens.tolist() == answered.tokens.tolist() == begun.tokens.tolist()
    assert bytes(asked.tokens[-len(HEADER) :].tolist()) == HEADER
    assert (asked.expected, answered.expected) == (None, "this")


def test_the_header_of_an_answer_stands_at_the_end_of_each_branch_alone() -> None:
    maker = PromptMaker(load_tokenizer("byte"))
    branches = [{"messages": [ASK]}, {"messages": [ASK, TELL]}, "more"]
    prompts = maker.of_record({"messages": [ASK, TELL, ASK], "branches": branches})
    first = [*b"<|user|>\nwhich?", *HEADER, *b"this", 256, *b"\n<|user|>\nwhich?"]
    asks = [*b"\n<|user|>\nwhich?", *HEADER]
    assert [prompt.tokens.tolist() for prompt in prompts] == [
        [*first, *asks],
        [*first, *asks],
        first,
    ]
    assert [prompt.branch_start for prompt in prompts] == [len(first), len(first), None]
    assert [prompt.expected for prompt in prompts] == [None, "this", "more"]


OFF, EMPTY = {"enable_thinking": False}, {"before_answers": "<think>\n\n</think>\n\n"}
MIXED, TURNS = (
    {"empty_thoughts": 5, name: 5, **EMPTY} for name in ("real_thoughts", "no_thoughts")
)
# The stored settings of training, --thinking or --no-thinking, and the library's prompt for the
# same.
THINKING: list[tuple[dict[str, Any], bool | None, dict[str, bool]]] = [
    *(
        (MIXED, None, {}),
        (MIXED, False, OFF),
        (EMPTY, True, {"enable_thinking": True}),
        (EMPTY, None, OFF),
    ),
    *(
        (TURNS, None, {}),
        ({**TURNS, "no_thoughts": 4}, None, OFF),
        ({"empty_thoughts": 5}, None, OFF),
        ({}, None, {}),
    ),
]


def test_a_model_is_asked_as_most_of_its_answers_were_learned_or_as_told(tmp_path: Path) -> None:
    """Prompts match the library's, and a record's variables have priority. Prompts with images and
    branches are whole conversations.
    """
    tokenizer, text = tokenizer_at(write_tokenizer(tmp_path)), TEMPLATES["qwen_3"]
    template, theirs = template_of(text, tokenizer, None), library(tmp_path, text)
    record = {
        "messages": [ASK, TELL, ASK],
        "branches": [{"messages": [TELL]}, {"messages": [TOOL, TELL, ASK]}],
    }
    for kept, told, given in THINKING:
        asked = dataclasses.replace(template, **asked_by({"default": text, **kept}, told))
        for said in ({}, {"enable_thinking": not told}):
            how = {"add_generation_prompt": True, "return_dict": False, **given, **said}
            found = PromptMaker(tokenizer, template=asked).of_record(
                {**record, "chat_template_kwargs": said}
            )
            for prompt, more, expected in zip(
                found, ([], [TOOL, TELL, ASK]), ("this", None), strict=True
            ):
                ids = theirs.apply_chat_template([ASK, TELL, ASK, *more], **how)
                assert (prompt.tokens.tolist(), prompt.expected, prompt.branch_start) == (
                    ids,
                    expected,
                    None,
                )
    with pytest.raises(
        ValueError, match="--no-thinking: the chat template has no variable `enable_thinking`"
    ):
        asked_by({"default": TEMPLATES["qwen_25"]}, False)
    assert asked_by({"default": TEMPLATES["qwen_25"], **EMPTY}, False) == EMPTY
