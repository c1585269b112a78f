"""Advice for records that have no form, or whose form cannot be trained.

Advice must be safe to follow. It never drops a system prompt, learns what users write, turns an
answer into context, or learns answers that a dataset marks as bad.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacp.prepare.records.record import LEARNED_ROLES, RecordError, RecordRules
from megacp.prepare.records.turns import ROLE_KEYS, are_messages, list_at, role_of

# column names of questions and answers in published data sets
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
"""Common names of text columns, in lower case."""
_ANSWERED = ("messages", "conversations", "conversation", "completion", "output")
"""Keys of records with an answer, which a `label` may rate."""
# keys that rate an answer (KTO) or classify a text
_LABELS = ("label", "kto_tag")
_PREFERENCES = "are preferences (DPO), which cannot be trained here"
_SPEAKERS = (
    "human:",
    "user:",
    "assistant:",
    "<|im_start|>",
    "<|user|>",
    "[inst]",
    "### instruction",
)
"""Marks of a text that is a dialogue of several speakers."""


def refuse_untrained(given: Mapping[str, Any], rules: RecordRules) -> None:
    """Raise RecordError for record types that are not trained.

    These are preferences (a good and a bad answer), single messages, and texts or answers with a
    `label`.
    """
    # preferences: only the chosen answer could be trained on
    if given.keys() >= {"chosen", "rejected"}:
        column = _chosen_column(given)
        dropped = "rejected"
        if column in given:
            dropped += f",{column}"
        way = f"use --columns {column}=chosen --ignore-keys {dropped}"
        if not column:
            # `chosen` is a whole dialogue as one text
            way = "convert `chosen` to `messages`; as one text it would also teach the users' turns"
        raise RecordError(
            f"`chosen` and `rejected` {_PREFERENCES}; to learn the chosen answers, {way}"
        )
    # a text next to a role is a message, not a document
    text_key = rules.text_key
    if text_key in given and isinstance(given.get("role"), str) and not rules.leaves_out("role"):
        raise RecordError(
            f"`{text_key}` with `role` {given['role']!r} is a single message. Put all messages of "
            "a conversation into one record; as separate texts, user turns would be learned too"
        )
    for key in _LABELS:
        label = given.get(key)
        if label is None or label == "" or isinstance(label, list | dict) or rules.leaves_out(key):
            continue
        if text_key in given:
            what = "the class of the text"
            if not isinstance(label, str):
                what = f"the number of the text's class ({label})"
            raise RecordError(
                f"`{key}` is {what} and would be lost; use --columns "
                f"instruction={text_key},output={key} to learn it as an answer if it is a word, or "
                f"--ignore-keys {key} to learn only the text"
            )
        # a number or a boolean rates the answer; a string may be anything
        if any(name in given for name in _ANSWERED) and not isinstance(label, str):
            raise RecordError(
                f"`{key}` rates the answers (KTO), which cannot be trained here; to learn only the "
                "good ones: "
                f"jq -c 'select(.{key} == true or .{key} == 1) | del(.{key})' FILE > NEW.jsonl"
            )


def _chosen_column(given: Mapping[str, Any]) -> str:
    """Return the key under which to read `chosen`: a conversation or a completion; "" if neither
    fits.
    """
    # some data sets repeat the prompt at the beginning of `chosen`
    chosen = list_at(given["chosen"], "chosen")
    prompt = list_at(given.get("prompt"), "prompt")
    # a text: it answers an instruction or continues a prompt
    if not isinstance(chosen, list):
        asked = {"instruction": "output", "prompt": "completion"}
        return next((answer for question, answer in asked.items() if question in given), "")
    is_whole = not isinstance(prompt, list) or chosen[: len(prompt)] == prompt
    return "messages" if is_whole else "completion"


def advice_for(given: Mapping[str, Any]) -> str:
    """Return advice for a record without a form, or "" if none is known."""
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
    # the first that applies; the later ones are guesses that need more care
    for advise in ways:
        if advice := advise(given):
            return advice
    return ""


def _of_message(given: Mapping[str, Any]) -> str:
    """Advise on a single message: the file has one conversation over many lines."""
    has_role = any(key in given for key in ROLE_KEYS)
    if not has_role or given.keys().isdisjoint(("content", "value", "parts")):
        return ""
    return (
        "This is a single message. If the file is one conversation, convert it to one record: "
        "jq -c '{messages: .}' FILE > NEW.jsonl"
    )


def _of_list(given: Mapping[str, Any]) -> str:
    """Advise on a conversation under an unknown key."""
    # keys with a list of messages, possibly as a JSON string
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
    roles = [role_of(str(each.get("role", each.get("from"))), rules) for each in messages]
    if not any(role in LEARNED_ROLES for role in roles):
        return f"`{key}` is a prompt without an answer, so there is nothing to learn"
    return (
        f"Build with --columns messages={key}{_system_column(given)} to read `{key}` as a "
        "conversation"
    )


def _system_column(given: Mapping[str, Any]) -> str:
    """Return the part of --columns for the record's only system prompt, or ""."""
    # several candidates would be a guess
    systems = [
        key
        for key, value in given.items()
        if "system" in key.lower() and isinstance(value, str | dict)
    ]
    return f",system={systems[0]}" if len(systems) == 1 and systems != ["system"] else ""


def _of_pair(given: Mapping[str, Any]) -> str:
    """Advise on a question and an answer under other keys."""
    # lower-case name -> key, for keys with a text
    texts = {key.lower(): key for key, value in given.items() if isinstance(value, str)}
    questions = [texts[name] for name in _QUESTIONS if name in texts]
    answers = [texts[name] for name in _ANSWERS if name in texts]
    if not questions or not answers:
        return ""
    contexts = [texts[name] for name in _CONTEXTS if name in texts and texts[name] not in answers]
    # the `input` of Alpaca is not a second question, but belongs to the first
    if len(questions) == 2 and questions[-1] in contexts:
        questions.remove(contexts[0])
    # with several candidates the user has to choose
    question = questions[0] if len(questions) == 1 else "QUESTION"
    answer = answers[0] if len(answers) == 1 else "ANSWER"
    named = [("instruction", question), ("output", answer)]
    if contexts and contexts[0] != question:
        named.append(("input", contexts[0]))
    # as a conversation (Alpaca's keys), or as a text with a completion
    talk = _columns(named) + _system_column(given)
    meant = []
    if len(questions) > 1:
        meant.append(f"QUESTION is {_either(questions)}")
    if len(answers) > 1:
        meant.append(f"ANSWER is {_either(answers)}")
    where = f", where {' and '.join(meant)}," if meant else ""
    advice = (
        f"Build with --columns {talk}{where} to read a question and its answer (rendered by the "
        "chat template, if there is one)"
    )
    # a plain text has no place for a context or a system prompt
    if len(named) > 2 or any("system" in name for name in texts):
        return advice
    text = _columns([("prompt", question), ("completion", answer)])
    return f"{advice}, or with --columns {text} to read a text and its continuation"


def _columns(named: list[tuple[str, str]]) -> str:
    """Return a value of --columns, without keys that already have their name."""
    return ",".join(f"{key}={name}" for key, name in named if key != name)


def _either(keys: list[str]) -> str:
    """Return alternative keys as text."""
    return " or ".join(f"`{key}`" for key in keys)


def _of_transcript(given: Mapping[str, Any]) -> str:
    """Advise on a text with several speakers."""
    for key, value in given.items():
        if isinstance(value, str) and any(mark in value.lower() for mark in _SPEAKERS):
            return (
                f"`{key}` is one text with several speakers; convert it to `messages`, because as "
                "text all of it would be learned"
            )
    return ""


def _of_tokens(given: Mapping[str, Any]) -> str:
    """Advise on the token ids of another tool."""
    # the ids depend on a tokenizer that the record does not name
    if "input_ids" not in given:
        return ""
    return (
        "`input_ids` are the tokens of some tokenizer, but a build needs the texts themselves (or "
        "a tokenized Megatron dataset, .idx)"
    )


def _of_text(given: Mapping[str, Any]) -> str:
    """Advise on a plain text under another key, next to only metadata."""
    found = _contents(given)
    if len(found) != 1 or found[0].lower() not in _TEXTS:
        return ""
    return f"Use --text-key {found[0]} to learn `{found[0]}` as plain text"


def _of_two_columns(given: Mapping[str, Any]) -> str:
    """Advise on two texts under any keys, next to only metadata."""
    found = _contents(given)
    if len(found) != 2 or not all(isinstance(given[key], str) for key in found):
        return ""
    first, second = found
    talk = _columns([("instruction", first), ("output", second)])
    return f"If `{second}` is the answer to `{first}`, build with --columns {talk}"


def _contents(given: Mapping[str, Any]) -> list[str]:
    """Return the keys of a record that are not metadata."""
    found = []
    for key, value in given.items():
        # exactly the keys that a record without a form would lose
        try:
            RecordRules().refuse_lost({key: value}, (), "", in_record=True)
        except RecordError:
            found.append(key)
    return found


def _of_wrapper(given: Mapping[str, Any]) -> str:
    """Advise on an object around a list of records, such as a database export."""
    found = []
    for key, value in given.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            found.append(key)
    # an export has little else in it, such as a version
    if len(found) != 1 or len(given) > 3:
        return ""
    return f"If `{found[0]}` is a list of records: jq -c '.{found[0]}[]' FILE > NEW.jsonl"
