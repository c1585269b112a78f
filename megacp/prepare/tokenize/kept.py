"""Where the tokenizer of a dataset and of a run lies, so that nobody has to name it again."""

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
"""Folder of a dataset with the files of its tokenizer."""


def kept_tokenizer(directory: StrPath | Url) -> str:
    """What to give to `load_tokenizer` to get the tokenizer a dataset was made with.

    ValueError when its files are not in DIRECTORY/tokenizer.
    """
    manifest, place = DatasetManifest.read(directory), place_of(directory)
    if manifest.tokenizer.kind == "byte":
        return "byte"
    kept = place / TOKENIZER_DIRECTORY
    if isinstance(kept, Path):
        folder = kept
    else:
        # the settings next to a tokenizer are no part of its hash, so two datasets may have
        # different ones
        folder = fetched(kept, f"{manifest.tokenizer.sha256[:16]}-{manifest.fingerprint[:16]}")
    names = sorted(str(path) for path in folder.glob("*") if path.name != "tokenizer_config.json")
    names.sort(key=lambda name: name.endswith(".txt"))  # vocab.json before merges.txt
    if not names:
        raise ValueError(
            f"{folder}: the {manifest.tokenizer.kind} tokenizer of this dataset is not there"
        )
    return ",".join(names)


def own_tokenizer(folder: Path, sha256: str, data_path: DataPath | None) -> str | None:
    """What --tokenizer would name for a run with checkpoints in `folder`: the files there, else
    those of its datasets.

    None where none of them has this `sha256`.
    """
    if sha256 == ByteTokenizer.sha256:
        return "byte"
    named = [str(folder)] if tokenizer_files(folder) else []
    for dataset in named_folders(data_path):
        with contextlib.suppress(ValueError, OSError):  # it may lie on another machine
            named.append(kept_tokenizer(dataset))
    return next(
        (name for name in named if load_tokenizer(name, "reference").sha256 == sha256), None
    )
