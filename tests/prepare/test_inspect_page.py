"""The page of a pack fits a telephone, can be read in both schemes, and shows records as text."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from megacp.prepare.inspect_page import write_page
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.training.data.reader import PackedDataset
from tests.browser import looks
from tests.prepare.media.pictures import TINY, encoded, noise
from tests.prepare.packs.builds import run

MARKUP = "<script>document.title = 'run'</script><b>bold</b>"
LONG_WORD = "w" * 200


def page_of(folder: Path) -> str:
    """Return the page of a pack with markup, long words, deep branches and pictures."""
    tree: dict = {"text": "leaf"}
    for _ in range(8):
        tree = {"text": "branch ", "branches": [tree, f"other {LONG_WORD}"]}
    pictures = []
    for size in ((8, 8), (90, 60), (600, 40)):
        data = base64.b64encode(encoded(noise(*size))).decode()
        pictures.append({"type": "image", "base64": data})
    question = {"role": "user", "content": f"{MARKUP} {LONG_WORD}"}
    records = [
        {"messages": [question, {"role": "assistant", "content": f"Shown: {MARKUP}"}]},
        tree,
        {"content": [*pictures, {"type": "text", "text": "Q"}]},
    ]
    corpus = folder / f"records_with_a_long_name_{LONG_WORD[:80]}.jsonl"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    # one unit of input, so that all records share a pack
    run([corpus], folder / "d", seq_length=8192, unit_bytes=10**6, image_rules=TINY)
    write_page(folder / "page.html", PackedDataset(folder / "d"), 0, load_tokenizer("byte"))
    return (folder / "page.html").read_text()


@pytest.mark.parametrize("dark", [False, True])
def test_a_pack_fits_the_screen_and_its_markup_is_text(tmp_path: Path, dark: bool) -> None:
    shown = looks(page_of(tmp_path), tmp_path, [1280, 400], dark=dark)
    assert [look.width for look in shown] == [1280, 400]
    for look in shown:
        assert look.is_dark == dark and (look.page_luminance < 0.1) == dark
        assert look.overflow == 0
        assert look.faint() == []
        assert min(one["pixels"] for one in look.texts) >= 12
        assert look.text.count(MARKUP) == 2
        assert not {"script", "b"} & set(look.tags)
        assert "img" in look.tags
