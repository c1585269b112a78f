"""What to do with a record that has no form, or whose form is one that is not trained.

Advice must be safe to follow: no system prompt is dropped, nothing that users say is learned, no
answer becomes context, and answers that a data set calls bad are not learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacp.prepare.records.record import LEARNED_ROLES, RecordError, RecordRules
from megacp.prepare.records.turns import ROLE_KEYS, are_messages, list_at, role_of

_QUESTIONS = (
    "question",
    "query",
    "prompt",
    "instruction",
    "input",
    "user",
    "human",
    "problem",
    "user_prompt",
)
_ANSWERS = (
    "answer",
    "response",
    "completion",
    "output",
    "assistant",
    "solution",
    "target",
    "reply",
    "gpt",
    "bot",
)
_CONTEXTS = ("context", "input", "passage")
_TEXTS = (
    "content",
    "contents",
    "body",
    "document",
    "doc",
    "code",
    "article",
    "page_content",
    "raw_content",
)
"""Usual names of columns, in lower case."""
_ANSWERED = ("messages", "conversations", "conversation", "completion", "output")
"""Keys of records with an answer, which a `label` may judge."""
_LABELS = ("label", "kto_tag")
_PREFERENCES = "are preferences (DPO), which are not trained here"
_SPEAKERS = (
    "human:",
    "user:",
    "assistant:",
    "<|im_start|>",
    "<|user|>",
    "[inst]",
    "### instruction",
)
"""Marks of a text in which several speak."""


def refuse_untrained(given: Mapping[str, Any], rules: RecordRules) -> None:
    """RecordError for a good and a bad answer in one record, one message, and a `label` of an
    answer or a text.
    """
    if given.keys() >= {"chosen", "rejected"}:
        column = _chosen_column(given)
        dropped = "rejected"
        if column in given:
            dropped += f",{column}"
        way = f"give --columns {column}=chosen --ignore-keys {dropped}"
        if not column:
            way = "make `messages` of `chosen`, which is one text with all that users say in it"
        raise RecordError(
            f"`chosen` and `rejected` {_PREFERENCES}; to learn the chosen answers, {way}"
        )
    text_key = rules.text_key
    if text_key in given and isinstance(given.get("role"), str) and not rules.leaves_out("role"):
        raise RecordError(
            f"`{text_key}` is what a {given['role']!r} says, as `role` tells: one message. Make "
            "one record of all "
            "messages of a conversation: as a text, what users say would be learned too"
        )
    for key in _LABELS:
        label = given.get(key)
        if label is None or label == "" or isinstance(label, list | dict) or rules.leaves_out(key):
            continue
        if text_key in given:
            what = (
                "the class of the text"
                if isinstance(label, str)
                else f"the number of the text's class ({label})"
            )
            raise RecordError(
                f"`{key}` is {what} and would be lost; --columns "
                f"instruction={text_key},output={key} learns it as an "
                f"answer where it is a word, --ignore-keys {key} learns the text alone"
            )
        if any(name in given for name in _ANSWERED) and not isinstance(label, str):
            raise RecordError(
                f"`{key}` says which answers are good (KTO), which is not trained here; to learn "
                "the good ones: "
                f"jq -c 'select(.{key} == true or .{key} == 1) | del(.{key})' FILE > NEW.jsonl"
            )


def _chosen_column(given: Mapping[str, Any]) -> str:
    """Return the key that a chosen answer has to be read as: a conversation, or what follows a
    prompt; else empty.
    """
    chosen = list_at(given["chosen"], "chosen")
    prompt = list_at(given.get("prompt"), "prompt")
    if not isinstance(chosen, list):
        asked = {"instruction": "output", "prompt": "completion"}
        return next((answer for question, answer in asked.items() if question in given), "")
    is_whole = not isinstance(prompt, list) or chosen[: len(prompt)] == prompt
    return "messages" if is_whole else "completion"


def advice_for(given: Mapping[str, Any]) -> str:
    """Return what to do with a record without a form; empty where nothing is known to help."""
    ways = (
        _of_message,
        _of_list,
        _of_pair,
        _of_transcript,
        _of_tokens,
        _of_text,
        _of_two_columns,
        _of_wrapper,
    )
    for advise in ways:
        if advice := advise(given):
            return advice
    return ""


def _of_message(given: Mapping[str, Any]) -> str:
    """A message, where a list of messages is one record over many lines."""
    if (
        not any(key in given for key in ROLE_KEYS)
        or not {"content", "value", "parts"} & given.keys()
    ):
        return ""
    way = "jq -c '{messages: .}' FILE > NEW.jsonl"
    return (
        "This is one message of a list. If the file is one conversation, make a record of it: "
        f"{way}"
    )


def _of_list(given: Mapping[str, Any]) -> str:
    """A conversation under another key."""
    found = {}
    for key, value in given.items():
        try:
            messages = list_at(value, key)
        except RecordError:
            continue
        if are_messages(messages):
            found[key] = messages
    if len(found) != 1:
        return ""
    ((key, messages),) = found.items()
    rules = RecordRules()
    if not any(
        role_of(str(each.get("role", each.get("from"))), rules) in LEARNED_ROLES
        for each in messages
    ):
        return f"`{key}` asks, and nothing in the record answers: there is nothing to learn"
    return (
        f"A build's --columns messages={key}{_system_column(given)} reads `{key}` as a conversation"
    )


def _system_column(given: Mapping[str, Any]) -> str:
    """Return the part of --columns that names the only system prompt of a record; empty without
    one.
    """
    systems = [
        key
        for key, value in given.items()
        if "system" in key.lower() and isinstance(value, str | dict)
    ]
    return f",system={systems[0]}" if len(systems) == 1 and systems != ["system"] else ""


def _of_pair(given: Mapping[str, Any]) -> str:
    """A question and its answer under other names."""
    texts = {key.lower(): key for key, value in given.items() if isinstance(value, str)}
    questions = [texts[name] for name in _QUESTIONS if name in texts]
    answers = [texts[name] for name in _ANSWERS if name in texts]
    if not questions or not answers:
        return ""
    contexts = [texts[name] for name in _CONTEXTS if name in texts and texts[name] not in answers]
    if len(questions) == 2 and questions[-1] in contexts:  # Alpaca's input is no second question
        questions.remove(contexts[0])
    question = questions[0] if len(questions) == 1 else "QUESTION"
    answer = answers[0] if len(answers) == 1 else "ANSWER"
    named = [("instruction", question), ("output", answer)]
    if contexts and contexts[0] != question:
        named.append(("input", contexts[0]))
    talk = _columns(named) + _system_column(given)
    meant = [f"QUESTION is {_either(questions)}"] if len(questions) > 1 else []
    meant += [f"ANSWER is {_either(answers)}"] if len(answers) > 1 else []
    where = f", where {' and '.join(meant)}," if meant else ""
    advice = (
        f"A build's --columns {talk}{where} reads a question and its answer (by the chat "
        "template, if there is one)"
    )
    if len(named) > 2 or any("system" in name for name in texts):  # which a text has no place for
        return advice
    text = _columns([("prompt", question), ("completion", answer)])
    return f"{advice}; --columns {text} reads a text and what follows it"


def _columns(named: list[tuple[str, str]]) -> str:
    """Return a value of --columns without names that are read as they are."""
    return ",".join(f"{key}={name}" for key, name in named if key != name)


def _either(keys: list[str]) -> str:
    return " or ".join(f"`{key}`" for key in keys)


def _of_transcript(given: Mapping[str, Any]) -> str:
    """A text in which several speak."""
    for key, value in given.items():
        if isinstance(value, str) and any(mark in value.lower() for mark in _SPEAKERS):
            return (
                f"`{key}` is one text in which several speak: make `messages` of it, or all of "
                "it would be learned"
            )
    return ""


def _of_tokens(given: Mapping[str, Any]) -> str:
    """The tokens of another tool."""
    if "input_ids" not in given:
        return ""
    return "`input_ids` are tokens of some tokenizer, and a build makes its own: give the texts"


def _of_text(given: Mapping[str, Any]) -> str:
    """A plain text under another name, next to nothing but metadata."""
    found = _contents(given)
    if len(found) != 1 or found[0].lower() not in _TEXTS:
        return ""
    return f"--text-key {found[0]} learns `{found[0]}` as a plain text"


def _of_two_columns(given: Mapping[str, Any]) -> str:
    """Two texts of any names, next to nothing but metadata."""
    found = _contents(given)
    if len(found) != 2 or not all(isinstance(given[key], str) for key in found):
        return ""
    first, second = found
    talk = _columns([("instruction", first), ("output", second)])
    return f"If `{first}` asks for `{second}`: a build's --columns {talk}"


def _contents(given: Mapping[str, Any]) -> list[str]:
    """Return the keys of a record that are not plain metadata."""
    found = []
    for key, value in given.items():
        try:
            RecordRules().refuse_lost({key: value}, (), "", in_record=True)
        except RecordError:
            found.append(key)
    return found


def _of_wrapper(given: Mapping[str, Any]) -> str:
    """An object around a list of records, as of an export of a database."""
    found = []
    for key, value in given.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            found.append(key)
    if len(found) != 1 or len(given) > 3:
        return ""
    return f"If `{found[0]}` is a list of records: jq -c '.{found[0]}[]' FILE > NEW.jsonl"
