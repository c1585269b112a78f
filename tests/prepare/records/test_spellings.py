"""Records in common formats equal the plain form, or are refused with advice that works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.records.forms import Talk, said_by
from megacp.prepare.records.record import ALPACA, AS_MESSAGES, FOR_PROMPTS, RecordError, RecordRules
from megacp.prepare.records.sample import RECORD_KEYS, parse_record

ASK = {"role": "user", "content": "Q"}
TELL = {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
TALK = {"messages": [ASK, TELL]}
WITH_SYSTEM = {"messages": [SYSTEM, ASK, TELL]}
TURNS = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
PREFERENCE = {"chosen": [ASK, TELL], "rejected": [ASK, {**TELL, "content": "B"}]}


def talk_of(record: dict[str, Any], rules: RecordRules | None = None) -> Talk:
    """Return the messages that a record gives to a chat template."""
    said, form = said_by(record, rules or RecordRules(), RECORD_KEYS, has_template=True)
    assert isinstance(said, Talk) and form == "chat_template"
    return said


@pytest.mark.parametrize(
    ("record", "plain"),
    [
        ({"messages": json.dumps([ASK, TELL])}, TALK),
        ({"messages": "\n " + json.dumps([ASK, TELL], indent=1)}, TALK),
        ({"messages": [json.dumps(ASK), json.dumps(TELL)]}, TALK),
        ({"conversations": json.dumps(TURNS)}, TALK),
        ({"conversation": [ASK, TELL]}, TALK),
        ({"conversation": TURNS}, TALK),
        ({"messages": TURNS}, TALK),
        ({"messages": [{"role": "human", "content": "Q"}, {"role": "gpt", "content": "A"}]}, TALK),
        (
            {"messages": [{"role": "User", "content": "Q"}, {"role": "ASSISTANT", "content": "A"}]},
            TALK,
        ),
        ({"messages": [ASK, {"role": "model", "content": "A"}]}, TALK),
        (
            {
                "messages": [
                    {"role": "user", "parts": [{"text": "Q"}]},
                    {"role": "model", "parts": ["A"]},
                ]
            },
            TALK,
        ),
        (
            {"messages": [{"role": "user", "value": "Q"}, {"from": "assistant", "content": "A"}]},
            TALK,
        ),
        ({"messages": [{"role": "user", "text": "Q"}, {**TELL, "text": ""}]}, TALK),
        ({"prompt": json.dumps([ASK]), "completion": [TELL]}, TALK),
        ([ASK, TELL], TALK),
        (TURNS, TALK),
        ({**TALK, "system": "S"}, WITH_SYSTEM),
        ({**TALK, "system": ""}, TALK),
        ({**WITH_SYSTEM, "system": " S\n"}, WITH_SYSTEM),
        ({"conversation": TURNS, "system": "S"}, WITH_SYSTEM),
        ({"prompt": [ASK], "completion": [TELL], "system": "S"}, WITH_SYSTEM),
        ({**TALK, "prompt": "Q", "prompt_id": "7"}, TALK),
        ({**WITH_SYSTEM, "prompt": "Q ", "category": "Chat"}, WITH_SYSTEM),
        ({**TALK, "prompt": [ASK]}, TALK),
        ({**TALK, "prompt": "Q", "completion": "A"}, TALK),
        ({**TALK, "instruction": "Q", "output": "A"}, TALK),
        ({**TALK, "question": "Q", "response": "A"}, TALK),
    ],
)
def test_a_conversation_is_read_in_every_spelling_with_one_meaning(
    record: Any, plain: dict[str, Any]
) -> None:
    assert parse_record(record) == parse_record(plain)


def test_a_text_of_json_is_read_where_a_list_or_an_object_must_stand() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    plain = {"messages": [ASK, call], "tools": tools, "chat_template_kwargs": {"x": 1}}
    as_text = {key: json.dumps(value) for key, value in plain.items()}
    assert talk_of(as_text) == talk_of(plain)
    alpaca = {"instruction": "Q", "output": "A", "history": [["a", "b"]]}
    assert talk_of({**alpaca, "history": json.dumps([["a", "b"]])}) == talk_of(alpaca)
    images = RecordRules(media=True)
    shown = {"text": "x", "images": ["a.png", "b.png"]}
    assert parse_record({**shown, "images": json.dumps(shown["images"])}, images) == parse_record(
        shown, images
    )
    assert parse_record({"text": "[1, 2]"}).prefix[0].text == "[1, 2]"  # a text may look like JSON


MESSAGE = re.escape("`messages[1]`")
REFUSED: list[tuple[Any, str]] = [
    (
        {"messages": "[{'role': 'user', 'content': 'Q'}]"},
        "`messages` is a string, but not JSON: .*json.dumps",
    ),
    ({"messages": '[{"role": "user"'}, "`messages` is a string, but not JSON"),
    ({"messages": "[" * 100_000}, "nested too deeply"),
    ({"messages": ["Q", "A"]}, r"`messages\[0\]` .*found a string; the speaker of a text"),
    (
        {"messages": [ASK, {**TELL, "from": "gpt"}]},
        f"{MESSAGE}: `role` and `from` both specify the speaker",
    ),
    (
        {"messages": [ASK, {**TELL, "value": "B"}]},
        f"{MESSAGE}: `content` and `value` both specify the text",
    ),
    (
        {"messages": [ASK, {"role": "model", "parts": [{"inline_data": "x"}]}]},
        r"`messages\[1\].parts\[0\]` must be a text",
    ),
    ({"messages": [ASK, {"role": 3, "content": "A"}]}, r"`messages\[1\].role` is a number"),
    ({**WITH_SYSTEM, "system": "T"}, r"`system` and `messages\[0\]` are different system prompts"),
    (
        {**TALK, "prompt": "T"},
        "`prompt` differs from the first user .*--columns system=prompt .*--ignore-keys prompt",
    ),
    ({**TALK, "response": "B"}, "`response` differs from the last answer"),
    (
        {**TALK, "system_prompt": "T"},
        "`system_prompt` may be a system prompt .*--columns system=system_prompt ",
    ),
    (
        {"text": "x", "system": "S"},
        "`system` may be a system prompt and would be lost. A plain text cannot have",
    ),
    (
        {"prompt": json.dumps([ASK]), "completion": "A"},
        "`prompt` is a string that contains messages as JSON",
    ),
    ({**TALK, "text": "rendered"}, r"`text` and `messages`; use --ignore-keys text "),
    ({"prompt": "Q", "completion": "A", "label": False}, r"KTO.*select\(.label == true"),
    ({**TALK, "label": 0}, "KTO"),
    ({**TALK, "kto_tag": False}, "KTO.*del.*kto_tag"),
    ({"text": "good film", "label": 1}, "the number of the text's class .1. and would be lost"),
    ({"text": "good film", "label": "positive"}, "--columns instruction=text,output=label"),
    (
        {"chosen": "Human: Q Assistant: A", "rejected": "Human: Q Assistant: B"},
        "convert `chosen` to `messages`",
    ),
    (
        {"conversation": [{"human": "Q", "assistant": "A"}]},
        r"`conversation\[0\]` has no `role`: .*jq -c",
    ),
    ({"content": "print(1)", "lang": "Python"}, "use --text-key content "),
    (json.dumps(TALK), "found a string that contains JSON; .*jq -c fromjson"),
    ({**ASK, "content": [{"type": "text", "text": "Q"}]}, "This is a single message"),
    (ASK, r"a single message.*jq -c '\{messages: .\}'"),
    ({"data": [TALK, TALK]}, r"jq -c '.data\[\]' FILE"),
    (
        {"conversation_text": "Human: Q\n\nAssistant: A"},
        "with several speakers; convert it to `messages`",
    ),
    ({"body": "USER: Q ASSISTANT: A"}, "with several speakers"),
    ({"text": "Q", "role": "prompter"}, "`text` with `role` 'prompter' is a single message"),
    ({"prompt": [ASK], "reward": 1}, "`prompt` is a prompt without an answer"),
    (
        {"problem": "Q", "solution": "A", "answer": "4"},
        "output=ANSWER, where ANSWER is `answer` or `solution`, ",
    ),
    ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "`input_ids` are the tokens"),
]


@pytest.mark.parametrize(("record", "reason"), REFUSED)
def test_a_spelling_with_two_meanings_is_refused_with_what_to_do(record: Any, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parse_record(record)


UNSAFE = [record for record, _ in REFUSED] + [
    {"role_a": "Q", "role_b": "A"},
    {"messages": [ASK, {"role": "bot", "content": "A"}]},
    {**TALK, "sys_prompt": "S", "system_message": "S"},
    PREFERENCE,
]


@pytest.mark.parametrize("record", UNSAFE)
def test_no_advice_loses_a_system_prompt_or_learns_a_bad_answer(record: Any) -> None:
    with pytest.raises(RecordError) as refused:
        parse_record(record)
    for keys in re.findall(r"--ignore-keys ([\w,]+)", str(refused.value)):
        assert not any("system" in key or key in ("chosen", "role") for key in keys.split(",")), (
            refused.value
        )


# ---- names of --columns and --roles


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((own, name) for own, _, name in (part.partition("=") for part in text.split(",")))


@pytest.mark.parametrize(
    ("record", "plain"),
    [
        ({"question": "Q", "answer": "A"}, {"instruction": "Q", "output": "A"}),
        ({"Question": "Q", "Answer": "A"}, {"instruction": "Q", "output": "A"}),
        ({"query": "Q", "response": "A"}, {"instruction": "Q", "output": "A"}),
        ({"input": "Q", "output": "A"}, {"instruction": "Q", "output": "A"}),
        ({"instruction": "Q", "response": "A"}, {"instruction": "Q", "output": "A"}),
        (
            {"instruction": "Q", "input": "X", "response": "A"},
            {"instruction": "Q", "input": "X", "output": "A"},
        ),
        (
            {"instruction": "Q", "context": "X", "response": "A"},
            {"instruction": "Q", "input": "X", "output": "A"},
        ),
        ({"prompt": "Q", "response": "A"}, {"instruction": "Q", "output": "A"}),
        ({"problem": "Q", "solution": "A"}, {"instruction": "Q", "output": "A"}),
        (
            {"system_prompt": "S", "question": "Q", "response": "A"},
            {"instruction": "Q", "output": "A", "system": "S"},
        ),
        ({"dialogue": TURNS}, TALK),
        ({"chat": json.dumps([ASK, TELL])}, TALK),
        (PREFERENCE, TALK),
        ({**PREFERENCE, "prompt": "Q"}, TALK),
        ({**PREFERENCE, "prompt": "Q", **TALK}, TALK),
        ({"contents": TURNS, "systemInstruction": {"parts": [{"text": "S"}]}}, WITH_SYSTEM),
        ({"document": "Q", "summary": "A", "id": 3}, {"instruction": "Q", "output": "A"}),
        (
            {"system": "S", "input": "Q", "output": "A"},
            {"instruction": "Q", "output": "A", "system": "S"},
        ),
        ({**PREFERENCE, "prompt": [ASK]}, TALK),
        ({"prompt": [ASK], "chosen": [TELL], "rejected": [TELL]}, TALK),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, {"prompt": "Q", "completion": "A"}),
        ({"body": "a text", "lang": "en"}, {"text": "a text"}),
        ({"messages": [ASK, {"role": "bot", "content": "A"}]}, TALK),
        ({**TALK, "system_message": "S"}, WITH_SYSTEM),
    ],
)
def test_advice_can_be_followed(record: dict[str, Any], plain: dict[str, Any]) -> None:
    """Parse the record again with the first flags of the message, as a user would copy them."""
    with pytest.raises(RecordError) as refused:
        parse_record(record)
    said = str(refused.value)
    columns, roles, ignored, text_key = (
        re.search(rf"--{flag} ([\w=,]+)", said)
        for flag in ("columns", "roles", "ignore-keys", "text-key")
    )
    rules = RecordRules(
        text_key=text_key[1] if text_key else "text",
        columns=pairs(columns[1]) if columns else (),
        roles=pairs(roles[1]) if roles else (),
        ignore_keys=tuple(ignored[1].split(",")) if ignored else (),
    )
    assert parse_record(record, rules) == parse_record(plain)


def test_columns_name_any_key_and_errors_have_the_name_of_the_file() -> None:
    rules = RecordRules(columns=pairs("prompt=question,completion=answer"))
    assert parse_record({"question": "Q", "answer": "A"}, rules) == parse_record(
        {"prompt": "Q", "completion": "A"}
    )
    with pytest.raises(RecordError, match="^`answer` is empty"):
        parse_record({"question": "Q", "answer": ""}, rules)
    with pytest.raises(
        RecordError, match="missing key: .*--columns completion=answer: the record has no such key"
    ):
        parse_record({"question": "Q", "reply": "A"}, rules)
    with pytest.raises(RecordError, match="both `prompt` and `question`, .*--ignore-keys prompt "):
        parse_record({"question": "Q", "answer": "A", "prompt": "P"}, rules)
    own_out = RecordRules(columns=rules.columns, ignore_keys=("prompt",))
    assert (
        parse_record({"question": "Q", "answer": "A", "prompt": "P"}, own_out).prefix[0].text == "Q"
    )
    swapped = RecordRules(columns=pairs("prompt=completion,completion=prompt"))
    assert parse_record({"prompt": "A", "completion": "Q"}, swapped) == parse_record(
        {"prompt": "Q", "completion": "A"}
    )
    nested = {"text": "Q", "branches": [{"msgs": [ASK, TELL]}]}
    expected = parse_record({"text": "Q", "branches": [TALK]})
    assert parse_record(nested, RecordRules(columns=pairs("messages=msgs"))) == expected
    with pytest.raises(RecordError, match=r"`msgs\[0\].content`"):
        parse_record(
            {"msgs": [{"role": "user", "content": 3}]}, RecordRules(columns=pairs("messages=msgs"))
        )


def test_an_unknown_role_is_refused_with_the_flags_for_all_it_may_be() -> None:
    record = {"messages": [ASK, {"role": "agent", "content": "A"}]}
    with pytest.raises(
        RecordError,
        match="--roles assistant=agent .*--roles user=agent .*--context-roles agent",
    ):
        parse_record(record)
    assert parse_record(record, RecordRules(roles=pairs("assistant=agent"))) == parse_record(TALK)
    # --roles may assign a known name to another role
    named = RecordRules(roles=pairs("user=agent"))
    assert sum(piece.weight for piece in parse_record(record, named).prefix) == 0


# ---- Alpaca's records


def test_alpaca_is_a_conversation_by_a_template_and_its_own_prompt_without() -> None:
    record = {"instruction": "Q", "input": "X", "output": "A"}
    asked = {"messages": [{**ASK, "content": "Q\nX"}, TELL]}
    assert talk_of(record).messages == asked["messages"]  # joined as in LLaMA-Factory
    assert talk_of({**record, "input": ""}).messages == TALK["messages"]
    assert talk_of({**record, "system": "S", "history": [["a", "b"]]}).messages == [
        SYSTEM,
        {**ASK, "content": "a"},
        {**TELL, "content": "b"},
        *asked["messages"],
    ]
    own = parse_record(record)
    assert own.forms == {ALPACA} and "### Instruction:\nQ\n\n### Input:\nX\n\n" in str(
        own.prefix[0].text
    )
    assert parse_record(record, RecordRules(form=AS_MESSAGES)) == parse_record(asked)
    assert parse_record(asked).forms == {AS_MESSAGES}
    assert parse_record({"prompt": "Q", "completion": "A"}).forms == {"completion"}
    assert not parse_record({"text": "x"}).forms
    only = RecordRules(form=ALPACA)
    assert parse_record(record, only) == own and not parse_record({"text": "x"}, only).forms
    for other in (TALK, {**record, "system": "S"}):
        with pytest.raises(
            RecordError, match="--chat-template alpaca accepts only records of `instruction`"
        ):
            parse_record(other, only)
    assert parse_record(record, FOR_PROMPTS).forms == {ALPACA}
    assert parse_record({**record, "history": "[]"}) == own


def test_a_record_that_is_asked_may_say_more_than_one_that_is_learned() -> None:
    asked = parse_record({**TALK, "prompt": "T", "label": False}, FOR_PROMPTS)
    assert asked == parse_record(TALK, FOR_PROMPTS)
    assert parse_record({"text": "Q", "role": "x", "label": 1}, FOR_PROMPTS) == parse_record(
        {"text": "Q"}, FOR_PROMPTS
    )


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(
    ("content", "plain"),
    [
        ([ASK, TELL], [TALK]),
        ({"data": [TALK, TALK], "version": 1}, [TALK, TALK]),
        (json.dumps(TALK), [TALK]),
        ({"conversation": [{"human": "Q", "assistant": "A"}], "id": 7}, [TALK]),
        ({"prompt": json.dumps([ASK]), "completion": [TELL]}, [TALK]),
        ({"prompt": "Q", "completion": "A", "label": True}, [{"prompt": "Q", "completion": "A"}]),
        ({"prompt": "Q", "completion": "A", "label": False}, []),
    ],
)
def test_jq_makes_what_the_advice_promises(tmp_path: Path, content: Any, plain: list[Any]) -> None:
    """Run the command of the message in a shell."""
    path = tmp_path / "FILE"
    path.write_text(json.dumps(content, indent=1))
    try:
        # a reader yields the elements of a list
        parse_record(content[0] if isinstance(content, list) else content)
        said = "jq -c . FILE > NEW.jsonl"
    except RecordError as error:
        said = str(error)
    match = re.search(r"jq -c (?:'[^']*'|\S+) FILE > NEW.jsonl", said)
    assert match is not None, said
    subprocess.run(["sh", "-c", match[0]], cwd=tmp_path, check=True, timeout=20)
    made = [json.loads(line) for line in (tmp_path / "NEW.jsonl").read_text().splitlines()]
    assert [parse_record(record) for record in made] == [parse_record(record) for record in plain]
