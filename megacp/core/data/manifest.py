"""`manifest.json`: what a packed dataset is, and the exact files it consists of.

Key property: it is written last, atomically, so a directory with a manifest is a finished dataset. Its text is
canonical and holds its checksum: equal datasets have equal manifests, and an edited one is told.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.core.storage import files
from megacp.core.storage.json_fields import LARGEST_INT32, PLAIN_NAME, SHA256, Fields
from megacp.core.storage.place import place_of, read_content
from megacp.core.storage.url import Url

FORMAT_VERSION = 2
CHECKSUMS_SINCE = 2
"""The first format with a checksum of the manifest and a checksums.npy in each shard."""
MANIFEST_NAME = "manifest.json"
_LARGEST = 1 << 30
"""Bytes of a manifest: half a million shards."""
_MOST_RANKS = 1 << 20
_HASH, _NAME = "64 hexadecimal digits", "a plain name"


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer a dataset was made with; ids are None when the tokenizer has no such token."""

    kind: str
    """byte | sentencepiece | huggingface | gpt2 (Tokenizer.kind)."""
    sha256: str
    """Over the tokenizer's files; a fixed word's hash for the byte tokenizer."""
    vocab_size: int
    """Token ids are 0 .. vocab_size - 1."""
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    begins_with: int | None = None
    """The id that begins every document; None = none, and then it is not written."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a shard: name within the shard directory, size in bytes, sha256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ShardEntry:
    """One shard directory: its files and what they hold."""

    name: str
    num_packs: int
    num_segments: int
    num_tokens: int
    """True tokens, without padding."""
    num_padded_tokens: int
    """Tokens once every segment is padded to pad_multiple."""
    files: tuple[FileEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """Builtin types only: a line of journal.jsonl, an element of the manifest's `shards`."""
        return {**vars(self), "files": [vars(file) for file in self.files]}

    @staticmethod
    def from_json(value: Any) -> ShardEntry:
        """The inverse of `to_json`; ValueError names the field that is missing, unknown or wrong."""
        return _parse_shard(Fields(value, "shard"))

    def file(self, name: str) -> FileEntry | None:
        """What is stated of one file; None when the shard has no such file."""
        return next((file for file in self.files if file.name == name), None)


@dataclass(frozen=True)
class DatasetManifest:
    """The whole of manifest.json. Counts and efficiency are properties: they follow from the shards."""

    config_fingerprint: str
    """Hash of all that decides the bytes (inputs, tokenizer, lengths, rules); a build with another one is refused."""
    tokenizer: TokenizerInfo
    seq_length: int
    """Padded tokens a pack may hold."""
    pad_multiple: int
    """Every segment's padded length is a multiple of it."""
    sources: tuple[str, ...]
    """Input files; `source_file` of a segment is an index into it."""
    shards: tuple[ShardEntry, ...]
    num_rejected: int = 0
    """Records refused (rejects.jsonl)."""
    image_rules: dict[str, Any] | None = None
    """How images become tokens; None in a text dataset."""
    cp_degrees: tuple[int, ...] = (1, 2, 4, 8, 16)
    """CP degrees the dataset was planned for; an image dataset has a shards_cp{P}.npy for each."""
    format_version: int = FORMAT_VERSION
    chat_template: dict[str, Any] | None = None
    """The templates that wrote messages, by name; None = the house's own form, and then it is not written."""
    document_end: dict[str, int | None] | None = None
    """`{"token": id}` that every document ends with, or `{"token": null}`; None = not known, and then not written."""

    @property
    def num_token_ids(self) -> int:
        """Ids are 0 .. this - 1: the tokenizer's, and those of image tokens above them."""
        special = (self.image_rules or {}).get("token_ids", {}).values()
        return max([self.tokenizer.vocab_size, *(i + 1 for i in special)])

    @property
    def num_packs(self) -> int:
        """Packs in all shards."""
        return sum(shard.num_packs for shard in self.shards)

    @property
    def num_segments(self) -> int:
        """Segments (source documents, or pieces of split ones) in all shards."""
        return sum(shard.num_segments for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """True tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def packing_efficiency(self) -> float:
        """True tokens / (packs x seq_length); 0.0 for an empty dataset."""
        places = self.num_packs * self.seq_length
        return self.num_tokens / places if places else 0.0

    @functools.cached_property
    def checksum(self) -> str:
        """sha256 in hex of all other fields, in canonical JSON."""
        return hashlib.sha256(json.dumps(self._fields(), sort_keys=True).encode()).hexdigest()

    def to_text(self) -> str:
        """Canonical JSON (sorted keys, indented, newline at the end), with the derived counts for human readers."""
        own = {"checksum": self.checksum} if self.format_version >= CHECKSUMS_SINCE else {}
        return json.dumps({**self._fields(), **own}, indent=1, sort_keys=True) + "\n"

    def _fields(self) -> dict[str, Any]:
        tokenizer = dict(vars(self.tokenizer))
        if self.tokenizer.begins_with is None:
            del tokenizer["begins_with"]
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("chat_template", "document_end"):
            if own[name] is None:
                del own[name]
        derived = {name: getattr(self, name) for name in _DERIVED}
        return {**own, "tokenizer": tokenizer, "shards": [shard.to_json() for shard in self.shards], **derived}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A sha256 in hex over all fields: equal for byte-identical datasets, wherever they lie."""
        if self.format_version >= CHECKSUMS_SINCE:
            return self.checksum
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @property
    def unchecked(self) -> str:
        """What no checksum covers, in one line; empty for a dataset of the present format."""
        if self.format_version >= CHECKSUMS_SINCE:
            return ""
        return (
            f"built in format {self.format_version}, without checksums of packs and of the manifest: flipped bits of a "
            ".bin are found by `verify` and --verify-data alone, an edited manifest.json by nothing"
        )

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write DIRECTORY/manifest.json atomically (temporary name, fsync, rename, fsync of the directory)."""
        files.write_atomically(Path(directory) / MANIFEST_NAME, self.to_text().encode())

    @staticmethod
    def read(directory: files.StrPath | Url) -> DatasetManifest:
        """Read DIRECTORY/manifest.json; ValueError names the file and what is wrong with it."""
        path = place_of(directory) / MANIFEST_NAME
        try:
            text = read_content(path, _LARGEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            what = "build" if isinstance(path, Path) else "build, or the upload of a finished one,"
            raise ValueError(
                f"{path}: no such file; a finished dataset has one (was the {what} interrupted?)"
            ) from error
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            return _parse(Fields(files.parse_json(text)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def other_ends(one: DatasetManifest, other: DatasetManifest) -> tuple[int | None, int | None] | None:
    """With which tokens the documents of two datasets end where they end otherwise; None where they end alike.

    A dataset that does not say counts by the end token of its tokenizer.
    """
    if one.document_end is not None and other.document_end is not None:
        ends = one.document_end["token"], other.document_end["token"]
    else:
        ends = one.tokenizer.eos_id, other.tokenizer.eos_id
    return ends if ends[0] != ends[1] else None


def known_end(manifests: Sequence[DatasetManifest]) -> dict[str, int | None] | None:
    """With what the documents of datasets end that end alike, as `document_end`; None where one does not say."""
    ends = [one.document_end for one in manifests]
    return None if None in ends else ends[0]


_DERIVED = ("num_packs", "num_segments", "num_tokens", "packing_efficiency")


def _parse(fields: Fields) -> DatasetManifest:
    version = fields.integer("format_version", 0)
    if not 1 <= version <= FORMAT_VERSION:
        raise ValueError(f"format_version {version}, this program reads 1 to {FORMAT_VERSION}")
    seq_length, tokenizer = fields.integer("seq_length", 1, LARGEST_INT32), _parse_tokenizer(fields.object("tokenizer"))
    manifest = DatasetManifest(
        config_fingerprint=fields.text("config_fingerprint", SHA256, _HASH),
        tokenizer=tokenizer,
        seq_length=seq_length,
        pad_multiple=fields.integer("pad_multiple", 1, seq_length),
        sources=fields.texts("sources"),
        shards=tuple(_parse_shard(shard) for shard in fields.objects("shards")),
        num_rejected=fields.integer("num_rejected"),
        image_rules=fields.optional_object("image_rules"),
        cp_degrees=fields.integers("cp_degrees", 1, _MOST_RANKS),
        format_version=version,
        chat_template=_parse_template(fields.object("chat_template")) if fields.has("chat_template") else None,
        document_end=_parse_end(fields, tokenizer.vocab_size),
    )
    _refuse_token_ids(manifest.image_rules)
    _refuse_repeated("shards", [shard.name for shard in manifest.shards])
    stated = fields.text("checksum", SHA256, _HASH) if version >= CHECKSUMS_SINCE else None
    fields.done(_DERIVED)
    for name in _DERIVED:
        if not fields.is_number(name, getattr(manifest, name)):
            raise fields.refused(name, f"but the shards add up to {getattr(manifest, name)}")
    if stated is not None and stated != manifest.checksum:
        raise ValueError(
            f"its checksum is {manifest.checksum}, it was written with {stated}: it was damaged or edited since; copy "
            "it again from where it was built, or build the dataset again"
        )
    return manifest


def _parse_tokenizer(fields: Fields) -> TokenizerInfo:
    vocab_size = fields.integer("vocab_size", 1, LARGEST_INT32)
    ids = {name: fields.optional_integer(name, 0, vocab_size - 1) for name in ("eos_id", "bos_id", "pad_id")}
    if fields.has("begins_with"):
        ids["begins_with"] = fields.integer("begins_with", 0, vocab_size - 1)
    info = TokenizerInfo(fields.text("kind", PLAIN_NAME), fields.text("sha256", SHA256, _HASH), vocab_size, **ids)
    fields.done()
    return info


def _parse_template(fields: Fields) -> dict[str, str]:
    template = {name: fields.text(name) for name in fields.values}
    fields.done()
    if "default" not in template:
        raise ValueError("`chat_template` has no template named default")
    return template


def _parse_end(fields: Fields, vocab_size: int) -> dict[str, int | None] | None:
    if not fields.has("document_end"):
        return None
    end = fields.object("document_end")
    token = end.optional_integer("token", 0, vocab_size - 1)
    end.done()
    return {"token": token}


def _parse_shard(fields: Fields) -> ShardEntry:
    listed = tuple(_parse_file(file) for file in fields.objects("files"))
    _refuse_repeated("files", [file.name for file in listed])
    counts = {name: fields.integer(name) for name in ("num_segments", "num_tokens", "num_padded_tokens")}
    name = fields.text("name", PLAIN_NAME, _NAME)
    entry = ShardEntry(name, num_packs=fields.integer("num_packs", 1), files=listed, **counts)
    fields.done()
    return entry


def _parse_file(fields: Fields) -> FileEntry:
    entry = FileEntry(
        fields.text("name", PLAIN_NAME, _NAME), fields.integer("size"), fields.text("sha256", SHA256, _HASH)
    )
    fields.done()
    return entry


def _refuse_repeated(what: str, names: Sequence[str]) -> None:
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"`{what}` names {', '.join(repeated[:5])} more than once")


def _refuse_token_ids(image_rules: dict[str, Any] | None) -> None:
    """The one part of the rules that is needed before the image room reads them all."""
    if image_rules is not None and "token_ids" in image_rules:
        ids = Fields(image_rules).object("token_ids")
        for name in image_rules["token_ids"]:
            ids.integer(name, 0, LARGEST_INT32 - 1)
