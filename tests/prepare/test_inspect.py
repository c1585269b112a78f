"""Print packs and write them as HTML pages with all text escaped."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

from megacp.prepare.describe import describe_pack
from megacp.prepare.inspect_page import write_page
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.training.data.reader import PackedDataset
from tests.prepare.media.pictures import TINY, encoded, noise
from tests.prepare.packs.builds import run

EVIL = "<script>alert('x')</script><img src=http://evil/ onerror=1> & \u6f22"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Collect a page's tags with attributes, marked text and all text; check that tags are
    nested.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text, self.marked = "", ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        self.marked += data if "mark" in self.open else ""


def page_of(tmp_path: Path, *records: dict, **changes: object) -> Page:
    corpus = tmp_path / "<b>.jsonl"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    run([corpus], tmp_path / "d", seq_length=1024, **changes)
    write_page(tmp_path / "page.html", PackedDataset(tmp_path / "d"), 0, load_tokenizer("byte"))
    return Page((tmp_path / "page.html").read_text())


def test_text_of_records_is_escaped_and_what_is_learned_is_marked(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        {
            "messages": [
                {"role": "user", "content": EVIL},
                {"role": "assistant", "content": f"no {EVIL}"},
            ]
        },
    )
    names = {tag for tag, _ in page.tags}
    assert "script" not in names and not any("onerror" in attributes for _, attributes in page.tags)
    assert (
        f"<|user|>\n{EVIL}" in page.text
        and f"no {EVIL}" in page.marked
        and "user" not in page.marked
    )
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.tags)


def test_branches_of_branches_stand_inside_of_what_they_continue(tmp_path: Path) -> None:
    inner = {"text": "one", "branches": [{"text": "two", "branches": ["three"]}, "four"]}
    page = page_of(tmp_path, {"text": "What? ", "branches": [inner, "five"]}, {"text": "next"})
    boxes = re.findall(r"</?div|Branch \d", (tmp_path / "page.html").read_text())
    heads = {
        box: boxes[:i].count("<div") - boxes[:i].count("</div")
        for i, box in enumerate(boxes)
        if "B" in box
    }
    assert heads == {"Branch 1": 1, "Branch 2": 2, "Branch 3": 3, "Branch 4": 2, "Branch 5": 1}
    assert (
        page.text.index("Branch 5") < page.text.index("next")
        and "four" in page.marked
        and "ive" in page.marked
    )
    told = describe_pack(PackedDataset(tmp_path / "d"), 0, load_tokenizer("byte")).splitlines()
    found = [line.partition(":")[0] for line in told if line.lstrip().startswith("branch ")]
    assert found == [
        "      branch 1",
        "        branch 2 of 1",
        "          branch 3 of 2",
        "        branch 4 of 1",
        "      branch 5",
    ]


def test_a_small_image_is_enlarged_and_crops_stand_beside_theirs(tmp_path: Path) -> None:
    parts = [
        {"type": "image", "base64": base64.b64encode(encoded(noise(*size))).decode()}
        for size in ((8, 8), (90, 60))
    ]
    page = page_of(tmp_path, {"content": [*parts, {"type": "text", "text": "Q"}]}, image_rules=TINY)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [attributes["width"] for attributes in images] == ["112", "90"]
    data = [base64.b64decode(str(attributes["src"]).partition(",")[2]) for attributes in images]
    assert [Image.open(io.BytesIO(each)).size for each in data] == [(8, 8), (90, 60)]
    crops = sum(tag == "rect" for tag, _ in page.tags)
    assert crops > 1 and f"item 1: 90 x 60, {crops} crops" in page.text
    told = describe_pack(PackedDataset(tmp_path / "d"), 0, load_tokenizer("byte"))
    assert "\xabQ\xbb" in told


def test_all_that_is_learned_is_shown_by_its_beginning_behind_a_long_prompt_too(
    tmp_path: Path,
) -> None:
    ask, tells = {"role": "user", "content": "which? " * 4}, [f"{i} is it. " * 3 for i in range(10)]
    turns = [message for tell in tells for message in (ask, {"role": "assistant", "content": tell})]
    page_of(
        tmp_path,
        {"messages": [{"role": "system", "content": "careful " * 90}, *turns[:2]]},
        {"messages": turns},
    )
    dataset = PackedDataset(tmp_path / "d")
    told = "".join(describe_pack(dataset, i, load_tokenizer("byte")) for i in range(len(dataset)))
    assert [told.count(f"\u00ab{i} is it.") for i in range(10)] == [2, *[1] * 9] and len(
        told
    ) < 1200
    assert (
        "'<|system|>\\ncareful " in told
        and f"which? \\n<|assistant|>\\n\u00ab{tells[0]}\u00bb'" in told
    )


def test_a_pack_of_many_documents_is_shown_by_its_first_ones(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    a.write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(40)))
    run([a], tmp_path / "d")
    dataset, tokenizer = PackedDataset(tmp_path / "d"), load_tokenizer("byte")
    shown = describe_pack(dataset, 0, tokenizer)
    assert shown.count("\n") == 21 and shown.endswith("30 more documents; --documents 0 shows all")
    assert "110 tokens, 70 learned" in shown
    assert describe_pack(dataset, 0, tokenizer, documents=0).count("\n") == 80
