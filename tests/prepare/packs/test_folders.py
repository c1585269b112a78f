"""Build random small folders of records, and compare the datasets with the library.

Token ids, learned weights and rejects must be equal. `check` has passed for over a thousand seeds
with several kinds of tokenizers and templates; the test runs a few of them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.prepare import command
from megacp.prepare.verify import verify
from megacp.training.data.collate import collate
from megacp.training.data.reader import PackedDataset
from tests.prepare.records.test_read import PACK, write, write_tar
from tests.prepare.templates.public import TEMPLATES, write_tokenizer
from tests.prepare.templates.test_public import expected, library

PIECES = "the answer is |42|  two  |\n|\r\n\t|\u00e9\u00fc|\u6f22\u5b57\u304b|\U0001f468\u200d\U0001f469|e\u0301|'re|\\\"|\0"
PIECES += "|\u0627\u0644|\u2028|\u0939\u093f|<b>&amp;|{{ x }}|\ufeff|\U0001d54f|====="
CONTAINERS = (
    "a.jsonl",
    "b.json",
    "c.jsonl.gz",
    "d.json.gz",
    "e.jsonl.zst",
    "f.parquet",
    "g.tar",
    "h.jsonl",
)
FORMS = ("text", "text", "messages", "prompt", "conversations", "alpaca", "none", "empty")
SPEAKERS = {"user": "human", "assistant": "gpt", "system": "system"}


def some_record(rng: random.Random, most: int) -> tuple[dict[str, Any], list[Any]]:
    """A record with its expected texts or messages, each with a weight; empty if it is refused."""
    form, weight = rng.choice(FORMS), rng.choice([1.0, 1.0, 0.5])
    said, asked, more = (
        "".join(rng.choices(PIECES.split("|"), k=rng.randint(1, most))) for _ in range(3)
    )
    record: dict[str, Any] = {"id": "7"} if weight == 1 else {"weight": weight}
    if form == "none":
        return record | {"other_words": said}, []
    if form == "empty":
        return record | {"text": ""}, []
    if form == "text":
        return record | {"text": said}, [(said, weight)]
    if form == "prompt":
        return record | {"prompt": asked, "completion": said}, [(asked, 0.0), (said, weight)]
    if form == "alpaca":
        inputs = rng.choice([{}, {"input": more}])
        question = f"{asked}\n{more}" if inputs else asked  # the format of LLaMA-Factory
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
        return record | inputs | {"instruction": asked, "output": said}, [(talk, weight)]
    turns = [("system", more)] * rng.randint(0, 1) + [
        ("user", asked),
        ("assistant", said),
    ] * rng.randint(1, 2)
    messages = [{"role": role, "content": content} for role, content in turns]
    if form == "conversations":
        return record | {form: [{"from": SPEAKERS[r], "value": c} for r, c in turns]}, [
            (messages, weight)
        ]
    return record | {form: messages}, [(messages, weight)]


def meant(says: list[Any], theirs: Any) -> list[tuple[int, float]]:
    """Return ids and weights by the library's tokenizer and template."""
    if says and isinstance(says[0][0], list):
        return [
            (i, says[0][1] * weight)
            for i, weight in zip(*expected(theirs, says[0][0]), strict=True)
        ]
    found = [
        (i, weight)
        for text, weight in says
        for i in theirs(text, add_special_tokens=False)["input_ids"]
    ]
    return found + [(theirs.eos_token_id, weight) for _, weight in says[-1:]]


def written(path: Path, records: list[dict[str, Any]], rng: random.Random) -> list[int]:
    """Write the records to a new file. Return the line, row or tar position of each."""
    numbers = np.arange(1, len(records) + 1)
    lines = [json.dumps(record, ensure_ascii=rng.random() < 0.5) for record in records]
    if path.suffix == ".parquet":
        write(path, records)
    elif path.suffix == ".tar":
        write_tar(path, [(f"{i:03d}.json", line.encode()) for i, line in enumerate(lines)])
    else:
        end, blank = rng.choice(["\n", "\r\n"]), [rng.random() < 0.2 for _ in lines]
        text, numbers = f"[{end}" + f",{end}".join(lines) + "]", numbers + 1
        if ".jsonl" in path.suffixes:
            text = "".join(line + end * (1 + more) for line, more in zip(lines, blank, strict=True))
            numbers += np.cumsum([-1, *blank])[:-1]
        path.write_bytes(
            PACK.get(path.suffix, bytes)(rng.choice([b"", b"\xef\xbb\xbf"]) + text.encode())
        )
    return numbers.tolist()


def stored(folder: Path) -> tuple[Counter[str], float]:
    """Return the documents of a dataset, with pieces joined, and the weights used in training."""
    dataset, total = PackedDataset(folder), 0.0
    found: dict[tuple[int, int], list[tuple[int, list[tuple[int, float]]]]] = {}
    for pack in map(dataset.pack, range(len(dataset))):
        total += collate([pack]).weight_sum
        weights = np.ones(len(pack.tokens)) if pack.weights is None else pack.weights
        stops = np.cumsum(pack.segments["true_length"])
        for row, stop in zip(pack.segments, stops.tolist(), strict=True):
            here = slice(stop - int(row["true_length"]), stop)
            piece = list(zip(pack.tokens[here].tolist(), weights[here].tolist(), strict=True))
            place = int(row["source_file"]), int(row["source_offset"])
            found.setdefault(place, []).append((int(row["source_start"]), piece))
    return Counter(
        repr(sum((piece for _, piece in sorted(pieces)), [])) for pieces in found.values()
    ), total


def check(seed: int, folder: Path, tokenizer: Path, template: str) -> bool:
    """Build a random folder and compare the dataset. Return whether it has learned tokens."""
    rng, theirs, source = (
        random.Random(seed),
        library(tokenizer, TEMPLATES[template]),
        folder / "in",
    )
    length, pad = rng.choice([24, 64, 200]), rng.choice([1, 1, 8])
    oversize, share = (
        rng.choice(["drop", "split", "truncate", "error"]),
        rng.choice([0.0, 0.0, 0.4]),
    )
    want, rejected, weight, longest = (
        Counter[str](),
        list[tuple[str, int]](),
        0.0,
        length // pad * pad,
    )
    source.mkdir(parents=True)
    for name in rng.sample(CONTAINERS, rng.randint(1, 4)):
        made = [some_record(rng, rng.choice([3, 20, 90])) for _ in range(rng.randint(1, 12))]
        numbers = written(source / name, [record for record, _ in made], rng)
        for number, (_, says) in zip(numbers, made, strict=True):
            document = meant(says, theirs)
            if not document or (len(document) > length and oversize in ("drop", "error")):
                rejected.append((str(source / name), number))
                continue
            document = document[:longest] if oversize == "truncate" else document
            want[repr(document)] += 1
            weight += sum(each for i, (_, each) in enumerate(document) if i % longest)
    (folder / "t.jinja").write_bytes(TEMPLATES[template].encode())
    flags = [
        "build",
        "--input",
        f"{source}/*",
        "--output",
        folder / "out",
        "--tokenizer",
        tokenizer,
    ]
    flags += [
        "--seq-length",
        length,
        "--oversize",
        oversize,
        "--pad-multiple",
        pad,
        "--on-error",
        "skip",
    ]
    flags += ["--chat-template", folder / "t.jinja", "--workers", 1, "--unit-bytes", 900]
    flags += ["--window-tokens", rng.choice([100, 1 << 20])]
    flags += ["--valid-share", share] * (share > 0) + ["--seed", seed] * rng.randint(0, 1)
    if command.main(list(map(str, flags))) != 0:
        assert share or not weight, seed
        return False
    parts = [folder / "out", *([folder / "out/valid"] if share else [])]
    documents, weights = zip(*map(stored, parts), strict=True)
    assert sum(documents, Counter()) == want and sum(weights) == pytest.approx(weight, rel=1e-6), (
        seed
    )
    rows = [
        json.loads(line)
        for part in parts
        for line in (part / "rejects.jsonl").read_text().splitlines()
    ]
    assert sorted((row["file"], row["line"]) for row in rows) == sorted(rejected), seed
    assert not any(map(verify, parts)), seed
    return True


def test_what_is_built_of_a_random_folder_is_what_the_library_makes_of_its_records(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path / "t")
    assert (
        sum(check(seed, tmp_path / str(seed), tmp_path / "t", "granite") for seed in range(20)) > 14
    )
