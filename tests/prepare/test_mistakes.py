"""Typical mistakes with the input of a build end with a message that says what to do."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare.packs.run import build
from megacp.prepare.packs.settings import BuildSettings
from megacp.prepare.records.read import input_problem
from tests.prepare.packs import builds
from tests.prepare.templates.public import TEMPLATES, write_tokenizer

ASKED = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}


def built(path: Path, **changes: Any) -> str:
    """Build from a file with a byte tokenizer; return the error."""
    with pytest.raises(ValueError) as error:
        builds.run([path], path.parent / "d", **changes)
    assert not (path.parent / "d/manifest.json").exists()
    return str(error.value).replace(f"{path.parent}/", "")


# ---- files

FILES: dict[str, tuple[bytes, str]] = {
    "a.pdf": (
        b"%PDF-1.4",
        "a.pdf is a PDF document, which is not supported; use .jsonl.*pdftotext",
    ),
    "a.png": (b"\x89PNG\r\n", "a.png is an image, .*records that name the image"),
    "a.docx": (b"PK\x03\x04", "a.docx is a zip archive or an Office document.*use .jsonl"),
    "a.pkl": (b"\x80\x04\x95", "a.pkl is a Python pickle.*json.dumps, one per line"),
    "a.npy": (b"\x93NUMPY\x01", "a.npy is an array of numpy"),
    "a.xlsx": (b"PK\x03\x04", r"a.xlsx: this file type is not supported; use .jsonl.*read_excel\("),
    "a.arrow": (
        b"ARROW1\0\0",
        r"a.arrow: .* not supported.*from_file\(.*to_parquet\('a.parquet'\)",
    ),
    "a.jsonl": (gzip.compress(b'{"text": "a"}\n'), "compressed by gzip.*rename it to a.jsonl.gz$"),
    "b.json": (b"\x28\xb5\x2f\xfd", "b.json is compressed by zstd.*rename it to b.json.zst$"),
    "b.jsonl": (b"PAR1", "b.jsonl is a Parquet file.*rename it to b.parquet$"),
    "c.jsonl": (bytes(257) + b"ustar", "c.jsonl is a tar.*rename it to c.tar$"),
    "c.json": ('{"text": "a"}\n'.encode("utf-16"), "UTF-16 text.*iconv -f UTF-16 -t UTF-8 c.json"),
    "d.arr": (b"ARROW1\0\0", "d.arr is an Arrow file.*Dataset.from_file"),
    "e.jsonl": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS.*git lfs pull e.jsonl"),
    "e.json": (b"<!DOCTYPE html>\n", "e.json is a web page.*download the file itself"),
    "d.jsonl.gz": (b'{"text": "a"}\n', "d.jsonl.gz is not .gz but JSON; rename it to d.jsonl$"),
    "d.parquet": (
        b'[{"text": "a"}]\n',
        "d.parquet is not .parquet but JSON; rename it to d.jsonl$",
    ),
    "corpus": (b"Once upon", r"corpus does not contain JSON.*'Once upon'.*jq -Rc .* corpus.jsonl$"),
    "notes.md": (b"# Notes\n", r"notes.md does not contain JSON records: it begins with '# Notes"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_recognised_with_a_way_to_use_it(
    tmp_path: Path, name: str
) -> None:
    data, message = FILES[name]
    (tmp_path / name).write_bytes(data)
    assert re.search(message, built(tmp_path / name))


@pytest.mark.parametrize("name", ["a.data", "a", "a.JSONL", "a.ndjson"])
def test_json_may_have_any_other_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('\n {"text": "a b"}\n')
    assert builds.run([tmp_path / name], tmp_path / "d").documents == 1


def test_the_command_for_texts_makes_records(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\nA line\n")
    command = re.search("jq .*", built(tmp_path / "notes.md"))
    assert command is not None
    subprocess.run(command[0], shell=True, check=True, cwd=tmp_path)
    assert builds.run([tmp_path / "notes.jsonl"], tmp_path / "d").documents == 2


def test_a_missing_file_suggests_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("chats.jsonl", "texts.jsonl"):
        (tmp_path / name).write_text("{}")
    there = f"{tmp_path}/chats.jsonl"
    assert input_problem(there[:-1]) == f"no such file: {there[:-1]}, did you mean {there}?"
    assert input_problem(f"{tmp_path}/q") == f"no such file: {tmp_path}/q"
    monkeypatch.chdir(tmp_path)
    assert input_problem("q") == f"no such file: q (in {tmp_path})"
    problem = f"no such file: e/q; the folder {tmp_path}/e does not exist"
    assert input_problem("e/q") == problem
    assert "--input chats.jsonl texts.jsonl" in str(input_problem("chats.jsonl,texts.jsonl"))


@pytest.mark.parametrize("text", ["", "\n \n", "[]"])
def test_an_input_without_records_is_not_called_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    message = built(tmp_path / "a.json")
    assert "no usable record in a.json" in message and "has no record at all" in message


@pytest.mark.slow
def test_a_folder_of_save_to_disk_is_refused_with_the_command_that_converts_it(
    tmp_path: Path,
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "a b"}]).save_to_disk(tmp_path / "saved")
    message = str(input_problem(f"{tmp_path}/saved"))
    assert "a directory written by `save_to_disk`" in message
    command = re.search("python -c .*", message)
    assert command is not None
    here = command[0].replace("python", sys.executable, 1)
    subprocess.run(here, shell=True, check=True, cwd=tmp_path, capture_output=True)
    assert builds.run([tmp_path / "saved.parquet"], tmp_path / "d").documents == 1


# ---- records

LINES: dict[str, str] = {
    '{"text": "a",}': "column 14; remove the comma before }",
    '{"text": "a"},': "column 14; remove the comma at the end of the line",
    '{"text": "a"} {"text": "b"}': "write each record on its own line",
    '{"text": None}': "looks like a printed Python object: write records with json.dumps",
    "{'text': 'a'}": "looks like a printed Python object",
    "question,answer": "it begins with 'question,answer', but a record must be a JSON object such",
    '"hello"': 'must be a JSON object, such as {"text": "..."} or .*, found a string',
    '{"txt": "a"}': "found `txt`. Build with --columns text=txt if `txt` means `text`",
    '{"Text": "a"}': "Build with --columns text=Text",
    '{"prompt": "a"}': "`prompt` needs `completion` next to it",
    '{"text": ""}': "`text` is empty; remove the record, or use --on-error skip",
    '{"input_ids": [1]}': "needs the texts themselves .or a tokenized Megatron dataset, .idx",
    json.dumps({"messages": [{"role": "function", "content": "a"}]}): "--roles tool=function",
    json.dumps({"messages": [{"role": "assistant"}]}): "give it a text, or remove the message",
    json.dumps({"messages": [ASKED, ANSWER], "tools": [{"name": "f"}]}): (
        "only a chat template can write tools; give --chat-template, or use --ignore-keys tools"
    ),
    json.dumps({"messages": [{"role": "user", "content": [{"image": "a.jpg"}]}, ANSWER]}): (
        'found an object without it; add "type": "image" to the part'
    ),
    json.dumps({"messages": [ASKED]}): "1 document without .* use --roles assistant=NAME",
    json.dumps({"text": "a" * 300}): "--seq-length 128: raise this limit, or use --oversize split",
    json.dumps(
        {"messages": [{"role": "user", "content": "a" * 300}, ANSWER]}
    ): "raise this limit, or use --oversize drop to leave it out .split would separate answers",
    json.dumps(
        {"text": "a" * 300, "branches": ["b", "c"]}
    ): "use --oversize drop .* only cut documents without branches and images",
}


@pytest.mark.parametrize("line", LINES)
def test_a_bad_record_says_what_to_do(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    assert re.search(LINES[line], built(tmp_path / "a.jsonl"))


def test_the_advice_on_a_long_text_works(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 300}))
    summary = builds.run([tmp_path / "a.jsonl"], tmp_path / "d", oversize="split")
    assert "1 document, 301 tokens" in summary.sentence and "in 3 packs" in summary.sentence


def test_another_encoding_is_named_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "é"}\n'.encode("latin-1"))
    assert "iconv -f ISO-8859-1 -t UTF-8 FILE" in built(tmp_path / "a.jsonl")


def test_text_key_is_named_if_the_records_have_the_usual_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert "Leave out --text-key body" in built(tmp_path / "a.jsonl", text_key="body")


ARRAYS = {
    '[{"text": "a"},\n{"text": "b"},\n{"text" "c"}]': "':' delimiter before '\"c\"}]'",
    '[{"text": "a"},\n{"text": "b"},\n]': "Expecting value before ']'; remove the comma before ]",
    '[{"text": "a"},\n{"text": "b"},\n{"text": "c': "Unterminated string starting before '\"c'",
    '[{"text": "a"},\n{"text": "b"}\n{"text": "c"}]': "expected ',' or the end",
    '[{"text": "a"},\n{"text": "b"},\n{"txt": "c"}]': "found `txt`",
}


@pytest.mark.parametrize("text", ARRAYS)
@pytest.mark.parametrize("unit_bytes", [20, 2000])
def test_an_error_inside_an_array_names_the_record(
    tmp_path: Path, text: str, unit_bytes: int
) -> None:
    (tmp_path / "a.json").write_text(text)
    message = built(tmp_path / "a.json", unit_bytes=unit_bytes)
    assert ARRAYS[text] in message and "(record 3, byte offset" in message


# ---- settings


def test_a_single_text_is_one_input_in_python(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text('[{"text": "a b", "note": "c"}]')
    settings: dict[str, Any] = {"tokenizer": "byte", "seq_length": 128}
    for number, given in enumerate((str(path), path, [path])):
        made = BuildSettings(
            input=given,  # type: ignore[arg-type]
            output=str(tmp_path / str(number)),
            ignore_keys="note",  # type: ignore[arg-type]
            **settings,
        )
        assert made.input == (str(path),) and made.ignore_keys == ("note",)
        assert build(made, io.StringIO()).documents == 1


def test_a_missing_template_is_reported_as_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [ASKED, ANSWER]}))
    write_tokenizer(tmp_path / "model", bos_token=None)
    for tokenizer in ("byte", str(tmp_path / "model")):
        message = built(tmp_path / "a.jsonl", tokenizer=tokenizer, chat_template="x.jinja")
        assert message.startswith("--chat-template x.jinja: no such file; give the path") and (
            "chatml" in message and "auto" in message
        )


def test_a_model_on_the_hub_is_named_with_the_command_that_downloads_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    message = built(tmp_path / "a.jsonl", tokenizer="Qwen/Qwen3-0.6B")
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`" in message


def test_a_file_as_output_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="--output .* is a file, but a dataset is a new directory"):
        builds.run([tmp_path / "a.jsonl"], tmp_path / "a.jsonl")


def test_a_template_without_its_special_token_names_the_file(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tokenizer(model, bos_token=None, chat_template=TEMPLATES["llama_3"])
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [ASKED, ANSWER]}))
    message = built(tmp_path / "a.jsonl", tokenizer=str(model))
    assert "'bos_token' is undefined: tokenizer_config.json, next to the tokenizer" in message


# ---- the summary


def test_one_of_a_kind_is_written_in_the_singular(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a b"}\n{"txt": "a"}\n')
    printed = builds.run([path], tmp_path / "d", on_error="skip").sentence
    assert "1 document, 4 tokens" in printed and "in 1 pack of 128" in printed
    assert builds.run([path], tmp_path / "d", on_error="skip").sentence.startswith(
        "already complete: 1 pack;"
    )
    with pytest.raises(ValueError, match="^1 bad record, more than --max-errors 0"):
        builds.run([path], tmp_path / "e", on_error="skip", max_errors=0)
    with pytest.raises(ValueError, match="lacks 1 of 1 unit, 0:"):
        build(builds.settings([path], tmp_path / "f"), io.StringIO(), builds_missing=False)
    plural = re.compile(r"\b1 (documents|packs|tokens|steps|shards|records|answers|units)\b")
    assert not plural.search(printed)


@pytest.mark.parametrize("template", ["qwen_3", "qwen_25", "llama_3", "chatml", "ours_for_qwen3"])
def test_ordinary_chats_do_not_mention_thoughts(tmp_path: Path, template: str) -> None:
    model = tmp_path / "model"
    write_tokenizer(model, chat_template=TEMPLATES[template])
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [ASKED, ANSWER, ASKED, ANSWER]}))
    printed = builds.run([path], tmp_path / "d", tokenizer=str(model), seq_length=512).sentence
    assert "without a thought" not in printed


def test_a_base_models_folder_prints_one_line_about_its_form(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model", bos_token=None)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [ASKED, ANSWER]}))
    summary = builds.run([path], tmp_path / "d", tokenizer=str(tmp_path / "model"))
    (line,) = summary.sentence.splitlines()[1:]
    for said in (
        "megacp's own form",
        "the tokenizer's folder has no chat template",
        "generate.py --prompt and --chat",
        "convert_checkpoint.py --chat-template messages",
    ):
        assert said in line
