"""Megatron's way of preprocessing, which ours is measured beside: it makes the same tokens."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from bench.preprocessing import PEER
from megacp.core.data.indexed import IndexedReader
from tests.tools.in_process import preprocessed

TEXTS = ["def f(x):\n    return x", "  two\n\nlines ", "ümlaut und 漢字", "x"]


def documents(prefix: Path, end: int) -> list[list[int]]:
    """Ids of the documents of a Megatron file, each without the id that ends it."""
    reader = IndexedReader.open(prefix)
    ids = np.frombuffer(reader.stored(0, len(reader)), reader.dtype)
    ends = np.flatnonzero(ids == end)
    return [ids[start:stop].tolist() for start, stop in zip([0, *(ends[:-1] + 1)], ends, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_megatrons_loop_makes_the_tokens_of_our_build(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a peer that is quick because it does less: documents left out, an end that is missing."""
    pytest.importorskip("megatron.core")
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save(str(tmp_path / "tokenizer.json"))
    records = tmp_path / "text.jsonl"
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    flags = ["--input", records, "--tokenizer", tmp_path / "tokenizer.json", "--output"]

    built = preprocessed("build", *flags, tmp_path / "ours", "--seq-length", 128, "--workers", 1)
    assert built.returncode == 0, built.stderr
    monkeypatch.setattr("sys.argv", [str(PEER), *map(str, flags), str(tmp_path / "theirs"), "--batch", str(batch)])
    runpy.run_path(str(PEER), run_name="__main__")
    assert float(capsys.readouterr().out) > 0

    theirs = documents(tmp_path / "theirs", len(alphabet))
    assert [len(ids) for ids in theirs] == [len(text.encode()) for text in TEXTS]
    assert sorted(theirs) == sorted(documents(tmp_path / "ours" / "shard_00000" / "tokens", len(alphabet)))
