"""What a person reads of a dataset: short, and cut between characters."""

from __future__ import annotations

import io
import json
from pathlib import Path

from megacp.core.data.reader import PackedDataset
from megacp.prepare.build.progress import BuildProgress, rate
from megacp.prepare.describe import describe_pack
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from tests.prepare.build.builds import run


def test_a_pack_of_many_documents_is_shown_by_its_first_ones(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    a.write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(40)))
    run([a], tmp_path / "d")
    dataset, tokenizer = PackedDataset(tmp_path / "d"), load_tokenizer("byte")
    shown = describe_pack(dataset, 0, tokenizer)
    assert shown.count("\n") == 21 and shown.endswith("30 more documents; --documents 0 shows all")
    assert "110 tokens, 70 learned" in shown
    assert describe_pack(dataset, 0, tokenizer, documents=0).count("\n") == 80


def test_the_speed_of_a_build_counts_images_that_lie_in_files_of_their_own() -> None:
    progress = BuildProgress(io.StringIO(), 1000, bytes=1000, image_bytes=80_000_000)
    assert progress.read_bytes == 80_000_000 and "MB/s" in progress.line() and " 0.0 MB/s" not in progress.line()
    assert rate(80_000_000, 2.0) == "40.0 MB/s" and rate(3000, 2.0) == "1.5 kB/s"
