"""`manifest.json`: description of a packed dataset, with the exact files that belong to it.

The manifest is written last, atomically, so a directory with a manifest is a finished dataset. Its
text is canonical and has a checksum. Equal datasets therefore have equal manifests, and damaged or
edited manifests are detected.
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
"""Names in the rules of special image tokens that stand for one pooled feature each."""
THOUGHTS = ("empty_thoughts", "real_thoughts", "no_thoughts")
"""Counts of learned answers by what precedes them, for chat templates that support thoughts."""
_THOUGHT = "<think>"
"""Start of an empty thought written by the template. If the prompt already contains it, the
template writes only the end.
"""
ANSWER_FORMS = {
    "chat_template": "as the chat template writes them",
    "messages": "as messages in megacp's own form, <|ROLE|> and a newline before each",
    "alpaca": "after Alpaca's prompt, with ### Instruction: and ### Response:",
    "completion": "right after the text of their prompt",
}
"""Descriptions of the forms in which answers are learned."""


@dataclass(frozen=True)
class TokenizerInfo:
    """Tokenizer of a dataset. An id is None if the tokenizer has no such token."""

    kind: str
    """byte, sentencepiece, huggingface or gpt2 (Tokenizer.kind)."""
    sha256: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    begins_with: int | None = None
    """Id of the token that begins every document; None, which is not written, if there is none."""


@dataclass(frozen=True)
class FileEntry:
    """File of a shard: name in the shard's directory, size in bytes, sha256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ShardEntry:
    """Directory of a shard, with its files and counts."""

    name: str
    num_packs: int
    num_segments: int
    num_tokens: int
    num_padded_tokens: int
    files: tuple[FileEntry, ...]

    @staticmethod
    def from_json(values: dict[str, Any]) -> ShardEntry:
        """Return the entry for values from `dataclasses.asdict`.

        Raise ValueError for a name that could refer to a file outside the dataset.
        """
        own_files = tuple(FileEntry(**file) for file in values["files"])
        entry = ShardEntry(**{**values, "files": own_files})
        for name in (entry.name, *(file.name for file in entry.files)):
            if not PLAIN_NAME.fullmatch(name):
                raise ValueError(f"`shards` contains {name!r}, which is not a plain file name")
        return entry


@dataclass(frozen=True)
class DatasetManifest:
    """Contents of manifest.json; the properties are computed from the shards and rules."""

    config_fingerprint: str
    """Hash of everything that determines the bytes (inputs, tokenizer, lengths, rules).

    A build into the same directory must have the same hash.
    """
    tokenizer: TokenizerInfo
    seq_length: int
    pad_multiple: int
    sources: tuple[str, ...]
    """Input files; a segment's `source_file` is an index into them."""
    shards: tuple[ShardEntry, ...]
    num_rejected: int = 0
    image_rules: dict[str, Any] | None = None
    """Rules that convert images to tokens; None for a text dataset."""
    cp_degrees: tuple[int, ...] = (1, 2, 4, 8, 16)
    """CP degrees for which the dataset was planned; with images, each has a shards_cp{P}.npy."""
    format_version: int = FORMAT_VERSION
    chat_template: dict[str, Any] | None = None
    """Template for messages ("" means megacp's own format), and counts by THOUGHTS; None, which is
    not written, if there are no messages.
    """
    document_end: dict[str, int | None] | None = None
    """Token that ends every document, as `{"token": id}`; `{"token": null}` if there is none.

    None, which is not written, if unknown.
    """
    answer_forms: dict[str, int] | None = None
    """Number of records by the form of their answers, one of ANSWER_FORMS.

    None, which is not written, if there are no answers.
    """

    @property
    def num_token_ids(self) -> int:
        """Number of token ids, including image tokens above the vocabulary."""
        # ids may also reuse tokens inside the vocabulary
        special = (self.image_rules or {}).get("token_ids", {}).values()
        return max([self.tokenizer.vocab_size, *(i + 1 for i in special)])

    @property
    def feature_ids(self) -> tuple[int, ...]:
        """Ids of tokens that stand for image features; empty for text."""
        ids = (self.image_rules or {}).get("token_ids", {})
        return tuple(ids[name] for name in FEATURE_TOKENS if name in ids)

    @property
    def ends_with(self) -> int | None:
        """Id of the token that ends every document; None if there is none.

        Old datasets do not record it; they use the tokenizer's EOS token.
        """
        if self.document_end is None:
            return self.tokenizer.eos_id
        return self.document_end["token"]

    num_packs = property(lambda self: sum(shard.num_packs for shard in self.shards))
    num_segments = property(lambda self: sum(shard.num_segments for shard in self.shards))
    num_tokens = property(lambda self: sum(shard.num_tokens for shard in self.shards))

    @property
    def packing_efficiency(self) -> float:
        """Number of true tokens divided by packs x seq_length; 0.0 for an empty dataset."""
        available = self.num_packs * self.seq_length
        return self.num_tokens / available if available else 0.0

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of all fields as canonical JSON, equal for all byte-identical datasets."""
        return _checksum(self._fields())

    def _fields(self) -> dict[str, Any]:
        """Return the fields to write, including derived ones."""
        own = dataclasses.asdict(self) | {name: getattr(self, name) for name in _DERIVED}
        # Omit unknown values, so that datasets built before these fields existed keep their
        # checksum.
        if own["tokenizer"]["begins_with"] is None:
            del own["tokenizer"]["begins_with"]
        for name in ("chat_template", "document_end", "answer_forms"):
            if own[name] is None:
                del own[name]
        return own

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write DIRECTORY/manifest.json atomically, as canonical JSON.

        Derived counts are included for human readers.
        """
        content = {**self._fields(), "checksum": self.fingerprint}
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        files.write_atomically(Path(directory) / MANIFEST_NAME, text.encode())

    @staticmethod
    def read(directory: files.StrPath | Url) -> DatasetManifest:
        """Return the manifest in `directory`.

        Raise ValueError with the file's name and the problem if it is missing or damaged.
        """
        path = place_of(directory) / MANIFEST_NAME
        try:
            own = files.parse_json(read_content(path, 1 << 30))
            version = own["format_version"]
            if version != FORMAT_VERSION:
                raise ValueError(
                    f"format_version {version!r}, but this program reads {FORMAT_VERSION}: rebuild "
                    "the dataset"
                )
            # the checksum covers all other fields, including the derived ones
            stated = own.pop("checksum", None)
            found = _checksum(own)
            if stated != found:  # a correct checksum also ensures the types of all fields
                raise ValueError(
                    f"its checksum is {found}, but it was written with {stated}: copy it again or "
                    "rebuild the dataset"
                )
            # JSON has neither tuples nor dataclasses, so convert the nested values
            for name in _DERIVED:
                del own[name]
            own["tokenizer"] = TokenizerInfo(**own["tokenizer"])
            own["shards"] = tuple(ShardEntry.from_json(shard) for shard in own["shards"])
            own["sources"] = tuple(own["sources"])
            own["cp_degrees"] = tuple(own["cp_degrees"])
            return DatasetManifest(**own)
        except (FileNotFoundError, NotADirectoryError) as error:
            # a common mistake is to pass the records instead of the dataset built from them
            if Path(str(directory)).is_file():
                raise ValueError(
                    f"{directory}: is a file, but must be the folder of a packed dataset; build "
                    f"one from records with tools/preprocess_data.py build --input {directory} "
                    "--output DIR ..."
                ) from error
            # in a store of objects, there are no folders to look for
            if isinstance(path, Path) and not path.parent.exists():
                raise ValueError(f"{directory}: there is no such folder") from error
            raise ValueError(
                f"{path}: no such file, so this is not a finished dataset; check the path, and "
                "whether the build or upload was interrupted"
            ) from error
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is not a valid dataset manifest: {error}") from error


_DERIVED = ("num_packs", "num_segments", "num_tokens", "packing_efficiency")


def thoughts_told(chat_template: dict[str, Any] | None) -> str:
    """Return a line with the numbers of learned answers with and without a thought.

    Return "" if no answer has a thought and the template's prompt does not open one. If the prompt
    opens a thought, an answer without one is learned after an empty thought.
    """
    kept = chat_template or {}
    counts = [kept.get(name, 0) for name in THOUGHTS]  # [empty, real, none]
    before = kept.get("before_answers", "")
    opens = before != "" and _THOUGHT not in before
    if not counts[1] and not (counts[0] and opens):
        return ""
    sentence = "learned answers: {:,} without a thought, {:,} with one, {:,} right after the prompt"
    return sentence.format(*counts)


def answers_told(forms: dict[str, int] | None) -> str:
    """Return a line with the forms in which answers are learned; "" without answers."""
    told = []
    for form, words in ANSWER_FORMS.items():
        count = (forms or {}).get(form, 0)
        if count:
            told.append(f"{words} ({counted(count, 'record')})")
    return f"answers are learned {', and '.join(told)}" if told else ""


def _checksum(fields: dict[str, Any]) -> str:
    """Return the sha256 of the fields as canonical JSON."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
