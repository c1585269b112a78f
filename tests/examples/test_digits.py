"""The digit records, the counts of right answers, and the whole demo from scans to a page of
answers.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples import digits_to_jsonl, evaluate_digits
from megacp.huggingface import convert_command as convert
from megacp.huggingface import generate_command as generate
from megacp.prepare import command as preprocess
from megacp.train import main as train
from tests.browser import looks


@pytest.fixture(autouse=True, scope="module")
def the_scans() -> None:
    """Skip without scikit-learn. This runs in the first test, because the import costs a second in
    every process that collects tests.
    """
    pytest.importorskip("sklearn", reason="the digit scans are inside scikit-learn (extra `demo`)")


def made(folder: Path, *more: str) -> Path:
    assert (
        digits_to_jsonl.main(
            ["--output", str(folder), "--records", "60", "--held-out-several", "2", *more]
        )
        == 0
    )
    return folder


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scans(path: Path) -> set[int]:
    return {int(part["path"][:4]) for record in records(path) for part in record["content"]}


@pytest.mark.slow
def test_no_scan_is_in_training_and_held_out(tmp_path: Path) -> None:
    folder = made(tmp_path, "--records", "800")
    train_scans, held_out = scans(folder / "train.jsonl"), scans(folder / "held_out.jsonl")
    assert (
        max(train_scans) < 1500 <= min(held_out)
        and len(train_scans) == 1500
        and len(held_out) == 297
    )
    single = [
        record for record in records(folder / "held_out.jsonl") if len(record["content"]) == 1
    ]
    assert len(single) == 297
    assert {len(record["content"]) for record in records(folder / "train.jsonl")} == {
        1,
        2,
        3,
        4,
        5,
        6,
    }


def test_answers_are_those_of_the_scans_that_a_record_shows(tmp_path: Path) -> None:
    _, digits = digits_to_jsonl.load_scans()
    for record in records(made(tmp_path) / "train.jsonl"):
        shown = [int(digits[int(part["path"][:4])]) for part in record["content"]]
        answers = {
            b["messages"][0]["content"]: b["messages"][1]["content"] for b in record["branches"]
        }
        assert answers["which digits?"].split() == [str(digit) for digit in shown]
        assert int(answers["how many are even?"]) == sum(
            digit in (0, 2, 4, 6, 8) for digit in shown
        )
        assert ("sum of the first two?" in answers) == (len(shown) > 1)
        if len(shown) > 1:
            assert int(answers["sum of the first two?"]) == shown[0] + shown[1]
        for part in record["content"]:
            assert (tmp_path / "images" / part["path"]).is_file()


@pytest.mark.parametrize("flags", [["--records", "0"], ["--single", "1.5"], ["--shift", "9"]])
def test_wrong_numbers_are_refused(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        digits_to_jsonl.main(["--output", str(tmp_path / "d"), *flags])
    assert flags[0] in capsys.readouterr().err and not (tmp_path / "d").exists()


def answer(identity: str, question: str, expected: str, said: str, images: list[str]) -> str:
    prompt = f"<|user|>\n{question}\n<|assistant|>\n"
    line = {
        "id": identity,
        "images": images,
        "prompt": prompt,
        "expected": expected,
        "answer": said,
    }
    return json.dumps(line) + "\n"


def test_only_exact_answers_count_and_single_scans_stand_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    lines = [
        answer("1", "which digits?", "3", "3", ["a.png"]),
        answer("2", "which digits?", "3", "3 \u2028", ["a.png"]).replace("\\u2028", "\u2028"),
        answer("3", "which digits?", "3 4", "3 4", ["a.png", "a.png"]),
        answer("3", "how many are even?", "1", "<b>", ["a.png", "a.png"]),
    ]
    (tmp_path / "answers.jsonl").write_text("".join(lines))
    flags = ["--answers", str(tmp_path / "answers.jsonl"), "--images", str(tmp_path)]
    assert (
        evaluate_digits.main([*flags, "--page", str(tmp_path / "page.html"), "--goal", "0.5"]) == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0].split()[-4:] == ["50.0%", "1", "of", "2"]
        and "100.0%" in said[1]
        and "0.0%" in said[2]
    )
    page = (tmp_path / "page.html").read_text()
    assert "several images" in said[3] and page.count("several images") == 1
    assert re.findall('class="(right|wrong)"', page) == [
        "wrong",
        "wrong",
        "wrong",
        "right",
        "right",
    ]
    assert "data:image/png;base64," in page and "&lt;b&gt;" in page and "<b>" not in page
    assert evaluate_digits.main([*flags, "--goal", "0.9"]) == 1
    assert "1 of 2 single scans read correctly, but --goal is 90%" in capsys.readouterr().err
    (tmp_path / "answers.jsonl").write_text("{}\n")
    assert evaluate_digits.main(flags) == 2
    assert "answers.jsonl:1 is not a line of tools/generate.py" in capsys.readouterr().err


@pytest.mark.slow
def test_the_way_from_scans_to_a_page_of_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps of a smaller model detect parts of the demo that do not fit together."""
    monkeypatch.syspath_prepend(
        str(Path(digits_to_jsonl.__file__).parent)
    )  # the script's folder, as in a real run
    answer_with_transformers = importlib.import_module("answer_with_transformers")
    digits = made(tmp_path / "digits")
    image_flags = [
        "--image-size",
        "16",
        "--patch-size",
        "4",
        "--overlap-margins",
        "0,0",
        "--max-crops",
        "1",
    ]
    for split in ("train", "held_out"):
        build = [
            "build",
            "--input",
            str(digits / f"{split}.jsonl"),
            "--output",
            str(tmp_path / split),
            *image_flags,
        ]
        build += [
            "--tokenizer",
            "byte",
            "--seq-length",
            "1024",
            "--image-root",
            str(digits / "images"),
        ]
        assert preprocess.main([*build, "--workers", "1"]) == 0
    sizes = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --seq-length 1024 "
    sizes += "--qk-layernorm head --untie-embeddings-and-output-weights --additional-vocab-size 8 "
    sizes += "--vision-num-layers 2 --vision-hidden-size 32 --vision-ffn-hidden-size 48 --vision-num-attention-heads 2 "
    sizes += "--vision-patch-size 4 --vision-image-size 16 --vision-feature-layers -1 -2 "
    sizes += "--global-batch-size 1 --train-iters 3"
    data = ["--data-path", str(tmp_path / "train"), "--save", str(tmp_path / "run")]
    assert train([*sizes.split(), *data]) == 0
    ask = ["--checkpoint", str(tmp_path / "run"), "--tokenizer", "byte", "--max-new-tokens", "2"]
    few = tmp_path / "few.jsonl"
    lines = (digits / "held_out.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:5] + lines[-5:]))
    out = tmp_path / "answers.jsonl"
    flags = ["--input", str(few), "--image-root", str(digits / "images"), "--output", str(out)]
    assert generate.main([*ask, *flags]) == 0
    assert len(records(out)) == 5 * 2 + 5 * 3
    page = [
        "--answers",
        str(out),
        "--images",
        str(digits / "images"),
        "--page",
        str(tmp_path / "page.html"),
    ]
    capsys.readouterr()
    assert evaluate_digits.main(page) == 0
    assert "which digits? (1 image)" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text().count("<img") >= 10
    flags = [
        "--from",
        "megacp",
        "--to",
        "hf",
        "--input",
        str(tmp_path / "run"),
        "--output",
        str(tmp_path / "hf"),
    ]
    assert convert.main([*flags, "--tokenizer", "byte"]) == 0
    again = [
        "--model",
        str(tmp_path / "hf"),
        "--answers",
        str(out),
        "--images",
        str(digits / "images"),
    ]
    capsys.readouterr()
    assert answer_with_transformers.main([*again, "--max-new-tokens", "2"]) == 0
    assert "25 of 25 answers" in capsys.readouterr().out
    other = records(out)
    other[7]["answer"] = "another"
    out.write_text("".join(json.dumps(line) + "\n" for line in other))
    assert answer_with_transformers.main([*again, "--max-new-tokens", "2"]) == 1
    assert "24 of 25 answers" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_answers_fits_a_telephone_and_can_be_read(tmp_path: Path, dark: bool) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    answers = []
    for expected, count in ("3", 1), ("<b>4</b>", 12):
        names = ["a.png"] * count
        words = {"question": "Which digits?", "expected": expected, "answer": "3"}
        answers.append({**words, "id": expected, "images": names, "right": expected == "3"})
    counts = evaluate_digits.accuracies(answers)
    page = evaluate_digits.page(answers, counts, tmp_path, 5)
    for look in looks(page, tmp_path, (1280, 400), dark=dark):
        assert look.overflow == 0 and look.faint() == [] and look.is_dark == dark
        assert "<b>4</b>" in look.text and "b" not in look.tags
