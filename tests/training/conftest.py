"""A packed dataset of real text for the training tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacp.commands import preprocess


@pytest.fixture(scope="session")
def packed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte packs of 64 tokens, vocabulary 257, made by the tool."""
    folder = tmp_path_factory.mktemp("packed")
    records = [{"text": f"{i} times {i} is {i * i}. " * (1 + i % 7)} for i in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    build = ["build", "--input", str(folder / "text.jsonl"), "--output", str(folder / "data"), "--tokenizer", "byte"]
    assert preprocess.main([*build, "--seq-length", "64", "--oversize", "split", "--workers", "1"]) == 0
    return folder / "data"
