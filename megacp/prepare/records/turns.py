"""Convert lists of messages in common formats to OpenAI's: objects with `role` and `content`.

ShareGPT uses `from` and `value`; Gemini uses `parts` and the role `model`. Tables often store a
list as a JSON string. Only unambiguous formats are accepted: a role with an unclear meaning is
refused, and so are two keys with the same meaning.
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
"""Keys for the speaker of a message."""
_TEXT_KEYS = ("content", "value", "text", "parts")
"""Keys for the text of a message; all messages are converted to the first."""
# a message with one of these keys must be converted
_OTHER_KEYS = ("from", "value", "text", "parts")
_OWN_ROLES = (*CONTEXT_ROLES, *LEARNED_ROLES)
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""Role names in ShareGPT, and Gemini's `model`."""
_CALLS = "function_call"
"""ShareGPT's speaker name for tool calls. Their text is JSON: one `{"name": ..., "arguments":
{...}}`, or a list of them.
"""
_ASKING = ("human", "user", "question", "instruction", "query", "prompt", "input")
_ANSWERING = ("gpt", "assistant", "model", "bot", "answer", "response", "output", "completion")
"""Keys of an object that contains a question and its answer instead of two messages."""


# ---- JSON as text


def json_at(value: Any, where: str) -> Any:
    """Return a value, decoded if it is a JSON string. Raise RecordError for any other string.

    Tables store objects of different shapes as strings.
    """
    # JSONL already has objects
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value.encode())
    except (RecordError, UnicodeEncodeError) as error:
        raise RecordError(f"`{where}` is a string, but not JSON: {error}") from error


def list_at(value: Any, where: str) -> Any:
    """Return a value, decoded if it is a JSON list. Use only where plain text is not allowed."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return json_at(value, where)
    return value


# ---- messages


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of messages in any format."""
    if not isinstance(value, list) or not value:
        return False
    for each in value:
        if not isinstance(each, dict) or not any(key in each for key in ROLE_KEYS):
            return False
    return True


def messages_at(value: Any, key: str, rules: RecordRules) -> list[dict[str, Any]]:
    """Return the messages at `key` of a record, each with a `role`.

    Raise RecordError if the value is not a list of messages.
    """
    value = list_at(value, key)
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a non-empty list of messages, found {described(value)}")
    return [_message(each, f"{key}[{i}]", rules) for i, each in enumerate(value)]


def _message(turn: Any, where: str, rules: RecordRules) -> dict[str, Any]:
    """Return one message with `role` and `content`, whatever its format."""
    if isinstance(turn, str) and turn.lstrip().startswith("{"):
        turn = json_at(turn, where)
    if not isinstance(turn, dict):
        hint = ""
        if isinstance(turn, str):
            hint = "; the speaker of a text cannot be inferred from its position"
        raise RecordError(
            f"`{where}` must be an object with `role` and `content`, found {described(turn)}{hint}"
        )
    is_plain = turn.get("role") in _OWN_ROLES and turn.keys().isdisjoint(_OTHER_KEYS)
    # the fast path for nearly all messages: nothing to convert
    if is_plain and not rules.roles:
        return turn

    # find the speaker and the text
    role_key = _only_key(turn, ROLE_KEYS, where, "the speaker")
    if role_key is None:
        raise RecordError(f"`{where}` has no `role`{_pair_advice(turn, where)}")
    speaker = text_at(turn[role_key], f"{where}.{role_key}")
    text_key = _only_key(turn, _TEXT_KEYS, where, "the text")
    rest = {key: value for key, value in turn.items() if key not in (role_key, text_key)}
    # ShareGPT has a separate speaker for tool calls
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
    # the common case: another name for the role, the text, or both
    message = {"role": role_of(speaker, rules)}
    if text_key == "parts":
        message["content"] = _joined(turn[text_key], f"{where}.{text_key}")
    elif text_key is not None:
        message["content"] = turn[text_key]
    return message | rest


def _only_key(turn: dict[str, Any], keys: tuple[str, ...], where: str, what: str) -> str | None:
    """Return the key among `keys` that a message has, or None.

    A key with an empty value is returned only if no key has a non-empty value. Raise RecordError if
    two values are not empty; `what` describes the meaning of the keys.
    """
    # null counts as absent, as in a table
    there = [key for key in keys if turn.get(key) is not None]
    said = [key for key in there if turn[key] not in ("", [])]
    if len(said) > 1:
        raise RecordError(
            f"`{where}`: `{said[0]}` and `{said[1]}` both specify {what}; remove one of them"
        )
    return next(iter(said or there), None)


def role_of(speaker: str, rules: RecordRules) -> str:
    """Return the role of a speaker. An unknown name is returned unchanged and refused later."""
    # the user's own names (--roles) take precedence
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
    """Convert ShareGPT's tool calls to the `tool_calls` of a message."""
    # one call, or a list of parallel calls
    calls = json_at(value, where)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise RecordError(
            f"`{where}` must be a call with `name` and `arguments`, or a list of calls"
        )
    return [{"type": "function", "function": call} for call in calls]


def _joined(parts: Any, where: str) -> str:
    """Return the joined text of Gemini's parts. Raise RecordError for parts other than text."""
    texts = []
    if not isinstance(parts, list):
        parts = [parts]
    for i, part in enumerate(parts):
        text = part
        if isinstance(part, dict) and part.keys() == {"text"}:
            text = part["text"]
        if not isinstance(text, str):
            raise RecordError(
                f"`{where}[{i}]` must be a text, or an object with only `text`; found "
                f"{described(part)}"
            )
        texts.append(text)
    return "".join(texts)


def system_text(value: Any, where: str) -> str:
    """Return a system prompt: a text, or a message such as Gemini's `systemInstruction`."""
    if isinstance(value, dict):
        key = _only_key(value, _TEXT_KEYS, where, "the text")
        if key is not None:
            return _joined(value[key], f"{where}.{key}")
    return text_at(value, where)


def _pair_advice(turn: dict[str, Any], where: str) -> str:
    """Return advice for an object with a question and its answer; "" for any other object."""
    # only for exactly one question and one answer; anything else would be a guess
    asking = [key for key in _ASKING if isinstance(turn.get(key), str)]
    answering = [key for key in _ANSWERING if isinstance(turn.get(key), str)]
    if len(asking) != 1 or len(answering) != 1 or not where.endswith("]"):
        return ""
    key = where.rpartition("[")[0]
    # a jq command that converts each such object to two messages
    question = f'{{role: "user", content: .{asking[0]}}}'
    answer = f'{{role: "assistant", content: .{answering[0]}}}'
    change = f".messages = [.{key}[] | [{question}, {answer}][]]"
    if key != "messages":
        change += f" | del(.{key})"
    return (
        ": it is a question with its answer. Convert each such object to two messages: "
        f"jq -c '{change}' FILE > NEW.jsonl"
    )
