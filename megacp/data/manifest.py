"""`manifest.json`: what a packed dataset is, and the exact files it consists of.

Key property: it is written last, atomically, so a directory with a manifest is a finished dataset; and its text is
canonical, so that equal datasets have equal manifests. Rejected: inferring the dataset from a directory listing,
which cannot tell a finished build from a killed one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megacp.data.indexed import sync_directory

T = TypeVar("T")

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer a dataset was made with; ids are None when the tokenizer has no such token."""

    kind: str
    """byte | sentencepiece | huggingface | gpt2 (the tokenizer room's own names)."""
    sha256: str
    """Over the tokenizer's files; a fixed word's hash for the byte tokenizer."""
    vocab_size: int
    """Token ids are 0 .. vocab_size - 1."""
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None


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
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> ShardEntry:
        """The inverse of `to_json`; ValueError when keys are missing or unknown."""
        return _build(ShardEntry, {**value, "files": tuple(_build(FileEntry, f) for f in value.get("files", ()))})


@dataclass(frozen=True)
class Manifest:
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

    def to_text(self) -> str:
        """Canonical JSON (sorted keys, indented, newline at the end), with the derived counts for human readers."""
        derived = {name: getattr(self, name) for name in _DERIVED}
        return json.dumps({**dataclasses.asdict(self), **derived}, indent=1, sort_keys=True) + "\n"

    @property
    def fingerprint(self) -> str:
        """sha256 in hex of the canonical text: equal for byte-identical datasets, wherever they lie."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write DIRECTORY/manifest.json atomically (temporary name, fsync, rename, fsync of the directory)."""
        write_atomically(Path(directory) / MANIFEST_NAME, self.to_text().encode())

    @staticmethod
    def read(directory: str | os.PathLike[str]) -> Manifest:
        """Read DIRECTORY/manifest.json; ValueError names the file and what is wrong with it."""
        path = Path(directory) / MANIFEST_NAME
        if not path.is_file():
            raise ValueError(f"{path}: no such file; a finished dataset has one (was the build interrupted?)")
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(value, dict):
                raise ValueError(f"expected an object, found a {type(value).__name__}")
            return _parse(value)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error


_DERIVED = ("num_packs", "num_segments", "num_tokens", "packing_efficiency")


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace `path` by `data` so that a reader, also after a crash, sees the old or the new content, never a part."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _parse(value: dict[str, Any]) -> Manifest:
    version = value.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version {version!r}, this program reads {FORMAT_VERSION}")
    derived = {name: value.get(name) for name in _DERIVED}
    fields = {name: item for name, item in value.items() if name not in _DERIVED}
    for name in ("sources", "shards", "cp_degrees"):
        if not isinstance(fields.get(name), list):
            raise ValueError(f"`{name}` must be a list")
    if not isinstance(fields.get("image_rules"), dict | None):
        raise ValueError("`image_rules` must be an object or null")
    fields["tokenizer"] = _build(TokenizerInfo, fields.get("tokenizer") or {})
    fields["sources"], fields["cp_degrees"] = tuple(fields["sources"]), tuple(fields["cp_degrees"])
    fields["shards"] = tuple(ShardEntry.from_json(shard) for shard in fields["shards"])
    manifest = _build(Manifest, fields)
    for name, stated in derived.items():
        if stated != getattr(manifest, name):
            raise ValueError(f"`{name}` is {stated}, but the shards add up to {getattr(manifest, name)}")
    return manifest


def _build(cls: type[T], value: dict[str, Any]) -> T:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    known = {field.name for field in fields}
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    missing, unknown = sorted(required - set(value)), sorted(set(value) - known)
    if missing or unknown:
        raise ValueError(f"{cls.__name__}: missing keys {missing}, unknown keys {unknown}")
    return cls(**value)
