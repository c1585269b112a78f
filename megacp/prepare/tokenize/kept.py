"""Find the tokenizer of a dataset or training run, so that users need not specify it again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megacp.engine.config.blend import DataPath, named_folders
from megacp.prepare.tokenize.tokenizer import ByteTokenizer, load_tokenizer, tokenizer_files
from megacp.storage.files import StrPath
from megacp.storage.place import fetched, place_of
from megacp.storage.url import Url
from megacp.training.data.manifest import DatasetManifest

TOKENIZER_DIRECTORY = "tokenizer"
"""Folder of a dataset with a copy of its tokenizer."""


def kept_tokenizer(directory: StrPath | Url) -> str:
    """Return the argument for `load_tokenizer` that loads the tokenizer of a dataset.

    Raise ValueError if its files are not in DIRECTORY/tokenizer.
    """
    manifest = DatasetManifest.read(directory)
    place = place_of(directory)
    if manifest.tokenizer.kind == "byte":
        return "byte"
    kept = place / TOKENIZER_DIRECTORY
    if isinstance(kept, Path):
        folder = kept
    else:
        # the hash of a tokenizer does not cover the settings next to it, and two datasets may have
        # different settings: name the cached copy after both the tokenizer and the dataset
        folder = fetched(kept, f"{manifest.tokenizer.sha256[:16]}-{manifest.fingerprint[:16]}")
    names = sorted(str(path) for path in folder.glob("*") if path.name != "tokenizer_config.json")
    names.sort(key=lambda name: name.endswith(".txt"))  # vocab.json before merges.txt
    if not names:
        raise ValueError(
            f"{folder} has no files of this dataset's {manifest.tokenizer.kind} tokenizer"
        )
    return ",".join(names)


def own_tokenizer(folder: Path, sha256: str, data_path: DataPath | None) -> str | None:
    """Return the --tokenizer argument of a training run, or None if no candidate has this `sha256`.

    Candidates are the files in the checkpoint `folder`, then the tokenizers of the run's datasets.
    """
    if sha256 == ByteTokenizer.sha256:
        return "byte"
    named = []
    if tokenizer_files(folder):
        named.append(str(folder))
    for dataset in named_folders(data_path):
        # a dataset may be on another machine
        with contextlib.suppress(ValueError, OSError):
            named.append(kept_tokenizer(dataset))
    for name in named:
        if load_tokenizer(name, "reference").sha256 == sha256:
            return name
    return None
