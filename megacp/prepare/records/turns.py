"""Lists of messages in the spellings that people have, read as OpenAI's: objects with `role` and
`content`.

ShareGPT says `from` and `value`, Gemini `parts` and the role `model`. A table often holds a list as
a text of JSON. Only spellings with one meaning are read: a role that could be anybody's is refused,
and so are two keys for one thing.
"""

from __future__ import annotations

from typing import Any

from megacp.prepare.records.record import (
    CONTEXT_ROLES,
    LEARNED_ROLES,
    RecordError,
    RecordRules,
    decode_json,
    described,
    text_at,
)

ROLE_KEYS = ("role", "from")
"""Keys of a message that say who speaks."""
_TEXT_KEYS = ("content", "value", "text", "parts")
"""Keys of a message that say what is said; the first is that of all messages once they are read."""
_OTHER_KEYS = ("from", "value", "text", "parts")
_OWN_ROLES = (*CONTEXT_ROLES, *LEARNED_ROLES)
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""Other names of roles: ShareGPT's, and Gemini's `model`."""
_CALLS = "function_call"
"""ShareGPT's speaker of tool calls, which are JSON: `{"name": ..., "arguments": {...}}`, or a list
of such.
"""
_ASKING = ("human", "user", "question", "instruction", "query", "prompt", "input")
_ANSWERING = ("gpt", "assistant", "model", "bot", "answer", "response", "output", "completion")
"""Keys of an object that holds a question and its answer, in place of two messages."""


# ---- JSON as text


def json_at(value: Any, where: str) -> Any:
    """Decode a value that may be a text of JSON, as a table cannot hold objects of different
    shapes.
    """
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value.encode())
    except (RecordError, UnicodeEncodeError) as error:
        raise RecordError(f"`{where}` is a string and no JSON: {error}") from error


def list_at(value: Any, where: str) -> Any:
    """Return the list that a text of JSON holds, where a text could mean nothing else; any other
    value as it is.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        return json_at(value, where)
    return value


# ---- messages


def are_messages(value: Any) -> bool:
    """Whether a value is a list of messages, in any spelling."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, dict) and any(key in each for key in ROLE_KEYS) for each in value)


def messages_at(value: Any, key: str, rules: RecordRules) -> list[dict[str, Any]]:
    """Return the messages at `key` of a record, each with a `role`; RecordError when they are
    none.
    """
    value = list_at(value, key)
    if not isinstance(value, list) or not value:
        raise RecordError(
            f"`{key}` must be a list of at least one message, found {described(value)}"
        )
    return [_message(each, f"{key}[{i}]", rules) for i, each in enumerate(value)]


def _message(turn: Any, where: str, rules: RecordRules) -> dict[str, Any]:
    """Return one message with `role` and `content`, whatever its keys and its speaker are
    called.
    """
    if isinstance(turn, str) and turn.lstrip().startswith("{"):
        turn = json_at(turn, where)
    if not isinstance(turn, dict):
        hint = ""
        if isinstance(turn, str):
            hint = "; who says a text cannot be told from its place"
        raise RecordError(
            f"`{where}` must be an object with `role` and `content`, found {described(turn)}{hint}"
        )
    is_plain = turn.get("role") in _OWN_ROLES and turn.keys().isdisjoint(_OTHER_KEYS)
    if is_plain and not rules.roles:  # nearly all messages: nothing is to be renamed
        return turn
    role_key = _only_key(turn, ROLE_KEYS, where, "who speaks")
    if role_key is None:
        raise RecordError(f"`{where}` has no `role`{_pair_advice(turn, where)}")
    speaker = text_at(turn[role_key], f"{where}.{role_key}")
    text_key = _only_key(turn, _TEXT_KEYS, where, "what is said")
    rest = {key: value for key, value in turn.items() if key not in (role_key, text_key)}
    if speaker == _CALLS and text_key is not None:
        return {
            "role": LEARNED_ROLES[0],
            "tool_calls": _calls(turn[text_key], f"{where}.{text_key}"),
            **rest,
        }
    if text_key is None and role_key == "from":
        raise RecordError(
            f"`{where}` must be an object with `from` and `value`, found {described(turn)}"
        )
    message = {"role": role_of(speaker, rules)}
    if text_key == "parts":
        message["content"] = _joined(turn[text_key], f"{where}.{text_key}")
    elif text_key is not None:
        message["content"] = turn[text_key]
    return message | rest


def _only_key(turn: dict[str, Any], keys: tuple[str, ...], where: str, what: str) -> str | None:
    """Return that of some keys which a message has; RecordError where two of them are not empty."""
    there = [key for key in keys if turn.get(key) is not None]
    said = [key for key in there if turn[key] not in ("", [])]
    if len(said) > 1:
        raise RecordError(f"`{where}`: `{said[0]}` and `{said[1]}` both say {what}; leave one out")
    return next(iter(said or there), None)


def role_of(speaker: str, rules: RecordRules) -> str:
    """Return the role of a speaker; a name that means none is returned as it is, to be refused or
    taken as context.
    """
    for role, name in rules.roles:
        if speaker == name:
            return role
    if speaker in rules.context_roles:
        return speaker
    lower = speaker.lower()
    if lower in _OWN_ROLES:
        return lower
    return _ROLES.get(lower, speaker)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return ShareGPT's calls of tools as those of a message."""
    calls = json_at(value, where)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise RecordError(
            f"`{where}` must be a call with `name` and `arguments`, or a list of calls"
        )
    return [{"type": "function", "function": call} for call in calls]


def _joined(parts: Any, where: str) -> str:
    """Return the text of Gemini's parts."""
    texts = []
    for i, part in enumerate(parts if isinstance(parts, list) else [parts]):
        text = part
        if isinstance(part, dict) and part.keys() == {"text"}:
            text = part["text"]
        if not isinstance(text, str):
            raise RecordError(
                f"`{where}[{i}]` must be a text, or an object with `text` alone; found "
                f"{described(part)}"
            )
        texts.append(text)
    return "".join(texts)


def system_text(value: Any, where: str) -> str:
    """Return a system prompt: a text, or a message with it, as Gemini's `systemInstruction`."""
    if isinstance(value, dict):
        key = _only_key(value, _TEXT_KEYS, where, "what is said")
        if key is not None:
            return _joined(value[key], f"{where}.{key}")
    return text_at(value, where)


def _pair_advice(turn: dict[str, Any], where: str) -> str:
    """Return what to do with an object that holds a question and its answer; empty where it is
    none.
    """
    asking = [key for key in _ASKING if isinstance(turn.get(key), str)]
    answering = [key for key in _ANSWERING if isinstance(turn.get(key), str)]
    if len(asking) != 1 or len(answering) != 1 or not where.endswith("]"):
        return ""
    key = where.rpartition("[")[0]
    messages = f'[{{role: "user", content: .{asking[0]}}}, {{role: "assistant", content: .{answering[0]}}}]'
    return (
        ": it is a question with its answer. Make two messages of it: jq -c '.messages = "
        f"[.{key}[] | {messages}[]]"
        f"{'' if key == 'messages' else f' | del(.{key})'}' FILE > NEW.jsonl"
    )
