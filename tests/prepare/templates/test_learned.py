"""Compare the learned text under templates of 2026, as TRL ships them, with lists made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.records.chat_template import OURS, template_of
from megacp.prepare.records.sample import parse_record
from tests.prepare.records.test_read import values
from tests.prepare.templates.public import TEMPLATES, of_trl, tokenizer_at, write_tokenizer

END = "<|im_end|>\n"
FOUR, BEHIND = f"Four.{END}", "\n</think>\n\n"
XML = (
    "<tool_call>\n<function=look>\n<parameter=place>\nOslo\n</parameter>\n</function>\n</tool_call>"
)
ATEM = '<atem:invoke name="look">\n<atem:parameter name="place">Oslo</atem:parameter>\n</atem:invoke>\n'
CALLS = f"<|message|><atem:function_calls>\n{ATEM}</atem:function_calls><|eot|>"
MUSE = " to=user<|message|>Four.<|eot|>"
LFM = "<|tool_call_start|>[look(place='Oslo')]<|tool_call_end|>"
GEMMA = '<|tool_call>call:look{place:<|"|>Oslo<|"|>}<tool_call|><|tool_response>'
GLM = "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call><|observation|>"
LEARNED: dict[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(
        ("qwen3_5_think", "qwen3_6", "qwen3_8"), (FOUR, f"Hm.{BEHIND}{FOUR}", XML + END, BEHIND)
    ),
    "qwen3_5_nothink": (FOUR, f"Hm.{BEHIND}{FOUR}", XML + END, ""),
    "qwen3_5_think_training": (FOUR, f"<think>\nHm.{BEHIND}{FOUR}", XML + END, BEHIND),
    "qwen3_5": (FOUR.strip(), f"Hm.{BEHIND}{FOUR.strip()}", f"{XML}<|im_end|>", BEHIND),  # ours
    "nemotron_3_super": (FOUR, f"Hm.\n</think>\n{FOUR}", f"\n{XML}\n{END}", "</think>"),
    "nemotron_3_5_lightning": (FOUR, f"Hm.</think>{FOUR}", f"\n{XML}\n{END}", "</think>"),
    "lfm2_2_5": (FOUR, f"<think>Hm.</think>{FOUR}", LFM + END, ""),
    "gemma4_v5": ("Four.<turn|>\n", "<|channel>thought\nHm.\n<channel|>Four.<turn|>\n", GEMMA, ""),
    "glm4moe_training": (
        "Four.<|user|>",
        "\n<think>Hm.</think>\nFour.<|user|>",
        GLM,
        "\n<think></think>\n",
    ),
    "muse_glimmer": (
        MUSE,
        f" to=self<|message|>Hm.<|eom|><|start|>assistant{MUSE}",
        f" to=look{CALLS}",
        "",
    ),
}
"""Learned text of an answer, an answer with a thought, and a call; then the empty thought before an
answer.
"""
ASK, TELL = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four."}
LOOK = {"name": "look", "arguments": {"place": "Oslo"}}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "call00001", "type": "function", "function": LOOK}],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("name", LEARNED)
def test_an_answer_is_learned_without_the_thought_that_it_had_not(folder: Path, name: str) -> None:
    """This holds whether or not the prompt opens a thought. Prompts then end with the same text."""
    (answer, thinking, call, before), text = LEARNED[name], OURS.get(name) or of_trl(name)
    tokenizer = tokenizer_at(folder / "tokenizer.json")
    made = template_of(text, tokenizer, "2026-01-31")

    def written(*messages: dict[str, Any]) -> tuple[str, list[str], str]:
        sample = parse_record({"messages": [*messages]}, template=made)
        (piece,) = sample.prefix
        return piece.text, [piece.text[a:b] for a, b, _ in piece.learned], sample.before_answers

    assert written(ASK, TELL, ASK, TELL)[1:] == ([answer, answer], before)
    assert written(ASK, CALL, RESULT, TELL)[1:] == ([call, answer], before)
    assert written(ASK, {**TELL, "reasoning_content": "Hm."})[1:] == ([thinking], "")
    # a template without this role gets a system message
    assert written({**ASK, "role": "developer"}, ASK, TELL)[1] == [answer]
    if name.startswith("qwen3_"):
        assert written({**TELL, "weight": 0}, ASK, TELL)[1] == [answer]
    else:
        assert written(TELL, ASK, TELL)[1] == [answer, answer]
    asked = template_of(text, tokenizer, "2026-01-31", before).render([ASK], prompt=True).text
    assert written(ASK, TELL) == (asked + answer + "\n" * (name in OURS), [answer], before)


def test_what_a_template_changes_of_an_answer_before_an_answer_is_no_empty_thought(
    folder: Path,
) -> None:
    made = template_of(of_trl("qwen3"), tokenizer_at(folder / "tokenizer.json"), None)
    assert parse_record({"messages": [ASK, TELL, TELL]}, template=made).before_answers == ""


PADDED: list[dict[str, Any]] = [{"city": "Oslo", "days": None}, {"city": None, "days": 3}]


def containers(folder: Path) -> Iterator[Path]:
    """Write two calls in common formats: objects, objects with nulls, JSON strings, and tables."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    plain = [{key: value for key, value in given.items() if value is not None} for given in PADDED]

    def record(arguments: Any, written: Callable[[Any], Any] = list, **more: Any) -> dict[str, Any]:
        calls = written(
            [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
        )
        tool = {
            "type": "function",
            "function": {"name": "look", "parameters": {"type": "object", **more}},
        }
        return {
            "messages": [ASK, {"role": "assistant", "content": "", "tool_calls": calls}],
            "tools": [tool],
        }

    padded = [record(given, description=None) for given in PADDED]
    texts = [record(given, lambda calls: [json.dumps(call) for call in calls]) for given in PADDED]
    lines = {
        "objects": map(record, plain),
        "nulls": padded,
        "strings": (record(json.dumps(given, indent=1)) for given in plain),
        "all": (record(given, json.dumps) for given in plain),
    }
    for name, records in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        yield folder / f"{name}.jsonl"
    for name, rows in (("struct", padded), ("Json", texts)):  # column types of `datasets`
        table = pa.Table.from_pylist(rows)
        kind = pa.struct(
            {"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(pa.json_())}
        )
        schema = table.schema.set(0, pa.field("messages", pa.list_(kind)))
        pq.write_table(table.cast(schema) if name == "Json" else table, folder / f"{name}.parquet")
        yield folder / f"{name}.parquet"


def test_calls_are_learned_alike_from_every_container(tmp_path: Path) -> None:
    """Nulls count as absent, except inside strings. Qwen2.5's template would encode a string
    twice.
    """
    made = template_of(TEMPLATES["qwen_25"], tokenizer_at(write_tokenizer(tmp_path)), None)
    said = [
        f'{{"name": "look", "arguments": {given}}}' for given in ('{"city": "Oslo"}', '{"days": 3}')
    ]
    for path in containers(tmp_path):
        pieces = [parse_record(value, template=made).prefix[0] for value in values(path)]
        found = [piece.text[a:b] for piece in pieces for a, b, _ in piece.learned]
        assert found == [f"<tool_call>\n{call}\n</tool_call>{END}" for call in said], path
        assert all('"parameters": {"type": "object"}}' in piece.text for piece in pieces), path
    own = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "look", "arguments": '{"city": null}'}}],
    }
    assert (
        '"arguments": {"city": null}'
        in parse_record({"messages": [ASK, own]}, template=made).prefix[0].text
    )


def test_a_model_that_learned_no_thought_is_asked_without_the_one_that_its_prompt_opens(
    folder: Path,
) -> None:
    tokenizer, text = tokenizer_at(folder / "tokenizer.json"), of_trl("deepseek_r1_distill")
    sample = parse_record({"messages": [ASK, TELL]}, template=template_of(text, tokenizer, None))
    (piece,) = sample.prefix
    asked = (
        template_of(text, tokenizer, None, sample.before_answers).render([ASK], prompt=True).text
    )
    assert asked == piece.text[: piece.learned[0][0]] and sample.answers["empty_thoughts"] == 1
