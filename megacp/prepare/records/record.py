"""A record of the input with its place in a file, or the reason why there is none; what a record
may hold.

All readers give the same two types. A key that is not read is accepted only when it cannot hold
something to learn: it is empty, plain metadata by its name, or named by the user.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

DEFAULT_MAX_RECORD_BYTES = 64 << 20
LEARNED_ROLES = ("assistant",)
AS_MESSAGES = "messages"
ALPACA = "alpaca"
"""Two forms in which answers are learned without a chat template; the values of `RecordRules.form`.
"""
CONTEXT_ROLES = ("system", "developer", "user", "tool")
_SEEN = set("image img picture photo frame video jpg jpeg png webp".split())
"""Words, without their s, of keys that name what is seen beside the text."""
_HEARD = {"audio", "sound", "speech"}
_DESCRIBING = set(
    "id count size width height length len hash type format score date md5 sha1 sha256 sha512 language lang".split()
)
"""Last words, without their s, of keys that describe content and are none."""
_METADATA = set(
    "added attr attribute author byte categorie category char character charset checksum commit confidence config "
    "copyright country crawl crawled created creator dataset datetime day difficulty digest dir directory domain dump "
    "encoding exif ext extension extra fetched file filename filepath fingerprint fork fraction genre guid head hexsha "
    "host idx index info issue key keyword kind level licence license like line link locale meta metadata mime "
    "modified month name nsfw num number origin owner path perplexity ppl prob probability propertie provenance "
    "published publisher punsafe pwatermark quality rank rating ratio region repo repository retrieved revision script "
    "sha shard similarity site snapshot source split src star stat statu subset tag time timestamp title topic "
    "toxicity uid updated uri url username uuid version view vote warc website year".split()
)
"""Last words, without their s, of keys of plain metadata, where no word of content stands before
them.
"""
_METADATA_BEGINNINGS = {"meta", "metadata", "num", "n", "is", "has", "quality", "warc", "nb"}
_SYSTEM = "may be a system prompt"
_SYSTEM_TAKEN = "--columns system={} takes it as the system prompt of a conversation"
_SYSTEM_ASIDE = "A text has no place for it; `messages`, or `instruction` with `output`, have one"
_IMAGES = "names an image or a video"
_TAKEN = (
    "A build with --image-root takes images as `image` or `images`, and videos alike, beside a text or messages with a "
    "user"
)
"""Where to write what such a key names."""


class RecordError(ValueError):
    """Why one record cannot be used; the reader adds where it stands."""


@dataclass(frozen=True)
class Refusal:
    """A record that cannot be used: one line of rejects.jsonl."""

    file: str
    line: int
    """1-based; of a JSON array where the element begins; in Parquet the row, in a tar the number of
    the record.
    """
    offset: int
    """Byte offset of the record in its (uncompressed) file; in Parquet the row, 0-based."""
    reason: str
    number: int = 0
    """1-based number of the record, where lines do not number records: in a JSON array and in JSON
    over many lines.
    """

    def __str__(self) -> str:
        number = f"record {self.number}, " if self.number else ""
        return f"{self.file}:{self.line}: {self.reason} ({number}byte offset {self.offset})"


@dataclass(frozen=True)
class Record:
    """A decoded record and where it stands; `line` and `offset` as in Refusal."""

    line: int
    offset: int
    size: int
    """Bytes it takes in the file."""
    value: Any
    members: dict[str, bytes] | None = None
    """Files of a tar's group that are neither record nor text, by their whole names (only when
    asked for).
    """
    number: int = 0
    """Number as in Refusal, but counted from the beginning of the extent."""


def without_nulls(value: Any) -> Any:
    """A value without the null keys of its objects: a table, or lines made of one, has those that
    other rows have.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def text_at(value: Any, key: str) -> str:
    """A value that stands at `key` of a record and must be a string; RecordError when it is
    none.
    """
    if not isinstance(value, str):
        raise RecordError(f"`{key}` is {described(value)}, it must be a string")
    return value


def described(value: Any) -> str:
    """What a value of a record is, in words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"a number ({value})" if math.isfinite(value) else "a number"
    return names.get(type(value), f"a {type(value).__name__}") if value != [] else "an empty list"


def decode_json(line: bytes) -> Any:
    """One line of JSON as a Python value; RecordError for what is not UTF-8, not JSON, or not
    Unicode text.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        bad = line[error.start]
        raise RecordError(
            f"not UTF-8: byte 0x{bad:02x} at column {error.start + 1} of the line"
        ) from error
    try:
        return of_text(json.loads(text), text)
    except json.JSONDecodeError as error:
        hint = ""
        if re.match(r"\s*[\[{]+\s*'", text):
            hint = "; it looks like Python's own notation, which ast.literal_eval reads: write it with json.dumps"
        raise RecordError(
            f"invalid JSON: {json_fault(error)} at column {error.colno}{hint}"
        ) from error
    except RecursionError as error:
        raise RecordError("invalid JSON: lists or objects are nested too deeply") from error
    except ValueError as error:
        raise RecordError(json_fault(error)) from error


def json_fault(error: ValueError) -> str:
    """What is wrong with a JSON text, in the words of its reader, but for its advice to change a
    limit of Python.
    """
    if isinstance(error, RecordError):
        return str(error)
    if isinstance(error, json.JSONDecodeError):
        return error.msg.removesuffix(" at")
    return f"a whole number has more than {sys.get_int_max_str_digits():,} digits"


def of_text(value: Any, text: str) -> Any:
    """A value that was read from JSON; RecordError where a string of it is not Unicode text."""
    if "\\ud" in text or "\\uD" in text:  # the only way to write a lone surrogate
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                "a string holds half of a surrogate pair (\\ud800 to \\udfff), no text"
            ) from error
    return value


@dataclass(frozen=True)
class RecordRules:
    """How records are read, and what the user lets through."""

    text_key: str = "text"
    media: bool = False
    """Whether images and videos may be there."""
    ignore_keys: tuple[str, ...] = ()
    """Names, and patterns with `*`; a pattern covers neither images and the like nor a message's
    keys.
    """
    context_roles: tuple[str, ...] = ()
    """Roles beside CONTEXT_ROLES of which nothing is learned; `*` is all."""
    roles: tuple[tuple[str, str], ...] = ()
    """Pairs of a role and a name that the records have for it (--roles)."""
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs of a key that is read and the name that the records have for it (--columns)."""
    form: str = ""
    """How conversations are written without a chat template. Empty: Alpaca's records after Alpaca's
    own prompt, all others as messages; AS_MESSAGES: all as messages; ALPACA: only Alpaca's records,
    after its prompt."""
    ignore_weights: bool = False
    """Whether `weight` of messages and branches counts as 1."""
    asks: bool = False
    """Whether an assistant's header follows messages that end with another's: no text of it is
    learned.
    """
    prefix_tree: bool = False
    """Whether a record may be several that share their beginnings: rollouts, or completions of one
    prompt.
    """

    def leaves_out(self, key: str) -> bool:
        """Whether --ignore-keys covers a key, by its name or a pattern."""
        return any(fnmatchcase(key, pattern) for pattern in self.ignore_keys)

    def renamed(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a record with the keys that are read in place of those that --columns names.

        RecordError where a key is there under both names.
        """
        if not self.columns:
            return record
        theirs = {name for _, name in self.columns}
        kept = {key: value for key, value in record.items() if key not in theirs}
        for key, name in self.columns:
            if name not in record:
                continue
            if kept.get(key) is not None and key not in self.ignore_keys:
                raise RecordError(
                    f"`{key}` and `{name}` are both there, and --columns {key}={name} names one "
                    "for the other; "
                    f"--ignore-keys {key} leaves `{key}` out"
                )
            kept[key] = record[name]
        return kept

    def refuse_lost(
        self, found: Mapping[str, Any], known: Iterable[str], where: str, in_record: bool = False
    ) -> None:
        """RecordError for keys of `found`, which stands at `where`, that are not read and not
        empty.

        `in_record`: metadata may stand here, as in a record, and not in a message or a part of one.
        """
        lost: dict[str, str] = {}
        for key in found.keys() - {*known, *self.ignore_keys}:
            if found[key] is not None and found[key] not in ("", b"", [], {}):
                is_number = isinstance(found[key], bool | int | float)
                reason = (
                    _reason(key, self.ignore_keys, is_number) if in_record else "is unknown here"
                )
                lost |= {key: reason} if reason else {}
        if lost:
            keys = [key for key in found if key in lost]
            note = "; ".join(f"`{key}` {lost[key]} and would be lost" for key in keys)
            advice = []
            for key in keys:
                if lost[key] == _SYSTEM:
                    advice.append(_SYSTEM_ASIDE if key == "system" else _SYSTEM_TAKEN.format(key))
            if others := [key for key in keys if lost[key] not in (_IMAGES, _SYSTEM)]:
                advice.append(f"--ignore-keys {','.join(others)} leaves it out")
            if _IMAGES in lost.values():
                advice.append(_TAKEN)
            raise RecordError(f"{where and f'{where}: '}{note}. {'. '.join(advice)}")


FOR_PROMPTS = RecordRules(
    media=True, ignore_keys=("*",), context_roles=("*",), ignore_weights=True, asks=True
)
"""Rules of records that are asked, from which nothing is learned: the last thing said is the
answer, of any weight.
"""


@lru_cache(maxsize=4096)
def _reason(key: str, ignored: tuple[str, ...], is_number: bool) -> str | None:
    """Why a key of a record that is not empty is refused; None when it may stand there."""
    snake = re.sub(
        r"([a-z])([A-Z])", r"\1_\2", key
    ).lower()  # `maxStars_repo-path` is max, stars, repo, path
    words = [word for word in re.split(r"[^a-z0-9]+", snake) if word and not word.isdigit()] or [
        snake
    ]
    singular = [word if word in ("is", "has", "ids") else word.rstrip("s") for word in words]
    counts = singular[0] in _METADATA_BEGINNINGS
    if singular[-1] in _DESCRIBING or (counts and is_number):
        return None
    if not _SEEN.isdisjoint(singular):
        return _IMAGES
    if not _HEARD.isdisjoint(singular):
        return "names a sound"
    if counts or singular[-1] in _METADATA or any(fnmatchcase(key, pattern) for pattern in ignored):
        return None
    if "system" in singular and not is_number:
        return _SYSTEM
    return "is unknown"


# ---- pieces of a record: texts with a loss weight each, images and videos as it names them

MEDIA_TYPES = ("image", "video")
MEDIA_SOURCES = ("path", "base64", "member", "bytes")
LINKS = ("url", "image_url")
"""Keys of a part that name a path, a URL or the bytes as a data URL."""


@dataclass(frozen=True)
class Media:
    """An image or a video as a record names it; nothing has been read yet."""

    kind: str
    """image or video."""
    source: str
    """One of MEDIA_SOURCES."""
    value: str | bytes
    key: str
    """Where it stands in the record."""


@dataclass(frozen=True)
class SamplePart:
    """A stretch of text, an image or a video, or (both None) the tokenizer's end-of-document token;
    its loss weight.
    """

    text: str | None
    weight: float
    media: Media | None = None

    @property
    def is_end(self) -> bool:
        """Whether it is the end-of-document token."""
        return self.text is None and self.media is None


END = SamplePart(None, 1.0)


@dataclass(frozen=True)
class Rendered(SamplePart):
    """A whole conversation as a chat template writes it, to be tokenized as one text."""

    learned: tuple[tuple[int, int, float], ...] = ()
    """Characters start..stop and their loss weight, in order; all others are not learned."""
    places: tuple[tuple[int, int], ...] = ()
    """Characters start..stop that stand for an image or a video; these follow in the same order as
    own pieces.
    """


@dataclass(frozen=True)
class Sample:
    """One document: `prefix`, then `branches`, each a continuation of one of the parts before
    it.
    """

    prefix: tuple[SamplePart, ...]
    branches: tuple[tuple[SamplePart, ...], ...] = ()
    """Depth first: behind each stand those that continue it."""
    parents: tuple[int, ...] = ()
    """The part that each branch continues, 0 = the prefix; -1 = none: it is a whole, as the prefix
    then is.
    """
    talks: bool = False
    """Whether it was made of messages, its own or a branch's."""
    forms: frozenset[str] = frozenset()
    """Forms in which its answers are learned, of ANSWER_FORMS; empty for a plain text."""
    answers: Mapping[str, int] = field(default_factory=dict)
    """How many stand behind what, by the names of THOUGHTS; `in_context`: not learned, for lack of
    their thoughts.
    """
    before_answers: str = ""
    """The empty thought that stands, not learned, before an answer; empty where none does."""


def media_at(part: dict[str, Any], kind: str, where: str, rules: RecordRules) -> Media:
    """The image or video (`kind`) that a part of a record names; RecordError says what is wrong
    with it.
    """
    if not rules.media:
        raise RecordError(
            f"`{where}` is of type {kind}: this build makes text datasets, images need the vision "
            "build "
            "(--image-root or another flag for images)"
        )
    # nulls are what Parquet fills in for absent keys
    given = {key: part[key] for key in (*MEDIA_SOURCES, kind, *LINKS) if part.get(key) is not None}
    if len(given) != 1:
        sources = ", ".join((*MEDIA_SOURCES, *LINKS))
        raise RecordError(
            f"`{where}` of type {kind} needs exactly one of {sources}, found "
            f"{', '.join(given) or 'none'}"
        )
    ((key, value),) = given.items()
    rules.refuse_lost(part, ("type", key), f"`{where}`")
    where = f"{where}.{key}"
    if key == "image_url" and isinstance(
        value, dict
    ):  # OpenAI's, beside `detail`, which says nothing of the image
        value = value.get("url")
    if key == kind and isinstance(value, dict):
        # the `Image` feature of Hugging Face datasets, {bytes, path}, where `path` only names bytes
        rules.refuse_lost(value, ("bytes", "path"), f"`{where}`")
        if value.get("bytes") is None and value.get("path") is None:
            raise RecordError(f"`{where}` has neither `bytes` nor `path`")
        key = "path" if value.get("bytes") is None else "bytes"
        value = value[key]
    if key == "bytes":
        if not isinstance(value, bytes):
            raise RecordError(
                f"`{where}` is {described(value)}, it must be bytes (only Parquet has them; use "
                "base64)"
            )
        return Media(kind, key, value, where)
    if not text_at(value, where):
        raise RecordError(f"`{where}` is empty")
    if value.startswith("data:"):
        return Media(kind, "base64", value, where)
    return Media(kind, "path" if key in (kind, *LINKS) else key, value, where)
