"""Which keys and roles a record may have beside those that are read: what would be lost is refused.

Key property: a key is accepted only when it cannot hold something to learn. It is empty, plain metadata by its name, or
named by the user. Rejected: to ignore unknown keys, which drops images beside the words, and to refuse them all, which
refuses every corpus that carries a `url`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from megacp.prepare.records.record import RecordError

LEARNED_ROLES = ("assistant",)
CONTEXT_ROLES = ("system", "developer", "user", "tool")
MESSAGE_KEYS = ("role", "content", "weight", "id")

_ASSISTANTS = {"gpt", "bot", "model", "ai", "chatgpt", "chatbot", "agent", "llm", "answer", "response", "output"}
"""Names that other formats give to what here is an assistant."""
_TEXTS = {
    *("text", "input", "inputs", "output", "outputs", "target", "targets", "system", "context", "suffix", "prefix"),
    *("labels", "label_ids", "mask", "loss", "loss_mask", "loss_weight", "loss_weights", "train", "trainable"),
    *("attention_mask", "position_ids", "input_ids", "token_ids", "tokens"),
}
"""Keys of what other tools learn, or of how they learn it."""
_CONTENT_WORDS = {
    *("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "frame", "frames"),
    *("video", "videos", "audio", "audios", "sound", "sounds", "speech"),
    *("tool", "tools", "function", "functions", "call", "calls"),
    *("reasoning", "thinking", "thought", "thoughts", "rationale"),
    *("prompt", "prompts", "completion", "completions", "instruction", "instructions", "question", "questions"),
    *("answer", "answers", "response", "responses", "chosen", "rejected", "caption", "captions"),
    *("conversation", "conversations", "dialog", "dialogue", "message", "messages", "turn", "turns"),
    *("content", "contents", "text", "texts"),
}
_DESCRIBING = {
    *("id", "ids", "count", "size", "width", "height", "length", "len", "hash", "type", "format", "score", "date"),
    *("md5", "sha1", "sha256", "sha512", "language", "lang"),
}
"""Last words of keys that describe content and are none."""
_METADATA_WORDS = _DESCRIBING | {
    *("idx", "index", "uid", "uuid", "guid", "key", "sha", "digest", "checksum", "fingerprint", "version", "revision"),
    *("source", "sources", "src", "origin", "provenance", "dataset", "subset", "split", "shard", "config"),
    *("dump", "snapshot", "crawl", "url", "urls", "uri", "link", "links", "domain", "domains", "host", "site"),
    *("website", "file", "filename", "filepath", "path", "paths", "dir", "directory", "ext", "extension"),
    *("repo", "repository", "commit", "head", "hexsha", "stars", "forks", "issues", "likes", "votes", "views"),
    *("license", "licenses", "licence", "copyright", "langs", "languages", "locale", "script", "country", "region"),
    *("datetime", "time", "timestamp", "year", "month", "day", "created", "modified", "updated", "added", "published"),
    *("crawled", "retrieved", "fetched", "author", "authors", "publisher", "creator", "owner", "username", "name"),
    *("title", "category", "categories", "tag", "tags", "topic", "topics", "keywords", "genre", "kind", "level"),
    *("mime", "encoding", "charset", "scores", "quality", "rating", "rank", "perplexity", "ppl", "toxicity"),
    *("confidence", "probability", "prob", "ratio", "fraction", "difficulty", "bytes", "chars", "characters", "lines"),
    *("num", "number", "meta", "metadata", "attributes", "attrs", "properties", "extra", "info", "stats", "warc"),
}
_METADATA_BEGINNINGS = {"meta", "metadata", "num", "n", "is", "has", "quality", "warc", "nb"}
_HINTS = {
    "an image or a video is a part of `content`": ("image", "img", "picture", "photo", "frame", "video"),
    "write it as `messages` with `role` and `content`": (
        *("conversation", "dialog", "turn", "message", "prompt", "completion", "instruction", "question", "answer"),
        *("response", "input", "output", "system"),
    ),
    "nothing of tools is read without --chat-template": ("tool", "function", "call"),
    "only `content` is read without --chat-template": ("reasoning", "thinking", "thought", "rationale"),
    "a loss weight is `weight`": ("loss", "mask", "train"),
}


@dataclass(frozen=True)
class Accepted:
    """What the user lets through: keys to ignore, roles to take as context."""

    ignore_keys: tuple[str, ...] = ()
    """Names, and patterns with `*`; a pattern covers neither what looks like content nor a message's keys."""
    context_roles: tuple[str, ...] = ()
    """Roles beside CONTEXT_ROLES of which nothing is learned; `*` is all but those that other formats learn."""

    ignore_weights: bool = False
    """Whether `weight` of messages and branches counts as 1."""
    asks: bool = False
    """Whether an assistant's header follows messages that end with another's: no text of it is learned."""

    def role_problem(self, role: str) -> str | None:
        """Why a role cannot be used; None when it can."""
        if role in LEARNED_ROLES or role in CONTEXT_ROLES or role in self.context_roles:
            return None
        if "*" in self.context_roles and role.lower() not in _ASSISTANTS:
            return None
        known = ", ".join((*CONTEXT_ROLES, *LEARNED_ROLES))
        return (
            f"{role!r} is none of the roles {known}, and only what an assistant says is learned; rename it, or give "
            f"--context-roles {role} to learn nothing of it"
        )


NOTHING_MORE = Accepted()
FOR_PROMPTS = Accepted(("*",), ("*",), True, True)
"""Of records that are asked, from which nothing is learned: the last thing said is the answer, whatever it weighs."""


@dataclass(frozen=True)
class RecordRules:
    """How records are read."""

    text_key: str
    media: bool
    """Whether images and videos may be there."""
    accepted: Accepted
    has_template: bool = False
    """Whether a chat template writes messages: it reads what it likes of them."""

    def refuse_lost(self, found: Mapping[str, Any], known: Iterable[str], where: str, in_record: bool = False) -> None:
        """RecordError for keys of `found`, which stands at `where`, that are not read."""
        if not found.keys() <= {*known} and (lost := _lost_keys(found, known, self.accepted, in_record)):
            raise RecordError(f"{where}: {lost}" if where else lost)


def _lost_keys(found: Mapping[str, Any], known: Iterable[str], accepted: Accepted, in_record: bool) -> str | None:
    """A sentence about the keys of `found` that are not read; None when nothing would be lost.

    `in_record`: metadata may stand here, as in a record, and not in a message or a part of one.
    """
    known = tuple(known)
    lost = {
        key: _reason(key, known, accepted, isinstance(value, bool | int | float), in_record)
        for key, value in found.items()
        if key not in known and key not in accepted.ignore_keys and not _is_empty(value)
    }
    reasons = {key: reason for key, reason in lost.items() if reason is not None}
    if not reasons:
        return None
    told = "; ".join(f"`{key}` {reason}" for key, reason in reasons.items())
    return f"{told}. --ignore-keys {','.join(reasons)} leaves it out"


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes | list | dict) and not value)


@lru_cache(maxsize=4096)
def _reason(key: str, known: tuple[str, ...], accepted: Accepted, is_number: bool, in_record: bool) -> str | None:
    """Why a key that is not empty is refused; None when it may stand there."""
    words = _words(key)
    if not in_record:
        return f"is unknown here and would be lost{_hint(words)}"
    looks_like_content = key.lower() in _TEXTS
    if not looks_like_content:
        about = words[0] in _METADATA_BEGINNINGS and (is_number or words[-1] not in _CONTENT_WORDS)
        if about or words[-1] in _DESCRIBING:
            return None
        looks_like_content = not is_number and bool(_CONTENT_WORDS & set(words))
    if looks_like_content:
        return f"looks like content and would be lost{_hint(words)}"
    if words[-1] in _METADATA_WORDS:
        return None
    if near := difflib.get_close_matches(key.lower(), known, 1, 0.75):
        return f"is unknown, the nearest key is `{near[0]}`"
    if any(fnmatchcase(key, pattern) for pattern in accepted.ignore_keys):
        return None
    return "is unknown and would be lost"


def _hint(words: tuple[str, ...]) -> str:
    if words[-1] in _DESCRIBING:
        return ""
    singular = {word.rstrip("s") for word in words}
    found = (hint for hint, about in _HINTS.items() if singular & {word.rstrip("s") for word in about})
    return "".join(f" ({hint})" for hint in [next(found, None)] if hint)


def _words(key: str) -> tuple[str, ...]:
    """`maxStars_repo-path` as max, stars, repo, path; numbers are left out."""
    parts = re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()
    words = tuple(word for word in re.split(r"[^a-z0-9]+", parts) if word and not word.isdigit())
    return words or (key.lower(),)
