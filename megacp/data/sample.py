"""A record of the input as a `Sample`: pieces of text with a loss weight each, after a shared prefix maybe branches.

Key property: the forms a record may have are rows of one table, each a function from the record to pieces, and every
way to be wrong has its own message. Rejected: turning conversations into one string first, which loses which part of it
the loss is on.

A record has exactly one of
* `text`: a string, all of it learned;
* `messages`: [{"role": ..., "content": ...}, ...]; a message is written as `<|ROLE|>` newline CONTENT, then the
  end-of-document token after an assistant's message and a newline after any other; only what an assistant says, with
  its end-of-document token, is learned; several messages are joined by a newline;
* `content`: [{"type": "text", "text": ...}, ...], the texts joined as they are;
and optionally `id` (string or integer, unique in the dataset), `weight` (a finite number >= 0 that multiplies the loss
of the record) and `branches`: a list of alternative continuations, each a string or a record of one of these forms;
they see the record's own text as their prefix, and not each other. Other keys are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEARNED_ROLES = ("assistant",)
MEDIA_TYPES = ("image", "video")


class RecordError(ValueError):
    """Why one record cannot be used; the reader adds where it stands."""


@dataclass(frozen=True)
class Piece:
    """A stretch of text, or (text None) the tokenizer's end-of-document token, and its loss weight."""

    text: str | None
    weight: float


END = Piece(None, 1.0)


@dataclass(frozen=True)
class Sample:
    """One document: `prefix`, then each of `branches` as an alternative continuation of it."""

    prefix: tuple[Piece, ...]
    branches: tuple[tuple[Piece, ...], ...] = ()
    weight: float = 1.0
    """Multiplies the weight of every piece."""
    identity: str | None = None
    """The record's `id`."""


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"`{key}` is {_name(value)}, it must be a string")
    return value


def _from_text(value: Any, key: str) -> list[Piece]:
    text = _text(value, key)
    if not text:
        raise RecordError(f"`{key}` is empty")
    return [Piece(text, 1.0)]


def _from_messages(value: Any, key: str) -> list[Piece]:
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one message, found {_name(value)}")
    pieces: list[Piece] = []
    for i, message in enumerate(value):
        where = f"{key}[{i}]"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise RecordError(f"`{where}` must be an object with `role` and `content`, found {_name(message)}")
        role, content = _text(message["role"], f"{where}.role"), message["content"]
        if not role:
            raise RecordError(f"`{where}.role` is empty")
        if isinstance(content, list):
            said = "".join(piece.text or "" for piece in _from_content(content, f"{where}.content"))
        else:
            said = _text(content, f"{where}.content")
        learned = float(role in LEARNED_ROLES)
        pieces.append(Piece(("\n" if i else "") + f"<|{role}|>\n", 0.0))
        if said:
            pieces.append(Piece(said, learned))
        if learned:
            pieces.append(END)
    return pieces


def _from_content(value: Any, key: str) -> list[Piece]:
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one part, found {_name(value)}")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA_TYPES:
            raise RecordError(
                f"`{key}[{i}]` is of type {kind}: this build makes text datasets, images need the vision build"
            )
        if kind != "text":
            raise RecordError(
                f"`{key}[{i}]` must be an object with `type` text (or {', '.join(MEDIA_TYPES)}), found {_name(part)}"
            )
        texts.append(_text(part.get("text"), f"{key}[{i}].text"))
    joined = "".join(texts)
    if not joined:
        raise RecordError(f"`{key}` holds no text")
    return [Piece(joined, 1.0)]


_FORMS: dict[str, Callable[[Any, str], list[Piece]]] = {
    "text": _from_text,
    "messages": _from_messages,
    "content": _from_content,
}


def _pieces(record: dict[str, Any], text_key: str, where: str = "") -> list[Piece]:
    keys = {form: text_key if form == "text" else form for form in _FORMS}
    present = [form for form in _FORMS if record.get(keys[form]) is not None]
    if len(present) != 1:
        found = ", ".join(f"`{key}`" for key in list(record)[:8]) or "no key"
        wanted = " or ".join(f"`{key}`" for key in keys.values())
        reason = "missing key" if not present else "more than one content key"
        raise RecordError(f"{reason}: {where or 'a record'} needs exactly one of {wanted}, found {found}")
    key = keys[present[0]]
    return _FORMS[present[0]](record[key], f"{where}.{key}" if where else key)


def _ended(pieces: list[Piece]) -> tuple[Piece, ...]:
    if pieces[-1].text is None:  # an assistant's last word ends the document too
        return tuple(pieces)
    return (*pieces, Piece(None, pieces[-1].weight))


def parse_record(record: Any, text_key: str = "text") -> Sample:
    """A decoded record as a Sample; `text_key` is the name under which plain text is found.

    RecordError says what is wrong with it.
    """
    if not isinstance(record, dict):
        raise RecordError(f"a record must be a JSON object, found {_name(record)}")
    pieces = _pieces(record, text_key)
    identity, weight, branches = record.get("id"), record.get("weight"), record.get("branches")
    if identity is not None and (isinstance(identity, bool) or not isinstance(identity, str | int)):
        raise RecordError(f"`id` is {_name(identity)}, it must be a string or an integer")
    if weight is None:
        weight = 1.0
    elif isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RecordError(f"`weight` is {_name(weight)}, it must be a number")
    elif not 0.0 <= weight <= 1e30:  # also refuses NaN; the upper bound keeps float32 finite
        raise RecordError(f"`weight` is {weight}, it must be a finite number >= 0")
    identity = None if identity is None else str(identity)
    if branches is None:
        return Sample(_ended(pieces), (), float(weight), identity)
    if not isinstance(branches, list) or not branches:
        raise RecordError(f"`branches` must be a list of at least one continuation, found {_name(branches)}")
    return Sample(
        tuple(pieces), tuple(_branch(b, i, text_key) for i, b in enumerate(branches)), float(weight), identity
    )


def _branch(value: Any, i: int, text_key: str) -> tuple[Piece, ...]:
    where = f"branches[{i}]"
    if isinstance(value, str):
        return _ended(_from_text(value, where))
    if not isinstance(value, dict):
        raise RecordError(f"`{where}` is {_name(value)}, it must be a string or an object")
    return _ended(_pieces(value, text_key, where))


def decode_json(line: bytes) -> Any:
    """One line of JSON as a Python value; RecordError for what is not UTF-8, not JSON, or not Unicode text."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        bad = line[error.start]
        raise RecordError(f"not UTF-8: byte 0x{bad:02x} at column {error.start + 1} of the line") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        message = getattr(error, "msg", str(error))
        raise RecordError(f"invalid JSON: {message} at column {getattr(error, 'colno', 1)}") from error
    except RecursionError as error:
        raise RecordError("invalid JSON: nested too deeply") from error
    if "\\ud" in text or "\\uD" in text:  # the only way to write a lone surrogate
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RecordError("a string holds half of a surrogate pair (\\ud800 to \\udfff), no text") from error
    return value


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"a number ({value})" if math.isfinite(value) else "a number"
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), f"a {type(value).__name__}")
