"""Types shared by all readers and parsers of records, and the rules for the keys of a record.

A reader yields a `Record` for each entry of an input file, or a `Refusal` with the reason why the
entry cannot be used. A key that the parser does not read is accepted only if it cannot contain
training text: its value is empty, its name is plain metadata, or the user listed it.
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
from pathlib import PurePath
from typing import Any

import numpy as np

DEFAULT_MAX_RECORD_BYTES = 64 << 20
# roles whose messages have a loss
LEARNED_ROLES = ("assistant",)
# values of `RecordRules.form`: how answers are written if there is no chat template
AS_MESSAGES = "messages"
ALPACA = "alpaca"
CONTEXT_ROLES = ("system", "developer", "user", "tool")
_SEEN = set("image img picture photo frame video jpg jpeg png webp".split())
"""Words (in the singular) in keys that refer to images or videos."""
# audio is not supported, so these keys are always refused
_HEARD = {"audio", "sound", "speech"}
_DESCRIBING = set(
    "id count size width height length len hash type format score date md5 sha1 sha256 sha512 "
    "language lang".split()
)
"""Last words (in the singular) of keys that describe content, such as `image_width`."""
_METADATA = set(
    "added attr attribute author byte categorie category char character charset checksum commit "
    "confidence config copyright country crawl crawled created creator dataset datetime day "
    "difficulty digest dir directory domain dump encoding exif ext extension extra fetched file "
    "filename filepath fingerprint fork fraction genre guid head hexsha host idx index info issue "
    "key keyword kind level licence license like line link locale meta metadata mime modified "
    "month name nsfw num number origin owner path perplexity ppl prob probability propertie "
    "provenance published publisher punsafe pwatermark quality rank rating ratio region repo "
    "repository retrieved revision script sha shard similarity site snapshot source split src "
    "star stat statu subset tag time timestamp title topic toxicity uid updated uri url username "
    "uuid version view vote warc website year".split()
)
"""Last words (in the singular) of metadata keys, unless another word of the key refers to content.
"""
# first words of metadata keys, such as `is_safe` and `num_turns`
_METADATA_BEGINNINGS = {"meta", "metadata", "num", "n", "is", "has", "quality", "warc", "nb"}
# reasons why a key is refused; `refuse_lost` chooses its advice by them
_SYSTEM = "may be a system prompt"
_SYSTEM_TAKEN = "Use --columns system={} to read it as the system prompt of a conversation"
_SYSTEM_ASIDE = (
    "A text cannot have a system prompt; `messages`, or `instruction` with `output`, can"
)
_IMAGES = "names an image or a video"
_TAKEN = (
    "A build with --image-root reads images from `image` or `images`, and videos from `video` or "
    "`videos`, next to a text or to messages with a user turn"
)
"""Advice for keys that refer to images or videos."""


# files whose records are numbered, and the word for such a record
_NUMBERED = {".parquet": "row", ".csv": "row", ".tsv": "row", ".idx": "document"}


class RecordError(ValueError):
    """Reason why a record cannot be used; the reader adds the file and line."""


@dataclass(frozen=True)
class Refusal:
    """A record that cannot be used; one line of rejects.jsonl."""

    file: str
    line: int
    """1-based line where the record begins; the 1-based row in Parquet or record number in a
    tar.
    """
    offset: int
    """Byte offset of the record in its (uncompressed) file; the 0-based row in Parquet."""
    reason: str
    number: int = 0
    """1-based record number for JSON arrays and multi-line JSON, where lines do not number records;
    else 0.
    """

    def __str__(self) -> str:
        # the offset of a row or document is its number
        if (noun := _NUMBERED.get(PurePath(self.file).suffix)) is not None:
            return f"{self.file}:{self.line}: {self.reason} ({noun} {self.offset + 1})"
        number = f"record {self.number}, " if self.number else ""
        return f"{self.file}:{self.line}: {self.reason} ({number}byte offset {self.offset})"


@dataclass(frozen=True)
class Record:
    """A decoded record and its position; `line` and `offset` are as in `Refusal`."""

    line: int
    offset: int
    size: int
    """Bytes of the record in the file."""
    value: Any
    members: dict[str, bytes] | None = None
    """Media files of a tar record by full name, without the record and its text (only on
    request).
    """
    number: int = 0
    """Record number as in `Refusal`, but counted from the beginning of the extent."""


def without_nulls(value: Any) -> Any:
    """Return a value without the null keys of its objects, at any depth.

    Rows of a table have a null for each key that only other rows use.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def text_at(value: Any, key: str) -> str:
    """Return a value if it is a string. Raise RecordError, naming its `key`, if it is not."""
    if not isinstance(value, str):
        raise RecordError(f"`{key}` is {described(value)}, but it must be a string")
    return value


def described(value: Any) -> str:
    """Describe the type of a JSON value for an error message, with the value of a number."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"a number ({value})" if math.isfinite(value) else "a number"
    if value == []:
        return "an empty list"
    return names.get(type(value), f"a {type(value).__name__}")


def decode_json(line: bytes) -> Any:
    """Decode one line of JSON. Raise RecordError if it is not UTF-8, not JSON, or not Unicode
    text.
    """
    # decode first: json.loads would guess other encodings
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        bad = line[error.start]
        raise RecordError(
            f"not UTF-8: byte 0x{bad:02x} at column {error.start + 1} of the line; convert the "
            "file, for example from Latin-1: iconv -f ISO-8859-1 -t UTF-8 FILE > NEW.jsonl"
        ) from error
    try:
        return of_text(json.loads(text), text)
    except json.JSONDecodeError as error:
        raise RecordError(
            f"invalid JSON: {json_fault(error)} at column {error.colno}{json_hint(text, error.pos)}"
        ) from error
    except RecursionError as error:
        raise RecordError("invalid JSON: lists or objects are nested too deeply") from error
    except ValueError as error:
        raise RecordError(json_fault(error)) from error


def json_fault(error: ValueError) -> str:
    """Describe an error of the JSON decoder, without Python's advice to raise a limit."""
    if isinstance(error, RecordError):
        return str(error)
    if isinstance(error, json.JSONDecodeError):
        return error.msg.removesuffix(" at")
    # the only other ValueError of the decoder: Python refuses to convert very long integers
    return f"an integer has more than {sys.get_int_max_str_digits():,} digits"


def json_hint(text: str, position: int) -> str:
    """Return advice, after a semicolon, for invalid JSON at a position of a text; "" if unknown."""
    # a script may print Python objects instead of JSON
    rest = text[position:]
    if rest.startswith(("'", "None", "True", "False")):
        return "; this looks like a printed Python object: write records with json.dumps"
    before = text[:position].rstrip()
    if before.endswith(",") and rest[:1] in ("}", "]"):
        return f"; remove the comma before {rest[0]}"
    # JSON lines have neither commas between records nor two records in a line
    if before.endswith("}") and rest.strip() == ",":
        return "; remove the comma at the end of the line"
    if before.endswith("}") and rest.startswith("{"):
        return "; write each record on its own line"
    # a line of another text, such as CSV
    if not before and rest[:1] not in ("{", "[", '"', ""):
        return (
            f"; it begins with {rest[:40]!r}, but a record must be a JSON object such as "
            '{"text": "..."}'
        )
    return ""


def of_text(value: Any, text: str) -> Any:
    """Return a value decoded from a JSON text. Raise RecordError if a string is not valid
    Unicode.
    """
    if "\\ud" in text or "\\uD" in text:  # only an escape can spell a lone surrogate
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                "a string contains half of a surrogate pair (\\ud800 to \\udfff), which is not text"
            ) from error
    return value


@dataclass(frozen=True)
class RecordRules:
    """How to read records: key names, roles, and which content may be dropped."""

    text_key: str = "text"
    media: bool = False
    """Whether records may contain images and videos."""
    ignore_keys: tuple[str, ...] = ()
    """Key names, or patterns with `*`. Patterns apply neither to media keys nor to keys of
    messages.
    """
    context_roles: tuple[str, ...] = ()
    """Roles without loss in addition to CONTEXT_ROLES; `*` allows any role."""
    roles: tuple[tuple[str, str], ...] = ()
    """Pairs of a role and its name in the records (--roles)."""
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs of a key and its name in the records (--columns)."""
    form: str = ""
    """How to write conversations without a chat template.

    "" writes Alpaca records with the Alpaca prompt and all other records as messages. AS_MESSAGES
    writes all records as messages. ALPACA accepts only Alpaca records, with the Alpaca prompt.
    """
    ignore_weights: bool = False
    """Whether to treat every `weight` of messages and branches as 1."""
    asks: bool = False
    """Whether the record is a prompt: it ends with an assistant header, and no token has a loss."""
    prefix_tree: bool = False
    """Whether a record may contain several samples with common prefixes (rollouts, or completions
    of one prompt).
    """

    def leaves_out(self, key: str) -> bool:
        """Return whether --ignore-keys covers a key, by name or by pattern."""
        return any(fnmatchcase(key, pattern) for pattern in self.ignore_keys)

    def renamed(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a record with its keys renamed according to --columns.

        Raise RecordError if a record has a key under both names.
        """
        if not self.columns:
            return record
        # a renamed key is no longer read under its old name
        theirs = {name for _, name in self.columns}
        kept = {key: value for key, value in record.items() if key not in theirs}
        for key, name in self.columns:
            if name not in record:
                continue
            if kept.get(key) is not None and key not in self.ignore_keys:
                raise RecordError(
                    f"a record has both `{key}` and `{name}`, but --columns {key}={name} renames "
                    f"`{name}` to `{key}`; use --ignore-keys {key} to leave `{key}` out"
                )
            kept[key] = record[name]
        return kept

    def refuse_lost(
        self, found: Mapping[str, Any], known: Iterable[str], where: str, in_record: bool = False
    ) -> None:
        """Raise RecordError if `found` has non-empty keys that are neither known nor ignored.

        `where` names the object in the message. `in_record` allows metadata keys, which a record
        may have, but a message or a part of one may not.
        """
        lost: dict[str, str] = {}
        for key in found.keys() - {*known, *self.ignore_keys}:
            # an empty value has no content to lose
            if found[key] is None or found[key] in ("", b"", [], {}):
                continue
            reason: str | None = "is unknown here"
            if in_record:
                is_number = isinstance(found[key], bool | int | float)
                reason = _reason(key, self.ignore_keys, is_number)
            if reason:
                lost[key] = reason
        if lost:
            # in the order of the record: the difference above is a set
            keys = [key for key in found if key in lost]
            note = "; ".join(f"`{key}` {lost[key]} and would be lost" for key in keys)
            advice = []
            for key in keys:
                if lost[key] == _SYSTEM:
                    advice.append(_SYSTEM_ASIDE if key == "system" else _SYSTEM_TAKEN.format(key))
            others = [key for key in keys if lost[key] not in (_IMAGES, _SYSTEM)]
            if others:
                advice.append(f"Use --ignore-keys {','.join(others)} to leave it out")
            if _IMAGES in lost.values():
                advice.append(_TAKEN)
            prefix = f"{where}: " if where else ""
            raise RecordError(f"{prefix}{note}. {'. '.join(advice)}")


FOR_PROMPTS = RecordRules(
    media=True, ignore_keys=("*",), context_roles=("*",), ignore_weights=True, asks=True
)
"""Rules for prompts, which have no loss: a final assistant message is the expected answer, whatever
its weight.
"""


@lru_cache(maxsize=4096)
def _reason(key: str, ignored: tuple[str, ...], is_number: bool) -> str | None:
    """Return why a non-empty key of a record is refused, or None if it may be ignored.

    `ignored` are the patterns of --ignore-keys; `is_number`: the value is a number or a boolean.
    """
    # split the key into words: `maxStars_repo-path` is max, stars, repo, path
    snake = re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()
    pieces = re.split(r"[^a-z0-9]+", snake)
    words = [word for word in pieces if word and not word.isdigit()] or [snake]
    singular = [word if word in ("is", "has", "ids") else word.rstrip("s") for word in words]
    counts = singular[0] in _METADATA_BEGINNINGS
    # `image_width` is metadata, but `image` is not, so these words are tested before the media
    if singular[-1] in _DESCRIBING or (counts and is_number):
        return None
    if not _SEEN.isdisjoint(singular):
        return _IMAGES
    if not _HEARD.isdisjoint(singular):
        return "names a sound"
    # a pattern of --ignore-keys must not drop media, so it is tested after them
    if counts or singular[-1] in _METADATA or any(fnmatchcase(key, pattern) for pattern in ignored):
        return None
    if "system" in singular and not is_number:
        return _SYSTEM
    return "is unknown"


# ---- parts of a sample: texts with a loss weight each; images and videos by reference

# kinds of media, and keys of a content part for their contents
MEDIA_TYPES = ("image", "video")
MEDIA_SOURCES = ("path", "base64", "member", "bytes")
_SIZES = ("min_pixels", "max_pixels", "resized_width", "resized_height")
REQUESTS = {"image": _SIZES, "video": (*_SIZES, "fps", "nframes")}
"""Keys of qwen_vl_utils by which a content part asks for a size or for frames."""
LINKS = ("url", "image_url")
"""Keys of a content part that give a path, a URL, or the bytes as a data URL."""


@dataclass(frozen=True)
class Media:
    """A reference to an image or a video in a record; nothing has been read yet."""

    kind: str
    """"image" or "video"."""
    source: str
    """One of MEDIA_SOURCES."""
    value: str | bytes
    key: str
    """Path of the reference in the record, for error messages."""
    requests: tuple[tuple[str, float], ...] = ()
    """Pairs of a key in REQUESTS and its value."""


@dataclass(frozen=True)
class SamplePart:
    """A text, an image or a video, with its loss weight.

    If both `text` and `media` are None, it is the tokenizer's end-of-document token.
    """

    text: str | None
    weight: float
    media: Media | None = None

    @property
    def is_end(self) -> bool:
        """Whether this is the end-of-document token."""
        return self.text is None and self.media is None


END = SamplePart(None, 1.0)


@dataclass(frozen=True)
class Rendered(SamplePart):
    """A whole conversation as rendered by a chat template; it must be tokenized as one text."""

    learned: tuple[tuple[int, int, float], ...] = ()
    """Ranges of characters (start, stop) with their loss weight, in order; the remaining text has
    no loss.
    """
    places: tuple[tuple[int, int], ...] = ()
    """Ranges of characters (start, stop) of image and video placeholders. The media follow as
    separate parts, in the same order.
    """


@dataclass(frozen=True, eq=False)
class Tokenized(SamplePart):
    """A whole document that another program has tokenized; `text` is empty."""

    ids: np.ndarray | None = None
    """int64 [n], n >= 1."""


@dataclass(frozen=True)
class Sample:
    """One document: a `prefix`, then `branches`, each continuing an earlier part."""

    prefix: tuple[SamplePart, ...]
    branches: tuple[tuple[SamplePart, ...], ...] = ()
    """Depth first: each branch is followed by the branches that continue it."""
    parents: tuple[int, ...] = ()
    """Number of the part that each branch continues (0 is the prefix), or -1 if it is a whole
    document (a rollout); the prefix is then a whole document, too.
    """
    talks: bool = False
    """Whether the record, or a branch of it, consists of messages."""
    forms: frozenset[str] = frozenset()
    """Members of ANSWER_FORMS that its answers have; empty for plain text."""
    answers: Mapping[str, int] = field(default_factory=dict)
    """Number of answers by their kind of thought (the names of THOUGHTS).

    `in_context` counts answers without loss because their thought is missing.
    """
    before_answers: str = ""
    """Empty thought, without loss, that precedes answers; "" if there is none."""


def media_at(part: dict[str, Any], kind: str, where: str, rules: RecordRules) -> Media:
    """Return the image or video (`kind`) that a content part refers to.

    Raise RecordError if the part is invalid or if `rules` do not allow media.
    """
    if not rules.media:
        raise RecordError(
            f"`{where}` has type {kind}, but this build makes a text dataset; use --image-root or "
            "another image flag to build with images"
        )
    # Parquet fills absent keys with nulls
    given = {key: part[key] for key in (*MEDIA_SOURCES, kind, *LINKS) if part.get(key) is not None}
    if len(given) != 1:
        sources = ", ".join((*MEDIA_SOURCES, *LINKS))
        raise RecordError(
            f"`{where}` of type {kind} needs exactly one of {sources}; it has "
            f"{', '.join(given) or 'none'}"
        )
    ((key, value),) = given.items()
    rules.refuse_lost(part, ("type", key, *REQUESTS[kind]), f"`{where}`")
    requests = _requests_of(part, kind, where, rules)
    # unpack the forms that wrap the value in an object
    where = f"{where}.{key}"
    # OpenAI's form has the URL in an object; `detail` next to it does not change the image
    if key == "image_url" and isinstance(value, dict):
        value = value.get("url")
    if key == kind and isinstance(value, dict):
        # the `Image` feature of Hugging Face datasets: {bytes, path}, where `path` names the bytes
        rules.refuse_lost(value, ("bytes", "path"), f"`{where}`")
        if value.get("bytes") is None and value.get("path") is None:
            raise RecordError(f"`{where}` has neither `bytes` nor `path`")
        key = "path" if value.get("bytes") is None else "bytes"
        value = value[key]
    if key == "bytes":
        if not isinstance(value, bytes):
            raise RecordError(
                f"`{where}` is {described(value)}, but it must be bytes, which only Parquet has; "
                "use `base64` in JSON"
            )
        return Media(kind, key, value, where, requests)
    if isinstance(value, list) and kind == "video":
        raise RecordError(
            f"`{where}` is a list of frames, but a video must be one file: join the frames, for "
            "example with ffmpeg, or give each as a part of type image"
        )
    if not text_at(value, where):
        raise RecordError(f"`{where}` is empty")
    # a data URL contains the bytes themselves
    if value.startswith("data:"):
        return Media(kind, "base64", value, where, requests)
    return Media(kind, "path" if key in (kind, *LINKS) else key, value, where, requests)


def _requests_of(
    part: dict[str, Any], kind: str, where: str, rules: RecordRules
) -> tuple[tuple[str, float], ...]:
    """Return the size and the frames that a content part asks for, without ignored keys.

    Raise RecordError for a value that is not a number above 0, or for only one of two sides.
    """
    found: dict[str, float] = {}
    for name in REQUESTS[kind]:
        value = part.get(name)
        if value is None or name in rules.ignore_keys:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise RecordError(f"`{where}.{name}` is {described(value)}, but it must be above 0")
        found[name] = value
    sides = {"resized_width", "resized_height"} & found.keys()
    if len(sides) == 1:
        raise RecordError(
            f"`{where}` has only `{sides.pop()}`; give both `resized_width` and `resized_height`"
        )
    return tuple(found.items())
