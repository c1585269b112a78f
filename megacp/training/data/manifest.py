"""`manifest.json`: what a packed dataset is, and the exact files it consists of.

It is written last, atomically, so a directory with a manifest is a finished dataset. Its text is
canonical and holds a checksum: equal datasets have equal manifests, and a damaged or edited one is
refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.storage import files
from megacp.storage.files import PLAIN_NAME
from megacp.storage.place import place_of, read_content
from megacp.storage.url import Url
from megacp.storage.wording import counted

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
FEATURE_TOKENS = ("image_patch", "video_patch")
"""Special image tokens, by their names in rules, that stand for a pooled feature each."""
THOUGHTS = ("empty_thoughts", "real_thoughts", "no_thoughts")
"""Counts of learned answers by what they stand behind, where a chat template knows of thoughts."""
_THOUGHT = "<think>"
"""Begins an empty thought that the template writes; where a prompt opens a thought, only its end is
left to write.
"""
ANSWER_FORMS = {
    "chat_template": "as the chat template writes them",
    "messages": "as messages in megacp's own form, <|ROLE|> and a newline before each",
    "alpaca": "after Alpaca's prompt, with ### Instruction: and ### Response:",
    "completion": "right after the text of their prompt",
}
"""Forms in which answers are learned, and the words for them."""


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer a dataset was made with; ids are None when the tokenizer has no such token."""

    kind: str
    """byte | sentencepiece | huggingface | gpt2 (Tokenizer.kind)."""
    sha256: str
    vocab_size: int
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
    num_padded_tokens: int
    files: tuple[FileEntry, ...]

    @staticmethod
    def from_json(values: dict[str, Any]) -> ShardEntry:
        """The inverse of `dataclasses.asdict`. ValueError for a name that leads out of the
        dataset.
        """
        entry = ShardEntry(
            **{**values, "files": tuple(FileEntry(**file) for file in values["files"])}
        )
        if bad := [
            name
            for name in (entry.name, *(f.name for f in entry.files))
            if not PLAIN_NAME.fullmatch(name)
        ]:
            raise ValueError(f"`shards` names {bad[0]!r}, which is no plain name")
        return entry


@dataclass(frozen=True)
class DatasetManifest:
    """The whole of manifest.json; counts follow from the shards."""

    config_fingerprint: str
    """Hash of all that decides the bytes (inputs, tokenizer, lengths, rules); a build with another
    one is refused.
    """
    tokenizer: TokenizerInfo
    seq_length: int
    pad_multiple: int
    sources: tuple[str, ...]
    """Input files; `source_file` of a segment is an index into it."""
    shards: tuple[ShardEntry, ...]
    num_rejected: int = 0
    image_rules: dict[str, Any] | None = None
    """How images become tokens; None in a text dataset."""
    cp_degrees: tuple[int, ...] = (1, 2, 4, 8, 16)
    """CP degrees the dataset was planned for; an image dataset has a shards_cp{P}.npy for each."""
    format_version: int = FORMAT_VERSION
    chat_template: dict[str, Any] | None = None
    """What wrote messages ("": the house's own form), and counts by THOUGHTS; None = no messages,
    and not written.
    """
    document_end: dict[str, int | None] | None = None
    """`{"token": id}` that every document ends with, or `{"token": null}`; None = not known, and
    then not written.
    """
    answer_forms: dict[str, int] | None = None
    """Records by the form in which their answers are learned, of ANSWER_FORMS; None = no answers,
    and not written.
    """

    @property
    def num_token_ids(self) -> int:
        """Ids are 0 .. this - 1: the tokenizer's, and those of image tokens above them."""
        special = (self.image_rules or {}).get("token_ids", {}).values()
        return max([self.tokenizer.vocab_size, *(i + 1 for i in special)])

    @property
    def feature_ids(self) -> tuple[int, ...]:
        """Token ids that stand where an image feature goes; none for text."""
        ids = (self.image_rules or {}).get("token_ids", {})
        return tuple(ids[name] for name in FEATURE_TOKENS if name in ids)

    @property
    def ends_with(self) -> int | None:
        """The id that ends every document; None = none. A dataset that does not say has its
        tokenizer's.
        """
        return self.tokenizer.eos_id if self.document_end is None else self.document_end["token"]

    num_packs = property(lambda self: sum(shard.num_packs for shard in self.shards))
    num_segments = property(lambda self: sum(shard.num_segments for shard in self.shards))
    num_tokens = property(lambda self: sum(shard.num_tokens for shard in self.shards))

    @property
    def packing_efficiency(self) -> float:
        """True tokens / (packs x seq_length); 0.0 for an empty dataset."""
        available = self.num_packs * self.seq_length
        return self.num_tokens / available if available else 0.0

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 in hex of all fields in canonical JSON: equal for byte-identical datasets,
        wherever they lie.
        """
        return _checksum(self._fields())

    def _fields(self) -> dict[str, Any]:
        own = dataclasses.asdict(self) | {name: getattr(self, name) for name in _DERIVED}
        # a field that is not known is left out, so datasets that were built before it existed keep
        # their checksum
        if own["tokenizer"]["begins_with"] is None:
            del own["tokenizer"]["begins_with"]
        for name in ("chat_template", "document_end", "answer_forms"):
            if own[name] is None:
                del own[name]
        return own

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write DIRECTORY/manifest.json atomically: canonical JSON, with the derived counts for
        human readers.
        """
        text = (
            json.dumps({**self._fields(), "checksum": self.fingerprint}, indent=1, sort_keys=True)
            + "\n"
        )
        files.write_atomically(Path(directory) / MANIFEST_NAME, text.encode())

    @staticmethod
    def read(directory: files.StrPath | Url) -> DatasetManifest:
        """Read DIRECTORY/manifest.json; ValueError names the file and what is wrong with it."""
        path = place_of(directory) / MANIFEST_NAME
        try:
            own = files.parse_json(read_content(path, 1 << 30))
            if (version := own["format_version"]) != FORMAT_VERSION:
                raise ValueError(
                    f"format_version {version!r}, this program reads {FORMAT_VERSION}: build it "
                    "again"
                )
            stated = own.pop("checksum", None)
            if stated != (found := _checksum(own)):  # it stands for the types of all fields
                raise ValueError(
                    f"its checksum is {found}, it was written with {stated}: copy it, or build it "
                    "again"
                )
            for name in _DERIVED:
                del own[name]
            own["tokenizer"] = TokenizerInfo(**own["tokenizer"])
            own["shards"] = tuple(ShardEntry.from_json(shard) for shard in own["shards"])
            own["sources"], own["cp_degrees"] = tuple(own["sources"]), tuple(own["cp_degrees"])
            return DatasetManifest(**own)
        except (FileNotFoundError, NotADirectoryError) as error:
            if Path(str(directory)).is_file():
                way = (
                    f"tools/preprocess_data.py build --input {directory} --output DIR ... makes "
                    "one of records"
                )
                raise ValueError(
                    f"{directory}: is a file, a dataset's folder is needed; {way}"
                ) from error
            raise ValueError(
                f"{path}: no such file; a finished dataset has one (was the build, or the upload, "
                "interrupted?)"
            ) from error
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is no manifest of this program: {error}") from error


_DERIVED = ("num_packs", "num_segments", "num_tokens", "packing_efficiency")


def thoughts_told(chat_template: dict[str, Any] | None) -> str:
    """Say how many answers of a manifest, or a blend, are learned after which thought.

    Empty where thoughts play no part: no answer has one, and no prompt of the template opens one.
    Where a prompt opens a thought, an answer without one is learned after the rest of an empty
    thought.
    """
    kept = chat_template or {}
    counts = [kept.get(name, 0) for name in THOUGHTS]
    before = kept.get("before_answers", "")
    opens = before != "" and _THOUGHT not in before
    if not counts[1] and not (counts[0] and opens):
        return ""
    sentence = "learned answers: {:,} without a thought, {:,} with one, {:,} right after the prompt"
    return sentence.format(*counts)


def answers_told(forms: dict[str, int] | None) -> str:
    """Say in one line in which form the answers of a manifest, a blend or a run are learned; empty
    without any.
    """
    told = []
    for form, words in ANSWER_FORMS.items():
        if count := (forms or {}).get(form, 0):
            told.append(f"{words} ({counted(count, 'record')})")
    return f"answers are learned {', and '.join(told)}" if told else ""


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
