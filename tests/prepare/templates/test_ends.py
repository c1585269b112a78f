"""The end of an answer is learned: a token of the template, of the next turn, or of the model's
folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare import command as preprocess
from megacp.prepare.records.chat_template import ChatTemplate, template_of
from megacp.prepare.records.conversation import answer_ends
from megacp.prepare.records.record import RecordError, RecordRules, Rendered
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.tokenizer import Tokenizer
from tests.prepare.templates.public import of_trl, tokenizer_at
from tests.prepare.templates.test_public import expected, library

ASK, TELL = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four."}
ASK_2, TELL_2 = (
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes \u00e9\u6f22 \U0001f642."},
)
HM = {"reasoning_content": "Two metres."}
LOOK = {"name": "tide", "arguments": {"city": "Bergen", "days": 3}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": LOOK}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "tide", "content": "2 m"}
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}}
TOOLS = [
    {"type": "function", "function": {"name": "tide", "description": "Height", "parameters": CITY}}
]
PLAIN = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}{{ 'assistant' if add_generation_prompt }}"
BLOCK = (
    "{% for m in messages %}<|user|>{{ m.role }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|endoftext|>{% endfor %}"
)
ENDED = BLOCK.replace("{% endgeneration %}", "<|endoftext|>{% endgeneration %}")


def write_folder(folder: Path, text: str, **config: Any) -> Path:
    """Write a model's folder with a template and a tokenizer that has its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {*re.findall(r"<\|[a-z_]+\|>|<sop>|\[gMASK\]", text), "<|endoftext|>", "<|user|>"}
    made.add_special_tokens([AddedToken(token, normalized=False) for token in sorted(special)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(text)
    return folder


def opened(folder: Path, text: str, **config: Any) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = tokenizer_at(write_folder(folder, text, **config) / "tokenizer.json")
    return tokenizer, template_of(text, tokenizer, "2026-03-04")


def read(
    made: ChatTemplate, *messages: dict[str, Any], **more: Any
) -> tuple[Rendered, list[str], dict[str, int]]:
    sample = parse_record({"messages": [*messages], **more}, RecordRules(), template=made)
    piece = sample.prefix[0]
    assert isinstance(piece, Rendered)
    return piece, [str(piece.text)[a:b] for a, b, _ in piece.learned], dict(sample.answers)


GLM = {
    "one turn": [ASK, TELL],
    "turns": [ASK, TELL, ASK_2, TELL_2],
    "a question at the end": [ASK, TELL, ASK_2],
    "an agent": [ASK, CALL, RESULT, TELL, ASK_2, TELL_2],
    "a call at the end": [ASK, CALL],
    "thoughts": [ASK, {**CALL, **HM}, RESULT, {**TELL, **HM}],
    "a system": [{"role": "system", "content": "Be terse."}, ASK, TELL],
}


@pytest.mark.parametrize("kind", GLM)
def test_the_token_of_the_next_turn_is_learned_as_under_the_training_template(
    tmp_path: Path, kind: str
) -> None:
    """GLM-4.5 ends an answer with the token of the next turn; TRL's training template writes and
    masks it.
    """
    _, made = opened(tmp_path, of_trl("glm4moe"))
    messages, tools = GLM[kind], TOOLS if "tool" in str(GLM[kind]) else None
    piece, learned, answers = read(made, *messages, tools=tools)
    ids, places = made.encode(str(piece.text))
    mask = [
        float(any(a < stop and b > start for start, stop, _ in piece.learned)) for a, b in places
    ]
    assert (ids.tolist(), mask) == expected(
        library(tmp_path, of_trl("glm4moe_training")), messages, tools=tools
    )
    assert learned[-1].endswith("<|observation|>" if messages[-1] is CALL else "<|user|>")
    assert "no_end" not in answers


@pytest.mark.parametrize("stated", [None, ["<|endoftext|>", "<|user|>", "<|observation|>"]])
def test_a_server_stops_at_the_tokens_of_the_next_turn(
    tmp_path: Path, stated: list[str] | None
) -> None:
    tokenizer, made = opened(tmp_path, of_trl("glm4moe"))
    if stated:
        ids = [tokenizer.token_id(token) for token in stated]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    ends = answer_ends(made.text, tokenizer)
    assert [tokenizer.decode([i]) for i in ends] == ["<|user|>", "<|observation|>"]


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", [7, [7, 8], {"text_config": {"eos_token_id": 7}}])
def test_the_end_of_the_folder_is_learned_where_a_template_writes_none(
    tmp_path: Path, name: str, eos: Any
) -> None:
    write_folder(tmp_path, PLAIN, eos_token=None)
    (tmp_path / name).write_text(
        json.dumps(eos if isinstance(eos, dict) else {"eos_token_id": eos})
    )
    tokenizer = tokenizer_at(tmp_path / "tokenizer.json")
    made = template_of(PLAIN, tokenizer, None)
    assert read(made, ASK, TELL)[1:] == ([f"Four.{made._model.id_to_token(7)}"], {"no_thoughts": 1})


def test_the_end_of_the_tokenizer_comes_first_and_without_any_an_answer_has_none(
    tmp_path: Path,
) -> None:
    _, made = opened(tmp_path / "a", PLAIN)
    assert read(made, ASK, TELL)[1] == ["Four.<|endoftext|>"]
    assert read(made, ASK, TELL, ASK_2, TELL_2)[1:] == (
        ["Four.", f"{TELL_2['content']}<|endoftext|>"],
        {"no_thoughts": 2, "no_end": 1},
    )
    _, made = opened(tmp_path / "b", PLAIN, eos_token=None)
    assert read(made, ASK, TELL)[1:] == (["Four."], {"no_thoughts": 1, "no_end": 1})


def test_branches_begin_with_the_token_that_ends_what_they_share(tmp_path: Path) -> None:
    _, made = opened(tmp_path / "glm", of_trl("glm4moe"))
    record = {
        "messages": [ASK, TELL],
        "branches": [{"messages": [ASK_2, TELL_2]}, {"messages": [ASK, TELL]}],
    }
    sample = parse_record(record, template=made)
    assert str(sample.prefix[0].text).endswith("Four.<|user|>")
    whole = read(made, ASK, TELL, ASK_2, TELL_2)[0]
    assert sample.branches[0][0] == whole
    _, plain = opened(tmp_path / "plain", PLAIN)
    sample = parse_record(record, template=plain)
    # branches do not begin with the end token of the folder
    assert str(sample.prefix[0].text).endswith("Four.")
    assert sample.branches[0][0] == read(plain, ASK, TELL, ASK_2, TELL_2)[0]


@pytest.mark.parametrize(("text", "count"), [(BLOCK, 2), (ENDED, 0)])
def test_a_build_that_learns_no_end_says_so(
    tmp_path: Path, text: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "model", text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [ASK, TELL, ASK_2, TELL_2]}) + "\n")
    flags = [
        "--tokenizer",
        str(folder),
        "--seq-length",
        "256",
        "--workers",
        "1",
        "--output",
        str(tmp_path / "d"),
    ]
    assert preprocess.main(["build", "--input", str(tmp_path / "a.jsonl"), *flags]) == 0
    told = (
        f"{count} answers are learned without an end token, so a model may not stop after them: let "
        "the chat template"
    )
    assert (told in capsys.readouterr().out) == (count > 0)


THOUGHTS = [
    {**CALL, "reasoning_content": "Ask."},
    {**CALL, "thinking": "Ask.", "weight": 0},
    {**CALL, "content": "Ask."},  # the template treats it as a thought
    {**CALL, "content": "Ask.", "weight": 0},
]


@pytest.mark.parametrize("call", THOUGHTS)
def test_a_call_whose_thought_is_left_out_is_context_of_the_answer(
    tmp_path: Path, call: dict[str, Any]
) -> None:
    """gpt-oss' template drops the thought of a call once an answer follows; TRL's template masks
    the same answer.
    """
    _, made = opened(tmp_path, of_trl("gptoss"))
    answer = {**TELL, **HM}
    _, learned, answers = read(made, ASK, call, RESULT, answer, tools=TOOLS)
    assert answers == {"real_thoughts": 1} | ({} if "weight" in call else {"in_context": 1})
    theirs = library(
        tmp_path, of_trl("gptoss_training").replace('strftime_now("%Y-%m-%d")', "'2026-03-04'")
    )
    messages = [ASK, {key: value for key, value in call.items() if key != "weight"}, RESULT, answer]
    out = theirs.apply_chat_template(
        messages, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    masked = theirs.decode(
        [i for i, on in zip(out["input_ids"], out["assistant_masks"], strict=True) if on]
    )
    before, _, last = masked.partition("<|call|><|start|>assistant")
    assert before and learned == [last] and "Two metres." in last
    assert read(made, ASK, CALL, RESULT, TELL, tools=TOOLS)[1][1:] == [
        "<|channel|>final<|message|>Four.<|return|>"
    ]


def test_what_a_template_never_writes_next_to_a_call_is_refused(tmp_path: Path) -> None:
    said = "{{ m.tool_calls | tojson if m.tool_calls else m.content }}<|endoftext|>"
    _, made = opened(
        tmp_path, f"{{% for m in messages %}}<|user|>{{{{ m.role }}}}{said}{{% endfor %}}"
    )
    for call in ({**CALL, "content": "Ask."}, {**CALL, "content": "Ask.", "weight": 0}):
        with pytest.raises(
            RecordError, match="would be lost, because the chat template does not write it"
        ) as error:
            read(made, ASK, call, RESULT, TELL)
        assert "--ignore-keys" not in str(error.value)


def test_qwen_learns_an_answer_after_a_call_whose_thought_a_later_turn_drops(
    tmp_path: Path,
) -> None:
    _, made = opened(tmp_path, of_trl("qwen3"), eos_token="<|im_end|>")
    _, learned, answers = read(made, ASK, {**CALL, **HM}, RESULT, TELL, ASK_2, TELL_2, tools=TOOLS)
    assert (
        learned == ["Four.<|im_end|>\n", f"{TELL_2['content']}<|im_end|>\n"]
        and answers["in_context"] == 1
    )
