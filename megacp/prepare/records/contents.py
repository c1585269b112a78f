"""Recognise input files whose contents differ from their names, and advise how to use them.

A compressed or binary file with the name of a JSON file would be refused at its first byte, with a
message about that byte.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

_READ_BYTES = 512
"""Bytes of a file that are compared; a tar names its format at byte 257."""


# Rows of `_KINDS` are compared in their order; no two of them can match one file.
class _Kind(NamedTuple):
    """A kind of file, by the bytes at a fixed place."""

    begins: bytes
    what: str
    advice: str
    """Advice for a file of this kind; {path} is its path, {stem} the path without its suffix."""
    suffix: str = ""
    """Suffix under which files of this kind are read."""
    at: int = 0


_WEB_PAGE = "a web page"
_DATASETS = "python -c \"import datasets; datasets.Dataset.from_file('{path}')"
_KINDS = (
    _Kind(b"\x1f\x8b", "compressed by gzip", "rename it to {path}.gz", ".gz"),
    _Kind(b"\x28\xb5\x2f\xfd", "compressed by zstd", "rename it to {path}.zst", ".zst"),
    _Kind(b"PAR1", "a Parquet file", "rename it to {stem}.parquet", ".parquet"),
    _Kind(b"ustar", "a tar", "rename it to {stem}.tar", ".tar", 257),
    _Kind(b"MMIDIDX", "a Megatron index", "rename it and its .bin to {stem}.idx and .bin", ".idx"),
    _Kind(b"BZh", "compressed by bzip2", "bunzip2 -c {path} > {stem}.jsonl"),
    _Kind(b"\xfd7zXZ", "compressed by xz", "xz -dc {path} > {stem}.jsonl"),
    _Kind(b"7z\xbc\xaf", "a 7z archive", "7z x {path}"),
    _Kind(b"PK\x03\x04", "a zip archive or an Office document", "unzip -l {path} lists its files"),
    _Kind(b"ARROW1", "an Arrow file", _DATASETS + ".to_parquet('{stem}.parquet')\""),
    _Kind(b"version https://git-lfs", "a pointer of Git LFS", "git lfs pull {path}"),
    _Kind(b"<!DOCTYPE html", _WEB_PAGE, "download the file itself (on the Hub, /resolve/)"),
    _Kind(b"<!doctype html", _WEB_PAGE, "download the file itself (on the Hub, /resolve/)"),
    _Kind(b"%PDF", "a PDF document", "extract its text: pdftotext {path}"),
    _Kind(b"\x89PNG", "an image", "give records that name the image (docs/data.md)"),
    _Kind(b"\xff\xd8\xff", "an image", "give records that name the image (docs/data.md)"),
    _Kind(b"\x93NUMPY", "an array of numpy", "write its texts as JSON lines"),
    _Kind(b"\x80\x03", "a Python pickle", "write its objects with json.dumps, one per line"),
    _Kind(b"\x80\x04", "a Python pickle", "write its objects with json.dumps, one per line"),
    _Kind(b"\x80\x05", "a Python pickle", "write its objects with json.dumps, one per line"),
    _Kind(b"SQLite format 3", "a SQLite database", "sqlite3 -json {path} 'select ...' > NEW.json"),
    _Kind(b"\xff\xfe", "UTF-16 text", "iconv -f UTF-16 -t UTF-8 {path} > NEW"),
    _Kind(b"\xfe\xff", "UTF-16 text", "iconv -f UTF-16 -t UTF-8 {path} > NEW"),
)
_BINARY_SUFFIXES = (".gz", ".zst", ".parquet", ".tar")
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson", ".jl")
_TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
_JSON_BEGINNINGS = (b"{", b"[", b'"')


def content_problem(path: str, formats: str) -> str | None:
    """Return why a local file is not in the format that its name says; None if it may be.

    `formats` lists the formats that are read.
    """
    place = Path(path)
    # a few bytes tell all kinds apart
    with place.open("rb") as stream:
        data = stream.read(_READ_BYTES)
    suffix = place.suffix.lower()
    for kind in _KINDS:
        if data[kind.at :].startswith(kind.begins):
            # a corpus may contain web pages as texts
            if kind.suffix == suffix or (kind.what == _WEB_PAGE and suffix in _TEXT_SUFFIXES):
                return None
            what = f"{path} is {kind.what}"
            # a kind that is read only has the wrong name
            if not kind.suffix:
                what += f", which is not supported; use {formats}"
            way = kind.advice.format(path=path, stem=place.with_suffix(""))
            return f"{what}. To use it: {way}"

    # no known kind of binary file: JSON, another text, or damaged
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    is_json = text.startswith(_JSON_BEGINNINGS)
    if suffix in _BINARY_SUFFIXES and is_json:
        # corpus.jsonl.gz has the right name without its last suffix, but corpus.parquet has none
        name = place.with_suffix("")
        if name.suffix not in _JSON_SUFFIXES:
            name = place.with_suffix(".jsonl")
        return f"{path} is not {suffix} but JSON; rename it to {name}"
    # a bad first line of JSONL is a bad record, which --on-error may skip
    known = (*_BINARY_SUFFIXES, *_JSON_SUFFIXES, *_TEXT_SUFFIXES)
    if suffix in known or is_json or not text:
        return None
    return (
        f"{path} does not contain JSON records: it begins with "
        f"{text[:40].decode(errors='replace')!r}; use {formats}. To read it as one text, rename it "
        f"to {place.with_suffix('.txt')}; to make a record of each line: "
        f"jq -Rc '{{text: .}}' {path} > {place.with_suffix('.jsonl')}"
    )


def missing_problem(path: str) -> str:
    """Return the message for a local file that does not exist, with the nearest name there is."""
    place = Path(path)
    # flags of other tools separate files by commas
    parts = [part.strip() for part in path.split(",")]
    if len(parts) > 1 and all(Path(part).is_file() for part in parts):
        return f"no such file: {path}; separate files by blanks: --input {' '.join(parts)}"
    # `absolute` shows from which folder a relative path was given
    if not place.parent.is_dir():
        return f"no such file: {path}; the folder {place.parent.absolute()} does not exist"
    names = [each.name for each in place.parent.iterdir()]
    close = difflib.get_close_matches(place.name, names, 1, 0.7)
    if close:
        return f"no such file: {path}, did you mean {place.with_name(close[0])}?"
    if place.is_absolute():
        return f"no such file: {path}"
    return f"no such file: {path} (in {Path.cwd()})"
