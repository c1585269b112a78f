"""Render conversations with published templates and compare ids and masks with the transformers
library.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacp.prepare.records.chat_template import ChatTemplate, load_chat_template
from megacp.prepare.records.documents import DocumentMaker
from megacp.prepare.records.record import RecordError, RecordRules
from megacp.prepare.records.sample import parse_record
from tests.prepare.templates.public import (
    DATED,
    GENERATING,
    TEMPLATES,
    WITH_TOOLS,
    WITHOUT_SYSTEM,
    tokenizer_at,
    write_tokenizer,
)

TODAY = "2026-03-04"
SYSTEM = {"role": "system", "content": "You are terse."}
ASK, TELL = (
    {"role": "user", "content": "What is 6 x 7?"},
    {"role": "assistant", "content": "The answer is 42."},
)
ASK_2, TELL_2 = (
    {"role": "user", "content": "  Sure?\n"},
    {"role": "assistant", "content": "Yes \u00e9\u6f22 \U0001f642."},
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather \u00e9 <b>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where"}},
            },
        },
    }
]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {}}]}
CALL["tool_calls"][0]["function"] = {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}
RESULT = {"role": "tool", "content": "4 degrees"}


@pytest.fixture(scope="module", params=["bytes", "metaspace"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_tokenizer(path, metaspace=request.param == "metaspace")
    return path


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the clock from which the library takes the date."""
    from transformers.utils import chat_template_utils

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.strptime(TODAY, "%Y-%m-%d")

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    yield


def template_of(folder: Path, name: str, tmp_path: Path) -> ChatTemplate:
    (tmp_path / "t.jinja").write_bytes(TEMPLATES[name].encode())
    tokenizer = tokenizer_at(folder / "tokenizer.json")
    return load_chat_template(
        str(tmp_path / "t.jinja"), tokenizer, TODAY if name in DATED else None
    )


def made(
    record: dict[str, Any], template: ChatTemplate, folder: Path, **accepted: Any
) -> tuple[list[int], list[float]]:
    """Return the ids and loss weights of a record in a build."""
    maker = DocumentMaker(tokenizer_at(folder / "tokenizer.json"), True, {}, template)
    sample = parse_record(record, RecordRules(**accepted), template=template)
    (document,) = maker.encode([[sample.prefix, *sample.branches]])
    if document.problem is not None:
        raise RecordError(document.problem)
    weights = np.ones(len(document.tokens)) if document.weights is None else document.weights
    return document.tokens.tolist(), weights.tolist()


@functools.lru_cache
def _library_of(folder: Path, config: bytes) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def library(folder: Path, text: str) -> Any:
    """Return the library's tokenizer of a folder, with a template."""
    found = _library_of(folder, (folder / "tokenizer_config.json").read_bytes())
    found.chat_template = text
    return found


def expected(
    theirs: Any, messages: list[dict[str, Any]], **given: Any
) -> tuple[list[int], list[float]]:
    """Return the library's ids and loss weights.

    Without generation blocks, the weights are computed by character from renderings of all
    beginnings.
    """
    dicts = [
        {key: value for key, value in message.items() if key != "weight"} for message in messages
    ]
    has_blocks = re.search(r"%-? *generation *-?%", theirs.chat_template) is not None
    out = theirs.apply_chat_template(
        dicts, return_dict=True, return_assistant_tokens_mask=has_blocks, **given
    )
    whole = theirs.apply_chat_template(dicts, tokenize=False, **given)
    offsets = theirs(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    weights = [0.0] * len(offsets)
    if has_blocks:
        # the library masks only the first token of a block's last character
        for n, learned in enumerate(out["assistant_masks"]):
            weights[n] = (
                1.0 if learned or (n and weights[n - 1] and offsets[n] == offsets[n - 1]) else 0.0
            )
    for i, message in enumerate(messages if not has_blocks else ()):
        if message["role"] == "assistant" and message.get("weight", 1):
            asked = theirs.apply_chat_template(
                dicts[:i], tokenize=False, add_generation_prompt=True, **given
            )
            told = theirs.apply_chat_template(dicts[: i + 1], tokenize=False, **given)
            told = (
                told if whole.startswith(told) else told.removesuffix("</s>")
            )  # Phi 3 ends the conversation
            # Qwen 3's own template writes an empty thought only in the last answer
            if not whole.startswith(told):
                told = asked + told.removeprefix(asked).removeprefix("<think>\n\n</think>\n\n")
            assert whole.startswith(asked) and whole.startswith(told)
            for n, (start, stop) in enumerate(offsets):
                if start < len(told) and stop > len(asked):
                    weights[n] = float(message.get("weight", 1))
    # an empty thought is not learned, unlike in the library
    for empty in re.finditer(r"\n*<think>\s*</think>\n*", whole):
        for n, (start, stop) in enumerate(offsets):
            if start >= empty.start() and stop <= empty.end():
                weights[n] = 0.0
    return out["input_ids"], weights


@pytest.mark.slow
def test_a_build_has_the_ids_and_the_mask_of_the_library(
    folder: Path, name: str, tmp_path: Path
) -> None:
    template, theirs = template_of(folder, name, tmp_path), library(folder, TEMPLATES[name])
    talks = [[ASK, TELL], [ASK, TELL, ASK_2, TELL_2], [ASK, {**TELL, "weight": 0}, ASK_2, TELL_2]]
    talks += (
        []
        if name in WITHOUT_SYSTEM
        else [[SYSTEM, ASK, TELL], [{**SYSTEM, "content": ""}, ASK, TELL]]
    )
    talks += [[ASK, TELL, ASK_2, TELL_2, ASK]]
    for talk in talks:
        ids, weights = expected(theirs, talk)
        if name in GENERATING and talk is talks[2]:
            weights = made({"messages": talk}, template, folder)[
                1
            ]  # the library does not support weights
            assert 0 < sum(weights) < sum(expected(theirs, talk)[1])
        assert made({"messages": talk}, template, folder) == (ids, weights), talk
        assert sum(weights) > 0


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_and_calls_are_those_of_the_library(folder: Path, name: str, tmp_path: Path) -> None:
    template, theirs = template_of(folder, name, tmp_path), library(folder, TEMPLATES[name])
    answer = {"role": "assistant", "content": "It is cold."}
    talk = [ASK, answer] if name == "granite" else [SYSTEM, ASK, CALL, RESULT, answer]
    # a call without a thought is written differently once an answer follows
    if name == "qwen_3":
        talk = [SYSTEM, ASK, {**CALL, "reasoning_content": "To be looked up."}, RESULT, answer]
    record = {"messages": talk, "tools": TOOLS}
    ids, weights = expected(theirs, talk, tools=TOOLS)
    assert made(record, template, folder) == (ids, weights)
    assert made({**record, "tools": json.dumps(TOOLS)}, template, folder) == (ids, weights)
    assert made({"messages": talk}, template, folder)[0] != ids


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.text(alphabet=" \n\ta<\u00e9\u6f22\U0001f642\u200d\"'{|", max_size=8),
        min_size=2,
        max_size=5,
    )
)
@pytest.mark.slow
def test_any_text_has_the_ids_and_the_mask_of_the_library_or_is_refused(
    folder: Path, name: str, tmp_path: Path, texts: list[str]
) -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    template, theirs = template_of(folder, name, tmp_path), library(folder, TEMPLATES[name])
    try:
        found = made({"messages": talk}, template, folder)
    except RecordError:
        assert name == "qwen_3" or any(not each["content"].strip() for each in talk)
    else:
        assert found == expected(theirs, talk)


def test_a_block_that_begins_with_a_blank_is_learned_whole(tmp_path: Path) -> None:
    """The library learns nothing of it if the tokenizer's offsets exclude white space."""
    write_tokenizer(tmp_path, trim_offsets=True)
    template, theirs = (
        template_of(tmp_path, "granite", tmp_path),
        library(tmp_path, TEMPLATES["granite"]),
    )
    talk = [ASK, {**TELL, "content": " 42"}]
    ids, weights = made({"messages": talk}, template, tmp_path)
    learned = [i for i, weight in zip(ids, weights, strict=True) if weight]
    assert theirs.decode(learned) == " 42<|end_of_text|>"
    assert ids == expected(theirs, talk)[0] and sum(expected(theirs, talk)[1]) == 0
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content if m.role == 'assistant' }}{% endgeneration %}"
        "{{ m.content if m.role == 'user' }}<|im_end|>{% endfor %}"
    )
    template = load_chat_template(
        str(tmp_path / "t.jinja"), tokenizer_at(tmp_path / "tokenizer.json"), None
    )
    ids, weights = made({"messages": [ASK, {**TELL, "content": "42  "}]}, template, tmp_path)
    assert theirs.decode([i for i, weight in zip(ids, weights, strict=True) if weight]) == "42  "


EVERYTHING = """
  {% set ns = namespace(count=0) %}
    {% for m in messages %}
      {% if m.role == 'system' %}
        {% continue %}
      {% endif %}
      {% set ns.count = ns.count + 1 %}
  {{ loop.index }}: {{ m | tojson(indent=2, sort_keys=true) }} {{ dict(a=m.content)['a'] }}
      {% if ns.count > 3 %}
        {{ raise_exception('too many') }}
        {% break %}
      {% endif %}
    {% endfor %}
{{ messages[0].nothing }}{{ '<b>' }}{{ [1, 2] | join(',') }}{{ ns.count }}
"""


def test_the_environment_is_that_of_the_library(folder: Path, tmp_path: Path) -> None:
    """Cover white space around blocks, loop controls, JSON without escapes, and undefined names."""
    (tmp_path / "t.jinja").write_text(EVERYTHING)
    template = load_chat_template(
        str(tmp_path / "t.jinja"), tokenizer_at(folder / "tokenizer.json"), None
    )
    theirs = library(folder, EVERYTHING)
    for talk in ([SYSTEM, ASK, TELL], [ASK, CALL, {**TELL_2, "reasoning": "<hm>"}]):
        assert template.render(talk).text == theirs.apply_chat_template(talk, tokenize=False)
    with pytest.raises(RecordError, match="refuses these messages: too many"):
        template.render([ASK] * 5)
    for unsafe in ("messages.__class__.a", "messages.append(1)", "raise_exception.__code__.a"):
        (tmp_path / "t.jinja").write_text("{{ " + unsafe + " }}{{ messages[0].content }}")
        template = load_chat_template(
            str(tmp_path / "t.jinja"), tokenizer_at(folder / "tokenizer.json"), None
        )
        with pytest.raises(RecordError, match="refuses these messages: .* is unsafe"):
            template.render([ASK])
