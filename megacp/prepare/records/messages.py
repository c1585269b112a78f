"""Messages and contents of a record as pieces, in the house's own form.

Key property: what stands in a message is learned or it is not, by its role and its `weight` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megacp.prepare.records.parts import END, MEDIA_TYPES, SamplePart, media_at
from megacp.prepare.records.record import RecordError, described, text_at
from megacp.prepare.records.record_keys import LEARNED_ROLES, MESSAGE_KEYS, RecordRules

MOST_WEIGHT = 1e12
"""Of a record, a branch and a message: the three times each other are finite in float32."""


@dataclass(frozen=True)
class Talk:
    """The messages of a record, whatever its form, with what else a chat template is given."""

    messages: list[dict[str, Any]]
    paths: tuple[str, ...]
    """Where each stands in the record."""
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def talk_of(value: Any, key: str) -> Talk:
    """The messages at `key` of a record; RecordError when they are none."""
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one message, found {described(value)}")
    paths = tuple(f"{key}[{i}]" for i in range(len(value)))
    for message, where in zip(value, paths, strict=True):
        if not isinstance(message, dict) or "role" not in message:
            raise RecordError(f"`{where}` must be an object with `role` and `content`, found {described(message)}")
    return Talk(value, paths)


def role_of(message: dict[str, Any], where: str, rules: RecordRules) -> str:
    """Who says a message; RecordError for one that is not known."""
    role = text_at(message["role"], f"{where}.role")
    if not role:
        raise RecordError(f"`{where}.role` is empty")
    if problem := rules.accepted.role_problem(role):
        raise RecordError(f"`{where}.role`: {problem}")
    return role


def from_messages(talk: Talk, rules: RecordRules) -> list[SamplePart]:
    """Messages in the house's own form."""
    pieces: list[SamplePart] = []
    for i, (message, where) in enumerate(zip(talk.messages, talk.paths, strict=True)):
        if "content" not in message:
            raise RecordError(f"`{where}` must be an object with `role` and `content`, found {described(message)}")
        role, content = role_of(message, where, rules), message["content"]
        rules.refuse_lost(message, MESSAGE_KEYS, f"`{where}`")
        learned = message_weight(message, role, where, rules)
        pieces.append(_header(role, first=not i))
        if isinstance(content, list):
            said = from_content(content, f"{where}.content", rules)
            pieces += [SamplePart(piece.text, learned * piece.weight, piece.media) for piece in said]
        elif text_at(content, f"{where}.content"):
            pieces.append(SamplePart(content, learned))
        if role in LEARNED_ROLES:
            pieces.append(replace(END, weight=learned))
    return pieces


def _header(role: str, first: bool) -> SamplePart:
    return SamplePart(("" if first else "\n") + f"<|{role}|>\n", 0.0)


def asking(talk: Talk) -> list[SamplePart]:
    """The header of the answer that messages ask for; none where the last one is an assistant's."""
    answered = talk.messages[-1]["role"] in LEARNED_ROLES
    return [] if answered else [_header(LEARNED_ROLES[0], first=False)]


def message_weight(message: dict[str, Any], role: str, where: str, rules: RecordRules) -> float:
    """The loss weight of a message's content: its `weight` where the role is learned, else 0."""
    weight = weight_of(message, f"{where}.weight")
    if role in LEARNED_ROLES:
        return 1.0 if rules.accepted.ignore_weights else weight
    if message.get("weight") is not None and weight > 0:
        raise RecordError(f"`{where}.weight` is {weight:g}, but nothing that a {role} says is learned; leave it out")
    return 0.0


def from_content(value: Any, key: str, rules: RecordRules) -> list[SamplePart]:
    """A list of parts, the texts between images joined."""
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one part, found {described(value)}")
    pieces: list[SamplePart] = []
    texts: list[str] = []

    def join() -> None:
        if joined := "".join(texts):
            pieces.append(SamplePart(joined, 1.0))
        texts.clear()

    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        where = f"{key}[{i}]"
        if kind in MEDIA_TYPES:
            join()
            pieces.append(SamplePart(None, 0.0, media_at(part, kind, where, rules)))
        elif kind == "text":
            rules.refuse_lost(part, ("type", "text"), f"`{where}`")
            texts.append(text_at(part.get("text"), f"{where}.text"))
        else:
            raise RecordError(
                f"`{where}` must be an object with `type` text (or {', '.join(MEDIA_TYPES)}), found {described(part)}"
            )
    join()
    if not pieces:
        raise RecordError(f"`{key}` holds no text")
    return pieces


def weight_of(record: dict[str, Any], key: str) -> float:
    """The `weight` of a record or branch, called `key` in messages; 1 where there is none."""
    weight = record.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RecordError(f"`{key}` is {described(weight)}, it must be a number")
    if not 0.0 <= weight <= MOST_WEIGHT:  # also refuses NaN
        raise RecordError(f"`{key}` is {weight}, it must be a number from 0 to {MOST_WEIGHT:g}")
    return float(weight)
