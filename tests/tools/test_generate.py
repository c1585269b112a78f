"""tools/generate.py as a user types it: texts, images, files of records, wrong flags."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megacp.huggingface import generate_command as generate
from megacp.huggingface.generation.sampler import Generator
from megacp.train import main as train
from tests.prepare.build.builds import run as build
from tests.prepare.media.pictures import TINY, encoded, noise, video

SIZES = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --seq-length 256 "
VISION = "--untie-embeddings-and-output-weights --additional-vocab-size 8 --vision-num-layers 2 "
VISION += "--vision-hidden-size 16 --vision-ffn-hidden-size 24 --vision-num-attention-heads 2 --vision-patch-size 4 "
VISION += "--vision-image-size 16 --vision-feature-layers -1 -2 "
RUN = "--global-batch-size 1 --train-iters 1 --save"


def question(file: str, text: str, answer: str) -> dict[str, Any]:
    user = {"role": "user", "content": [{"type": "image", "path": file}, {"type": "text", "text": text}]}
    return {"id": file, "messages": [user, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`seeing` and `reading` are checkpoints with and without a tower, `records.jsonl` what one was trained on."""
    folder = tmp_path_factory.mktemp("generate_tool")
    for name in ("a", "b"):
        (folder / f"{name}.png").write_bytes(encoded(noise(16, 16, ord(name))))
    lines = [json.dumps(question(f"{name}.png", "what?", f"it is {name}")) + "\n" for name in ("a", "b")]
    (folder / "records.jsonl").write_text("".join(lines))
    common = {"seq_length": 256, "cp_degrees": (1,)}
    build([folder / "records.jsonl"], folder / "packed", image_rules=TINY, image_root=str(folder), **common)
    (folder / "text.jsonl").write_text('{"text": "some words"}\n')
    build([folder / "text.jsonl"], folder / "text", **common)
    seeing = ["--data-path", str(folder / "packed"), *VISION.split()]
    assert train([*SIZES.split(), *seeing, *RUN.split(), str(folder / "seeing")]) == 0
    assert train([*SIZES.split(), "--data-path", str(folder / "text"), *RUN.split(), str(folder / "reading")]) == 0
    return folder


def flags(folder: Path, checkpoint: str, *more: object) -> list[str]:
    given = ["--checkpoint", folder / checkpoint, "--tokenizer", "byte", "--max-new-tokens", 3, *more]
    return [str(word) for word in given]


@pytest.mark.slow
def test_prompts_with_images_and_without_are_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(flags(folder, "reading", "--prompt", "one", "--prompt", "two")) == 0
    said = capsys.readouterr().out
    assert "after step 1\n--- 'one'\none" in said and "--- 'two'\ntwo" in said
    images = ["--image", folder / "a.png", "--image", folder / "b.png"]
    assert generate.main(flags(folder, "seeing", "--prompt", "one", "--prompt", "two", *images)) == 0
    said = capsys.readouterr().out
    assert "--- 'one'\none" in said and "--- 'two'\ntwo" in said


@pytest.mark.slow
def test_videos_are_seen_alone_and_beside_images_in_the_order_of_their_flags(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    answer = Generator.answer

    def noted(self: Generator, prompts: Any, *given: Any) -> Any:
        seen.extend([unit.frame for unit in prompt.prefix.units] for prompt in prompts)
        return answer(self, prompts, *given)

    monkeypatch.setattr(Generator, "answer", noted)
    (tmp_path / "v.mp4").write_bytes(video(20))
    moving, still = ["--video", tmp_path / "v.mp4"], ["--image", folder / "a.png"]
    for media in (moving, [*moving, *still], [*still, *moving]):
        assert generate.main(flags(folder, "seeing", "--prompt", "one", *media)) == 0
    assert capsys.readouterr().out.count("--- 'one'\none") == 3
    frames = list(range(8))
    assert seen == [frames, [*frames, -1], [-1, *frames]]


def test_records_are_answered_in_their_order_beside_what_was_expected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "answers.jsonl"
    more = ["--input", folder / "records.jsonl", "--output", out, "--image-root", folder]
    assert generate.main(flags(folder, "seeing", *more)) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["id"], line["images"], line["expected"]) for line in lines] == [
        (f"{name}.png", [f"{name}.png"], f"it is {name}") for name in ("a", "b")
    ]
    assert lines[0]["prompt"] == "<|user|>\nwhat?\n<|assistant|>\n" and "it is" not in lines[0]["answer"]
    assert "2 answers, 0 of 2 as expected" in capsys.readouterr().out


def test_records_may_begin_with_a_byte_order_mark_and_have_no_id(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "records.jsonl").read_text().splitlines()
    records = [{**json.loads(lines[0]), "id": None}, {**json.loads(lines[1]), "id": 0}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8-sig")
    more = ["--input", tmp_path / "r.jsonl", "--output", tmp_path / "o.jsonl", "--image-root", folder]
    assert generate.main(flags(folder, "seeing", *more)) == 0
    assert [json.loads(line)["id"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == ["1", "0"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "give either --prompt or --input"),
        (["--prompt", "a", "--input", "b", "--output", "c"], "give either --prompt or --input"),
        (["--input", "b", "--image", "c"], "--input and --output go together; --image goes with --prompt"),
        (["--input", "b", "--output", "c", "--video", "d"], "--video goes with --prompt; records of --input name"),
        (["--input", "b", "--output", "c", "--image-root", "none"], "--image-root none: no such directory"),
        (["--prompt", "a", "--image-root", "."], "--image-root goes with --input"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0: must be a finite number, 0 or more"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature nan: must be a finite number, 0 or more"),
        (["--input", __file__, "--output", __file__], "is --input, which it would overwrite"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--checkpoint", "x", "--tokenizer", "byte", *more])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_what_cannot_be_answered_ends_with_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(question("a.png", "ok?", "yes")) + "\n" + json.dumps(question("c.png", "?", "!")) + "\n")
    records = ["--input", bad, "--output", tmp_path / "o.jsonl", "--image-root", folder]
    picture = ["--prompt", "a", "--image", folder / "a.png"]
    good = ["--input", folder / "records.jsonl", "--image-root", folder]
    there, output = str(tmp_path), ["--output", tmp_path / "o.jsonl"]
    (tmp_path / "broken.png").write_bytes(b"nothing")
    (tmp_path / "v.mp4").write_bytes(video(20))
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "long").write_text("\n" + json.dumps({"text": "a" * 300, "branches": ["b"]}) + "\n")
    os.mkfifo(tmp_path / "pipe")
    for checkpoint, more, message in [
        ("seeing", records, "bad.jsonl:2: `messages[0].content[0].path` 'c.png': no such file under --image-root"),
        ("reading", records, "bad.jsonl:1: `messages[0].content[0].path` is an image, and no image rules are known"),
        ("none", ["--prompt", "a"], f"--checkpoint {folder / 'none'}: there is no committed checkpoint"),
        (
            "seeing",
            ["--prompt", "a", "--image", tmp_path / "none.png"],
            f"--image {there}/none.png: No such file",
        ),
        ("seeing", ["--prompt", "a", "--image", "/dev/zero"], "--image /dev/zero: is a device, no regular file"),
        ("seeing", ["--prompt", "a", "--image", tmp_path / "broken.png"], f"`--image {there}/broken.png`: the"),
        ("seeing", ["--prompt", ""], "--prompt '': the prompt is empty"),
        ("seeing", ["--prompt", "a" * 300, *picture[2:]], "aaa': 3"),
        ("seeing", ["--input", tmp_path / "none", *good[2:], *output], f"--input {there}/none: No such file"),
        (
            "seeing",
            ["--input", tmp_path / "empty", *good[2:], *output],
            f"--input {there}/empty holds no record",
        ),
        ("seeing", ["--input", tmp_path / "long", *good[2:], *output], f"--input {there}/long:2: 3"),
        ("seeing", ["--prompt", "a<im_patch>", "--data-path", folder / "none"], "none/manifest.json: no such file"),
        ("seeing", [*picture, "--data-path", folder / "text"], "text holds no image rules: give --data-path"),
    ]:
        assert generate.main(flags(folder, checkpoint, *more)) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and message in said and said.count("\n") == 1, said
