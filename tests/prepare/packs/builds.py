"""Build small text corpora, and read the datasets back."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacp.prepare.packs.progress import BuildSummary
from megacp.prepare.packs.run import build
from megacp.prepare.packs.settings import BuildSettings
from megacp.training.data.reader import PackedDataset


def write_records(
    path: Path, count: int, seed: int = 0, first_id: int | None = 0
) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    records = []
    for i in range(count):
        record: dict[str, Any] = {
            "text": f"{seed}.{i} " + "ab\u00e9 "[i % 4] * rng.randrange(1, 60)
        }
        if first_id is not None:
            record["id"] = first_id + i
        records.append(record)
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    return records


def settings(inputs: Sequence[Path | str], output: Path | str, **changes: Any) -> BuildSettings:
    values: dict[str, Any] = {"tokenizer": "byte", "seq_length": 128, "unit_bytes": 2000, **changes}
    return BuildSettings(input=tuple(map(str, inputs)), output=str(output), **values)


def run(
    inputs: Sequence[Path | str], output: Path, overwrite: bool = False, **changes: Any
) -> BuildSummary:
    return build(settings(inputs, output, **changes), io.StringIO(), overwrite)


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def visible(directory: Path) -> dict[str, bytes]:
    """Return `files` without the lock file that every build leaves."""
    return {name: data for name, data in files(directory).items() if name != ".lock"}


def documents(directory: Path) -> list[list[int]]:
    """Return all documents by source and offset, with split ones joined."""
    dataset = PackedDataset(directory)
    found = []
    for i in range(len(dataset)):
        pack, start = dataset.pack(i), 0
        for row in pack.segments:
            stop = start + int(row["true_length"])
            place = (int(row["source_file"]), int(row["source_offset"]), int(row["source_start"]))
            found.append((place, pack.tokens[start:stop].tolist()))
            start = stop
    joined: dict[tuple[int, int], list[int]] = {}
    for place, tokens in sorted(found):
        joined.setdefault(place[:2], []).extend(tokens)
    return list(joined.values())


def expected(records: list[dict[str, Any]]) -> list[list[int]]:
    return [[*record["text"].encode(), 256] for record in records]
