"""A record of the input as a `Sample`: pieces of text with a loss weight each, after a shared prefix maybe branches.

Key property: each form of a record is a row of one table, a function from the record to pieces. Each way to be wrong
has a message.

A record has exactly one of
* `text`: a string, all of it learned;
* `messages`: [{"role": ..., "content": ...}, ...]. A message is written as `<|ROLE|>` newline CONTENT, then the
  end-of-document token after an assistant's message and a newline after any other. Only what an assistant says is
  learned, with its end-of-document token, times the message's `weight`. A newline stands between messages;
* `content`: [{"type": "text", "text": ...}, ...], the texts joined as they are;
and optionally
* `id`: a string or an integer, unique in the dataset;
* `weight`: a finite number >= 0 that multiplies the loss of the record;
* `branches`: a list of alternative continuations.
`record_keys` says which other keys and roles there are.

A branch is a string or a record of one of these forms, maybe with a `weight`. It sees the record's text as its prefix,
and no other branch. Messages after messages go on as in one conversation. Right after an image, a branch that is
learned from its first word begins with a newline that is not learned: no text token would predict the word.

In a build with images, `content` (also that of a message) may hold parts of type `image` and `video`. Each has exactly
one of `path` (relative to --image-root; `image` or `video` means the same), `base64`, `member` (of the record's tar:
its extension or its whole name), `bytes` (Parquet), and for a video `frames`: a list of images, maybe with `fps`. They
stand where they are in the text, and nothing of them is learned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megacp.data.records.record_keys import LEARNED_ROLES, MESSAGE_KEYS, NOTHING_MORE, Accepted, lost_keys

RECORD_KEYS = ("id", "weight", "branches")
"""Of a record beside what it says."""
MEDIA_TYPES = ("image", "video")
MEDIA_SOURCES = ("path", "base64", "member", "bytes")


class RecordError(ValueError):
    """Why one record cannot be used; the reader adds where it stands."""


@dataclass(frozen=True)
class Media:
    """An image or a video as a record names it; nothing has been read yet."""

    kind: str
    """image or video."""
    source: str
    """One of MEDIA_SOURCES, or `frames`."""
    value: str | bytes
    key: str
    """Where it stands in the record."""
    frames: tuple[Media, ...] = ()
    """The images of a video that is given as such."""
    fps: float | None = None
    """Frames a second of `frames`; None = as the rules sample."""


@dataclass(frozen=True)
class SamplePart:
    """A stretch of text, an image or a video, or (both None) the tokenizer's end-of-document token; its loss weight."""

    text: str | None
    weight: float
    media: Media | None = None

    @property
    def is_end(self) -> bool:
        """Whether it is the end-of-document token."""
        return self.text is None and self.media is None


END = SamplePart(None, 1.0)


@dataclass(frozen=True)
class _Rules:
    """How records are read."""

    text_key: str
    media: bool
    """Whether images and videos may be there."""
    accepted: Accepted

    def refuse_lost(self, found: dict[str, Any], known: tuple[str, ...], where: str, in_record: bool = False) -> None:
        """RecordError for keys of `found`, which stands at `where`, that are not read."""
        if not found.keys() <= set(known) and (lost := lost_keys(found, known, self.accepted, in_record)):
            raise RecordError(f"{where}: {lost}" if where else lost)


@dataclass(frozen=True)
class Sample:
    """One document: `prefix`, then each of `branches` as an alternative continuation of it."""

    prefix: tuple[SamplePart, ...]
    branches: tuple[tuple[SamplePart, ...], ...] = ()
    weight: float = 1.0
    """Multiplies the weight of every piece."""
    identity: str | None = None
    """The record's `id`."""


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"`{key}` is {_name(value)}, it must be a string")
    return value


def _from_text(value: Any, key: str, rules: _Rules) -> list[SamplePart]:
    text = _text(value, key)
    if not text:
        raise RecordError(f"`{key}` is empty")
    return [SamplePart(text, 1.0)]


def _from_messages(value: Any, key: str, rules: _Rules) -> list[SamplePart]:
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one message, found {_name(value)}")
    pieces: list[SamplePart] = []
    for i, message in enumerate(value):
        where = f"{key}[{i}]"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise RecordError(f"`{where}` must be an object with `role` and `content`, found {_name(message)}")
        role, content = _text(message["role"], f"{where}.role"), message["content"]
        if not role:
            raise RecordError(f"`{where}.role` is empty")
        if problem := rules.accepted.role_problem(role):
            raise RecordError(f"`{where}.role`: {problem}")
        rules.refuse_lost(message, MESSAGE_KEYS, f"`{where}`")
        learned = _message_weight(message, role, where, rules)
        pieces.append(SamplePart(("\n" if i else "") + f"<|{role}|>\n", 0.0))
        if isinstance(content, list):
            said = _from_content(content, f"{where}.content", rules)
            pieces += [SamplePart(piece.text, learned * piece.weight, piece.media) for piece in said]
        elif _text(content, f"{where}.content"):
            pieces.append(SamplePart(content, learned))
        if role in LEARNED_ROLES:
            pieces.append(replace(END, weight=learned))
    return pieces


def _message_weight(message: dict[str, Any], role: str, where: str, rules: _Rules) -> float:
    """The loss weight of a message's content: its `weight` where the role is learned, else 0."""
    weight = _weight(message, f"{where}.weight")
    if role in LEARNED_ROLES:
        return 1.0 if rules.accepted.ignore_weights else weight
    if message.get("weight") is not None and weight > 0:
        raise RecordError(f"`{where}.weight` is {weight:g}, but nothing that a {role} says is learned; leave it out")
    return 0.0


def _from_content(value: Any, key: str, rules: _Rules) -> list[SamplePart]:
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{key}` must be a list of at least one part, found {_name(value)}")
    pieces: list[SamplePart] = []
    texts: list[str] = []

    def join() -> None:
        if joined := "".join(texts):
            pieces.append(SamplePart(joined, 1.0))
        texts.clear()

    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        where = f"{key}[{i}]"
        if kind in MEDIA_TYPES and not rules.media:
            raise RecordError(
                f"`{where}` is of type {kind}: this build makes text datasets, images need the vision build "
                "(--image-root, --image-rules or another flag for images)"
            )
        if kind in MEDIA_TYPES:
            join()
            pieces.append(SamplePart(None, 0.0, _media(part, kind, where, rules)))
        elif kind == "text":
            rules.refuse_lost(part, ("type", "text"), f"`{where}`")
            texts.append(_text(part.get("text"), f"{where}.text"))
        else:
            raise RecordError(
                f"`{where}` must be an object with `type` text (or {', '.join(MEDIA_TYPES)}), found {_name(part)}"
            )
    join()
    if not pieces:
        raise RecordError(f"`{key}` holds no text")
    return pieces


def _media(part: dict[str, Any], kind: str, where: str, rules: _Rules) -> Media:
    # nulls are what Parquet fills in for absent keys
    given = {key: part[key] for key in (*MEDIA_SOURCES, kind, "frames", "url") if part.get(key) is not None}
    allowed = (*MEDIA_SOURCES, "frames") if kind == "video" else MEDIA_SOURCES
    if "url" in given:
        raise RecordError(f"`{where}.url`: nothing is downloaded; give one of {', '.join(allowed)}")
    if len(given) != 1 or not {*given} <= {*allowed, kind}:
        found = ", ".join(given) or "none"
        raise RecordError(f"`{where}` of type {kind} needs exactly one of {', '.join(allowed)}, found {found}")
    ((key, value),) = given.items()
    rules.refuse_lost(part, ("type", key, "fps") if key == "frames" else ("type", key), f"`{where}`")
    where = f"{where}.{key}"
    if key == "frames":
        return _frames(part, value, where, rules)
    if key == "bytes":
        if not isinstance(value, bytes):
            raise RecordError(f"`{where}` is {_name(value)}, it must be bytes (only Parquet has them; use base64)")
        return Media(kind, key, value, where)
    if not _text(value, where):
        raise RecordError(f"`{where}` is empty")
    return Media(kind, "path" if key == kind else key, value, where)


def _frames(part: dict[str, Any], value: Any, where: str, rules: _Rules) -> Media:
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{where}`: a video with no frames, it must be a list of images, found {_name(value)}")
    fps = part.get("fps")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf):
        raise RecordError(f"`{where.rpartition('.')[0]}.fps` is {_name(fps)}, it must be a number above 0")
    images = []
    for i, item in enumerate(value):
        item = {"path": item} if isinstance(item, str) else item
        if not isinstance(item, dict):
            raise RecordError(f"`{where}[{i}]` must be a path or an object, found {_name(item)}")
        images.append(_media(item, "image", f"{where}[{i}]", rules))
    return Media("video", "frames", "", where, tuple(images), None if fps is None else float(fps))


_FORMS: dict[str, Callable[[Any, str, _Rules], list[SamplePart]]] = {
    "text": _from_text,
    "messages": _from_messages,
    "content": _from_content,
}


def _pieces(record: dict[str, Any], rules: _Rules, where: str = "") -> list[SamplePart]:
    # --text-key may name another form, which then is plain text; an ignored form is not there
    keys = {form: form for form in _FORMS if form not in ("text", rules.text_key, *rules.accepted.ignore_keys)}
    keys = {"text": rules.text_key, **keys}
    present = [form for form, key in keys.items() if record.get(key) is not None]
    if len(present) != 1:
        found = ", ".join(f"`{key}`" for key in list(record)[:8]) or "no key"
        wanted = " or ".join(f"`{key}`" for key in keys.values())
        reason = "missing key" if not present else "more than one content key"
        wanted += "" if not present else " (--ignore-keys leaves one out)"
        raise RecordError(f"{reason}: {where or 'a record'} needs exactly one of {wanted}, found {found}")
    beside = ("weight",) if where else RECORD_KEYS
    rules.refuse_lost(record, (*keys.values(), *beside), f"`{where}`" if where else "", in_record=True)
    key = keys[present[0]]
    return _FORMS[present[0]](record[key], f"{where}.{key}" if where else key, rules)


def _ended(pieces: list[SamplePart]) -> tuple[SamplePart, ...]:
    if pieces[-1].is_end:  # an assistant's last word ends the document too
        return tuple(pieces)
    return (*pieces, SamplePart(None, pieces[-1].weight))


def parse_record(record: Any, text_key: str = "text", media: bool = False, accepted: Accepted = NOTHING_MORE) -> Sample:
    """A decoded record as a Sample. RecordError says what is wrong with it.

    `text_key` names its plain text. `media`: whether it may hold images and videos. `accepted`: further keys and roles.
    """
    if not isinstance(record, dict):
        raise RecordError(f"a record must be a JSON object, found {_name(record)}")
    rules = _Rules(text_key, media, accepted)
    pieces = _pieces(record, rules)
    identity, branches = record.get("id"), record.get("branches")
    if identity is not None and (isinstance(identity, bool) or not isinstance(identity, str | int)):
        raise RecordError(f"`id` is {_name(identity)}, it must be a string or an integer")
    weight = _weight(record, "weight")
    identity = None if identity is None else str(identity)
    if branches is None:
        return Sample(_ended(pieces), (), weight, identity)
    if not isinstance(branches, list) or not branches:
        raise RecordError(f"`branches` must be a list of at least one continuation, found {_name(branches)}")
    found = [_branch(branch, i, rules) for i, branch in enumerate(branches)]
    conversation = record.get("messages") is not None
    joined = (
        _joined(pieces, each, conversation and isinstance(branch, dict) and branch.get("messages") is not None)
        for branch, each in zip(branches, found, strict=True)
    )
    return Sample(tuple(pieces), tuple(joined), weight, identity)


def has_messages(record: Any) -> bool:
    """Whether a record that could be parsed has messages, itself or in a branch."""
    branches = (branch for branch in record.get("branches") or () if isinstance(branch, dict))
    return any(each.get("messages") is not None for each in (record, *branches))


def _branch(value: Any, i: int, rules: _Rules) -> tuple[SamplePart, ...]:
    where = f"branches[{i}]"
    if isinstance(value, str):
        return _ended(_from_text(value, where, rules))
    if not isinstance(value, dict):
        raise RecordError(f"`{where}` is {_name(value)}, it must be a string or an object")
    if lost := [key for key in ("branches", "id") if value.get(key) is not None]:
        raise RecordError(f"`{where}.{lost[0]}`: a branch has none; branches of branches are written out as branches")
    weight = 1.0 if rules.accepted.ignore_weights else _weight(value, f"{where}.weight")
    pieces = _ended(_pieces(value, rules, where))
    return pieces if weight == 1.0 else tuple(replace(piece, weight=piece.weight * weight) for piece in pieces)


def _joined(prefix: list[SamplePart], branch: tuple[SamplePart, ...], conversation: bool) -> tuple[SamplePart, ...]:
    """A branch with what stands between it and its prefix; `conversation`: both are messages."""
    if conversation:
        return (replace(branch[0], text=f"\n{branch[0].text}"), *branch[1:])
    if prefix[-1].media is not None and branch[0].weight > 0:
        return (SamplePart("\n", 0.0), *branch)
    return branch


def _weight(record: dict[str, Any], key: str) -> float:
    """The `weight` of a record or branch, called `key` in messages; 1 where there is none."""
    weight = record.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RecordError(f"`{key}` is {_name(weight)}, it must be a number")
    if not 0.0 <= weight <= 1e30:  # also refuses NaN; the upper bound keeps float32 finite
        raise RecordError(f"`{key}` is {weight}, it must be a finite number >= 0")
    return float(weight)


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
