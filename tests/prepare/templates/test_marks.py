"""One rendering with marks locates all answers of a conversation, at low cost and like the
library.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.records import marks, sandbox
from megacp.prepare.records.chat_template import OURS, ChatTemplate, template_of
from megacp.prepare.records.record import RecordError, RecordRules, Rendered
from megacp.prepare.records.sample import parse_record
from tests.prepare.templates.public import of_trl, tokenizer_at, write_tokenizer
from tests.prepare.templates.test_public import expected, library

HM = {"reasoning_content": "six by seven"}
TOOL = {"name": "look", "description": "Looks", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
ASK, TELL = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four."}
SYSTEM = {"role": "system", "content": "Be terse."}
SEES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set parts = m.content %}"
    "{% if m.content is string %}{% set parts = [m.content] %}{% endif %}{% for p in parts %}"
    "{{ '<image>\n' if p.type == 'image' else p.text or p }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@functools.lru_cache
def template(folder: Path, name: str) -> ChatTemplate:
    text = OURS.get(name) or (name if "{" in name else of_trl(name))
    return template_of(text, tokenizer_at(folder / "tokenizer.json"), "2026-03-04")


def rendered(
    made: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None, **rules: Any
) -> Rendered:
    record = {"messages": messages} | ({"tools": tools} if tools else {})
    piece = parse_record(record, RecordRules(**rules), template=made).prefix[0]
    assert isinstance(piece, Rendered)
    return piece


def call(n: int, **more: Any) -> dict[str, Any]:
    function = {"name": f"look{n % 3}", "arguments": {"place": f"Oslo {n}", "days": n}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call0000{n % 10}", "function": function}],
        **more,
    }


def result(n: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"call0000{n % 10}",
        "name": f"look{n % 3}",
        "content": f"{n} degrees",
    }


# ---- cost of a long conversation


def agent(turns: int, **more: Any) -> list[dict[str, Any]]:
    steps = [message for n in range(turns) for message in (call(n, **more), result(n))]
    return [SYSTEM, ASK, *steps, {**TELL, **more}]


def thinker(turns: int) -> list[dict[str, Any]]:
    """Return an agent's conversation with its thoughts in the contents."""
    inside = "<think>\nhm\n</think>\n\nStep."
    return [{**m, "content": inside} if m["role"] == "assistant" else m for m in agent(turns)]


def chat(turns: int, **more: Any) -> list[dict[str, Any]]:
    edges = ("{}", "<b>{}</b>", "{}\n", "{} !")
    said = [(f"Question {n}?", edges[n % 4].format(n)) for n in range(turns)]
    return [
        m
        for ask, tell in said
        for m in ({**ASK, "content": ask}, {**TELL, "content": tell, **more})
    ]


def pictures(turns: int) -> list[dict[str, Any]]:
    part = {"type": "image", "path": "a.png"}
    asked = [
        {"role": "user", "content": [part, {"type": "text", "text": f"{n}?"}, part]}
        for n in range(turns)
    ]
    return [m for ask in asked for m in (ask, TELL)]


LONG = {
    "agent": agent,
    "agent with thoughts": functools.partial(agent, **HM),
    "agent with thoughts inside": thinker,
    "chat": chat,
    "chat with thoughts": functools.partial(chat, **HM),
    "pictures": pictures,
}
COSTLY = [
    *(
        (name, kind)
        for name in ("qwen3", "qwen3_5_think", "qwen3_training")
        for kind in list(LONG)[:5]
    ),
    *((name, kind) for name in ("glm4moe", "gemma4_v5", "qwen3_5") for kind in ("agent", "chat")),
    ("gptoss", "agent"),
    (SEES, "pictures"),
]


@pytest.mark.parametrize(("name", "kind"), COSTLY)
def test_a_conversation_costs_no_more_renderings_when_it_is_longer(
    folder: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template writes at most 30 times the length of the conversation, however long that is."""
    made, lengths, written = template(folder, name), list[int](), sandbox.rendered

    def counted(*given: Any) -> str:
        text = written(*given)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(sandbox, "rendered", counted)
    costs = []
    for turns in (20, 80):
        messages, tools = LONG[kind](turns), TOOLS if kind.startswith("agent") else None
        lengths.clear()
        text = rendered(made, messages, tools, media=kind == "pictures").text
        assert text is not None
        costs.append((len(lengths), sum(lengths) / len(text)))
    (few, _), (many, share) = costs
    # a few more renderings confirm answers in the first half, quarter, and so on
    assert many <= few + 12 and share < 30, costs


# ---- marks give the same result as renderings


OTHERWISE = {
    "upper but for the last": "{{ m.content if loop.last or m.role == 'user' else m.content | upper }}",
    "cut but for the last three": "{{ m.content if loop.revindex < 4 else m.content[:2] }}",
    "an end for long talks": "{{ m.content }}{{ '!' if messages | length > 9 and m.role == 'assistant' }}",
    "the last of the first ten": "{{ m.content }}{{ '!' if loop.last and loop.index > 10 and m.role == 'assistant' }}",
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_an_answer_that_is_written_otherwise_once_more_follows_is_refused(
    folder: Path, name: str
) -> None:
    body = f"<|im_start|>{{{{ m.role }}}}\n{OTHERWISE[name]}<|im_end|>\n"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    made = template(folder, f"{{% for m in messages %}}{body}{{% endfor %}}{prompt}")
    with pytest.raises(RecordError, match=r"once later messages follow|'0.' would be lost"):
        rendered(made, chat(12))
    assert rendered(made, chat(1)).learned


PECULIAR = {
    "trims": "{{ m.content | trim }}",
    "looks at the whole": "{{ '?' if m.content == 'Question 3?' }}{{ m.content }}",
    "counts characters": "{{ m.content | length }} {{ m.content }}",
    "looks at the beginning": "{{ '?' if m.content.startswith('Question') }}{{ m.content }}",
    "splits": "{{ m.content.split('</b>')[0] }}{{ '</b>' if '</b>' in m.content }}",
    "writes JSON": "{{ m.content | tojson }}",
    "writes JSON in ASCII": "{{ m.content | tojson(ensure_ascii=true) }}",
    "counts turns": "{{ loop.index }} {{ m.content }}",
    "writes a turn in a macro": "{{ told(m) }}",
}


@pytest.mark.parametrize("name", PECULIAR)
@pytest.mark.parametrize(
    "loop", ["m in messages", "m in messages[0:]", "i in range(messages | length)"]
)
def test_marks_tell_what_is_told_without_them(
    folder: Path, name: str, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that inspects its inputs would see the marks, so they are not used."""
    macro = "{% macro told(m) %}({{ m.content }}){% endmacro %}"
    look = "{% for m in messages %}{% if m.role == 'tool' %}{{ m }}{% endif %}{% endfor %}"
    body = f"{{% set m = m or messages[i] %}}<|im_start|>{{{{ m.role }}}}\n{PECULIAR[name]}<|im_end|>\n"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    made = template(folder, f"{macro}{look}{{% for {loop} %}}{body}{{% endfor %}}{prompt}")
    messages = chat(7) + [
        ASK,
        {**TELL, "weight": 0.5},
        ASK,
        {**TELL, "content": "Yes \u00e9\u6f22 \U0001f642."},
    ]
    if name.endswith("ASCII"):
        messages = messages[:-2]
    if name == "counts turns":
        prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{{ messages | length + 1 }} {% endif %}"
        made = template(folder, f"{macro}{look}{{% for {loop} %}}{body}{{% endfor %}}{prompt}")
    found = rendered(made, messages)
    monkeypatch.setattr(marks.Marks, "found", lambda self, text: ("", {}))
    assert found == rendered(made, messages)
    assert len(found.learned) == sum(m["role"] == "assistant" for m in messages)


SIXTH = {
    "another beginning": "<|im_start|>{{ m.role }}{{ '#' if loop.index == 6 }}\n{{ m.content }}</s>",
    "another end": "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'user' %}<|end|>{% elif loop.last %}</s>"
    "{% elif loop.index == 6 %}<|eot_id|>{% else %}<|end|>{% endif %}",
}


@pytest.mark.parametrize("name", SIXTH)
def test_one_answer_that_is_unlike_all_others_is_not_told_by_them(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sixth message is not among the answers that are also located by renderings."""
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant{{ '#' if messages | length == 5 }}\n{% endif %}"
    if name == "another end":
        prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    made = template(folder, f"{{% for m in messages %}}{SIXTH[name]}{{% endfor %}}{prompt}")
    found = rendered(made, [ASK, TELL] * 10)
    said = [str(found.text)[start:stop].removesuffix("</s>") for start, stop, _ in found.learned]
    assert said == ["Four."] * 10


def test_a_value_that_is_written_only_with_a_mark_in_it_is_lost(folder: Path) -> None:
    made = template(
        folder,
        "{% for m in messages %}{{ m.content }}{{ m.note if m.note | length > 5 }}{% endfor %}",
    )
    assert rendered(made, [{**ASK, "note": "in full"}, TELL]).text
    with pytest.raises(RecordError, match=r"`messages\[0\].note` would be lost"):
        rendered(made, [{**ASK, "note": "short"}, TELL])


# ---- the library


WITH_BLOCKS = (
    *(
        "glm4moe_training",
        "gptoss_training",
        "qwen2_5_training",
        "qwen3_training",
        "qwen3_5_think_training",
    ),
    *(
        "llama3_training",
        "gemma_training",
        "phi3_training",
        "lfm2_training",
        "nemotron_3_nano_training",
    ),
)
CHATS = {
    "one turn": [ASK, TELL],
    "turns": [
        ASK,
        TELL,
        {**ASK, "content": "  Sure?\n"},
        {**TELL, "content": "Yes \u00e9\u6f22 \U0001f642."},
    ],
    "long": [*chat(6)[:8], ASK, TELL],
    "no answer to the last": [ASK, TELL, ASK],
    "a system": [SYSTEM, ASK, TELL],
    "an agent": [ASK, call(1), result(1), TELL],
}


LIKE_THE_LIBRARY = [(name, kind) for name in WITH_BLOCKS for kind in CHATS]
# this template writes a space after an empty thought
LIKE_THE_LIBRARY.remove(("nemotron_3_nano_training", "an agent"))


@pytest.mark.parametrize(("name", "kind"), LIKE_THE_LIBRARY)
def test_blocks_are_learned_as_the_library_masks_them(folder: Path, name: str, kind: str) -> None:
    """The only exception is an empty thought, which the library learns."""
    made, messages = template(folder, name), CHATS[kind]
    tools = TOOLS if kind == "an agent" else None
    if kind == "a system" and name == "gemma_training":
        with pytest.raises(RecordError, match="System role not supported"):
            rendered(made, messages)
        return
    try:
        piece = rendered(made, messages, tools)
    except RecordError as error:
        assert kind == "an agent" and name in (
            "gemma_training",
            "phi3_training",
            "llama3_training",
            "lfm2_training",
        ), error
        return
    ids, places = made.encode(str(piece.text))
    learned = [any(a < stop and b > start for start, stop, _ in piece.learned) for a, b in places]
    theirs = library(folder, made.text)
    if "strftime_now" in made.text:
        theirs.chat_template = made.text.replace('strftime_now("%Y-%m-%d")', '"2026-03-04"')
    assert (ids.tolist(), [float(each) for each in learned]) == expected(
        theirs, messages, tools=tools
    )
