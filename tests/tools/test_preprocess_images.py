"""tools/preprocess_data.py with images on the command line: flags, rules from a file, kills at any
moment.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.prepare.media.pictures import encoded, noise
from tests.tools.in_process import preprocessed as tool
from tests.tools.test_preprocess_data import assert_one_line_error

TINY = ["--image-size", 16, "--patch-size", 4, "--overlap-margins", "1,1", "--max-crops", 6]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for i in range(80):
        width, height = (int(side) for side in rng.integers(5, 90, 2))
        (tmp_path / f"images/{i}.png").write_bytes(encoded(noise(width, height, i)))
        question = {
            "role": "user",
            "content": [{"type": "image", "path": f"{i}.png"}, {"type": "text", "text": "?"}],
        }
        branches = [{"messages": [{"role": "assistant", "content": f"{i} {k}"}]} for k in range(3)]
        lines.append(json.dumps({"messages": [question], "branches": branches}) + "\n")
    (tmp_path / "c.jsonl").write_text("".join(lines))
    return tmp_path / "c.jsonl"


def arguments(corpus: Path, output: Path, *more: object) -> list[object]:
    basic = [
        "build",
        "--input",
        corpus,
        "--output",
        output,
        "--tokenizer",
        "byte",
        "--seq-length",
        512,
    ]
    return [*basic, "--image-root", corpus.parent / "images", "--workers", 1, *more]


def test_rules_come_from_flags(corpus: Path, tmp_path: Path) -> None:
    more = ["--max-crops-per-pack", 30, "--cp-degrees", "1,2"]
    built = tool(*arguments(corpus, tmp_path / "flags", *TINY, "--column-tokens", *more))
    assert built.returncode == 0, built.stderr
    written = json.loads((tmp_path / "flags/manifest.json").read_text())["image_rules"]
    assert written["use_column_tokens"] and written["token_ids"]["image_patch"] == 257
    shards = {path.name for path in (tmp_path / "flags/shard_00000").glob("shards_*")}
    assert shards == {"shards_cp1.npy", "shards_cp2.npy"}
    shown = tool("inspect", tmp_path / "flags")
    assert (
        shown.returncode == 0
        and "image: tokens" in shown.stdout
        and "  cp 2: crops 0-" in shown.stdout
    )
    assert f"{'images':<24}80\n" in tool("stats", tmp_path / "flags").stdout
    assert tool("verify", tmp_path / "flags").returncode == 0


def test_wrong_image_flags_are_one_line_with_all_reasons(corpus: Path, tmp_path: Path) -> None:
    for flags, named in (
        (["--patch-size", 16], ["--patch-size 16"]),
        (["--max-crops-per-pack", 0], ["--max-crops-per-pack is 0"]),
        (["--image-pooling", "2,x"], ["--image-pooling"]),
    ):
        bad = tool(*arguments(corpus, tmp_path / "d", *flags))
        assert_one_line_error(bad)
        assert all(part in bad.stderr for part in named), bad.stderr
    assert not (tmp_path / "d").exists()
    text = [
        "build",
        "--input",
        corpus,
        "--output",
        tmp_path / "d",
        "--tokenizer",
        "byte",
        "--seq-length",
        512,
    ]
    assert_one_line_error(refused := tool(*text))
    assert "--image-root" in refused.stderr
