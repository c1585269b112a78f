"""tools/generate.py on the command line: texts, images, files of records, wrong flags."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megacp.huggingface import generate_command as generate
from megacp.huggingface.generation.sampler import Generator
from megacp.train import main as train
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.prepare.packs.builds import run as build

SIZES = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --seq-length 256 "
)
SIZES += "--global-batch-size 1 --train-iters 1 "
VISION = "--untie-embeddings-and-output-weights --additional-vocab-size 8 --vision-num-layers 2 "
VISION += "--vision-hidden-size 16 --vision-ffn-hidden-size 24 --vision-num-attention-heads 2 --vision-patch-size 4 "
VISION += "--vision-image-size 16 --vision-feature-layers -1 -2 "


def question(file: str, answer: str) -> dict[str, Any]:
    user = {
        "role": "user",
        "content": [{"type": "image", "path": file}, {"type": "text", "text": "what?"}],
    }
    return {"id": file, "messages": [user, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints with a tower (`seeing`) and without one (`reading`)."""
    folder = tmp_path_factory.mktemp("generate_tool")
    for name in ("a", "b"):
        (folder / f"{name}.png").write_bytes(encoded(noise(16, 16, ord(name))))
    lines = [json.dumps(question(f"{name}.png", f"it is {name}")) + "\n" for name in ("a", "b")]
    (folder / "records.jsonl").write_text("".join(lines))
    build(
        [folder / "records.jsonl"],
        folder / "packed",
        image_rules=TINY,
        image_root=str(folder),
        seq_length=256,
    )
    (folder / "text.jsonl").write_text('{"text": "some words"}\n')
    build([folder / "text.jsonl"], folder / "text", seq_length=256)
    for name, data, more in (("seeing", "packed", VISION), ("reading", "text", "")):
        assert (
            train(f"{SIZES} {more} --data-path {folder / data} --save {folder / name}".split()) == 0
        )
    return folder


def asked(folder: Path, checkpoint: str, *more: object) -> int:
    words = (
        "--checkpoint",
        folder / checkpoint,
        "--tokenizer",
        "byte",
        "--max-new-tokens",
        3,
        *more,
    )
    return generate.main(list(map(str, words)))


@pytest.mark.slow
def test_prompts_are_continued_behind_images_and_videos_in_the_order_of_their_flags(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[int]] = []
    answer = Generator.answer

    def noted(self: Generator, prompts: Any, *given: Any) -> Any:
        seen.extend([unit.frame for unit in prompt.units] for prompt in prompts)
        return answer(self, prompts, *given)

    monkeypatch.setattr(Generator, "answer", noted)
    (tmp_path / "v.mp4").write_bytes(video(20))
    moving, still = ["--video", tmp_path / "v.mp4"], ["--image", folder / "a.png"]
    texts = ["--prompt", "one", "--prompt", "two"]
    assert asked(folder, "reading", *texts) == 0
    for media in ([*still, "--image", folder / "b.png"], [*moving, *still], [*still, *moving]):
        assert asked(folder, "seeing", *texts, *media) == 0
    said = capsys.readouterr().out
    assert said.count("after step 1\n--- 'one'\n") == said.count("--- 'two'\n") == 4
    assert (
        said.count("--- 'one'\none") == 1
    )  # a model of texts continues it, a model of messages answers it
    media = ([], [-1, -1], [*range(8), -1], [-1, *range(8)])
    assert seen == [frames for frames in media for _ in texts[::2]]


def test_records_are_answered_in_their_order_beside_what_was_expected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte order mark may precede the records, and a record without an `id` gets its line
    number.
    """
    out = tmp_path / "new" / "answers.jsonl"
    more = ["--output", out, "--image-root", folder]
    assert asked(folder, "seeing", "--input", folder / "records.jsonl", *more) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["id"], line["images"], line["expected"]) for line in lines] == [
        (f"{name}.png", [f"{name}.png"], f"it is {name}") for name in ("a", "b")
    ]
    assert (
        lines[0]["prompt"] == "<|user|>\nwhat?\n<|assistant|>\n"
        and "it is" not in lines[0]["answer"]
    )
    assert "2 answers, 0 of 2 as expected" in capsys.readouterr().out
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    numbered = [{**record, "id": name} for record, name in zip(records, (None, 0), strict=True)]
    (tmp_path / "r.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in numbered), encoding="utf-8-sig"
    )
    assert asked(folder, "seeing", "--input", tmp_path / "r.jsonl", *more, "--overwrite") == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["1", "0"]
    # an array on one line: each record has its number, not the number of its line
    unnamed = [{k: v for k, v in record.items() if k != "id"} for record in records]
    (tmp_path / "r.json").write_text(json.dumps(unnamed))
    assert asked(folder, "seeing", "--input", tmp_path / "r.json", *more, "--overwrite") == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["1", "2"]


def test_a_terminal_that_is_closed_or_a_reader_that_goes_ends_it_in_silence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGPIPE ends the command if it writes nothing else; answers to records are written
    completely.
    """
    answer, ends = Generator.answer, list[bool]()

    def noted(*given: Any) -> Any:
        ends.append(signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL)
        return answer(*given)

    monkeypatch.setattr(Generator, "answer", noted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    records = [
        "--input",
        folder / "records.jsonl",
        "--output",
        tmp_path / "o.jsonl",
        "--image-root",
        folder,
    ]
    for checkpoint, *flags in (
        ("reading", "--chat"),
        ("reading", "--prompt", "a"),
        ("seeing", *records),
    ):
        assert asked(folder, checkpoint, *flags) == 0
    assert ends == [True, True, False]
    monkeypatch.setattr(sys, "stdin", None)
    assert asked(folder, "reading", "--chat") == 0


def test_flags_that_contradict_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for more, named in [
        ("", "one of --prompt, --chat and --input"),
        ("--chat --raw", "--raw requires --prompt"),
        ("--input b --image c", "--input and --output must be used together; --image"),
        ("--prompt a --temperature nan", "--temperature nan"),
        (f"--input {__file__} --output {__file__}", f"--output {__file__}"),
        ("--prompt a --max-new-tokens 0", "--max-new-tokens 0"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            generate.main(["--checkpoint", "x", "--tokenizer", "byte", *more.split()])
        assert named in capsys.readouterr().err.partition("error: ")[2]


def test_a_checkpoint_that_is_none_is_named_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path, told in (
        (str(tmp_path / "none"), "none: the folder does not exist"),
        (str(tmp_path / "file"), "file is a file: give the folder of --save"),
        ("org/model", "hf download org/model --local-dir model"),
    ):
        assert generate.main(["--checkpoint", path, "--prompt", "a"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: --checkpoint {path}") and told in said


@pytest.mark.slow
def test_what_cannot_be_answered_ends_with_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        json.dumps(question("a.png", "yes")) + "\n" + json.dumps(question("c.png", "!")) + "\n"
    )
    more_of_input = ["--image-root", folder, "--output", tmp_path / "o.jsonl"]
    (tmp_path / "broken.png").write_bytes(b"nothing")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "long").write_text("\n" + json.dumps({"text": "a" * 300, "branches": ["b"]}) + "\n")
    for checkpoint, more, named in [
        ("seeing", ["--input", bad], "bad.jsonl:2: `messages[0].content[0].path` 'c.png'"),
        ("reading", ["--input", bad], "bad.jsonl:1: `messages[0].content[0].path`"),
        ("seeing", ["--input", tmp_path / "none"], f"--input {tmp_path}/none: "),
        ("seeing", ["--input", tmp_path / "empty"], f"--input {tmp_path}/empty "),
        ("seeing", ["--input", tmp_path / "long"], f"--input {tmp_path}/long:2: 3"),
        (str(tmp_path), ["--prompt", "a"], f"--from hf --to megacp --input {tmp_path} "),
        ("none", ["--prompt", "a"], f"--checkpoint {folder / 'none'}: "),
        ("seeing", ["--prompt", ""], "--prompt '': "),
        (
            "seeing",
            ["--prompt", "a", "--image", tmp_path / "none.png"],
            f"--image {tmp_path}/none.png: ",
        ),
        ("seeing", ["--prompt", "a", "--image", "/dev/zero"], "--image /dev/zero "),
        (
            "seeing",
            ["--prompt", "a", "--image", tmp_path / "broken.png"],
            f"--image {tmp_path}/broken.png`: ",
        ),
        ("seeing", ["--prompt", "a" * 300, "--image", folder / "a.png"], "aaa': 3"),
    ]:
        more = more + more_of_input if more[0] == "--input" else more
        assert asked(folder, checkpoint, *more) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and named in said and said.count("\n") == 1, said
