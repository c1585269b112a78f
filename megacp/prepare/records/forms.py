"""What a record says, as texts or as messages: its forms, its messages, the images that its texts leave a place for.

A record has exactly one form. Keys of two forms in one record are refused with both names, as only one of the two
would be learned. What stands in a message is learned or not by its role and its `weight` alone.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megacp.prepare.records.record import (
    CONTEXT_ROLES,
    END,
    LEARNED_ROLES,
    LINKS,
    MEDIA_SOURCES,
    MEDIA_TYPES,
    RecordError,
    RecordRules,
    SamplePart,
    decode_json,
    described,
    media_at,
    text_at,
    without_nulls,
)

MESSAGE_KEYS = ("role", "content", "weight", "id")
MOST_WEIGHT = 1e12
"""Largest weight of a record, a branch and a message: the three times each other are finite in float32."""
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
"""Roles of ShareGPT by the names that it has for them; others are the same."""
_CALLS = "function_call"
"""ShareGPT's speaker of tool calls, which are JSON: `{"name": ..., "arguments": {...}}`, or a list of such."""
_PLACE = re.compile(r"<(image|video)>")
"""What stands in a text for the next of a record's images or videos."""
_UNFILLED = re.compile(r"^<image>|<image>$", re.MULTILINE)
"""A place at the edge of a line, where no image is named; amid a line it may be a word about images."""
_SOURCES = (*MEDIA_SOURCES, *MEDIA_TYPES, *LINKS)
"""Keys of a part that name its image or video."""
IMAGE_AS_TEXT = "<image>"
"""Word of --ignore-keys by which such a place is learned as text."""
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_PAIRED = ", paired with an input that provides further context"


@dataclass(frozen=True)
class Talk:
    """The messages of a record, whatever its form, with what else a chat template is given."""

    messages: list[dict[str, Any]]
    paths: tuple[str, ...]
    """Where each stands in the record."""
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


Said = list[SamplePart] | Talk


# ---- messages and contents


def talk_of(value: Any, key: str) -> Talk:
    """The messages at `key` of a record; RecordError when they are none."""
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one message, found {described(value)}")
    paths = tuple(f"{key}[{i}]" for i in range(len(value)))
    for message, where in zip(value, paths, strict=True):
        if not isinstance(message, dict):
            raise RecordError(f"`{where}` must be an object with `role` and `content`, found {described(message)}")
        if message.get("role") is None:
            raise RecordError(f"`{where}` has no `role`")
    return Talk(value, paths)


def role_and_weight(message: dict[str, Any], where: str, rules: RecordRules) -> tuple[str, float]:
    """Who says a message, and the loss weight of its content: its `weight` where the role is learned, else 0."""
    role, weight = text_at(message["role"], f"{where}.role"), weight_of(message, f"{where}.weight")
    if role not in (*LEARNED_ROLES, *CONTEXT_ROLES, *rules.context_roles) and "*" not in rules.context_roles:
        raise RecordError(
            f"`{where}.role`: {role!r} is none of the roles {', '.join((*CONTEXT_ROLES, *LEARNED_ROLES))}, and only "
            f"what an assistant says is learned; --context-roles {role} takes it as context"
        )
    if role in LEARNED_ROLES:
        return role, 1.0 if rules.ignore_weights else weight
    if message.get("weight") is not None and weight > 0:
        raise RecordError(f"`{where}.weight` is {weight:g}, but nothing that a {role} says is learned; leave it out")
    return role, 0.0


def from_messages(talk: Talk, rules: RecordRules) -> list[SamplePart]:
    """Messages in the house's own form."""
    pieces: list[SamplePart] = []
    for i, (message, where) in enumerate(zip(talk.messages, talk.paths, strict=True)):
        if "content" not in message:
            calls = ": tool calls are written by a chat template, give --chat-template" * ("tool_calls" in message)
            raise RecordError(f"`{where}` has no `content`{calls}")
        (role, learned), content = role_and_weight(message, where, rules), message["content"]
        rules.refuse_lost(message, (*MESSAGE_KEYS, *(["name"] if role == "tool" else [])), f"`{where}`")
        pieces.append(turn_header(role, first=not i))
        if isinstance(content, list):
            said = from_content(content, f"{where}.content", rules)
            pieces += [SamplePart(piece.text, learned * piece.weight, piece.media) for piece in said]
        elif text_at(content, f"{where}.content"):
            pieces.append(SamplePart(content, learned))
        if role in LEARNED_ROLES:
            pieces.append(replace(END, weight=learned))
    return pieces


def turn_header(role: str, first: bool) -> SamplePart:
    """What stands before a message in the house's own form."""
    return SamplePart(("" if first else "\n") + f"<|{role}|>\n", 0.0)


def from_content(value: Any, key: str, rules: RecordRules) -> list[SamplePart]:
    """A list of parts, the texts between images joined."""
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one part, found {described(value)}")
    pieces: list[SamplePart] = []
    for i, part in enumerate(value):
        where = f"{key}[{i}]"
        kind = kind_of(part, where)
        if kind != "text":
            pieces.append(SamplePart(None, 0.0, media_at(part, kind, where, rules)))
        elif text := text_of(part, where, rules):
            before = pieces.pop().text or "" if pieces and pieces[-1].media is None else ""
            pieces.append(SamplePart(before + text, 1.0))
    if not pieces:
        raise RecordError(f"`{key}` holds no text")
    return pieces


def kind_of(part: Any, where: str) -> str:
    """The type of a part of a content; RecordError for one that is not known."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":  # OpenAI's
        return "image"
    if kind not in ("text", *MEDIA_TYPES):
        allowed = f"text (or {', '.join(MEDIA_TYPES)})"
        raise RecordError(f"`{where}` must be an object with `type` {allowed}, found {described(part)}")
    return str(kind)


def text_of(part: dict[str, Any], where: str, rules: RecordRules) -> str:
    """The text of a part of a content."""
    rules.refuse_lost(part, ("type", "text"), f"`{where}`")
    return text_at(part.get("text"), f"{where}.text")


def weight_of(record: dict[str, Any], key: str) -> float:
    """The `weight` of a record or branch, called `key` in errors; 1 where there is none."""
    weight = record.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RecordError(f"`{key}` is {described(weight)}, it must be a number")
    if not 0.0 <= weight <= MOST_WEIGHT:  # also refuses NaN
        raise RecordError(f"`{key}` is {weight}, it must be a number from 0 to {MOST_WEIGHT:g}")
    return float(weight)


# ---- forms


Reader = Callable[[dict[str, Any], Callable[[str], str], RecordRules], Said]
"""What a record says, from the record and from a key to the words for where it stands."""


def plain_text(value: Any, key: str) -> list[SamplePart]:
    """A text, all of it learned."""
    if not text_at(value, key):
        raise RecordError(f"`{key}` is empty")
    return [SamplePart(value, 1.0)]


def _answered(prompt: str, answer: list[SamplePart]) -> list[SamplePart]:
    return [SamplePart(prompt, 0.0), *answer] if prompt else answer


def _prompt_and_completion(record: dict[str, Any], at: Callable[[str], str], rules: RecordRules) -> Said:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _answered(prompt, plain_text(completion, at("completion")))
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise RecordError(
            f"`{at('prompt')}` is {described(prompt)} and `{at('completion')}` {described(completion)}: both must be "
            "strings, or both lists of messages"
        )
    asked, answer = talk_of(prompt, at("prompt")), talk_of(completion, at("completion"))
    # what an assistant says in a prompt is no answer to it
    before = [{**m, "weight": m.get("weight") or 0} if m["role"] in LEARNED_ROLES else m for m in asked.messages]
    return Talk([*before, *answer.messages], asked.paths + answer.paths)


def _alpaca(record: dict[str, Any], at: Callable[[str], str], rules: RecordRules) -> Said:
    instruction, given = (text_at(record.get(key, ""), at(key)) for key in ("instruction", "input"))
    if not instruction:
        raise RecordError(f"`{at('instruction')}` is empty")
    if "history" in record or "system" in record:
        return _talk_of_alpaca(record, at, "\n".join([instruction, given] if given else [instruction]))
    paired, shown = (_PAIRED, f"### Input:\n{given}\n\n") if given else ("", "")
    prompt = _ALPACA.format(paired=paired, instruction=instruction, input=shown)
    return _answered(prompt, plain_text(record["output"], at("output")))


def _talk_of_alpaca(record: dict[str, Any], at: Callable[[str], str], asked: str) -> Talk:
    """Alpaca with earlier turns or a system prompt, for which its text has no place: messages, as LLaMA-Factory's."""
    history, system, key = record.get("history", []), text_at(record.get("system", ""), at("system")), at("history")
    pairs = history if isinstance(history, list) else [history]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RecordError(f"`{key}` must be a list of pairs, each a question and its answer")
    said = [("system", system, at("system"))] if system else []
    for i, (question, answer) in enumerate(pairs):
        said += [("user", question, f"{key}[{i}][0]"), ("assistant", answer, f"{key}[{i}][1]")]
    said += [("user", asked, at("instruction")), ("assistant", record["output"], at("output"))]
    return Talk(
        [{"role": role, "content": text_at(text, where)} for role, text, where in said], tuple(w for *_, w in said)
    )


def _conversations(record: dict[str, Any], at: Callable[[str], str], rules: RecordRules) -> Said:
    value, key = record["conversations"], at("conversations")
    if isinstance(value, list):
        value = [_turn(turn, f"{key}[{i}]") for i, turn in enumerate(value)]
    talk = talk_of(value, key)
    if not record.get("system"):
        return talk
    if talk.messages[0]["role"] == "system":
        raise RecordError(f"`{at('system')}` and `{key}[0]` are both what the system says; leave one out")
    system = {"role": "system", "content": text_at(record["system"], at("system"))}
    return Talk([system, *talk.messages], (at("system"), *talk.paths))


def _turn(turn: Any, where: str) -> Any:
    """A turn of ShareGPT as a message; one that is a message already stays."""
    if not isinstance(turn, dict) or "role" in turn:
        return turn
    if "from" not in turn or "value" not in turn:
        raise RecordError(f"`{where}` must be an object with `from` and `value`, found {described(turn)}")
    speaker = text_at(turn["from"], f"{where}.from")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker == _CALLS:
        calls = _json_at(turn["value"], f"{where}.value")
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, dict) and "name" in call for call in calls):
            raise RecordError(f"`{where}.value` must be a call with `name` and `arguments`, or a list of calls")
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls], **rest}
    return {"role": _SPEAKERS.get(speaker, speaker), "content": turn["value"], **rest}


def _json_at(value: Any, where: str) -> Any:
    """A value that may be a string of JSON, as a table cannot hold objects of different shapes."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RecordError(f"`{where}` is a string and no JSON: {error}") from error


def objects_at(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects, or that of a string of JSON; a blank one has none."""
    value = _json_at((value.strip() or "[]") if isinstance(value, str) else value, where)
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise RecordError(f"`{where}` must be a list of objects, found {described(value)}")
    return value


def with_object(call: dict[str, Any], key: str) -> dict[str, Any]:
    """A tool, or a call of one, with the object at `key` that a string of JSON there holds, as OpenAI writes it."""
    inner, value = call.get("function"), call.get(key)
    if isinstance(inner, dict):
        return {**call, "function": with_object(inner, key)}
    with contextlib.suppress(RecordError):
        value = decode_json(value.encode()) if isinstance(value, str) else value
    return {**call, key: value} if isinstance(value, dict) else call


FORMS: dict[tuple[str, ...], tuple[Reader, tuple[str, ...]]] = {
    ("messages",): (lambda record, at, rules: talk_of(record["messages"], at("messages")), ()),
    ("caption",): (lambda record, at, rules: plain_text(record["caption"], at("caption")), ()),
    ("content",): (lambda record, at, rules: from_content(record["content"], at("content"), rules), ()),
    ("conversations",): (_conversations, ("system",)),
    ("prompt", "completion"): (_prompt_and_completion, ()),
    ("instruction", "output"): (_alpaca, ("input", "history", "system")),
}
"""All but plain text: the keys that must be there, how they are read, keys that may be there too."""


def said_by(
    record: dict[str, Any], rules: RecordRules, own_keys: tuple[str, ...], has_template: bool, where: str = ""
) -> Said:
    """What a record says, or a branch at `where`; `own_keys`: those that belong to it in any form.

    RecordError: no form or several, what a form cannot be, keys that would be lost.
    """
    # --text-key may name a key of another form, which then is plain text; an ignored key is not there
    text_key, ignored = rules.text_key, {*rules.ignore_keys} - {rules.text_key, *own_keys}
    forms = [(text_key,), *(keys for keys in FORMS if text_key not in keys)]
    given = {key: value for key, value in record.items() if value is not None and key not in ignored}
    given |= {key: without_nulls(value) for key, value in given.items() if key not in own_keys}
    present = [keys for keys in forms if given.keys() >= {*keys}]
    if given.keys() >= {"chosen", "rejected"}:
        raise RecordError(
            "`chosen` and `rejected` are preferences (DPO), which are not trained here; to learn answers, name them "
            "`messages` (whole talks), `completion` (beside `prompt`) or `output` (beside `instruction`): "
            "jq -c '.completion = .chosen | del(.chosen, .rejected)'"
        )
    if len(present) != 1:
        shown = {keys: " with ".join(f"`{key}`" for key in keys) for keys in forms}
        found = ", ".join(f"`{key}`" for key in list(record)[:8]) or "no key"
        wanted = " or ".join(words for keys, words in shown.items() if ignored.isdisjoint(keys))
        nulls = [f"`{key}` is null" for keys in forms for key in keys if key in record and record[key] is None]
        reason = "more than one content key" if present else next(iter(nulls), "missing key")
        several = " and ".join(shown[keys] for keys in present)
        wanted += f" (it has {several}; --ignore-keys leaves one out)" if present else ""
        raise RecordError(f"{reason}: {where or 'a record'} needs exactly one of {wanted}, found {found}")
    read, at = (*present[0], *own_keys), f"{where}." if where else ""
    if present[0] == (text_key,):
        said: Said = plain_text(given[text_key], f"{at}{text_key}")
    else:
        reader, beside = FORMS[present[0]]
        said, read = reader(given, lambda key: f"{at}{key}", rules), (*read, *beside)
    media_keys: tuple[str, ...] = ()
    if isinstance(said, Talk):
        said, media_keys = _with_media(said, given, rules)
        for message, path in zip(said.messages, said.paths, strict=True):
            content = message.get("content")
            blind = isinstance(content, str) and message["role"] not in LEARNED_ROLES and _UNFILLED.search(content)
            if blind and rules.media and not (media_keys or {IMAGE_AS_TEXT, "*"} & {*rules.ignore_keys}):
                raise RecordError(
                    f"`{path}` has a place <image> and the record names no image; name it as `image` or `images`, or "
                    f"give --ignore-keys '{IMAGE_AS_TEXT}' to learn it as text"
                )
        if has_template:
            said, read = _with_tools(said, given), (*read, "tools", "chat_template_kwargs")
    elif rules.media and all(piece.media is None for piece in said):
        said, media_keys = _texts_with_media(said, given, rules, f"{at}{present[0][0]}")
    rules.refuse_lost(given, (*read, *media_keys), f"`{where}`" if where else "", in_record=True)
    return said


def _with_tools(talk: Talk, record: dict[str, Any]) -> Talk:
    """Messages with the tools and the variables that their record gives to a chat template."""
    variables = record.get("chat_template_kwargs") or {}
    tools = [with_object(tool, "parameters") for tool in objects_at(record.get("tools") or [], "tools")] or None
    if tools and "conversations" in record:  # ShareGPT has the functions alone
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    if not isinstance(variables, dict):
        raise RecordError(f"`chat_template_kwargs` is {described(variables)}, it must be an object")
    return replace(talk, tools=tools, variables=variables)


# ---- images of a record in the places that its texts leave for them


def _texts_with_media(
    texts: list[SamplePart], record: dict[str, Any], rules: RecordRules, key: str
) -> tuple[list[SamplePart], tuple[str, ...]]:
    """Texts at `key` with a record's images and videos, as those of messages; the keys that name those."""
    messages = [{"role": "user", "content": [{"type": "text", "text": piece.text}]} for piece in texts]
    talk, keys = _with_media(Talk(messages, (key,) * len(messages)), record, rules)
    pieces = []
    for message, piece in zip(talk.messages, texts, strict=True):
        found = from_content(message["content"], key, rules)
        pieces += [replace(each, weight=each.weight * piece.weight) for each in found]
    return pieces, keys


def _with_media(talk: Talk, record: dict[str, Any], rules: RecordRules) -> tuple[Talk, tuple[str, ...]]:
    """Messages with a record's images and videos in the places of their texts; the keys that name those.

    Where no message has a place, they stand at the beginning of the first of a user, as LLaVA and TRL have it.
    """
    keys: dict[str, str] = {}
    values: dict[str, list[Any]] = {}
    for kind in MEDIA_TYPES:
        named = [key for key in (kind, f"{kind}s") if record.get(key) not in (None, [])]
        if len(named) > 1:
            raise RecordError(f"`{named[0]}` and `{named[1]}` both name what stands at <{kind}>; leave one out")
        for key in named:
            keys[kind] = key
            values[kind] = list(record[key]) if isinstance(record[key], list) else [record[key]]
    places: Counter[str] = Counter()

    def filled(kind: str) -> dict[str, Any]:
        places[kind] += 1
        value = values[kind][places[kind] - 1] if places[kind] <= len(values[kind]) else None
        if isinstance(value, bytes):
            return {"type": kind, "bytes": value}
        if isinstance(value, dict) and not value.keys() <= {"bytes", "path"}:
            return {"type": kind, **value}
        return {"type": kind, kind: value}

    def parts_of(content: Any) -> Iterator[Any]:
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in values and all(part.get(key) is None for key in _SOURCES):
                yield filled(kind)
            elif kind == "text" and isinstance(part.get("text"), str):
                for i, text in enumerate(_PLACE.split(part["text"])):  # text, kind, text, kind, ..., text
                    if i % 2 and text in values:
                        yield filled(text)
                    elif text := f"<{text}>" if i % 2 else text:
                        yield {**part, "text": text}
            else:
                yield part

    messages = []
    for message in talk.messages:
        before, parts = places.total(), list(parts_of(message.get("content")))
        messages.append({**message, "content": parts} if places.total() > before else message)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if not places and values and rules.media and first is not None and not any(map(_names_media, messages)):
        line = "\n" * ("conversations" in record)  # LLaVA's
        leading = "".join(f"<{kind}>{line}" * len(of) for kind, of in values.items())
        content = messages[first].get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        messages[first] = {**messages[first], "content": [*parts_of(leading), *parts]}
    if not places:  # nothing in the messages reads them
        return talk, ()
    for kind, key in keys.items():
        if places[kind] != len(values[kind]):
            raise RecordError(
                f"`{key}` names {len(values[kind])} and the messages have {places[kind]} places for them "
                f"(<{kind}>, or a part of type {kind} that names none)"
            )
    return Talk(messages, talk.paths), tuple(keys.values())


def _names_media(message: dict[str, Any]) -> bool:
    """Whether parts of a message are no texts."""
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") != "text" for part in content)
