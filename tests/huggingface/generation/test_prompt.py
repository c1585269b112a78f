"""Prompts: what is given beside a text has the tokens and the pixels that a record of the same has."""

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
from tests.prepare.templates.public import TEMPLATES, of_trl, tokenizer_at, write_tokenizer
from tests.prepare.templates.test_public import library

pytest.importorskip("av")
PICTURE, MOVING = encoded(noise(30, 20)), video(43)
GIVEN = {"image": PICTURE, "video": MOVING}
HEADER = b"\n<|assistant|>\n"


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("video",), ("image", "video"), ("video", "image"), ("video", "video")])
def test_given_media_have_the_tokens_and_pixels_of_a_record(kinds: tuple[str, ...]) -> None:
    maker = PromptMaker(load_tokenizer("byte"), TINY)
    given = maker.of_text("what?", [Media(kind, "bytes", GIVEN[kind], f"--{kind}") for kind in kinds])
    parts = [{"type": kind, "base64": base64.b64encode(GIVEN[kind]).decode()} for kind in kinds]
    content = [*parts, {"type": "text", "text": "what?"}]
    (record,) = maker.of_record({"messages": [{"role": "user", "content": content}]})
    assert [*b"<|user|>\n", *given.tokens.tolist(), *HEADER] == record.tokens.tolist()
    assert len(given.units) == sum(1 if kind == "image" else 12 for kind in kinds)
    for found, expected in zip(prompt_pixels([given], TINY), prompt_pixels([record], TINY), strict=True):
        assert np.array_equal(found, expected)


ASK, TELL = {"role": "user", "content": "which?"}, {"role": "assistant", "content": "this"}
TOOL = {"role": "tool", "content": ""}


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "say"}], [ASK, TELL], [ASK, TELL, TOOL]])
def test_messages_without_an_answer_are_asked_as_those_with_one(before: list[dict[str, str]]) -> None:
    """The header of the answer has no weight in training: no model writes it."""
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
    assert [prompt.tokens.tolist() for prompt in prompts] == [[*first, *asks], [*first, *asks], first]
    assert [prompt.branch_start for prompt in prompts] == [len(first), len(first), None]
    assert [prompt.expected for prompt in prompts] == [None, "this", "more"]


def test_a_model_without_thoughts_is_asked_behind_the_empty_one_that_its_answers_followed(tmp_path: Path) -> None:
    """As the template itself asks where thinking is off; images and branches are asked in whole conversations."""
    tokenizer = tokenizer_at(write_tokenizer(tmp_path))
    template = template_of(TEMPLATES["qwen_3"], tokenizer, None, "<think>\n\n</think>\n\n")
    maker, theirs = PromptMaker(tokenizer, template=template), library(tmp_path, TEMPLATES["qwen_3"])
    record = {"messages": [ASK, TELL, ASK], "branches": [{"messages": [TELL]}, {"messages": [TOOL, TELL, ASK]}]}
    found = maker.of_record(record)
    for prompt, more, expected in zip(found, ([], [TOOL, TELL, ASK]), ("this", None), strict=True):
        talk = [ASK, TELL, ASK, *more]
        ids = theirs.apply_chat_template(talk, add_generation_prompt=True, enable_thinking=False, return_dict=False)
        assert (prompt.tokens.tolist(), prompt.expected, prompt.branch_start) == (ids, expected, None)


EMPTY = {"before_answers": "<think>\n\n</think>\n\n"}
THINKING: list[tuple[dict[str, Any], bool | None, dict[str, bool]]] = [
    ({"empty_thoughts": 9, "real_thoughts": 1, **EMPTY}, None, {}),
    ({"empty_thoughts": 9, "real_thoughts": 1, **EMPTY}, False, {"enable_thinking": False}),
    ({"empty_thoughts": 9, **EMPTY}, True, {"enable_thinking": True}),
    ({"empty_thoughts": 5, "no_thoughts": 5, **EMPTY}, None, {}),
    ({"empty_thoughts": 5, "no_thoughts": 4, **EMPTY}, None, {"enable_thinking": False}),
    ({"empty_thoughts": 5}, None, {"enable_thinking": False}),
    (EMPTY, None, {"enable_thinking": False}),
    ({}, None, {}),
]
"""What was learned, as a checkpoint keeps it; --thinking or --no-thinking; how the library is asked for the same."""


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_a_model_is_asked_as_most_of_its_answers_were_learned_or_as_told(tmp_path: Path, name: str) -> None:
    """As the library asks, in several turns too; what a record says of its template comes first."""
    tokenizer, text = tokenizer_at(write_tokenizer(tmp_path)), of_trl(name)
    template, theirs = template_of(text, tokenizer, None), library(tmp_path, text)
    thought = {**TELL, "content": "<think>\nhm\n</think>\n\nthis"}
    for kept, told, given in THINKING:
        if "think" in name and "before_answers" in kept:
            kept = {**kept, "before_answers": "\n</think>\n\n"}
        asked = dataclasses.replace(template, **asked_by({"default": text, **kept}, told))
        maker = PromptMaker(tokenizer, template=asked)
        for talk, own in (([ASK], {}), ([ASK, thought, ASK], {}), ([ASK], {"enable_thinking": not told})):
            (prompt,) = maker.of_record({"messages": talk, "chat_template_kwargs": own})
            ids = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False, **{**given, **own})
            assert prompt.tokens.tolist() == ids, (kept, told, talk)
    with pytest.raises(ValueError, match="--no-thinking: the chat template reads no `enable_thinking`"):
        asked_by({"default": TEMPLATES["qwen_25"]}, False)
    assert asked_by({"default": TEMPLATES["qwen_25"], **EMPTY}, False) == EMPTY
