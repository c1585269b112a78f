"""The forms of a record, one row each: by which keys it is known, and what it says as texts or as messages.

Key property: a record has exactly one form. Keys of two forms in one record are refused with both names, as only one of
the two would be learned. Rejected: a flag that names the form, which says the same of records that are something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megacp.prepare.records.messages import Talk, from_content, talk_of
from megacp.prepare.records.parts import MEDIA_SOURCES, MEDIA_TYPES, SamplePart
from megacp.prepare.records.record import RecordError, described, text_at
from megacp.prepare.records.record_keys import LEARNED_ROLES, RecordRules

_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
"""Roles of ShareGPT by the names that it has for them; others are the same."""
_PLACE = re.compile(r"<(image|video)>")
"""What stands in a text for the next of a record's images or videos."""
_UNFILLED = re.compile(r"^<image>|<image>$", re.MULTILINE)
"""A place at the edge of a line, where no image is named; amid a line it may be a word about images."""
IMAGE_AS_TEXT = "<image>"
"""Of --ignore-keys: such a place is learned as text."""
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_PAIRED = ", paired with an input that provides further context"
_SOURCES = (*MEDIA_TYPES, "frames", "url")
"""Further keys of a part that name what it shows."""
_OF_TEMPLATES = ("tools", "chat_template_kwargs")
"""Keys of records with messages that a chat template reads."""

Said = list[SamplePart] | Talk


@dataclass(frozen=True)
class Form:
    """One way to write a record."""

    keys: tuple[str, ...]
    """All of them are there; the first two tell forms apart in messages."""
    read: Callable[[dict[str, Any], Callable[[str], str], RecordRules], Said]
    """From the record, and from a key to the words for where it stands."""
    beside: tuple[str, ...] = ()
    """Keys that may be there too."""

    @property
    def shown(self) -> str:
        """How messages call it."""
        return " with ".join(f"`{key}`" for key in self.keys)


def plain_text(value: Any, key: str) -> list[SamplePart]:
    """A text, all of it learned."""
    text = text_at(value, key)
    if not text:
        raise RecordError(f"`{key}` is empty")
    return [SamplePart(text, 1.0)]


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
    paired, shown = (_PAIRED, f"### Input:\n{given}\n\n") if given else ("", "")
    prompt = _ALPACA.format(paired=paired, instruction=instruction, input=shown)
    return _answered(prompt, plain_text(record["output"], at("output")))


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
    return {"role": _SPEAKERS.get(speaker, speaker), "content": turn["value"], **rest}


FORMS = {
    "text": Form(("text",), lambda record, at, rules: plain_text(record[rules.text_key], at(rules.text_key))),
    "messages": Form(("messages",), lambda record, at, rules: talk_of(record["messages"], at("messages"))),
    "content": Form(("content",), lambda record, at, rules: from_content(record["content"], at("content"), rules)),
    "conversations": Form(("conversations",), _conversations, ("system",)),
    "prompt": Form(("prompt", "completion"), _prompt_and_completion),
    "alpaca": Form(("instruction", "output"), _alpaca, ("input",)),
}


def said_by(record: dict[str, Any], rules: RecordRules, own_keys: tuple[str, ...], where: str = "") -> Said:
    """What a record says, or a branch at `where`; `own_keys`: those that belong to it in any form.

    RecordError: no form or several, what a form cannot be, keys that would be lost.
    """
    # --text-key may name a key of another form, which then is plain text; an ignored key is not there
    text_key, ignored = rules.text_key, {*rules.accepted.ignore_keys} - {rules.text_key, *own_keys}
    forms = [Form((text_key,), FORMS["text"].read)]
    forms += [form for form in FORMS.values() if "text" not in form.keys and text_key not in form.keys]
    given = {key: value for key, value in record.items() if value is not None and key not in ignored}
    present = [form for form in forms if given.keys() >= {*form.keys}]
    if len(present) != 1:
        found = ", ".join(f"`{key}`" for key in list(record)[:8]) or "no key"
        wanted = " or ".join(form.shown for form in forms if ignored.isdisjoint(form.keys))
        reason = "missing key" if not present else "more than one content key"
        several = " and ".join(form.shown for form in present)
        wanted += f" (it has {several}; --ignore-keys leaves one out)" if present else ""
        raise RecordError(f"{reason}: {where or 'a record'} needs exactly one of {wanted}, found {found}")
    form = present[0]
    said = form.read(given, lambda key: f"{where}.{key}" if where else key, rules)
    read = (*form.keys, *form.beside, *own_keys)
    if isinstance(said, Talk):
        said, media_keys = _with_media(said, given, where)
        if rules.media and not media_keys and not {IMAGE_AS_TEXT, "*"} & {*rules.accepted.ignore_keys}:
            _refuse_unfilled(said)
        read += media_keys + (_OF_TEMPLATES if rules.has_template else ())
    rules.refuse_lost(given, read, f"`{where}`" if where else "", in_record=True)
    return _with_tools(said, given) if isinstance(said, Talk) and rules.has_template else said


def _with_tools(talk: Talk, record: dict[str, Any]) -> Talk:
    """Messages with the tools and the variables that their record gives to a chat template."""
    tools, variables = record.get("tools"), record.get("chat_template_kwargs") or {}
    if isinstance(tools, str):  # a table cannot hold tools of different shapes
        try:
            tools = json.loads(tools) if tools else None
        except ValueError as error:
            raise RecordError(f"`tools` is a string and no JSON: {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RecordError(f"`tools` must be a list of objects, found {described(tools)}")
    if not isinstance(variables, dict):
        raise RecordError(f"`chat_template_kwargs` is {described(variables)}, it must be an object")
    return Talk(talk.messages, talk.paths, tools, variables)


def _with_media(talk: Talk, record: dict[str, Any], where: str) -> tuple[Talk, tuple[str, ...]]:
    """Messages with a record's images and videos in the places that their texts leave for them; the keys of those."""
    given: dict[str, list[Any]] = {}
    keys: list[str] = []
    for kind in MEDIA_TYPES:
        named = [key for key in (kind, f"{kind}s") if record.get(key) not in (None, [])]
        if len(named) > 1:
            raise RecordError(f"`{named[0]}` and `{named[1]}` both name what stands at <{kind}>; leave one out")
        for key in named:
            value = record[key]
            given[kind] = list(value) if isinstance(value, list) else [value]
            keys.append(key)
    count = {kind: len(sources) for kind, sources in given.items()}
    split = [_split(message.get("content"), given) for message in talk.messages]
    places = {kind: sum(len(found[kind]) for _, found in split) for kind in given}
    if not any(places.values()):  # nothing in the messages reads them
        return talk, ()
    for kind, number in places.items():
        if number != count[kind]:
            key = next(key for key in keys if key.startswith(kind))
            raise RecordError(
                f"`{key}` names {count[kind]} and the messages have {number} places for them "
                f"(<{kind}>, or a part of type {kind} that names none)"
            )
    for _, found in split:
        for kind, parts in found.items():
            for part in parts:
                part.update(_source(kind, given[kind].pop(0)))
    messages = [{**m, "content": c} if "content" in m else m for m, (c, _) in zip(talk.messages, split, strict=True)]
    return Talk(messages, talk.paths), tuple(keys)


def _refuse_unfilled(talk: Talk) -> None:
    """RecordError where messages have a place for an image and nothing names one, which would be learned blind."""
    contents = [message.get("content") for message in talk.messages]
    parts = [content if isinstance(content, list) else [{"text": content}] for content in contents]
    parts = [[part for part in each if isinstance(part, dict)] for each in parts]
    if any(part.get("type") in MEDIA_TYPES for each in parts for part in each):
        return
    for message, path, each in zip(talk.messages, talk.paths, parts, strict=True):
        texts = [text for part in each if isinstance(text := part.get("text"), str)]
        if message.get("role") not in LEARNED_ROLES and any(map(_UNFILLED.search, texts)):
            raise RecordError(
                f"`{path}` has a place <image> and the record names no image; name it as `image` or `images`, or give "
                f"--ignore-keys '{IMAGE_AS_TEXT}' to learn it as text"
            )


def _source(kind: str, value: Any) -> dict[str, Any]:
    """The keys of a part that name an image as the list of a record does."""
    if isinstance(value, bytes):
        return {"bytes": value}
    if isinstance(value, list):
        return {"frames": value}
    return value if isinstance(value, dict) and not value.keys() <= {"bytes", "path"} else {kind: value}


def _split(content: Any, given: dict[str, list[Any]]) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    """A message's content as parts, and those of them that are places without a source, by kind of `given`."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in given}
    parts: list[Any] = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        kind = part.get("type") if isinstance(part, dict) else None
        named = isinstance(part, dict) and any(part.get(key) is not None for key in (*MEDIA_SOURCES, *_SOURCES))
        if kind in found and not named:
            found[kind].append({"type": kind})
            parts.append(found[kind][-1])
        elif kind == "text" and isinstance(part.get("text"), str):
            texts = _PLACE.split(part["text"])  # text, kind, text, kind, ..., text
            for i, text in enumerate(texts):
                if i % 2 and text in found:
                    found[text].append({"type": text})
                    parts.append(found[text][-1])
                elif text := f"<{text}>" if i % 2 else text:
                    parts.append({**part, "text": text})
        else:
            parts.append(part)
    return (parts if any(found.values()) else content), found
