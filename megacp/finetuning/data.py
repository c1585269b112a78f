"""Look at the data of a fine-tuning: the form of its records and the lengths of its documents."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.finetuning.flags import flag_words
from megacp.prepare.command import build_settings
from megacp.prepare.packs.lengths import Lengths, measure
from megacp.prepare.records.read import Extent, read_extent
from megacp.prepare.records.record import Record
from megacp.storage.place import expanded, place_of, size_of
from megacp.storage.url import is_url
from megacp.storage.wording import counted

# Records at the beginning of each file whose keys are looked at.
_LOOKED_AT = 100
# Columns with a question and its answer, as tables name them. The first match is used.
_QUESTIONS = (
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("input", "output"),
)
# Keys that make a record complete without --columns.
_COMPLETE = {"text", "messages", "conversations", "conversation", "completion", "branches"}
# Beginnings of keys and of types of content parts that refer to images and videos.
_MEDIA = ('"image', '"video')


@dataclass(frozen=True)
class Data:
    """The data of a fine-tuning."""

    lengths: Lengths
    build: dict[str, object] = field(default_factory=dict)
    """Chosen fields of the build: how its records are read."""

    @property
    def sentence(self) -> str:
        """Describe the documents."""
        lengths = self.lengths
        noun = "conversation" if lengths.talks == lengths.documents else "document"
        about = "" if lengths.is_whole else "about "
        return (
            f"{about}{counted(lengths.all_documents, noun)} with {about}"
            f"{counted(lengths.all_tokens, 'token')}; the longest has {lengths.longest:,}"
        )


def look_at(
    paths: Sequence[str], folder: Path, build_words: Sequence[str], has_tower: bool
) -> Data:
    """Return the data of these files, read with the tokenizer of a model's folder.

    `has_tower` says whether the model has a vision tower. Raise ValueError for files that cannot be
    read and for bad records.
    """
    records = list(_first_records(paths))
    # Flags of the user take precedence over these choices.
    chosen: dict[str, object] = {}
    flags = {word.partition("=")[0] for word in build_words}
    if "--columns" not in flags:
        columns = _columns(records)
        if columns:
            chosen["columns"] = columns
    has_media = any(_names_media(value) for value in records)
    if has_media and not has_tower:
        raise ValueError(
            f"{paths[0]} has records with images or videos, but the model in {folder} has no "
            "vision tower: give a vision-language model (docs/conversion.md lists them)"
        )
    # --image-root makes a build read images. Relative paths start at the folder of the first file.
    if has_media and "--image-root" not in flags and not is_url(paths[0]):
        chosen["image_root"] = os.path.dirname(paths[0]) or "."
    words = [
        *("--input", *paths, "--output", "unused", "--seq-length", "1"),
        *("--tokenizer", str(folder)),
        *flag_words(chosen),
        *build_words,
    ]
    # The build itself prints these notes again.
    with contextlib.redirect_stderr(io.StringIO()):
        settings = build_settings(words)
    return Data(measure(settings), chosen)


def _first_records(paths: Sequence[str]) -> Iterator[Any]:
    """Yield the values of the first records of each file."""
    for source, pattern in enumerate(paths):
        for path in expanded(pattern):
            # A file that is missing or has another type is refused by the build's own check.
            try:
                extent = Extent(source, path, 0, size_of(place_of(path)))
                for item in itertools.islice(read_extent(extent), _LOOKED_AT):
                    if isinstance(item, Record):
                        yield item.value
            except (OSError, ValueError):
                continue


def _columns(records: Sequence[Any]) -> str:
    """Return a value for --columns if the records have columns with questions and answers."""
    for value in records:
        # The first record that needs help decides, because the flag holds for all records.
        if not isinstance(value, dict) or _COMPLETE & set(value):
            continue
        if {"instruction", "output"} <= set(value):
            continue
        for question, answer in _QUESTIONS:
            if question in value and answer in value:
                # A question is read as an instruction, and its answer as the output.
                pairs = {"instruction": question, "output": answer}
                return ",".join(f"{own}={name}" for own, name in pairs.items() if own != name)
    return ""


def _names_media(value: Any) -> bool:
    """Return whether a record refers to an image or a video."""
    if not isinstance(value, dict):
        return False
    # Media may be named at any depth, for example in a content part of a message.
    text = json.dumps(value, default=str)
    return any(mark in text for mark in _MEDIA)
