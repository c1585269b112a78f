"""Build chats in public formats and compare the learned tokens with lists made by hand."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megacp.prepare import command as preprocess
from megacp.prepare.describe import pack_documents, runs_of
from megacp.prepare.records import read
from megacp.prepare.records.record import Refusal
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.training.data.blend import PackBlend
from megacp.training.data.manifest import DatasetManifest, thoughts_told
from megacp.training.data.reader import PackedDataset
from megacp.training.loop.sources import Sources
from tests.prepare.templates.public import TEMPLATES, write_tokenizer

CHATS = Path(__file__).parent / "chats"
END, EMPTY = "<|im_end|>", "<think>\n\n</think>\n\n"
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "Oslo"}}}}\n</tool_call>{END}'
LAST = f"<think>\nSeven more.\n</think>\n\n49.{END}"
LEARNED: dict[str, list[list[str]]] = {
    "alpaca.json": [[f"Red, yellow, blue.{END}"], [f"4{END}"]],
    "sharegpt.json": [[f"A model.{END}", f"Since today.{END}"]],
    "sharegpt_tools.json": [[CALL, f"4 degrees.{END}"]],
    "openai_tools.jsonl": [[CALL, f"4 degrees.{END}"]],
    "thoughts.jsonl": [[LAST], [LAST], [f"42.{END}"]],
    "trl.jsonl": [[f"Lima.{END}"], [" 4</s>"]],
}
"""Learned texts of each record of a file, for either of the two templates for Qwen3."""
COUNTS = {"thoughts.jsonl": (1, 2, 0), "alpaca.json": (2, 0, 0), "trl.jsonl": (1, 0, 0)}
"""Learned answers without a thought where the prompt opens one, with a real thought, and directly
after the prompt.
"""
WITH_IMAGES = {
    "llava.json": [["A red square.</s>"]],
    "openai_images.jsonl": [["A red square.</s>"], ["Red too.</s>"]],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of a model's folder that a build reads."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, bos_token=None, chat_template=TEMPLATES["qwen_3"])
    return folder


def build(model: Path, output: Path, *paths: Path | str, **flags: Any) -> int:
    """Run the build command with `flags`."""
    given = {"tokenizer": model, "seq_length": 2048, "workers": 1, **flags}
    named = [
        str(part)
        for name, value in given.items()
        for part in (f"--{name.replace('_', '-')}", value)
    ]
    return preprocess.main(["build", "--input", *map(str, paths), "--output", str(output), *named])


def learned(dataset: Path) -> list[list[str]]:
    """Return the learned texts of each document, in input order."""
    packs, tokenizer = (
        PackedDataset(dataset),
        load_tokenizer(str(dataset / "tokenizer" / "tokenizer.json")),
    )
    found = {}
    for pack in map(packs.pack, range(len(packs))):
        for row, (here, _) in zip(pack.segments, pack_documents(pack), strict=True):
            assert pack.weights is not None
            tokens, weights = pack.tokens[here], pack.weights[here]
            found[int(row["source_offset"])] = [
                tokenizer.decode(tokens[run]) for run in runs_of(weights) if weights[run.start]
            ]
    return [found[offset] for offset in sorted(found)]


@pytest.mark.parametrize("template", ["", "qwen3"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_chat_is_learned_as_a_reader_would_mark_it(
    model: Path, tmp_path: Path, name: str, template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3's own template has no generation blocks, and its answers end with a newline after the
    end token.
    """
    assert (
        build(
            model, tmp_path / "d", CHATS / name, **({"chat_template": template} if template else {})
        )
        == 0
    )
    found = [[text.removesuffix("\n") for text in texts] for texts in learned(tmp_path / "d")]
    assert found == LEARNED[name]
    said, (empty, real, none) = capsys.readouterr().out, COUNTS.get(name, (1, 0, 1))
    assert ("2 answers not learned, only used as context" in said) == (name == "thoughts.jsonl")
    told = (
        f"learned answers: {empty} without a thought, {real} with one, {none} right after the "
        "prompt"
    )
    # the line is about thoughts, and is not printed for ordinary chats
    assert (told in said) == (name == "thoughts.jsonl")
    kept = DatasetManifest.read(tmp_path / "d").chat_template
    assert (kept or {}).get("before_answers") == (EMPTY if empty else None)


def test_answers_are_counted_in_parts_of_a_build_and_in_a_blend(
    model: Path, tmp_path: Path
) -> None:
    for part in ({"units": "0/2"}, {"units": "1/2"}, {}):
        assert (
            build(
                model,
                tmp_path / "a",
                CHATS / "thoughts.jsonl",
                chat_template="auto",
                unit_bytes=100,
                **part,
            )
            == 0
        )
    assert build(model, tmp_path / "b", CHATS / "trl.jsonl", chat_template="auto") == 0
    blend = PackBlend([PackedDataset(tmp_path / name) for name in "ab"], [Fraction(1)] * 2)
    assert thoughts_told(Sources(blend, None, "").chat_template).startswith(
        "learned answers: 2 without a thought"
    )


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_chat_about_images_is_learned_as_a_reader_would_mark_it(
    model: Path, tmp_path: Path, name: str
) -> None:
    Image.new("RGB", (30, 20), "red").save(tmp_path / "photo.png")
    flags = {
        "chat_template": "ignore",
        "image_root": tmp_path,
        "image_size": 28,
        "max_crops": 1,
        "overlap_margins": "0,0",
    }
    assert build(model, tmp_path / "d", CHATS / name, **flags) == 0
    assert learned(tmp_path / "d") == WITH_IMAGES[name]
    packs = PackedDataset(tmp_path / "d")
    assert sum(len(packs.pack(i).images.units) for i in range(len(packs))) == len(WITH_IMAGES[name])


def test_a_file_that_is_no_form_of_records_is_named_with_the_forms_that_are(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.xlsx", "a.feather"):
        (tmp_path / name).write_text("text\nhello\n")
        assert build(model, tmp_path / "d", tmp_path / name) == 2
        assert (
            f"{name}: this file type is not supported; use .jsonl, .json" in capsys.readouterr().err
        )


BROKEN = {
    '[\n {"text": "a"},\n {"text": }\n]': ("3", "Expecting value"),
    '[\n {"text": "a"}\n {"text": "b"}]': ("3", "expected ','"),
    '[{"text": "a"}]\n[]': ("1", "expected ','"),
    '[{"text": "a"}, 3]': ("1", "must be a JSON object"),
    '[{"text": "a"},\n\n{"text": "' + "b" * 5000 + '"}]': ("3", "--max-record-bytes 4000"),
    '[{"text": "a"}, {"text": "cut': ("1", "Unterminated"),
    "[]": ("", "no usable record"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_wrong_with_an_array_is_told_with_its_line(
    model: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, words = BROKEN[text]
    (tmp_path / "a.json").write_text(text)
    assert build(model, tmp_path / "d", tmp_path / "a.json", max_record_bytes=4000) == 2
    error = capsys.readouterr().err
    assert words in error and (not line or f"a.json:{line}: " in error)


def test_an_array_is_read_with_little_of_it_in_memory(tmp_path: Path) -> None:
    records = [{"text": f"{i} " + "\u6f22" * (i % 900)} for i in range(5000)]
    (tmp_path / "a.json").write_text(
        json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8"
    )
    data, size = (tmp_path / "a.json").read_bytes(), (tmp_path / "a.json").stat().st_size
    found = list(read.read_extent(read.Extent(0, str(tmp_path / "a.json"), 0, size)))
    assert [item.value for item in found] == records
    for item in found[::500]:  # each record is at its offset and line
        assert json.loads(data[item.offset : item.offset + item.size]) == item.value
        assert data[: item.offset].count(b"\n") == item.line - 1
    assert size > 4 << 20
    (tmp_path / "a.json").write_bytes(data := data.replace('"4321 \u6f22'.encode(), b'"\\ud800 .'))
    units = read.plan_units([str(tmp_path / "a.json")], 1 << 20)
    extents, before = [extent for unit in units for extent in unit.extents], read.LinesBefore()
    cut = [
        (before(extent) + item.line, item)
        for extent in extents
        for item in read.read_extent(extent)
    ]
    ((line, bad),) = ((line, item) for line, item in cut if isinstance(item, Refusal))
    assert len(units) == -(-size >> 20) and [item.offset for _, item in cut] == [
        item.offset for item in found
    ]
    assert line == found[4321].line and "surrogate" in bad.reason


def test_a_share_of_the_records_is_kept_for_validation_and_stays_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choice depends on the contents: copies stay together, and more input moves no record."""
    lines = [json.dumps({"text": f"document {i % 150}"}) + "\n" for i in range(200)]

    def texts(name: str, part: str, count: int) -> list[str]:
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:count]))
        assert build(model, tmp_path / name, tmp_path / f"{name}.jsonl", valid_share=0.2) == 0
        packs, tokenizer = PackedDataset(tmp_path / name / part), load_tokenizer(str(model))
        taken = (
            pack.tokens[here]
            for pack in map(packs.pack, range(len(packs)))
            for here, _ in pack_documents(pack)
        )
        return [tokenizer.decode(tokens) for tokens in taken]

    train, valid = texts("a", ".", 200), texts("a", "valid", 200)
    assert len(train) + len(valid) == 200 and not {*train} & {*valid} and 15 < len(valid) < 65
    assert {*texts("b", "valid", 100)} == {*valid} & {f"document {i}</s>" for i in range(100)}
    assert build(model, tmp_path / "c", tmp_path / "b.jsonl", valid_share=1e-9) == 2
    assert "--valid-share 1e-09 leaves no record for" in capsys.readouterr().err
